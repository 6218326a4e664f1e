# SPDX-License-Identifier: Apache-2.0
"""TRL: supervised fine-tuning with packing and LoRA, and preference optimisation."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers import AutoModelForCausalLM

import mhla_hf  # noqa: F401
from tests import ROOT

from .mhla_models import mhla_modules, unsettle
from .tiny_files import save_softmax, tokenizer


trl = pytest.importorskip("trl")
# It asks for it by the former names.
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing")

TEXTS = ["hello world, how are you", "a longer text, so that it is packed", "x is y", "numbers 1 2 3"]
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["mhla"], "task_type": "CAUSAL_LM"}
COMMON = {"per_device_train_batch_size": 4, "logging_steps": 1, "report_to": "none", "use_cpu": True, "bf16": False}


@pytest.fixture
def directory(tmp_path):
    """A saved MHLA model, its parameters off their initial values."""
    base = save_softmax("llama", tmp_path / "softmax")
    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="mhla", mhla={"block_size": 4, "grid": [8]})
    unsettle(model)
    model.save_pretrained(tmp_path / "mhla")
    tokenizer("llama").save_pretrained(tmp_path / "mhla")
    return tmp_path / "mhla"


def losses(trainer):
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def fine_tuning(directory, texts, **options):
    from datasets import Dataset

    peft_config = options.pop("peft_config", None)
    return trl.SFTTrainer(
        model=str(directory),
        args=trl.SFTConfig(str(directory.parent / "run"), **COMMON, **options),
        train_dataset=Dataset.from_dict({"text": texts}),
        peft_config=peft_config,
    )


@torch.no_grad()
def loss_of_each_alone(directory, texts):
    """Mean over the predicted tokens of all texts, each in a forward pass of its own."""
    model, words = AutoModelForCausalLM.from_pretrained(directory).eval(), tokenizer("llama")
    found = []
    for text in texts:
        tokens = words(text + words.eos_token, return_tensors="pt").input_ids
        scores = model(tokens).logits[0, :-1].log_softmax(-1)
        found += (-scores.gather(-1, tokens[0, 1:, None])).flatten().tolist()
    return sum(found) / len(found)


@pytest.mark.parametrize(
    "options", [{"packing": True, "max_length": 64}, {"padding_free": True, "max_length": None}, {}], ids=str
)
def test_packed_texts_do_not_see_each_other(directory, options):
    trainer = fine_tuning(directory, TEXTS, max_steps=1, **options)
    assert len(mhla_modules(trainer.model)) == 3
    assert losses(trainer) == [pytest.approx(loss_of_each_alone(directory, TEXTS), abs=1e-4)]


def test_an_adapter_comes_back(directory):
    trainer = fine_tuning(directory, TEXTS * 4, packing=True, max_length=64, max_steps=5, learning_rate=1e-2,
                          peft_config=LoraConfig(**LORA))  # fmt: skip
    first, *_, last = losses(trainer)
    assert last < first - 0.02
    trainer.save_model(str(directory.parent / "adapter"))
    words = tokenizer("llama")(TEXTS[1], return_tensors="pt")
    again = AutoPeftModelForCausalLM.from_pretrained(directory.parent / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**words).logits, trainer.model.eval()(**words).logits)
        assert not torch.allclose(
            again(**words).logits, AutoModelForCausalLM.from_pretrained(directory).eval()(**words).logits, atol=1e-2
        )


@pytest.mark.parametrize("peft_config", [None, LORA], ids=["full", "LoRA"])
def test_preferences_start_at_the_reference(directory, peft_config):
    from datasets import Dataset

    trainer = trl.DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory),
        args=trl.DPOConfig(str(directory.parent / "run"), max_steps=2, learning_rate=1e-2, **COMMON),
        train_dataset=Dataset.from_dict(
            {"prompt": ["hello", "say"] * 4, "chosen": [" world", " 1 2"] * 4, "rejected": [" dog", " a b"] * 4}
        ),
        processing_class=tokenizer("llama"),
        peft_config=peft_config and LoraConfig(**peft_config),
    )
    first, second = losses(trainer)
    assert first == pytest.approx(math.log(2), abs=1e-4)
    assert second < first - 0.01
    if peft_config is None:
        assert len(mhla_modules(trainer.ref_model)) == 3


def test_the_example_of_the_documentation(directory, monkeypatch):
    monkeypatch.chdir(directory.parent)
    directory.rename("llm-mhla")
    (directory.parent / "chats.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS * 4))
    page = (ROOT / "docs" / "use.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(# needs trl.*?)```", page, flags=re.DOTALL)
    # TRL trains in bfloat16 on a GPU by default.
    example = example.replace("max_length=1024", "max_length=1024, use_cpu=True, bf16=False")
    names: dict[str, object] = {}
    exec(compile(example, "docs/use.md", "exec"), names)
    assert (directory.parent / "llm-mhla-chat" / "adapter_model.safetensors").is_file()
    assert names["trainer"].state.global_step > 0
