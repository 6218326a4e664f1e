# SPDX-License-Identifier: Apache-2.0
"""What makes the comparison of classifiers fair: same weights, same images, and frozen mixing weights that stay."""

from __future__ import annotations

import pytest
import torch

from benchmarks.experiments.classifier import (
    classifier_optimizers,
    make_classifier,
    mixing_figures,
    take_step,
    train_classifier_case,
)
from benchmarks.experiments.classifier_variants import TITLES, classifier_cases
from benchmarks.experiments.digit_canvases import DigitCanvases
from benchmarks.optimization import freeze_mixing
from mhla_hf import MHLA


pytestmark = pytest.mark.slow


SHAPE = {"layers": 2, "hidden_size": 16, "heads": 2, "image_size": 32, "patch_size": 4, "mlp_ratio": 1.0}
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


def test_images_are_a_function_of_seed_and_step():
    data = DigitCanvases("train", 56, (40, 44))
    (images, labels), (again, same) = (data.training_batch(4, 0, 5) for _ in range(2))
    assert torch.equal(images, again) and torch.equal(labels, same)
    assert images.shape == (4, 1, 56, 56) and images.min() == -1 and images.max() <= 1
    for seed, step in ((0, 6), (1, 5)):
        assert not torch.equal(images, data.training_batch(4, seed, step)[0])


def test_tracking_changes_nothing():
    plain, tracked = (
        train_classifier_case(**smoke_options("mhla", track_every=every, seed=1), device=torch.device("cpu"))
        for every in (0, 1)
    )
    assert plain["losses"] == tracked["losses"] and plain["accuracy"] == tracked["accuracy"]
    assert not plain["attention"]
    assert [record["step"] for record in tracked["attention"]] == [0, 1, 2]
    assert [point["step"] for point in tracked["accuracies"]] == [0, 1, 2]
