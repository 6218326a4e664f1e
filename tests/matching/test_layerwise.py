# SPDX-License-Identifier: Apache-2.0
"""Matching of layers: what is compared, what learns, and what is left as it was, in every family."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import mhla_hf
from mhla_hf.matching.layer_training import MatchSettings, layer_optimizer, trained_names
from mhla_hf.matching.layerwise import match_layers, matching_losses
from mhla_hf.training.layers import find_projections, mhla_layers
from mhla_hf.training.teacher import SharedTeacher
from tests.integrations.transformers.mhla_models import default_options
from tests.integrations.transformers.tiny_models import inputs, softmax_model

from ..layers.test_original import DIFFUSERS, models


SMALL_BLOCKS = {"llama": {"block_size": 4}, "bert": {"block_size": 4}, "vit": {"blocks": (2, 2)}}
PROJECTIONS = {
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "bert": {"query", "key", "value", "dense"},
    "vit": {"q_proj", "k_proj", "v_proj", "o_proj"},
}


def pair(name, **options):
    """A student with small blocks, and its teacher."""
    teacher = softmax_model(name)
    return mhla_hf.convert(copy.deepcopy(teacher), {**SMALL_BLOCKS[name], **options}), teacher


def batches(name, count=3, padding=None):
    return [inputs(name, batch=4, length=20, padding=padding, seed=seed) for seed in range(count)]


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("name", ["wan", "dit", "sana", "llama", "bert", "vit"])
def test_every_family_learns(name):
    softmax, _, batch = models(name)
    options = DIFFUSERS[name]().options if name in DIFFUSERS else default_options(name)
    # Features after which the sums that MHLA divides by are never near zero.
    model = mhla_hf.convert(softmax, {**options, "feature_map": "hedgehog", "rope": "before_feature_map"})
    before = matching_losses(model, batch)
    report = match_layers(
        model, [batch], steps=3, warmup_steps=0, learning_rate=1e-3, mhla_learning_rate=1e-3, cache_dtype="float32"
    )
    assert report.cache == "memory" and report.cache_bytes > 0
    assert list(report.losses) == [layer.name for layer in mhla_layers(model)]
    for name, losses in report.losses.items():
        assert losses[0] == pytest.approx(before[name], rel=1e-4) and losses[2] < losses[0]


@pytest.mark.parametrize("name", SMALL_BLOCKS)
def test_the_student_is_its_own_teacher(name):
    student, teacher = pair(name)
    batch = batches(name)[0]
    alone = matching_losses(student, batch)
    assert matching_losses(student, batch, teacher=teacher) == pytest.approx(alone, rel=1e-5)
    assert student.config._attn_implementation == "mhla"
    # After calibration and training it is not; the original values say what it was.
    changed = {}
    for layer in find_projections(student, mhla_layers(student), batch):
        changed[f"{layer.projection_name}.weight"] = layer.projection.weight.detach().clone()
        torch.nn.init.normal_(layer.projection.weight)
    by_values = matching_losses(student, batch, teacher=SharedTeacher(student, changed))
    assert by_values == pytest.approx(matching_losses(student, batch, teacher=teacher), rel=1e-5)
    assert all(by_values[name] > 2 * alone[name] for name in alone)
    assert all(not torch.equal(student.get_parameter(name), value) for name, value in changed.items())


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_layer_is_compared_on_the_hidden_states_of_the_teacher(name):
    student, teacher = pair(name)
    batch = batches(name)[0]
    seen = {}

    def keep(model, which):
        layer = find_projections(student, mhla_layers(student), batch)[1]
        module = model.get_submodule(layer.name)
        names = [(layer.name, "input")]
        names.append((layer.projection_name if layer.projects_outside else layer.name, "output"))
        handles = []
        for name, what in names:

            def hook(module, args, kwargs, output, what=what):
                given = args[0] if args else kwargs["hidden_states"]
                seen[which, what] = given if what == "input" else output[0] if isinstance(output, tuple) else output

            handles.append(model.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
        return module, handles

    with torch.no_grad():
        _, handles = keep(teacher, "teacher")
        teacher(**batch)
        for handle in handles:
            handle.remove()
        # The student's layer gets the teacher's hidden states.
        module, handles = keep(student, "student")
        given = seen["teacher", "input"]

        def substitute(module, args, kwargs):
            if "hidden_states" in kwargs:
                return args, {**kwargs, "hidden_states": given}
            return (given, *args[1:]), kwargs

        handles.append(module.register_forward_pre_hook(substitute, with_kwargs=True, prepend=True))
        student(**batch)
        for handle in handles:
            handle.remove()
    target = seen["teacher", "output"]
    expected = (seen["student", "output"] - target).square().mean() / target.var(unbiased=False)
    losses = matching_losses(student, batch)
    assert len(losses) == 3
    assert list(losses.values())[1] == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(("name", "train"), [("llama", "mhla"), ("bert", "full")])
def test_only_what_is_asked_for_learns(name, train):
    student, _ = pair(name)
    student.train()
    frozen = next(student.parameters()).requires_grad_(False)
    before, seen = weights(student), []
    report = match_layers(
        student, batches(name), steps=30, train=train, mhla_learning_rate=0.05, learning_rate=1e-2,
        progress=lambda *step: seen.append(step),
    )  # fmt: skip
    assert [step for _, step, _ in seen] == list(range(1, 31)) * 3
    assert [loss for _, _, loss in seen] == [loss for losses in report.losses.values() for loss in losses]
    losses = report.mean_losses()
    assert sum(losses[-3:]) < 0.97 * sum(losses[:3])
    changed = {key for key, value in student.state_dict().items() if not torch.equal(value, before[key])}
    assert any(key.endswith(".mhla.mixing") for key in changed)
    others = {key.split(".")[-2] for key in changed if ".mhla." not in key}
    assert others == (PROJECTIONS[name] if train == "full" else set())
    assert student.training and not frozen.requires_grad
    assert all(parameter.requires_grad for parameter in student.parameters() if parameter is not frozen)
    assert all(parameter.grad is None for parameter in student.parameters())


def test_padding_does_not_count():
    student, teacher = pair("bert")
    batch = inputs("bert", batch=2, length=20, padding="right")
    changed = {**batch, "input_ids": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 7)}
    expected = matching_losses(student, batch, teacher=teacher)
    assert matching_losses(student, changed, teacher=teacher) == pytest.approx(expected, rel=1e-5)
    results = []
    for entry in (batch, changed):
        student, _ = pair("bert")
        match_layers(student, [entry], steps=2)
        results.append(student.get_submodule("bert.encoder.layer.2.attention.self.query").weight)
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["dit", "llama"])
def test_records_in_memory_on_disk_and_made_on_line_are_one(name, tmp_path):
    _, model, batch = models(name)
    half = {key: value[:1] if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    results = []
    for cache in ("memory", "disk", "none"):
        student = copy.deepcopy(model)
        # Text batches differ in their lengths, and records are of one batch each.
        report = match_layers(
            student, [batch, half], steps=4, batch_size=2, cache=cache, output=tmp_path / cache, save_every=3
        )
        assert report.cache == cache
        results.append((report.losses, weights(student)))
        assert not (tmp_path / cache / "activations").exists()
    for losses, values in results[1:]:
        assert losses == results[0][0] and equal(values, results[0][1])


class TestRoom:
    @pytest.fixture(autouse=True)
    def little_memory(self, monkeypatch):
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))

    def test_the_disk_is_next_and_without_it_records_are_made_again(self, tmp_path, monkeypatch):
        for output, cache in ((tmp_path, "disk"), (None, "none")):
            student, _ = pair("bert")
            report = match_layers(student, batches("bert"), steps=2, output=output)
            assert report.cache == cache and report.cache_bytes > 500 and len(report.mean_losses()) == 2
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**30))
        assert match_layers(pair("bert")[0], batches("bert"), steps=2, output=tmp_path / "full").cache == "none"

    def test_what_was_asked_for_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**30 + 600))
        student, _ = pair("bert")
        before = weights(student)
        for kind, other, what in (("memory", "disk", "half of the free memory, 500 B"), ("disk", "memory", "600 B")):
            with pytest.raises(
                ValueError, match=rf"cache='{kind}' needs \S+ kB, more than .*{what}: .*cache='{other}'"
            ):
                match_layers(student, batches("bert"), steps=3, cache=kind, output=tmp_path)
            assert equal(weights(student), before)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_layer_trains_on_a_device_of_its_own(device, tmp_path):
    results = []
    for chosen in (None, device):
        student, _ = pair("bert")
        options = {"steps": 3, "cache": "disk", "output": tmp_path / str(chosen)}
        results.append(match_layers(student, batches("bert"), device=chosen, **options).mean_losses())
        assert {value.device.type for value in student.state_dict().values()} == {"cpu"}
    assert results[0] == pytest.approx(results[1], rel=1e-3)


@pytest.mark.parametrize("optimizer", ["muon", "adam"])
def test_groups_of_the_optimizer(optimizer):
    student, _ = pair("bert")
    layer = find_projections(student, mhla_layers(student), batches("bert")[0])[0]
    config = MatchSettings(mhla_learning_rate=1e-2, learning_rate=7e-3, optimizer=optimizer)
    groups = layer_optimizer(layer, trained_names(layer, "full"), config).param_groups
    found = {id(member): (group["kind"], group["peak_lr"]) for group in groups for member in group["params"]}
    matrix = "matrix" if optimizer == "muon" else "adam"
    assert found[id(layer.mhla.mixing)] == ("logarithm", pytest.approx(2.5e-2))
    assert found[id(layer.attention.query.weight)] == found[id(layer.projection.weight)] == (matrix, 7e-3)
    assert found[id(layer.projection.bias)] == ("adam", 7e-3)
    assert found[id(layer.mhla.feature_map_query.weight)] == ("adam", 1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "softmax"}, "has no MHLA layers"),
        ({"teacher": "mhla"}, "original has MHLA layers"),
        ({"teacher": "other"}, "original lacks"),
        ({"batches": []}, "at least one batch"),
        ({"batches": lambda index: {}}, "num_batches=None must be a whole number"),
        ({"steps": 0}, "steps=0"),
        ({"train": "all"}, "train='all' is not one of"),
        ({"learning_rat": 1e-3}, "Unknown MatchSettings option learning_rat.*Did you mean 'learning_rate'"),
        ({"cache": "disk"}, "cache='disk' needs output"),
        ({"cache_dtype": "int8"}, "dtype='int8' is not one of"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mistakes(change, message):
    student, softmax = pair("bert")
    choices = {"softmax": softmax, "mhla": pair("bert")[0], "model": student, "other": pair("vit")[1]}
    arguments = {"model": student, "batches": batches("bert"), **change}
    for key in ("model", "teacher"):
        if isinstance(arguments.get(key), str):
            arguments[key] = choices[arguments[key]]
    with pytest.raises(ValueError, match=message):
        match_layers(arguments.pop("model"), arguments.pop("batches"), **arguments)


@pytest.mark.parametrize("cache", ["memory", "disk", "none"])
def test_a_layer_keeps_what_it_learned_only_where_its_held_out_error_falls(cache, tmp_path):
    """Compared with errors that are computed here, on the batches that no step has seen."""
    data = batches("bert", count=5)
    for number, rate in enumerate((1e-3, 100.0)):
        student, teacher = pair("bert")
        before = [matching_losses(student, batch) for batch in data[3:]]
        start = weights(student)
        report = match_layers(
            student, data, steps=6, held_out=2, learning_rate=rate, mhla_learning_rate=rate, cache=cache,
            cache_dtype="float32", output=tmp_path / str(number), save_every=2,
        )  # fmt: skip
        after = [matching_losses(student, batch, teacher=teacher) for batch in data[3:]]
        for name, figures in report.to_dict()["layers"].items():
            own, now = (sum(losses[name] for losses in found) / 2 for found in (before, after))
            assert figures["held_out_before"] == pytest.approx(own, rel=1e-4)
            is_kept = figures["held_out_after"] < figures["held_out_before"]
            assert now == pytest.approx(figures["held_out_after"] if is_kept else own, rel=1e-4)
            changed = {
                key for key, value in student.state_dict().items()
                if key.startswith(name) and not torch.equal(value, start[key])
            }  # fmt: skip
            assert bool(changed) == is_kept == (rate < 1)
            # What has not helped is tried again at a tenth of the rates.
            assert figures["attempt"] == (1 if rate < 1 else 2)
    with pytest.raises(ValueError, match="held_out=5"):
        match_layers(student, data, held_out=5)


def test_a_second_attempt_is_made_at_a_tenth_of_the_rates(tmp_path):
    """It ends as a first attempt at these rates, and a run that was stopped within it goes on from there."""
    data, results = batches("bert", count=4), []
    options = {"steps": 8, "held_out": 1, "cache": "none", "save_every": 2, "train": "mhla"}
    for number, rate in enumerate((0.1, 1.0, 1.0)):
        student, _ = pair("bert")
        seen = []

        def progress(*step, seen=seen, number=number):
            seen.append(step)
            if number == 2 and len(seen) == 8 * 3 + 4:
                raise KeyboardInterrupt

        run = partial(match_layers, student, data, output=tmp_path / str(number), mhla_learning_rate=rate, **options)
        if number == 2:
            with pytest.raises(KeyboardInterrupt):
                run(progress=progress)
            student, _ = pair("bert")
            run = partial(run.func, student, *run.args[1:], **run.keywords)
        report = run(progress=lambda *step, seen=seen: seen.append(step))
        results.append((report.layers, weights(student)))
    first, again = results[0][0], results[1][0]
    assert again == results[2][0] and equal(results[1][1], results[2][1])
    repeated = [name for name in again if again[name]["attempt"] == 2 and first[name]["attempt"] == 1]
    assert repeated
    for name in repeated:
        assert first[name]["held_out_after"] == pytest.approx(again[name]["held_out_after"])
        assert all(torch.equal(results[0][1][key], value) for key, value in results[1][1].items() if name in key)
