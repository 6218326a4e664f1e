# SPDX-License-Identifier: Apache-2.0
"""What makes the comparison of classifiers fair: same weights, same images, and frozen mixing weights that stay."""

from __future__ import annotations

import pytest
import torch
from transformers import DeiTForImageClassification

from benchmarks.experiments import blocks, classifier
from benchmarks.experiments.classifier import (
    STATISTICS,
    classifier_optimizers,
    make_classifier,
    mixing_figures,
    take_step,
    train_classifier_case,
    train_classifiers_case,
)
from benchmarks.experiments.classifier_variants import SIZES, TITLES, classifier_cases
from benchmarks.experiments.digit_canvases import DigitCanvases
from benchmarks.optimization import freeze_mixing
from mhla_hf import MHLA


SHAPE = {"layers": 2, "hidden_size": 16, "heads": 2, "image_size": 32, "patch_size": 4, "mlp_ratio": 1.0}
UNIFORM = {"mixing_init": "uniform"}
OPTIONS = {name: case.options["mhla"] for name, case in classifier_cases("cpu", TITLES).items()}


def mhla_layers(model):
    return [module for module in model.modules() if isinstance(module, MHLA)]


def smoke_options(name, **changes):
    options = {**classifier_cases("smoke", [name])[name].options, **changes}
    del options["seeds"]
    return options


@pytest.mark.parametrize("name", TITLES)
def test_contestants_start_from_the_same_weights(name):
    softmax = make_classifier(seed=3, mhla=None, **SHAPE).state_dict()
    weights = make_classifier(seed=3, mhla=OPTIONS[name], **SHAPE).state_dict()
    shared = {key: value for key, value in weights.items() if ".mhla." not in key}
    assert shared.keys() == softmax.keys()
    for key, value in shared.items():
        assert torch.equal(value, softmax[key]), key
    assert not softmax["deit.embeddings.position_embeddings"].eq(0).any()


def test_seeds_differ():
    first, second = (make_classifier(seed=seed, mhla=None, **SHAPE).classifier.weight for seed in (0, 1))
    assert not torch.equal(first, second)


def test_conversion_is_loading_with_the_attention_implementation():
    converted = make_classifier(seed=0, mhla={"blocks": [4, 4]}, **SHAPE).eval()
    config = make_classifier(seed=0, mhla=None, **SHAPE).config
    config.mhla = {"blocks": [4, 4]}
    config._attn_implementation = "mhla"
    built = DeiTForImageClassification(config).eval()
    built.load_state_dict(converted.state_dict())
    images = torch.randn(2, 1, 32, 32)
    assert torch.equal(built(pixel_values=images).logits, converted(pixel_values=images).logits)


def test_class_and_distillation_token_are_a_block_of_their_own():
    layer = mhla_layers(make_classifier(seed=0, mhla={"blocks": [4, 4]}, **SHAPE))[0]
    assert layer.num_prefix_tokens == 2 and layer.mixing.shape == (17, 17)


@torch.no_grad()
def test_uniform_mixing_is_linear_attention():
    """Of any number of blocks, as long as the weights stay as they start."""
    linear, uniform, local = (
        # A smaller eps, which the sums of features are compared with: those of uniform weights are means over blocks.
        make_classifier(seed=0, mhla={**mhla, "eps": 1e-12}, **SHAPE).double().eval()
        for mhla in (OPTIONS["linear"], {"blocks": [4, 4], **UNIFORM}, {"blocks": [4, 4]})
    )
    images = torch.randn(2, 1, 32, 32, dtype=torch.double)
    expected = linear(pixel_values=images).logits
    torch.testing.assert_close(uniform(pixel_values=images).logits, expected, rtol=1e-9, atol=1e-9)
    assert (local(pixel_values=images).logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "learned"])
def test_frozen_mixing_stays(frozen):
    model = make_classifier(seed=0, mhla={"blocks": [4, 4]}, **SHAPE)
    if frozen:
        freeze_mixing(model)
    optimizers = classifier_optimizers(model, 1e-2, 1e-2, 1e-2)
    trained = {id(parameter) for one in optimizers for group in one.param_groups for parameter in group["params"]}
    assert trained == {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        take_step(model, optimizers, torch.randn(2, 1, 32, 32), torch.tensor([1, 2]))
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    mixing = {name for name in before if name.endswith(".mhla.mixing")}
    assert len(mixing) == SHAPE["layers"]
    assert changed & mixing == (set() if frozen else mixing)
    assert changed - mixing
    assert [layer["movement"] > 0 for layer in mixing_figures(model)] == [not frozen] * SHAPE["layers"]


def test_matrices_of_layers_are_trained_by_muon():
    """The output gate's are among them."""
    model = make_classifier(seed=0, mhla=OPTIONS["mhla-cpe-gate"], **SHAPE)
    muon, _ = classifier_optimizers(model, 1e-2, 1e-2, 1e-2)
    chosen = {id(parameter) for parameter in muon.param_groups[0]["params"]}
    names = {name.split(".", 3)[-1] for name, parameter in model.named_parameters() if id(parameter) in chosen}
    own = {f"attention.{part}_proj.weight" for part in "qkvo"} | {"mlp.fc1.weight", "mlp.fc2.weight"}
    assert names == own | {"attention.mhla.gate.weight"}


def test_mixing_learns_relative_to_its_size():
    rates = {}
    for count in (2, 8):
        model = make_classifier(seed=0, mhla={"blocks": [count, count]}, **SHAPE)
        rates[count] = classifier_optimizers(model, 1e-2, 1e-2, 3e-2)[1].param_groups[1]["peak_lr"]
    assert rates == {2: 3e-2 / 5, 8: 3e-2 / 65}


def test_images_are_a_function_of_seed_and_step():
    data = DigitCanvases("train", 56, (40, 44))
    (images, labels), (again, same) = (data.training_batch(4, 0, 5) for _ in range(2))
    assert torch.equal(images, again) and torch.equal(labels, same)
    assert images.shape == (4, 1, 56, 56) and images.min() == -1 and images.max() <= 1
    for seed, step in ((0, 6), (1, 5)):
        assert not torch.equal(images, data.training_batch(4, seed, step)[0])


def test_held_out_images_are_always_the_same():
    data = DigitCanvases("held_out", 56, (40, 44))
    first, second = (list(data.evaluation_batches(2)) for _ in range(2))
    assert sum(len(labels) for _, labels in first) == 2 * len(data.labels)
    for (images, labels), (again, same) in zip(first, second, strict=True):
        assert torch.equal(images, again) and torch.equal(labels, same)
    assert torch.equal(data.probe(3), data.probe(3))


def test_tracking_changes_nothing():
    plain, tracked = (
        train_classifier_case(**smoke_options("mhla", track_every=every, seed=1), device=torch.device("cpu"))
        for every in (0, 1)
    )
    assert plain["losses"] == tracked["losses"] and plain["accuracy"] == tracked["accuracy"]
    assert not plain["attention"]
    assert [record["step"] for record in tracked["attention"]] == [0, 1, 2]
    assert [point["step"] for point in tracked["accuracies"]] == [0, 1, 2]


def test_each_seed_has_a_run():
    options = smoke_options("linear", track_every=2)
    runs = train_classifiers_case(seeds=[0, 1], device=torch.device("cpu"), **options)["runs"]
    assert runs[0]["losses"] != runs[1]["losses"]
    assert all(layer["movement"] == 0 for run in runs for layer in run["mixing"])
    assert ["matrix" in run["mixing"][0] for run in runs] == [True, False]
    for record in runs[0]["attention"]:
        assert [set(layer) for layer in record["layers"].values()] == [set(STATISTICS)]


def test_unknown_attention_is_an_error():
    with pytest.raises(ValueError, match="attention must be 'softmax' or 'mhla'; got 'linear'"):
        train_classifier_case(attention="linear", device=torch.device("cpu"))


def test_loss_that_is_not_finite_is_an_error(monkeypatch):
    monkeypatch.setattr(classifier, "take_step", lambda *arguments: float("nan"))
    with pytest.raises(FloatingPointError, match="The loss with seed 0 and softmax is no longer finite"):
        train_classifier_case(**smoke_options("softmax"), device=torch.device("cpu"))


@pytest.mark.parametrize("setting", ["cpu", "gpu"])
def test_trainings_have_enough_tokens(setting):
    sizes = SIZES[setting]
    assert (sizes["image_size"] // sizes["patch_size"]) ** 2 >= 196
    assert max(sizes["digit_sizes"]) <= sizes["image_size"]
    assert blocks.NAMES["mhla"] == 16
