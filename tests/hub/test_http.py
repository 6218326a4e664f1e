# SPDX-License-Identifier: Apache-2.0
"""Pushing MHLA models to a Hub and loading them from it, against a real server on the loopback interface."""

import hashlib
import json

import numpy as np
import pytest

from tests.hub_models import KINDS, OPTIONS


MODEL_FILES = {
    "wan": ("transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"),
    "sana": ("transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"),
    "language": ("config.json", "model.safetensors"),
}


@pytest.fixture(scope="module")
def pushed(hub_and_client, tmp_path_factory):
    """The folder with the output of each model, which the libraries' own methods pushed to `user/KIND`.

    `push_directory` pushed them to `user/directory-KIND`.
    """
    hub, client = hub_and_client
    folder = tmp_path_factory.mktemp("pushed")
    # Weights go up in several parts, and listings come down in several pages.
    hub.part_size, hub.page_size = 40_000, 4
    client.check(f"""
        import mhla_hf.hub, numpy
        from tests import hub_models
        for kind in {KINDS}:
            # Weights of their own: what other tests uploaded is not sent again.
            model = hub_models.make(kind, seed=1)
            numpy.save(f"{folder}/{{kind}}.npy", hub_models.output(kind, model))
            model.push_to_hub(f"user/{{kind}}")
            model.save_pretrained(f"{folder}/directory-{{kind}}")
            mhla_hf.hub.push_directory(f"{folder}/directory-{{kind}}", f"user/directory-{{kind}}")
            if kind == "wan":
                model.save_pretrained("{folder}/wan", push_to_hub=True, repo_id="user/saved")
                model.transformer.push_to_hub("user/transformer-only")
    """)
    assert hub.unknown == []
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_pushed_repository_is_complete(kind, hub, pushed):
    repository = hub.repositories[f"user/{kind}"]
    files = repository.commits[repository.find("main")]
    config, weights = (files[path] for path in MODEL_FILES[kind])
    config = json.loads(config.content)
    assert {name: config["mhla"][name] for name in OPTIONS[kind]} == OPTIONS[kind]
    if kind != "language":
        index = json.loads(files["model_index.json"].content)
        assert index["transformer"] == ["mhla_hf", config["_class_name"]]
        assert {"README.md", "vae/config.json", "transformer/mhla_hf.py"} <= set(files)
    else:
        assert config["auto_map"] == {"AutoConfig": "modeling_mhla.Configuration"} and "modeling_mhla.py" in files
    assert b"- linear-attention" in files["README.md"].content
    for path, file in files.items():
        assert file.lfs == path.endswith(".safetensors"), path
        assert not file.lfs or hub.objects[file.sha256] == file.content
    parts = [r for r in hub.requests if r.path.startswith(f"/storage/{weights.sha256}/")]
    assert len([r for r in parts if r.method == "PUT"]) > 1


def test_saving_and_pushing_a_model_alone(hub, pushed):
    files = hub.repositories["user/saved"].files
    for path in ("transformer/diffusion_pytorch_model.safetensors", "model_index.json", "vae/config.json"):
        assert files[path] == (pushed / "wan" / path).read_bytes()
    weights = "diffusion_pytorch_model.safetensors"
    assert hub.repositories["user/transformer-only"].files[weights] == files[f"transformer/{weights}"]


def test_token_is_not_sent_to_the_storage(hub, pushed):
    stored = [r for r in hub.requests if r.path.startswith("/storage/") and r.method in ("GET", "PUT")]
    assert stored and not any("authorization" in r.headers for r in stored)


@pytest.mark.parametrize("kind", KINDS)
def test_loads_with_the_same_outputs(kind, client, hub, pushed):
    client.check(f"""
        import mhla_hf, numpy
        from tests import hub_models
        expected = numpy.load("{pushed}/{kind}.npy")
        models = [hub_models.load("{kind}", name) for name in ("user/{kind}", "user/directory-{kind}")]
        if "{kind}" != "language":
            models.append(mhla_hf.load_pipeline("user/{kind}"))
            models.append(mhla_hf.load_pipeline("user/{kind}", None, revision="main", token="loopback"))
        for model in models:
            numpy.testing.assert_array_equal(hub_models.output("{kind}", model), expected)
    """)
    assert hub.unknown == []
    assert np.load(pushed / f"{kind}.npy").std() > 0


def test_models_from_the_hub_in_other_ways(client, hub, pushed):
    client.check("""
        import mhla_hf, torch
        from diffusers import AutoModel
        model = mhla_hf.MHLAWanTransformer3DModel.from_pretrained("user/transformer-only")
        assert type(AutoModel.from_pretrained("user/transformer-only")) is type(model)
        of_pipeline = mhla_hf.load_pipeline("user/wan").transformer
        assert type(of_pipeline) is mhla_hf.MHLAWanTransformer3DModel
        for name, value in model.state_dict().items():
            assert torch.equal(value, of_pipeline.state_dict()[name]), name
        override = mhla_hf.MHLAWanTransformer3DModel.from_pretrained(
            "user/wan", subfolder="transformer", mhla={"normalizer": "none"}
        )
        assert override.mhla_config.normalizer == "none"
        try:
            mhla_hf.load_pipeline("user/wan", "softmax")
        except ValueError as error:
            assert "user/wan" in str(error)
        else:
            raise AssertionError("softmax was not refused")
        try:
            mhla_hf.load_pipeline("user/nothing")
        except OSError as error:
            assert "user/nothing" in str(error)
        else:
            raise AssertionError("a repository that does not exist was not refused")
    """)
    assert hub.unknown == []


def test_revisions_and_pull_requests(client, hub, pushed):
    """A commit leaves older ones as they were, and a pull request the main branch."""
    client.check("""
        import torch
        from tests import hub_models
        model = hub_models.make("language")
        model.push_to_hub("user/revised", max_shard_size="10KB")
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        model.push_to_hub("user/revised", max_shard_size="10KB", create_pr=True)
        with torch.no_grad():
            model.lm_head.weight.mul_(2)
        model.push_to_hub("user/revised", max_shard_size="10KB", revision="louder")
    """)
    repository = hub.repositories["user/revised"]
    assert repository.branches == ["main", "louder"] and "refs/pr/1" in repository.references
    assert "model.safetensors.index.json" in repository.files and "model.safetensors" not in repository.files
    # Shards without the layer that has changed are the same objects, and were sent once.
    objects = [hashlib.sha256(content).hexdigest() for content in repository.files.values()]
    assert all(hub.uploaded(oid) == len(hub.objects[oid]) for oid in objects if oid in hub.objects)
    client.check(f"""
        import torch
        from tests import hub_models
        models = [
            hub_models.load("language", "user/revised", revision=revision)
            for revision in ("main", "refs/pr/1", "louder", "{repository.find("main")}")
        ]
        scales = [float(model.lm_head.weight[0, 0] / models[0].lm_head.weight[0, 0]) for model in models]
        assert scales == [1, 2, 4, 1], scales
    """)
    assert hub.unknown == []
