# SPDX-License-Identifier: Apache-2.0
"""Empty sets and single samples: commands that read data work on them, or end in one line and write nothing."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

import mhla_hf
from mhla_hf.conversion import convert_pretrained
from mhla_hf.training.data.batches import drawn_held_out, last_held_out
from mhla_hf.training.data.images import image_batches
from tests import tiny
from tests.command_line import run_command
from tests.integrations.transformers.mhla_models import default_options
from tests.integrations.transformers.tiny_models import softmax_model
from tests.recovery.sources import model_directory


pytest.importorskip("datasets")

LINE = "the block mixes its summaries and every token of it reads what was written before"
FEW_ROWS = "has . rows of .* tokens .*; at least 2 are needed: give more text, or shorter rows"
FEW = "at least 2 are needed"
TEXTS = {
    "blank.txt": ("", FEW_ROWS, FEW),
    "short.txt": ("one two three four five", FEW_ROWS, FEW),
    "empty.jsonl": ("", "the file .* is empty", "the file .* is empty"),
    "lines.jsonl": ("\n\n", "has no records", "has no records"),
    "none.json": ("[]", "has no records", "has no records"),
    "one.jsonl": (json.dumps({"text": "one"}), FEW_ROWS, FEW),
    "same.jsonl": (json.dumps({"text": "one"}) + "\n" + json.dumps({"text": "one"}), FEW_ROWS, FEW),
    "number.jsonl": ('{"text": 1}', "a value of type int in 'text'", "a value of type int in 'text'"),
    "chats.jsonl": (
        json.dumps({"messages": [{"role": "user", "content": "one"}]}),
        "a chat in 'messages', which language models with a chat template read alone",
        "a chat in 'messages', which language models with a chat template read alone",
    ),
    "empty.parquet": ("", "the file .* is empty", "the file .* is empty"),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A softmax model of each kind, and the same converted."""
    root = tmp_path_factory.mktemp("sources")
    made = {name: model_directory(name, root / name) for name in ("llama", "bert", "vit")}
    tiny.wan_pipeline().save_pretrained(root / "wan")
    made["wan"] = root / "wan"
    for name, source in made.items():
        options = {"blocks": (1, 2, 2), "grid": (3, 2, 4)} if name == "wan" else {}
        convert_pretrained(source, root / f"{name}-mhla", options, progress=False)
    return made


def refused(sources, kind: str, data, message: str, tmp_path) -> None:
    """All commands that take the data end with the message, before anything is written."""
    source, out = sources[kind], tmp_path / "out"
    commands = {
        "recover": (source, out, "--device", "cpu"),
        "calibrate": (source.parent / f"{kind}-mhla", out, "--device", "cpu"),
        "convert": (source, out, "--calibrate"),
        "select-layers": (source, "--device", "cpu"),
    }
    for name, arguments in commands.items():
        done = run_command(name, *arguments, "--data", data, "-q", code=2)
        (line,) = [line for line in done.output.splitlines() if "error: " in line]
        assert re.search(message, line) and "unexpected" not in line, (name, line)
        assert not out.exists(), name


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("name", TEXTS)
def test_texts(kind, name, sources, tmp_path):
    content, of_rows, of_passages = TEXTS[name]
    data = tmp_path / "texts" if name.endswith(".txt") else tmp_path / name
    data.mkdir() if name.endswith(".txt") else None
    (data / name if data.is_dir() else data).write_text(content, encoding="utf-8")
    refused(sources, kind, data, of_rows if kind == "llama" else of_passages, tmp_path)


@pytest.mark.parametrize("kind", ["llama", "bert", "vit", "wan"])
def test_an_empty_folder(kind, sources, tmp_path):
    (tmp_path / "nothing").mkdir()
    refused(sources, kind, tmp_path / "nothing", "the folder .* is empty", tmp_path)


def test_one_image(sources, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    Image.new("RGB", (20, 20)).save(folder / "one.png")
    refused(sources, "vit", folder, "has 1 images that can be read; at least 2 are needed", tmp_path)
    refused(sources, "vit", folder / "one.png", "must be an existing folder", tmp_path)


def test_one_video(sources, tmp_path):
    imageio = pytest.importorskip("imageio")
    folder = tmp_path / "videos"
    folder.mkdir()
    frames = [np.full((16, 16, 3), 20 * number, np.uint8) for number in range(9)]
    imageio.mimwrite(folder / "one.mp4", frames, fps=16, macro_block_size=1)
    (folder / "one.txt").write_text("a clip", encoding="utf-8")
    out, size = tmp_path / "out", ("--height", "16", "--width", "16", "--num-frames", "5")
    done = run_command("recover", sources["wan"], out, "--data", folder, *size, "-q", code=2)
    assert "--data: at least 2 samples are needed, of which one is held out, got 1" in done.output
    assert not out.exists()


@pytest.mark.parametrize("split", [last_held_out, drawn_held_out])
def test_the_smallest_split(split):
    learned, held_out = split(2, 96)
    assert sorted([*learned, *held_out]) == [0, 1] and len(held_out) == 1
    for count in (0, 1):
        with pytest.raises(ValueError, match=f"at least 2 samples are needed, .*, got {count}"):
            split(count, 1)


def test_a_few_texts_are_enough(sources, tmp_path):
    path = tmp_path / "two.jsonl"
    path.write_text(json.dumps({"text": "one two"}) + "\n" + json.dumps({"text": "three"}), encoding="utf-8")
    changes = {"calibrate.batches": 2, "calibrate.batch_size": 2, "calibrate.fit_steps": 2, "data.max_length": 32}
    report = mhla_hf.recover(
        sources["bert"], tmp_path / "out", path, stages=["calibrate"], changes=changes, device="cpu", progress=False
    )
    assert (report.data["samples"], report.data["held_out"]) == (1, 1)
    assert all(np.isfinite(value) for figures in report.figures.values() for value in figures.values())


@pytest.mark.parametrize("height, width", [(1, 1), (1, 9), (3, 7), (7, 3), (3, 3)])
def test_images_of_few_pixels(height, width, tmp_path):
    """Their sizes could be numbers of channels."""
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), np.uint8)
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("one", "two"):
        Image.fromarray(pixels).save(folder / f"{name}.png")
    model = mhla_hf.convert(softmax_model("vit"), default_options("vit"))
    directory = model_directory("vit", tmp_path / "vit")
    source = image_batches(model, directory, str(folder), samples=2)
    found = source.batch("match", 0, 1)["pixel_values"]
    expected = source.processor(images=Image.fromarray(pixels), return_tensors="pt")["pixel_values"]
    assert torch.equal(found, expected)


def test_samples_that_cannot_be_used_are_told_before_anything_is_converted_or_loaded(sources, tmp_path, monkeypatch):
    imageio = pytest.importorskip("imageio")
    folder = tmp_path / "videos"
    folder.mkdir()
    for name in ("a", "b"):
        imageio.mimwrite(folder / f"{name}.mp4", [np.zeros((16, 16, 3), np.uint8)] * 3, fps=16, macro_block_size=1)
        (folder / f"{name}.txt").write_text("a clip", encoding="utf-8")
    monkeypatch.setattr("mhla_hf.recovery.recover.convert_pretrained", None)
    monkeypatch.setattr("mhla_hf.training.data.latent_cache.load_encoders", None)
    reason = "has 0 of 2 samples that can be used; at least . needed .*a.mp4 has fewer frames that can be read than 5"
    given = sources["wan"], tmp_path / "out", "--data", folder, "-q"
    size = "--height", "16", "--width", "16", "--num-frames", "5"
    for line in (("recover", *given, *size), ("train", "cache", *given, "--sizes", "16,16,5")):
        done = run_command(*line, code=2)
        assert re.search(reason, done.output.replace("\n", " ")), done.output


def test_data_that_are_no_cache(sources, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.txt").write_text("a clip", encoding="utf-8")
    line = "calibrate", sources["wan"].parent / "wan-mhla", tmp_path / "out", "--data", tmp_path / "files"
    done = run_command(*line, "-q", "--device", "cpu", code=2)
    assert "must be a cache, which mhla-hf train cache makes" in done.output, done.output


def test_a_probe_takes_an_image_of_one_pixel(sources, tmp_path):
    Image.new("RGB", (1, 1), "red").save(tmp_path / "pixel.png")
    options = "--quiet", "--image", tmp_path / "pixel.png", "--device", "cpu"
    run_command("inspect", sources["vit"].parent / "vit-mhla", *options)
