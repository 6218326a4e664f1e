# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf push` against a Hub on the loopback interface, and the ways to load what was pushed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mhla_hf.hub.push import prepare_push
from mhla_hf.utils.model_cards import is_generated
from tests import ROOT, hub_models, tiny
from tests.hub_repositories import File


WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A Wan pipeline and a language model, trained and saved, with the output of each."""
    folder = tmp_path_factory.mktemp("directories")
    for kind in ("wan", "language"):
        model = hub_models.make(kind)
        # Other weights than those that other tests push to the same Hub, and look for.
        next(getattr(model, "transformer", model).parameters()).data += 0.01
        model.save_pretrained(folder / kind)
        np.save(folder / f"{kind}.npy", hub_models.output(kind, model))
    tiny.character_tokenizer().save_pretrained(folder / "language")
    return folder


@pytest.fixture
def pipeline(directories, tmp_path):
    """A copy of the Wan pipeline, with a record that names its original."""
    shutil.copytree(directories / "wan", tmp_path / "wan")
    return tmp_path / "wan"


def push(client, *arguments, **variables):
    return client.command("push", *arguments, **variables)


def uploads(hub, since):
    """Hashes of the objects that arrived at the storage, in order, after a number of requests."""
    return [r.path.split("/")[2] for r in hub.requests[since:] if r.method == "PUT" and r.status == 200]


def renew(directory, seed):
    """Changes all weights: the storage knows contents that other tests have uploaded."""
    noise = torch.Generator().manual_seed(seed)
    for path in directory.glob("*/*.safetensors"):
        tensors = load_file(path)
        changed = {name: tensor + torch.randn(tensor.shape, generator=noise) / 100 for name, tensor in tensors.items()}
        save_file(changed, path, {"format": "pt"})


def commits(hub, name):
    return len(hub.repositories[name].commits)


def change(hub, name, path, content):
    """Commits a file, as on the Hub's website."""
    repository = hub.repositories[name]
    files = {**repository.commits[repository.find("main")], path: File(content)}
    repository.add_commit("refs/heads/main", files, "edited")


def test_contents(pipeline):
    (pipeline / "conversion.json").write_text(
        json.dumps(
            {"source": {"location": "Wan-AI/Wan"}, "data": {"folder": "/home/me/private/videos", "prompt": "a: b"}}
        )
    )
    config = pipeline / "vae/config.json"
    nested = {"inner": {"_name_or_path": "/home/me/inner", "other": "/kept/as/it/is"}}
    config.write_text(json.dumps({**json.loads(config.read_text()), "_name_or_path": "/home/me/vae", **nested}))
    tokenizer = pipeline / "tokenizer/tokenizer_config.json"
    tokenizer.write_text(json.dumps({**json.loads(tokenizer.read_text()), "name_or_path": "/home/me/tokens"}))
    # A list, as sentence-transformers writes for its data.
    (pipeline / "data_config.json").write_text("[1]")
    for name in ("work/run.json", ".lock", "checkpoint-20/optimizer.pt", "x.tmp", "training_args.bin", ".cache/a"):
        (pipeline / name).parent.mkdir(exist_ok=True)
        (pipeline / name).write_text("{}")
    before = {path: path.read_bytes() for path in pipeline.rglob("*") if path.is_file()}
    contents, _ = prepare_push(pipeline, "you/model")
    assert {path: path.read_bytes() for path in pipeline.rglob("*") if path.is_file()} == before
    names = set(contents.files)
    assert names == {
        "README.md", "conversion.json", "data_config.json", "model_index.json", "scheduler/scheduler_config.json",
        "text_encoder/config.json", "text_encoder/model.safetensors", "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json", "transformer/config.json", WEIGHTS, "transformer/mhla_hf.py",
        "transformer/modeling_mhla.py", "vae/config.json", "vae/diffusion_pytorch_model.safetensors",
    }  # fmt: skip
    assert sorted(contents.left_out) == [
        ".lock", "checkpoint-20/optimizer.pt", "training_args.bin", "work/run.json", "x.tmp"
    ]  # fmt: skip
    assert is_generated(contents.files["README.md"].decode())
    assert json.loads(contents.files["conversion.json"])["data"] == {"folder": "videos", "prompt": "a: b"}
    public = json.loads(contents.files["vae/config.json"])
    assert public["_name_or_path"] == "vae"
    assert public["inner"] == {"_name_or_path": "inner", "other": "/kept/as/it/is"}
    assert json.loads(contents.files["tokenizer/tokenizer_config.json"])["name_or_path"] == "tokens"
    (pipeline / "README.md").write_text("# Mine\n")
    assert prepare_push(pipeline, "you/model")[0].files["README.md"] == pipeline / "README.md"


def test_push_and_the_three_ways_to_load(client, hub, directories, tmp_path):
    for kind in ("wan", "language"):
        result = push(client, directories / kind, f"user/{kind}-pushed", "--private", "--quiet")
        assert result.code == 0, result.errors
        repository = hub.repositories[f"user/{kind}-pushed"]
        assert repository.private and commits(hub, f"user/{kind}-pushed") == 2
        assert "mhla" in repository.files["README.md"].decode()
    assert push(client, directories / "wan/transformer", "user/bare-pushed", "--quiet").code == 0
    program = f"""
        import sys
        import numpy, torch, transformers
        from diffusers import AutoModel, DiffusionPipeline

        def refused(load, *words):
            try:
                load()
            except (ValueError, OSError) as error:
                assert all(word in str(error) for word in words), error
            else:
                raise AssertionError("loaded without trust")
            assert "mhla_hf" not in sys.modules

        load_text = transformers.AutoModelForCausalLM.from_pretrained
        # As on a machine without the package: importing it fails.
        sys.modules["mhla_hf"] = None
        for load, name in ((DiffusionPipeline.from_pretrained, "wan"), (load_text, "language")):
            try:
                load(f"user/{{name}}-pushed", trust_remote_code=True)
            except ImportError as error:
                assert str(error).endswith("pip install . in a clone of its repository"), error
            else:
                raise AssertionError("loaded without the package")
        del sys.modules["mhla_hf"]
        refused(lambda: DiffusionPipeline.from_pretrained("user/wan-pushed"), "mhla_hf.py", "trust_remote_code=True")
        refused(lambda: AutoModel.from_pretrained("user/bare-pushed"), "trust_remote_code=True")
        # Never as softmax.
        softmax = {{"attn_implementation": "sdpa"}}
        refused(lambda: load_text("user/language-pushed", **softmax), "from a clone", "trust_remote_code=True")
        text = load_text("user/language-pushed", trust_remote_code=True)
        assert type(text) is transformers.Qwen3ForCausalLM and text.config._attn_implementation == "mhla"
        pipeline = DiffusionPipeline.from_pretrained("user/wan-pushed", trust_remote_code=True)
        # Afterwards everything works as with the package imported, with and without trust.
        plain, plain_text = DiffusionPipeline.from_pretrained("user/wan-pushed"), load_text("user/language-pushed")
        own = AutoModel.from_pretrained("user/wan-pushed", subfolder="transformer")
        bare = AutoModel.from_pretrained("user/bare-pushed", trust_remote_code=True)
        assert type(AutoModel.from_pretrained("user/bare-pushed")) is type(bare) is type(own)
        import mhla_hf
        from tests import hub_models
        loaded = mhla_hf.load_pipeline("user/wan-pushed")
        assert type(own) is type(pipeline.transformer) is mhla_hf.MHLAWanTransformer3DModel
        for kind, models in dict(wan=[pipeline, plain, loaded], language=[text, plain_text]).items():
            expected = numpy.load(f"{directories}/{{kind}}.npy")
            own = hub_models.load(kind, f"{directories}/{{kind}}")
            for model in models:
                denoisers = [getattr(part, "transformer", part) for part in (own, model)]
                weights, others = (denoiser.state_dict() for denoiser in denoisers)
                assert weights.keys() == others.keys()
                assert all(torch.equal(weights[name], others[name]) for name in weights)
                if kind == "wan":
                    model.set_progress_bar_config(disable=True)
                # Sums of floats depend on where in memory they lie.
                numpy.testing.assert_allclose(hub_models.output(kind, model), expected, rtol=1e-5, atol=1e-6)
        text.save_pretrained("{tmp_path}/saved")
        pipeline.save_pretrained("{tmp_path}/saved-pipeline")
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **hub.environment(tmp_path / "home")}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert hub.unknown == []
    assert "auto_map" not in json.loads((tmp_path / "saved/config.json").read_text())
    index = json.loads((tmp_path / "saved-pipeline/model_index.json").read_text())
    assert index["transformer"] == ["mhla_hf", "MHLAWanTransformer3DModel"]


def test_an_interrupted_push_goes_on_and_shows_nothing_before(client, hub, pipeline):
    arguments = (pipeline, "user/interrupted", "--quiet")
    renew(pipeline, seed=1)
    start = len(hub.requests)
    hub.inject("POST", "/commit/", 503, times=None)
    result = push(client, *arguments)
    assert result.code == 1 and "503 Service Unavailable" in result.errors and "Traceback" not in result.errors
    arrived = uploads(hub, start)
    assert (
        len(arrived) > 2 and commits(hub, "user/interrupted") == 1 and hub.repositories["user/interrupted"].files == {}
    )
    hub.heal()
    result = push(client, *arguments)
    assert result.code == 0, result.errors
    assert uploads(hub, start) == arrived
    assert commits(hub, "user/interrupted") == 2
    assert hub.unknown == []


def test_a_killed_push_leaves_the_repository_as_it_was(client, hub, pipeline):
    arguments = (pipeline, "user/killed", "--quiet")
    assert push(client, *arguments).code == 0
    before = hub.repositories["user/killed"].files
    renew(pipeline, seed=3)
    stopped = hub.inject("PUT", "/storage/", "hang", skip=2)
    words = ["push", *map(str, arguments)]
    process = client.start(f"from mhla_hf.cli.main import app; app({words!r})")
    assert stopped.reached.wait(60)
    os.kill(process, signal.SIGKILL)
    assert client.wait().code == -signal.SIGKILL
    assert hub.repositories["user/killed"].files == before and commits(hub, "user/killed") == 2
    hub.heal()
    stale = "transformer/diffusion_pytorch_model-00001-of-00002.safetensors"
    change(hub, "user/killed", stale, b"of an earlier push")
    assert push(client, *arguments).code == 0
    assert hub.repositories["user/killed"].files.keys() == before.keys() and commits(hub, "user/killed") == 4


def test_only_files_that_were_checked_are_pushed(hub, client, pipeline):
    client.check(f"""
        from pathlib import Path
        from mhla_hf.hub import push
        check = push.DirectoryCheck
        def check_and_add(root, files, **options):
            found = check(root, files, **options)
            Path("{pipeline}/late.safetensors").write_bytes(b"broken")
            return found
        push.DirectoryCheck = check_and_add
        push.push_directory("{pipeline}", "user/late")
    """)
    files = hub.repositories["user/late"].files
    assert WEIGHTS in files and "late.safetensors" not in files


def break_nan(directory):
    tensors = load_file(directory / WEIGHTS)
    name = min(name for name, tensor in tensors.items() if tensor.dim() == 2)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    return "NaN"


def break_pickle(directory):
    (directory / "extra.ckpt").write_bytes(b"\x80\x04.")
    return "extra.ckpt is a pickle"


def break_softmax(directory):
    shutil.rmtree(directory)
    tiny.wan_pipeline().save_pretrained(directory)
    return "has no MHLA model"


def break_link(directory):
    (directory / "notes.txt").symlink_to("/etc/hostname")
    return "notes.txt leads by a link"


@pytest.mark.parametrize("damage", [break_nan, break_pickle, break_softmax, break_link])
def test_nothing_is_pushed_when_something_is_wrong(client, hub, pipeline, damage):
    expected = damage(pipeline)
    seen = len(hub.requests)
    result = push(client, pipeline, "user/broken", "--quiet")
    assert result.code == 1 and expected in result.errors
    (line,) = result.errors.strip().splitlines()
    assert line.startswith("error: ") and len(line) < 900
    assert "user/broken" not in hub.repositories
    assert [r.path for r in hub.requests[seen:]] == ["/api/whoami-v2"]


@pytest.mark.parametrize(
    "arguments, variables, expected",
    [
        (["user/refused"], {"HF_TOKEN": "wrong"}, "Invalid user token"),
        (["user/refused"], {"HF_TOKEN": "reader"}, "you must use a write token|You don't have the rights"),
        (["other/refused"], {}, "You don't have the rights"),
        (["refused"], {}, "repo_id='refused' is not a repository"),
        (["user/public", "--private"], {}, "user/public exists and is public"),
    ],
)
def test_refusals_are_one_line(client, hub, directories, arguments, variables, expected):
    if "--private" in arguments and "user/public" not in hub.repositories:
        client.check("import huggingface_hub; huggingface_hub.create_repo('user/public')")
    result = push(client, directories / "wan", *arguments, "--quiet", **variables)
    assert result.code == 1
    *warnings, error = result.errors.strip().splitlines()
    assert error.startswith("error: ") and re.search(expected, error)
    assert all("licence" in warning for warning in warnings)


def test_dry_run_needs_no_network(client, hub, pipeline, tmp_path):
    seen = len(hub.requests)
    file = tmp_path / "files.json"
    result = push(client, pipeline, "user/dry", "--dry-run", "--json", file, "--quiet")
    assert result.code == 0, result.errors
    report = json.loads(file.read_text())
    assert WEIGHTS in report["files"]
    assert any("licence" in warning for warning in report["warnings"])
    shown = push(client, pipeline, "user/dry", "--dry-run").output
    assert "transformer/mhla_hf.py" in shown and "warning:" in shown
    assert len(hub.requests) == seen and "user/dry" not in hub.repositories


def test_cards_that_were_edited_on_the_hub_are_kept(client, hub, pipeline):
    client.check("import huggingface_hub; huggingface_hub.create_repo('user/edited')")
    # As the Hub's form for new repositories makes it.
    change(hub, "user/edited", "README.md", b"---\nlicense: mit\n---\n")
    assert push(client, pipeline, "user/edited", "--quiet").code == 0
    card = hub.repositories["user/edited"].files["README.md"]
    assert b"license: mit" in card and b"- mhla" in card and is_generated(card.decode())
    (pipeline / "transformer/notes.txt").write_text("new")
    assert push(client, pipeline, "user/edited", "--quiet").code == 0
    assert b"- mhla" in hub.repositories["user/edited"].files["README.md"]
    edited = card + b"\nA sentence of mine.\n"
    change(hub, "user/edited", "README.md", edited)
    (pipeline / "transformer/notes.txt").write_text("newer")
    result = push(client, pipeline, "user/edited", "--quiet")
    assert result.code == 0 and "README.md of user/edited was written or edited there and is kept" in result.errors
    assert hub.repositories["user/edited"].files["README.md"] == edited
    assert hub.repositories["user/edited"].files["transformer/notes.txt"] == b"newer"


def test_revisions_and_pull_requests(client, hub, directories, tmp_path):
    """A pull request and another branch leave the main branch as it was."""
    directory = tmp_path / "language"
    shutil.copytree(directories / "language", directory)
    for factor, options in ((1, "{}"), (2, '{"create_pr": True}'), (4, '{"revision": "louder"}')):
        tensors = load_file(directories / "language/model.safetensors")
        head = {"lm_head.weight": tensors["lm_head.weight"] * factor}
        save_file({**tensors, **head}, directory / "model.safetensors", {"format": "pt"})
        client.check(
            f"import mhla_hf.hub; mhla_hf.hub.push_directory({str(directory)!r}, 'user/revised', **{options})"
        )
    repository = hub.repositories["user/revised"]
    assert repository.branches == ["main", "louder"] and "refs/pr/1" in repository.references
    client.check("""
        from tests import hub_models
        heads = [
            hub_models.load("language", "user/revised", revision=revision).lm_head.weight
            for revision in ("main", "refs/pr/1", "louder")
        ]
        assert [float(head[0, 0] / heads[0][0, 0]) for head in heads] == [1, 2, 4]
    """)
    assert hub.unknown == []


def test_push_to_hub_of_the_libraries_refuses_nan(client, hub):
    result = client.run("""
        import torch
        from tests import hub_models
        model = hub_models.make("language")
        next(model.parameters()).data[0, 0] = float("nan")
        model.push_to_hub("user/nan")
    """)
    assert result.code == 1 and "has NaN values; nothing is pushed" in result.errors
    assert hub.repositories["user/nan"].files == {}
