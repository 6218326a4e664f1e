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
from mhla_hf.training.data.texts import TextCorpus, chat_tokens, text_batches
from tests.integrations.transformers.mhla_models import default_options
from tests.integrations.transformers.tiny_models import softmax_model
from tests.training.cases import CASES

from ...recovery.sources import model_directory, text_folder, tokenizer


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
    with pytest.raises(ValueError, match=r"record 1 of .* has no field 'text', but body: name the one with the text"):
        list(TextCorpus(str(path)).documents())
    path.write_bytes(b'{"text": "one"}\n[1\n')
    with pytest.raises(ValueError, match=f"texts{suffix} cannot be read: "):
        list(TextCorpus(str(path)).documents())


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "[{{ message.role }}]{{ message.content | trim }}."
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Like those of many models: nothing marks what the assistant says."""
CHAT = [
    {"role": "user", "content": "what is it"},
    {"role": "assistant", "content": " a row"},
    {"role": "user", "content": "and then"},
    {"role": "assistant", "content": "a block"},
]


def chat_file(path, *chats, field="messages"):
    path.write_text("\n".join(json.dumps({field: chat, "id": 1}) for chat in chats), encoding="utf-8")
    return str(path)


def chat_directory(folder, template=TEMPLATE):
    directory = model_directory("llama", folder)
    made = tokenizer()
    made.chat_template = template
    made.save_pretrained(directory)
    return directory, made


def test_chats_are_read_by_the_template_and_fine_tuned_on_the_assistant(tmp_path):
    pytest.importorskip("datasets")
    directory, characters = chat_directory(tmp_path / "llama")
    data = chat_file(tmp_path / "chats.jsonl", *[CHAT] * 8)
    source = text_batches(converted("llama"), directory, data, samples=8, length=64, held_out=1)
    ids = characters.apply_chat_template(CHAT)["input_ids"]
    tokens = torch.cat([source.table[index] for index in range(len(source.table))])
    assert tokens.tolist() == (ids * 8)[: len(tokens)]
    assert "labels" not in source.batch("distill", 0, 2)
    batch = source.batch("finetune", 0, 2)
    assert batch["labels"].shape == batch["input_ids"].shape
    assert torch.equal(batch["labels"] != -100, batch["labels"] == batch["input_ids"])
    labels = torch.cat([source.table.labels(index) for index in range(len(source.table))])[: len(ids)]
    assert characters.decode(labels[labels != -100]) == "a row.a block."


def test_turns_that_later_ones_change_are_not_learned(tmp_path):
    """As with templates that leave out the thoughts of earlier turns."""
    template = TEMPLATE.replace(
        "{{ message.content | trim }}",
        "{% if message.role == 'assistant' and loop.last %}~{% endif %}{{ message.content | trim }}",
    )
    _, characters = chat_directory(tmp_path / "llama", template)
    ids, said = chat_tokens(characters, CHAT)
    assert ids == characters.apply_chat_template(CHAT)["input_ids"]
    assert characters.decode([token for token, is_answer in zip(ids, said) if is_answer]) == "~a block."


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("messages", [{"from": "human", "value": "hello"}], "list, but not of messages with the texts 'role'"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "list, but not of messages"),
        ("body", 3, "no field 'text', but body, id: name the one with the text"),
        ("text", 3, "'text' of record 1 of .* holds int, not text; its fields are id, text: name"),
        ("text", {"en": "one"}, "holds dict, not text"),
        ("text", ["one", "two"], "list, but not of messages"),
    ],
)
def test_other_fields_than_text_are_refused(tmp_path, field, value, message):
    pytest.importorskip("datasets")
    directory, _ = chat_directory(tmp_path / "llama")
    data = chat_file(tmp_path / "chats.jsonl", value, value, field=field)
    with pytest.raises(ValueError, match=message):
        text_batches(converted("llama"), directory, data, samples=8, length=16)


def test_chats_need_a_template_and_a_language_model(tmp_path, caplog):
    pytest.importorskip("datasets")
    data = chat_file(tmp_path / "chats.jsonl", *[CHAT] * 4)
    directory = model_directory("llama", tmp_path / "llama")
    with pytest.raises(ValueError, match="need a fast tokenizer with a chat template"):
        text_batches(converted("llama"), directory, data, samples=8, length=16)
    with pytest.raises(ValueError, match="holds chats, which are for language models"):
        text_batches(converted("bert"), model_directory("bert", tmp_path / "bert"), data, samples=8)
    directory, _ = chat_directory(tmp_path / "other")
    data = chat_file(tmp_path / "chats.jsonl", CHAT, [{"role": "robot", "content": "no"}], *[CHAT] * 2)
    source = text_batches(converted("llama"), directory, data, samples=8, length=16, held_out=1)
    assert source.describe()["left_out"] == 1 and "no robots" in caplog.text


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
