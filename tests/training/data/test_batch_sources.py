# SPDX-License-Identifier: Apache-2.0
"""Batches to recover on: text, images and latents."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

import mhla_hf
from mhla_hf.training.data.batches import Latents
from mhla_hf.training.data.images import image_batches
from mhla_hf.training.data.texts import TextCorpus, text_batches
from tests.integrations.transformers.mhla_models import default_options
from tests.integrations.transformers.tiny_models import softmax_model
from tests.training.cases import CASES

from ...recovery.sources import model_directory, text_folder


def converted(name: str):
    sizes = {} if name.startswith("vit") else {"vocab_size": 128}
    return mhla_hf.convert(softmax_model(name, **sizes), default_options(name)).eval()


def equal(first, second) -> bool:
    tensors = [name for name in first if isinstance(first[name], torch.Tensor)]
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in tensors)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One source of every kind."""
    root = tmp_path_factory.mktemp("sources")
    texts = str(text_folder(root / "texts"))
    made = {}
    for name in ("llama", "bert"):
        directory = model_directory(name, root / name)
        length = {"llama": 32, "bert": 128}[name]
        made[name] = text_batches(converted(name), directory, texts, samples=64, length=length, held_out=5)
    made["vit"] = image_batches(converted("vit"), model_directory("vit", root / "vit"), "digits", samples=20)
    case = CASES["wan"]
    made["wan"] = Latents(case.dataset(12), case.objective, case.student(case.make_teacher()), held_out=3)
    return made


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "wan"])
def test_batches_are_a_pure_function(sources, name):
    source = sources[name]
    first = source.batch("match", 3, 4)
    source.batch("match", 40, 4)
    assert equal(source.batch("match", 3, 4), first)
    assert not equal(source.batch("distill", 3, 4), first)
    assert len(source) > 3 * len(source.held_out(1)) > 0
    assert all(equal(*pair) for pair in zip(source.held_out(2), source.held_out(2), strict=True))
    json.dumps(source.describe())


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "wan"])
def test_the_model_takes_them(sources, name):
    model = {"wan": lambda: CASES["wan"].student(CASES["wan"].make_teacher())}.get(name, lambda: converted(name))()
    with torch.no_grad():
        output = model(**sources[name].batch("match", 0, 2))[0]
    assert len(output) == 2 and torch.isfinite(output).all()


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_every_sample_once_in_an_epoch_and_none_of_the_held_out(sources, name):
    source = sources[name]
    key = "pixel_values" if name == "vit" else "input_ids"

    def rows(batch):
        return [tuple(row[row != 0].flatten().tolist()) for row in batch[key]]

    held_out = {row for batch in source.held_out(4) for row in rows(batch)}
    # A batch of 1 shows the plain order; passages come in groups of batches.
    steps = len(source) if name != "bert" else 32
    seen = [row for step in range(steps) for row in rows(source.batch("match", step, 1))]
    assert len(set(seen)) == min(steps, len(source)) and not held_out & set(seen)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_files_of_records(tmp_path, suffix):
    datasets = pytest.importorskip("datasets")
    path = tmp_path / f"texts{suffix}"
    rows = datasets.Dataset.from_list([{"body": "one  two"}, {"body": ""}, {"body": "three"}])
    rows.to_json(path) if suffix == ".jsonl" else rows.to_parquet(path)
    corpus = TextCorpus(str(path), "body")
    assert list(corpus.passages()) == ["one two", "three"]
    assert corpus.skipped == [f"record 2 of {path} has no text in 'body'"]
    with pytest.raises(ValueError, match=r"record 1 of .* has no field 'text'; its fields are body: name the one"):
        list(TextCorpus(str(path)).documents())
    path.write_bytes(b'{"text": "one"}\n[1\n')
    with pytest.raises(ValueError, match=f"texts{suffix} cannot be read: "):
        list(TextCorpus(str(path)).documents())


def test_data_set_of_the_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(**options):
        asked.append(options)
        if "nothing" in options["path"]:
            raise ValueError("no such thing\nand much more")
        return iter([{"text": "first"}, {"text": "second"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(TextCorpus("owner/name:config").documents()) == ["first", "second"]
    assert asked == [{"path": "owner/name", "name": "config", "split": "train", "streaming": True}]
    with pytest.raises(ValueError, match="data: owner/nothing cannot be read: no such thing and much more"):
        list(TextCorpus("owner/nothing").documents())


def test_mistakes_name_what_to_do(tmp_path):
    llama, vit = converted("llama"), converted("vit")
    directory = model_directory("llama", tmp_path / "llama")
    texts = str(text_folder(tmp_path / "texts", files=1, paragraphs=1))
    with pytest.raises(ValueError, match="1 rows of 64 tokens .* at least 2 are needed: give more text, or shorter"):
        text_batches(llama, directory, texts, samples=8, length=64)
    with pytest.raises(ValueError, match="max_length must be from 2 to 128"):
        text_batches(llama, directory, texts, samples=8, length=500)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="nothing is empty"):
        text_batches(llama, directory, str(tmp_path / "nothing"), samples=8)
    with pytest.raises(ValueError, match="tokenizer"):
        text_batches(llama, tmp_path / "nothing", texts, samples=8)
    with pytest.raises(OSError, match="Can't load image processor"):
        image_batches(vit, tmp_path / "nothing", "digits", samples=8)
    (tmp_path / "texts" / "capitals.txt").write_text("CAPITALS COME LATE IN THE VOCABULARY", encoding="utf-8")
    small = mhla_hf.convert(softmax_model("llama"), default_options("llama"))
    with pytest.raises(ValueError, match="makes token .*, but the model has 64"):
        text_batches(small, directory, texts, samples=8, length=8)


def test_folder_of_images(tmp_path, caplog):
    folder = tmp_path / "images"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            value = np.full((20, 24, 3), 30 * number + (5 if name == "cat" else 0), np.uint8)
            Image.fromarray(value).save(folder / name / f"{number}.png")
    (folder / "broken.png").write_bytes(b"not an image")
    source = image_batches(converted("vit"), model_directory("vit", tmp_path / "vit"), str(folder), samples=6)
    assert (len(source), source.describe()["held_out"], source.describe()["left_out"]) == (7, 1, 1)
    assert source.batch("match", 0, 3)["pixel_values"].shape == (3, 3, 16, 16)
    assert "broken.png cannot be read as an image" in caplog.text
