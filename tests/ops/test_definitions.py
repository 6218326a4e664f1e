# SPDX-License-Identifier: Apache-2.0
"""The tables of feature maps and normalisers: everything else takes its names from them and computes what they say."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest
import torch

from mhla_hf import MHLA, MHLAConfig, mhla_attention
from mhla_hf.ops import FEATURE_MAPS, NORMALIZERS


TABLES = {"feature_map": FEATURE_MAPS, "normalizer": NORMALIZERS}
# Around zero, where they bend, and far from it.
POINTS = torch.tensor([-3.0, -0.5, 0.25, 1.0, 4.0], dtype=torch.float64)
KERNEL_MAPS = [entry for entry in FEATURE_MAPS.values() if entry.kernel is not None]


@pytest.mark.parametrize("option", TABLES)
def test_configuration_has_the_names_of_the_table(option):
    names = list(TABLES[option])
    (field,) = [field for field in fields(MHLAConfig) if field.name == option]
    assert list(field.metadata["choices"]) == names
    for name in names:
        assert getattr(MHLAConfig(**{option: name}), option) == name
    with pytest.raises(ValueError, match=f"{option}='no such' is not one of {', '.join(map(repr, names))}."):
        MHLAConfig(**{option: "no such"})


def test_kernels_know_the_feature_maps_of_the_table():
    pytest.importorskip("triton")
    from mhla_hf.ops.triton import feature_maps

    for function in (feature_maps.feature_map, feature_maps.feature_map_gradient):
        branches = re.findall(r'FEATURE_MAP == "(\w+)"', inspect.getsource(function.fn))
        assert sorted(branches) == sorted(entry.kernel for entry in KERNEL_MAPS)


@pytest.mark.parametrize("entry", KERNEL_MAPS, ids=lambda entry: entry.kernel)
def test_gradients_of_the_table_are_those_of_its_maps(entry):
    points = POINTS.clone().requires_grad_()
    (expected,) = torch.autograd.grad((entry.forward(points) * 1.5).sum(), points)
    torch.testing.assert_close(entry.gradient(torch.full_like(POINTS, 1.5), POINTS), expected)


@pytest.mark.parametrize("entry", NORMALIZERS.values(), ids=list(NORMALIZERS))
def test_gradients_of_divisors(entry):
    points = POINTS.clone().requires_grad_()
    (expected,) = torch.autograd.grad(entry.divisor(points, 0.1).sum(), points)
    torch.testing.assert_close(expected, torch.zeros_like(POINTS) + entry.gradient(POINTS, 0.1))


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_layers_compute_the_formulas(feature_map, normalizer):
    """The layer in its own form against the dense one, for every pair of entries."""
    torch.manual_seed(0)
    config = MHLAConfig(blocks=(2, 2), feature_map=feature_map, normalizer=normalizer, feature_map_eps=0.1)
    layer = MHLA(config, hidden_size=8, num_heads=2, head_dim=4).double()
    query, key, value = torch.randn(3, 1, 16, 2, 4, dtype=torch.float64)
    output = layer(query, key, value, grid=(4, 4))
    learned = [module.weight for module in (layer.feature_map_query, layer.feature_map_key) if module is not None]
    maps = [learned[index : index + 1] for index in (0, 1)]
    features = [FEATURE_MAPS[feature_map].forward(x, *weight) + 0.1 for x, weight in zip((query, key), maps)]
    layout = layer.layout_for((4, 4))
    options = {"normalizer": normalizer, "backend": "naive"}
    expected = mhla_attention(*features, value, layer.mixing_matrix(layout), layout, **options)
    torch.testing.assert_close(output, expected)
