# SPDX-License-Identifier: Apache-2.0
"""Layer-wise attention transfer: what is compared, what is trained, and what is left as it was."""

from __future__ import annotations

import pytest
import torch

from mhla_hf.integrations.transformers.attaching import convert_transformers_model
from mhla_hf.training import match_attention, transfer_attention

from .tiny_models import inputs, softmax_model


PROJECTIONS = {"llama": ("q_proj", "k_proj"), "bert": ("query", "key"), "vit": ("q_proj", "k_proj")}
SMALL_BLOCKS = {"llama": {"block_size": 4}, "bert": {"block_size": 4}, "vit": {"blocks": (2, 2)}}


def models(name):
    """A student with small blocks, and its teacher."""
    return convert_transformers_model(softmax_model(name), SMALL_BLOCKS[name]), softmax_model(name)


def batches(name, count=3, padding=None):
    return [inputs(name, batch=4, length=20, padding=padding, seed=seed) for seed in range(count)]


@pytest.mark.parametrize("name", PROJECTIONS)
def test_the_student_is_its_own_teacher(name):
    student, teacher = models(name)
    batch = batches(name)[0]
    assert match_attention(student, None, batch) == pytest.approx(match_attention(student, teacher, batch), rel=1e-5)
    assert student.config._attn_implementation == "mhla"


@pytest.mark.parametrize("name", PROJECTIONS)
def test_a_layer_is_compared_on_the_hidden_states_of_the_teacher(name):
    student, teacher = models(name)
    batch = batches(name)[0]
    calls = {}

    def keep(model, which):
        attention = [
            module for module in model.modules() if "Attention" in type(module).__name__ and _projects(module)
        ]
        first = attention[0]
        return first.register_forward_hook(
            lambda module, args, output: calls.update({which: output[0] if isinstance(output, tuple) else output})
        )

    # The first layer sees the same hidden states in both models anyway.
    for model, which in ((student, "student"), (teacher, "teacher")):
        with torch.no_grad():
            handle = keep(model, which)
            model(**batch)
            handle.remove()
    target = calls["teacher"]
    expected = (calls["student"] - target).square().mean() / target.var(unbiased=False)
    losses = match_attention(student, teacher, batch)
    assert len(losses) == 3
    assert next(iter(losses.values())) == pytest.approx(expected.item(), rel=1e-4)


def _projects(module):
    return any(hasattr(module, name) for pair in PROJECTIONS.values() for name in pair)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_only_parameters_of_mhla_learn(name):
    student, _ = models(name)
    student.train()
    frozen = next(student.parameters()).requires_grad_(False)
    before = {key: value.clone() for key, value in student.state_dict().items()}
    seen = []
    report = transfer_attention(student, None, batches(name), steps=30, learning_rate=0.05, progress=seen.append)
    assert [step.step for step in report] == list(range(1, 31)) and seen == report
    assert sum(step.loss for step in report[-3:]) < 0.97 * sum(step.loss for step in report[:3])
    changed = {key for key, value in student.state_dict().items() if not torch.equal(value, before[key])}
    assert changed and all(".mhla." in key for key in changed)
    assert student.training and not frozen.requires_grad
    assert all(parameter.requires_grad for parameter in student.parameters() if parameter is not frozen)
    assert all(parameter.grad is None for parameter in student.parameters())


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_learn_when_asked_for(name):
    student, teacher = models(name)
    before = {key: value.clone() for key, value in student.state_dict().items()}
    transfer_attention(student, teacher, batches(name), steps=3, projections=PROJECTIONS[name], weight_decay=0.01)
    changed = {key for key, value in student.state_dict().items() if not torch.equal(value, before[key])}
    others = {key for key in changed if ".mhla." not in key}
    assert {key.split(".")[-2] for key in others} == set(PROJECTIONS[name])
    with pytest.raises(ValueError, match="teacher of their own"):
        transfer_attention(student, None, batches(name), projections=PROJECTIONS[name])


def test_padding_does_not_count():
    student, teacher = models("bert")
    batch = inputs("bert", batch=2, length=20, padding="right")
    changed = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)}
    expected = match_attention(student, teacher, batch)
    assert match_attention(student, teacher, changed) == pytest.approx(expected, rel=1e-5)


def test_the_same_seed_gives_the_same_weights():
    results = []
    for seed in (0, 0, 1):
        student, _ = models("bert")
        transfer_attention(student, None, batches("bert", count=5), steps=3, seed=seed)
        results.append(torch.cat([p.flatten() for n, p in student.named_parameters() if ".mhla." in n]))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_layers_that_stay_softmax_are_left_alone():
    student = convert_transformers_model(softmax_model("llama"), {"block_size": 4, "layers": [0, 2]})
    assert len(match_attention(student, None, batches("llama")[0])) == 2
    report = transfer_attention(student, None, batches("llama"), steps=1)
    assert len(report[0].losses) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"student": "softmax"}, "has no MHLA layers"),
        ({"teacher": "mhla"}, "teacher has MHLA layers"),
        ({"teacher": "student"}, "student itself"),
        ({"teacher": "other"}, "teacher has no"),
        ({"batches": []}, "batches is empty"),
        ({"steps": 0}, "steps=0"),
        ({"projections": ("q_lin",)}, "'q_lin'.*query"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mistakes(change, message):
    student, teacher = models("bert")
    choices = {
        "softmax": softmax_model("bert"),
        "mhla": models("bert")[0],
        "student": student,
        "other": models("vit")[1],
    }
    arguments = {"student": student, "teacher": teacher, "batches": batches("bert"), **change}
    for key in ("student", "teacher"):
        if isinstance(arguments[key], str):
            arguments[key] = choices[arguments[key]]
    with pytest.raises(ValueError, match=message):
        transfer_attention(arguments.pop("student"), arguments.pop("teacher"), arguments.pop("batches"), **arguments)
