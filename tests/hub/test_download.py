# SPDX-License-Identifier: Apache-2.0
"""Loading models from a Hub on the loopback interface: what the libraries pushed, faults on the way, hostile files."""

import json
import re

import pytest

from tests.hub_models import OPTIONS


WEIGHTS = r"^/storage/"
MODEL_FILES = {
    "wan": ("transformer/config.json", "transformer/diffusion_pytorch_model.safetensors"),
    "language": ("config.json", "model.safetensors"),
}


@pytest.fixture(scope="module")
def pushed(hub_and_client, tmp_path_factory):
    """The folder with the outputs of `user/wan` and `user/language`, pushed by the libraries' own methods."""
    hub, client = hub_and_client
    folder = tmp_path_factory.mktemp("pushed")
    # Weights go up in several parts, and listings come down in several pages.
    hub.part_size, hub.page_size = 40_000, 4
    client.check(f"""
        import numpy
        from tests import hub_models, tiny
        for kind in ("wan", "language"):
            model = hub_models.make(kind, seed=1)
            numpy.save(f"{folder}/{{kind}}.npy", hub_models.output(kind, model))
            model.push_to_hub(f"user/{{kind}}")
        tiny.wan_pipeline().push_to_hub("user/softmax")
    """)
    assert hub.unknown == []
    return folder


def load(client, folder, kind="wan", name="user/wan", **variables):
    """Loads a model and compares its output; prints the error, or how long the client waited between attempts."""
    call = f"mhla_hf.load_pipeline('{name}')" if kind == "wan" else f"hub_models.load('{kind}', '{name}')"
    program = f"""
        import mhla_hf, numpy
        from tests import hub_models
        try:
            model = {call}
        except Exception as error:
            print(type(error).__name__, " ".join(str(error).split()))
        else:
            numpy.testing.assert_array_equal(
                hub_models.output("{kind}", model), numpy.load("{folder}/{kind}.npy")
            )
            print("loaded", waits)
    """
    return client.check(program, **variables).strip().splitlines()[-1]


def convert(client, destination, source="user/softmax", *options, **variables):
    """Runs `mhla-hf convert` and returns its line of error; empty if it worked."""
    arguments = ("--blocks", "1,1,2", "--grid", "2,1,2", "--quiet", *options)
    result = client.command("convert", source, destination, *arguments, **variables)
    lines = [line for line in result.errors.splitlines() if line.startswith("error: ")]
    assert result.code == len(lines) <= 1 and "Traceback" not in result.errors, result.errors
    assert destination.exists() == (result.code == 0)
    return lines[0] if lines else ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODEL_FILES)
def test_what_the_libraries_push(kind, client, hub, pushed):
    repository = hub.repositories[f"user/{kind}"]
    files = repository.commits[repository.find("main")]
    config, weights = (files[path] for path in MODEL_FILES[kind])
    config = json.loads(config.content)
    assert {name: config["mhla"][name] for name in OPTIONS[kind]} == OPTIONS[kind]
    if kind == "wan":
        index = json.loads(files["model_index.json"].content)
        assert index["transformer"] == ["mhla_hf", config["_class_name"]] and "transformer/mhla_hf.py" in files
    else:
        assert config["auto_map"] == {"AutoConfig": "modeling_mhla.Configuration"} and "modeling_mhla.py" in files
    assert b"- linear-attention" in files["README.md"].content
    assert hub.objects[weights.sha256] == weights.content
    stored = [r for r in hub.requests if r.path.startswith("/storage/") and r.method in ("GET", "PUT")]
    assert stored and not any("authorization" in r.headers for r in stored)
    assert load(client, pushed, kind, f"user/{kind}") == "loaded []"
    assert hub.unknown == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("methods", "path", "effect", "options", "message"),
    [
        pytest.param("GET", WEIGHTS, 503, {}, "503 Service Unavailable", id="unavailable"),
        pytest.param("GET", WEIGHTS, "drop", {}, "peer closed connection", id="connection lost"),
        pytest.param("GET", WEIGHTS, "corrupt", {"times": 1}, "of user/.* arrived damaged", id="damaged weights"),
        pytest.param("GET HEAD", "/resolve/", 403, {"code": "GatedRepo"}, "Cannot access gated repo", id="gated"),
        pytest.param("GET HEAD", "", 404, {"code": "RepoNotFound"}, "Repository Not Found", id="no such repository"),
    ],
)
def test_lasting_faults(methods, path, effect, options, message, hub, client, pushed, tmp_path):
    options = {"times": None, **options}
    hub.inject(methods, path, effect, **options)
    error = load(client, pushed)
    assert re.search(message, error), error
    hub.heal()
    assert load(client, pushed).startswith("loaded"), "the second attempt fails"
    client.clear_cache()
    hub.inject(methods, path, effect, **options)
    error = convert(client, tmp_path / "converted")
    assert re.search(message, error), error


def test_offline_and_mistakes(client, hub, pushed, tmp_path):
    offline = "import huggingface_hub.constants; huggingface_hub.constants.HF_HUB_OFFLINE = True"
    program = f"{offline}; from mhla_hf.cli.main import app; app(['convert', 'user/softmax', '{tmp_path}/none', '-q'])"
    assert re.fullmatch(r"error: .*outgoing traffic has been disabled.*\n", client.run(program).errors, re.IGNORECASE)
    assert "Revision Not Found" in convert(client, tmp_path / "converted", "user/softmax", "--revision", "v9")
    assert "Repository Not Found" in convert(client, tmp_path / "converted", "user/sofmtax")
    assert "Repository Not Found" in load(client, pushed, HF_TOKEN="wrong") or "Invalid" in load(
        client, pushed, HF_TOKEN="wrong"
    )
    assert load(client, pushed) == "loaded []"
    with hub.unreachable():
        assert load(client, pushed) == "loaded []"


def test_an_estimate_downloads_configurations_alone(client, hub, pushed):
    client.clear_cache()
    start = len(hub.requests)
    result = client.command("estimate", "user/softmax", "--tokens", "64")
    assert result.code == 0 and "WanTransformer3DModel: 64 tokens" in result.output, result.errors
    read = {request.path.rpartition("/")[2] for request in hub.requests[start:] if "/resolve/" in request.path}
    assert read == {"model_index.json", "config.json"}


HOSTILE = {
    "index-above": (
        "index = {'metadata': {}, 'weight_map': dict.fromkeys(tensors, '../outside.safetensors')}; "
        "(folder / 'model.safetensors.index.json').write_text(json.dumps(index)); weights.unlink()",
        "../outside.safetensors",
    ),
    "pickle": ("torch.save(tensors, folder / 'pytorch_model.bin'); weights.unlink()", "only as pytorch_model.bin"),
    "header": ("weights.write_bytes(struct.pack('<Q', 10**10) + b'x')", "is truncated or not a safetensors file"),
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_repository(attack, hub, client, tmp_path):
    change, message = HOSTILE[attack]
    printed = client.check(f"""
        import json, struct
        from pathlib import Path
        import torch
        from huggingface_hub import HfApi
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM
        from tests import hub_models

        folder = Path("{tmp_path}/made")
        hub_models.make("language").save_pretrained(folder)
        weights = folder / "model.safetensors"
        tensors = load_file(weights)
        {change}
        api = HfApi()
        api.create_repo("user/{attack}")
        api.upload_folder(repo_id="user/{attack}", folder_path=folder)
        try:
            AutoModelForCausalLM.from_pretrained("user/{attack}")
        except (ValueError, OSError) as error:
            print(str(error))
    """)
    (line,) = printed.strip().splitlines()
    assert message in line and len(line) < 700
    result = client.command("doctor", f"user/{attack}")
    assert result.code == 1 and len(re.findall("^error", result.output, re.MULTILINE)) == 1, result
