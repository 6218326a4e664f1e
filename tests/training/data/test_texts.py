# SPDX-License-Identifier: Apache-2.0
"""Records of texts and chats: the field that is read, tokens of chats, what is learned of them, what is refused."""

import json

import pytest
import torch
import torch.nn.functional as F

import mhla_hf
from mhla_hf.training.config import TrainingConfig
from mhla_hf.training.data.texts import TextCorpus, text_batches, tokenize
from mhla_hf.training.libraries import TransformersTrainer
from tests.integrations.transformers.mhla_models import default_options
from tests.integrations.transformers.tiny_models import softmax_model

from ...recovery.sources import model_directory, tokenizer


datasets = pytest.importorskip("datasets")

TURN = "<{{ message.role }}>{{ message.content }}|"
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
TEMPLATE = "{% for message in messages %}" + TURN + "{% endfor %}" + PROMPT
SAID = "<assistant>{% generation %}{{ message.content }}|{% endgeneration %}"
ROLE = '{% for message in messages %}{% if message.role == "assistant" CONDITION %}'
MARKED = ROLE.replace("CONDITION", "") + SAID + "{% else %}" + TURN + "{% endif %}{% endfor %}"
# The last turn alone keeps what the model thinks.
LAST = "<assistant>thinks;{{ message.content }}|{% else %}"
THINKING = ROLE.replace("CONDITION", "and loop.last") + LAST + TURN + "{% endif %}{% endfor %}" + PROMPT

CHAT = [
    {"role": "system", "content": ""},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "two."},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "three."},
]

NAMES = {"system": "system", "user": "human", "assistant": "gpt"}
SHARE_GPT = [{"from": NAMES[each["role"]], "value": each["content"]} for each in CHAT]


def with_template(template: str | None):
    made = tokenizer()
    made.chat_template = template
    return made


def records(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def read(data: str, template: str | None = TEMPLATE, field: str | None = None, packed: bool = True, length: int = 8):
    own = with_template(template)
    return tokenize(TextCorpus(data, field, own if packed else None), own, packed=packed, length=length, samples=200)


@pytest.mark.parametrize(
    "template, said",
    [(TEMPLATE, ["two.|", "three.|"]), (MARKED, ["two.|", "three.|"]), (THINKING, ["thinks;three.|"])],
)
def test_the_template_makes_the_tokens_of_chats(template, said, tmp_path):
    own = with_template(template)
    expected = own.apply_chat_template(CHAT)["input_ids"]
    data = records(tmp_path / "chats.jsonl", [{"messages": CHAT}] * 3)
    table = read(data, template, length=len(expected))
    assert len(table) == 3 and all(table[row].tolist() == expected for row in range(3))
    learned = table.learned.view(3, -1)[1]
    parts, text = [], ""
    for token, mine in zip(expected, learned.tolist(), strict=True):
        text = text + own.convert_ids_to_tokens(token) if mine else ""
        parts += [text] if mine and not text[:-1] else []
        if mine:
            parts[-1] = text
    assert parts == said


def test_texts_are_learned_whole(tmp_path):
    assert read(records(tmp_path / "texts.jsonl", [{"text": "one two three four"}] * 2)).learned is None
    mixed = read(records(tmp_path / "mixed.jsonl", [{"text": "one two three four"}, {"messages": CHAT}]))
    assert mixed.learned[:8].all() and not mixed.learned.all()


@pytest.mark.parametrize(
    "row, field, template, found",
    [
        ({"text": "plain", "messages": CHAT}, None, TEMPLATE, "chat"),
        ({"text": "plain", "messages": CHAT}, "text", TEMPLATE, "plain"),
        ({"text": "plain", "messages": CHAT}, None, None, "plain"),
        ({"talk": CHAT}, "talk", TEMPLATE, "chat"),
        ({"text": "plain", "messages": None}, None, TEMPLATE, "plain"),
        ({"conversations": SHARE_GPT}, None, TEMPLATE, "chat"),
        ({"conversations": CHAT}, None, TEMPLATE, "chat"),
    ],
)
def test_which_field_is_read(row, field, template, found, tmp_path):
    data = records(tmp_path / "rows.jsonl", [row] * 2)
    (first, _) = TextCorpus(data, field, with_template(template)).documents()
    if found == "chat":
        expected = with_template(TEMPLATE).apply_chat_template(CHAT)["input_ids"]
        assert [max(token, ~token) for token in first.tolist()] == expected
    else:
        assert first == found


BAD = {
    "number": ({"text": 3}, "a value of type int in 'text', no text or chat; its fields are text: name the one with"),
    "none": ({"text": None, "label": 1}, "no text in 'text'; its fields are label, text: name the one .*--text-field"),
    "blank": ({"text": " "}, "no text in 'text'"),
    "dict": ({"text": {"en": "one"}}, "a value of type dict in 'text'"),
    "list of texts": ({"text": ["one", "two"]}, "a value of type list in 'text'"),
    "empty chat": ({"messages": []}, "a value of type list in 'messages'"),
    "no field": ({"body": "one"}, "no field 'messages'|no field 'text'; its fields are body"),
    "parts": (
        {"messages": [{"role": "assistant", "content": [{"type": "text", "text": "one"}]}]},
        "no chat in 'messages' that can be read: messages need a role .system, user or assistant. and content",
    ),
    "roles": ({"messages": [{"role": "observation", "content": "one"}]}, "no chat in 'messages' .* need a role"),
    "keys": ({"messages": [{"speaker": "user", "says": "one"}]}, "no chat in 'messages' .* need a role"),
    "tools": (
        {"messages": [*CHAT, {"role": "assistant", "content": "", "tool_calls": [{"name": "one"}]}]},
        "no chat in .* no calls of tools",
    ),
    "silent": ({"messages": CHAT[:2]}, "no chat in 'messages' that can be read: the assistant says nothing in it"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_fields_that_hold_no_text(name, suffix, tmp_path):
    row, message = BAD[name]
    path = tmp_path / f"rows{suffix}"
    rows = datasets.Dataset.from_list([row] * 3)
    rows.to_parquet(path) if suffix == ".parquet" else rows.to_json(path)
    with pytest.raises(ValueError, match=f"^data: record 1 of {path} has ({message})") as raised:
        read(str(path))
    assert "\n" not in str(raised.value)


def test_chats_without_a_template_or_for_encoders(tmp_path):
    data = records(tmp_path / "chats.jsonl", [{"messages": CHAT}] * 3)
    message = "a chat in 'messages', which language models with a chat template read alone; its fields are messages"
    for options in ({"template": None}, {"packed": False}):
        with pytest.raises(ValueError, match=message):
            read(data, **options)
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="no chat in 'messages' that can be read: roles must alternate"):
        read(data, refusing)


def test_some_bad_records_are_left_out(tmp_path, caplog):
    rows = [{"messages": []}, {"messages": CHAT[:2]}, *[{"messages": CHAT}] * 4, {"messages": None}]
    table = read(records(tmp_path / "chats.jsonl", rows))
    assert (
        table.skipped == 3
        and len(table) == 4 * len(with_template(TEMPLATE).apply_chat_template(CHAT)["input_ids"]) // 8
    )
    assert "record 2 of" in caplog.text and "the assistant says nothing" in caplog.text


def test_useless_data_sets_are_not_read_to_their_end(monkeypatch):
    read_rows = []

    def rows(**options):
        for number in range(10**6):
            read_rows.append(number)
            yield {"text": number}

    monkeypatch.setattr(datasets, "load_dataset", rows)
    with pytest.raises(ValueError, match="record 1 of owner/name has a value of type int in 'text'"):
        read("owner/name")
    assert len(read_rows) == 1000


@pytest.mark.usefixtures("fresh_accelerate_state")
def test_fine_tuning_learns_what_the_assistant_says(tmp_path):
    model = mhla_hf.convert(softmax_model("llama", vocab_size=128), default_options("llama"))
    directory = model_directory("llama", tmp_path / "llama")
    with_template(TEMPLATE).save_pretrained(directory)
    data = records(tmp_path / "chats.jsonl", [{"messages": CHAT}] * 20)
    source = text_batches(model, directory, data, samples=20, length=32, held_out=2)
    assert all("labels" not in source.batch(stage, 0, 2) for stage in ("calibrate", "match", "distill"))
    assert "labels" not in source.held_out(2)[0]
    batch = source.batch("finetune", 0, 4)
    assert torch.equal(batch["labels"] != -100, batch["labels"] == batch["input_ids"])
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"]).logits[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)
    config = TrainingConfig(max_steps=1, batch_size=4, device="cpu", output=str(tmp_path / "run"), progress=False)
    losses = TransformersTrainer(config, source, model).run().losses["finetune"]
    assert losses[0] == pytest.approx(expected.item(), rel=1e-5)
    everything = F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())
    assert losses[0] != pytest.approx(everything.item(), rel=1e-3)
