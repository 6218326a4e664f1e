# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf inspect` on pipelines and models of every kind, and on what cannot be inspected."""

from __future__ import annotations

import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

import mhla_hf
from tests.command_line import run_command
from tests.integrations.transformers.tiny_files import save_softmax
from tests.tiny import wan_pipeline
from tests.tiny_images import sana_pipeline


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of softmax models and their MHLA versions, by name."""
    root = tmp_path_factory.mktemp("models")
    pipelines = {
        "wan": (wan_pipeline, {"blocks": [1, 2, 2], "grid": [2, 2, 4], "layers": [1]}),
        "sana": (sana_pipeline, {}),
    }
    for name, (make, options) in pipelines.items():
        make().save_pretrained(root / f"{name}-softmax")
        mhla_hf.convert_pretrained(root / f"{name}-softmax", root / name, mhla=options)
    for name, options in (("llama", {"block_size": [8]}), ("vit", {"blocks": [2, 2]})):
        save_softmax(name, root / f"{name}-softmax")
        mhla_hf.convert_pretrained(root / f"{name}-softmax", root / name, mhla=options)
    return root


run = partial(run_command, "inspect")


def image(path):
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8)).save(path)
    return path


def line(result) -> str:
    """The one line of an error."""
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    lines = [text for text in result.stderr.splitlines() if text.startswith("error:")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("name", ("wan", "sana", "llama", "vit"))
def test_every_kind_of_model(saved, name, tmp_path):
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    steps = ("--steps", 2) if name in ("wan", "sana") else ()
    images = ("--image", image(tmp_path / "i.png")) if name == "vit" else ()
    options = ("--html", page, "--json", figures, "--tokens", 24, "--samples", 2)
    result = run(saved / name, *options, *steps, *images)
    report = json.loads(figures.read_text())
    (model,) = report["models"]
    kinds = [layer["kind"] for layer in model["layers"]]
    assert kinds == (["softmax", "mhla"] if name == "wan" else ["mhla"] * len(kinds))
    # The original lies beside it, and conversion.json names it.
    assert report["base"] == f"{name}-softmax"
    for layer in model["layers"]:
        if layer["kind"] == "mhla":
            assert layer["output_error"]["mean"] >= 0
            assert layer["attention"]["rows"] <= 24
            # Fresh weights have not moved.
            assert layer["mixing"]["movement"] == pytest.approx([0.0] * len(layer["mixing"]["movement"]), abs=1e-5)
    assert model["output_error"]["mean"] > 0
    if name == "llama":
        assert report["probe"] == "source code of Python's standard library"
        assert model["layers"][0]["attention"]["tokens"] == 24
    assert "effective rank" in result.stdout and "Wrote" in result.stdout
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_prompts_original_and_layers(saved, tmp_path):
    figures = tmp_path / "figures.json"
    prompts = ("--prompt", "the quick brown fox", "--prompt", "jumps over [the] lazy dog")
    run(saved / "llama", *prompts, "--original", saved / "llama-softmax", "--layers", "0,2", "--json", figures)
    report = json.loads(figures.read_text())
    assert report["prompts"] == ["the quick brown fox", "jumps over [the] lazy dog"]
    layers = report["models"][0]["layers"]
    assert [layer["mixing"] is not None for layer in layers] == [True, False, True]
    assert [layers[index]["attention"]["samples"] for index in (0, 2)] == [2, 2]
    assert layers[0]["attention"]["tokens"] == len("jumps over [the] lazy dog")


def test_images(saved, tmp_path):
    figures = tmp_path / "figures.json"
    result = run(saved / "vit", "--image", image(tmp_path / "i.png"), "--json", figures, "--quiet")
    assert result.stdout == ""
    report = json.loads(figures.read_text())
    assert report["probe"] == "1 image"
    (tmp_path / "bad.png").write_bytes(b"not an image")
    refused = run(saved / "vit", "--image", tmp_path / "bad.png", code=None)
    assert "bad.png cannot be read as an image" in line(refused)


def test_weights_alone(saved, tmp_path):
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    result = run(saved / "wan", "--samples", 0, "--html", page, "--json", figures)
    model = json.loads(figures.read_text())["models"][0]
    assert model["layers"][1]["attention"] is None and model["batches"] == 0
    assert "effective rank" not in result.stdout


@pytest.mark.parametrize(("options", "stored"), [({"blocks": [1, 2, 2]}, None), ({"grid": [4, 8, 8]}, [4, 8, 8])])
def test_the_grid_is_the_one_that_was_stored_or_that_the_probe_had(options, stored, tmp_path):
    torch.manual_seed(0)
    mhla_hf.convert(wan_pipeline(), options).save_pretrained(tmp_path / "mhla")
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    own = f"token grid: {' × '.join(map(str, stored)) if stored else 'not stored'}"
    result = run(tmp_path / "mhla", "--samples", 0, "--json", figures, "--html", page)
    mixing = json.loads(figures.read_text())["models"][0]["layers"][0]["mixing"]
    assert mixing["grid"] == stored and own in result.stdout
    shown = re.sub(r"<[^>]*>", " ", page.read_text())
    assert bool(re.search(r"token grid\s+not stored", shown)) == (stored is None)

    sizes = ("--height", 32, "--width", 64, "--num-frames", 9, "--samples", 4, "--steps", 2, "--tokens", 8)
    result = run(tmp_path / "mhla", "--json", figures, "--html", page, *sizes)
    layer = json.loads(figures.read_text())["models"][0]["layers"][0]
    assert ("The probe ran in" in result.stdout) == (stored is not None)
    assert layer["mixing"]["grid"] == (stored or [3, 2, 4])
    assert f"<dd>{' × '.join(map(str, stored or [3, 2, 4]))}" in page.read_text()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("wan-softmax", (), "has no MHLA model"),
        ("wan", ("--layers", "0"), "--layers names none of the MHLA layers"),
        ("wan", ("--block", "99"), "--block 99 must be"),
        ("wan", ("--component", "vae"), "--component 'vae'"),
        ("wan", ("--original", "{root}/llama-softmax"), "has no softmax model for transformer"),
        ("wan", ("--image", "a.png"), "leave images out"),
        ("wan", ("--layers", "1", "--height", "33"), "height"),
        ("llama", ("--height", "32"), "height: only for samples of pipelines"),
        ("llama", ("--tokens", "1"), "--tokens 1 must be"),
        ("vit", ("--prompt", "a"), "takes pixel_values"),
        ("llama", ("--image", "a.png"), "takes texts, no images"),
        ("llama", ("--device", "tpu"), "--device 'tpu'"),
    ],
)
def test_mistakes_give_one_line(saved, tmp_path, name, options, message):
    page = tmp_path / "page.html"
    options = [option.replace("{root}", str(saved)) for option in options]
    assert message in line(run(saved / name, "--html", page, *options, code=None))
    assert not list(tmp_path.iterdir())
