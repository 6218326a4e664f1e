# SPDX-License-Identifier: Apache-2.0
"""transformers' `Trainer`: accumulation, bf16, gradient checkpointing, evaluation, saving, packed batches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

import mhla_hf  # noqa: F401
from mhla_hf.utils.compat import checkpointing_method

from .mhla_models import mhla_modules
from .tiny_files import save_softmax


# Texts of three blocks and more go beyond the stored weights, and train their decay too.
SMALL_BLOCKS = {"block_size": 4, "grid": [8]}
# The name of the option from transformers 5.24 on, and before.
CHECKPOINTS = next(
    name
    for name in ("activation_checkpointing", "gradient_checkpointing")
    if name in TrainingArguments.__dataclass_fields__
)
CHECKPOINTING = {"off": None, "reentrant": True, "not reentrant": False}


def text_rows(count=16, seed=0):
    """Rows of different lengths that count upwards, easy to learn."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for index in range(count):
        start = torch.randint(3, 64, (1,), generator=generator)
        tokens = 3 + (start + torch.arange(10 + index % 7)) % 61
        rows.append({"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()})
    return rows


class PaddedText:
    """Collates rows of text, padded on the right; padding is no label."""

    def __call__(self, rows):
        length = max(len(row["input_ids"]) for row in rows)
        fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}

        def stacked(key):
            return torch.stack([F.pad(row[key], (0, length - len(row[key])), value=fill[key]) for row in rows])

        return {key: stacked(key) for key in fill}


def arguments(directory, **options):
    defaults = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_steps": 6,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
        "lr_scheduler_type": "constant",
    }
    return TrainingArguments(output_dir=str(directory), **{**defaults, **options})


def load(directory, **options):
    return AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="mhla", mhla={**SMALL_BLOCKS, **options}
    )


def losses(trainer, key="loss"):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def all_gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("bf16", "checkpointing"),
    [
        (False, "off"),
        pytest.param(True, "reentrant", marks=pytest.mark.slow),
        pytest.param(True, "not reentrant", marks=pytest.mark.slow),
    ],
    ids=["fp32", "bf16, reentrant checkpointing", "bf16, checkpointing"],
)
def test_training_a_language_model(tmp_path, bf16, checkpointing):
    model = load(save_softmax("llama", tmp_path / "softmax"))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    reentrant = CHECKPOINTING[checkpointing]
    options = {CHECKPOINTS: reentrant is not None, "bf16": bf16, "gradient_accumulation_steps": 2}
    if reentrant is not None:
        options[f"{CHECKPOINTS}_kwargs"] = {"use_reentrant": reentrant}
    trainer = Trainer(
        model,
        arguments(tmp_path / "run", **options),
        data_collator=PaddedText(),
        train_dataset=text_rows(),
        eval_dataset=text_rows(4, seed=1),
    )
    trainer.train()
    assert losses(trainer)[-1] < 0.85 * losses(trainer)[0]
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(tmp_path / "mhla")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mhla")
    assert len(mhla_modules(reloaded)) == 3
    for name, value in model.state_dict().items():
        assert torch.equal(reloaded.state_dict()[name], value), name
    again = Trainer(
        reloaded, arguments(tmp_path / "run", bf16=bf16), data_collator=PaddedText(), eval_dataset=text_rows(4, seed=1)
    )
    assert again.evaluate()["eval_loss"] == pytest.approx(evaluated, rel=1e-6)


def test_training_goes_on_from_a_checkpoint(tmp_path):
    directory = save_softmax("llama", tmp_path / "softmax")

    def train(run, model, **options):
        trainer = Trainer(
            model,
            arguments(tmp_path / run, save_strategy="steps", save_steps=3, **options),
            data_collator=PaddedText(),
            train_dataset=text_rows(),
        )
        trainer.train(resume_from_checkpoint=(tmp_path / run / "checkpoint-3").exists())
        return trainer.model.state_dict()

    straight = train("straight", load(directory), max_steps=6)
    train("resumed", load(directory), max_steps=3)
    resumed = train("resumed", load(directory), max_steps=6)
    for name, value in straight.items():
        torch.testing.assert_close(resumed[name], value, msg=name)


@pytest.mark.parametrize(
    ("name", "options"), [("llama", {}), ("llama", {"window": "adjacent", "window_size": 3}), ("vit", {})], ids=str
)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_gradients_under_checkpointing(name, options, reentrant):
    from .mhla_models import first_output, inputs, mhla_model

    padding = None if name == "vit" else "right"
    gradients = []
    for checkpointing in (False, True):
        model = mhla_model(name, **options).train()
        if checkpointing:
            checkpointing_method(model)({"use_reentrant": reentrant})
            if reentrant and name != "vit":
                model.enable_input_require_grads()
        output = first_output(model, **inputs(name, padding=padding))
        output.square().mean().backward()
        gradients.append(all_gradients(model))
    assert any(".mhla.mixing" in key for key in gradients[0])
    assert all(gradient.any() for key, gradient in gradients[0].items() if ".window_bias" in key)
    assert gradients[0].keys() == gradients[1].keys()
    for key, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], value, msg=key)


@pytest.mark.parametrize("lengths", [False, True], ids=["position_ids", "cu_seq_lens"])
def test_packed_batches(tmp_path, lengths):
    """A row of four documents trains as four padded rows do, token by token."""
    directory = save_softmax("llama", tmp_path / "softmax")
    rows = text_rows(4)
    gradients = []
    options = {"return_flash_attn_kwargs": True} if lengths else {}
    flattened = DataCollatorWithFlattening(return_position_ids=not lengths, **options)(
        [{key: row[key].tolist() for key in ("input_ids", "labels")} for row in rows]
    )
    padded = PaddedText()(rows)
    # The first token of a document is no label when packed; when padded it is none anyway.
    for batch in (padded, flattened):
        model = load(directory).train()
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        gradients.append((loss.item(), all_gradients(model)))
    assert gradients[1][0] == pytest.approx(gradients[0][0], rel=1e-5)
    for key, value in gradients[0][1].items():
        torch.testing.assert_close(gradients[1][1][key], value, atol=1e-6, rtol=1e-4, msg=key)
