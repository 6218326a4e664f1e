# SPDX-License-Identifier: Apache-2.0
"""`MHLAConfig`: JSON round trip, and every bad value refused by name."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mhla_hf import MHLAConfig
from mhla_hf.layers.mixing import reference_blocks, resolve_blocks


def test_json_round_trip():
    config = MHLAConfig(blocks=[3, 5, 10], layers=[4, 1], output_norm=True, mixing_range=2, lepe_kernel=3)
    stored = json.loads(config.to_json_string())
    assert stored == config.to_dict()
    assert MHLAConfig.from_dict(stored) == config
    assert (config.blocks, config.layers, config.mixing_range) == ((3, 5, 10), (1, 4), 2.0)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "mixing_storage": "distance", "mixing_tail": "decay", "mixing_tail_half_life": 2.5},
        {"resize": "extend", "mixing_tail": "none"},
    ],
    ids=str,
)
def test_options_of_mixing_weights_survive_json(options):
    config = MHLAConfig(block_size=(4,), **options)
    stored = json.loads(config.to_json_string())
    assert MHLAConfig.from_dict(stored) == config and stored == config.to_dict()
    assert {name: stored[name] for name in options} == options


def test_it_cannot_be_changed_and_replace_copies():
    config = MHLAConfig(blocks=(2,))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.blocks = (3,)
    changed = config.replace(normalizer="none")
    assert (config.normalizer, changed.normalizer, changed.blocks) == ("query", "none", (2,))
    assert hash(config) != hash(changed)


def test_coerce_takes_what_users_write():
    config = MHLAConfig(blocks=(2,))
    assert MHLAConfig.coerce(None) == MHLAConfig()
    assert MHLAConfig.coerce({"blocks": [2]}) == config
    assert MHLAConfig.coerce(config) is config
    with pytest.raises(ValueError, match="mhla options must be a dict or an object"):
        MHLAConfig.coerce("relu")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"feature_map": "gelu"}, "feature_map='gelu' is not one of 'relu', 'elu', 'exp', 'hedgehog', 'identity'"),
        ({"feature_map": "Hedghog"}, "Did you mean 'hedgehog'?"),
        ({"mixing_heads": 4}, "mixing_heads=4 is not one of 'shared', 'per_head'"),
        ({"output_norm": 1}, "output_norm must be true or false, got 1"),
        ({"lepe_kernel": 4}, "lepe_kernel"),
        ({"eps": -1}, "eps must be at least 0, got -1"),
        ({"mixing_range": 10**400}, "mixing_range must be a finite number"),
        ({"blocks": (0, 2)}, "blocks"),
        ({"blocks": (1, 2, 3, 4)}, "blocks"),
        ({"blocks": "3,5,10"}, "blocks"),
        ({"blocks": (2,), "block_size": (2,)}, "not both"),
        ({"blocks": (2, 2), "grid": (4,)}, "one entry per axis"),
        ({"blocks": (5,), "grid": (4,)}, "more blocks"),
        ({"layers": [-1]}, "layers"),
        ({"layers": [1, 1]}, "different layer indices"),
        ({"causal": True, "blocks": (2,)}, "block_size"),
        ({"causal": True, "block_size": (2, 2)}, "1-D"),
        ({"resize": "block_size", "blocks": (2,)}, "grid"),
        ({"causal": True, "block_size": (2,), "lepe_kernel": 3}, "lepe_kernel"),
        ({"mixing_tail": "linear"}, "mixing_tail='linear' is not one of 'constant', 'decay', 'none'"),
        ({"mixing_tail": "none"}, "mixing_tail='none' is for sequences \\(causal=True or resize='extend'\\)"),
        ({"mixing_tail": "decay", "blocks": (2, 2)}, "mixing_tail='decay' is for sequences"),
        ({"mixing_storage": "diagonal"}, "mixing_storage='diagonal' is not one of 'matrix', 'distance'"),
        ({"mixing_storage": "distance"}, "mixing_storage='distance' needs causal=True"),
        (
            {"mixing_storage": "distance", "resize": "extend", "block_size": (2,)},
            "mixing_storage='distance' needs causal=True",
        ),
        (
            {"mixing_tail_half_life": 4, "causal": True, "block_size": (2,)},
            "mixing_tail_half_life=4.0 needs mixing_tail='decay'",
        ),
        (
            {"mixing_tail_half_life": 0, "mixing_tail": "decay", "causal": True, "block_size": (2,)},
            "mixing_tail_half_life must be at least 0.01, got 0",
        ),
        ({"sinks": 3}, "Unknown mhla option sinks. Known options: feature_map, rope"),
        ({"lepe": 3}, "Did you mean 'lepe_kernel'?"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        MHLAConfig.from_dict(options)


def test_an_option_without_effect_warns():
    with pytest.warns(UserWarning, match="mixing_range has no effect"):
        MHLAConfig(mixing_init="uniform", mixing_range=2.0)


def test_layers_as_text():
    assert MHLAConfig(layers="2, 0").layers == (0, 2)
    assert MHLAConfig(layers="all").layers is None
    config = MHLAConfig.from_dict(MHLAConfig(layers="2/3").to_dict())
    assert config.layers == "2/3" and config.mhla_layers(7) == [1, 2, 4, 5]


def test_blocks_are_derived_and_pinned():
    assert reference_blocks(MHLAConfig(block_size=(7, 6, 5), grid=(21, 30, 52))) == (3, 5, 11)
    assert reference_blocks(MHLAConfig(), (64,)) == (8,)
    with pytest.raises(ValueError, match="blocks"):
        reference_blocks(MHLAConfig())
    pinned = resolve_blocks(MHLAConfig(), (4, 4))
    assert (pinned.blocks, pinned.grid) == ((2, 2), (4, 4))
    assert resolve_blocks(pinned, (9, 9)) is pinned
    assert resolve_blocks(MHLAConfig(block_size=(2, 2)), (9, 9)).grid == (9, 9)
    with pytest.raises(ValueError, match="each axis"):
        resolve_blocks(MHLAConfig(blocks=(3,)), (4, 4))


@pytest.mark.parametrize("eps", [0, 0.0, 1e-45, 1e-39])
@pytest.mark.parametrize("feature_map", ["relu", "identity"])
def test_what_would_divide_zero_by_zero_is_refused(feature_map, eps):
    with pytest.raises(ValueError, match=f"must be at least 1e-38 with feature_map='{feature_map}'"):
        MHLAConfig(feature_map=feature_map, eps=eps)
    for other in ({"feature_map": "elu"}, {"normalizer": "none"}, {"feature_map_eps": 1e-6}):
        assert MHLAConfig(**{"feature_map": feature_map, "eps": eps, **other}).eps == eps
    assert MHLAConfig(feature_map=feature_map, eps=1e-38).eps == 1e-38
