# SPDX-License-Identifier: Apache-2.0
"""Sizes of samples: what configurations of VAEs and transformers tell, and pixels to tokens and back."""

import diffusers
import pytest

from mhla_hf.models.registry import FAMILIES, family_for
from mhla_hf.models.sizes import SampleSize, patch_sizes, vae_factors


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (None, None)),
        ({"scale_factor_temporal": 4, "scale_factor_spatial": 16}, (4, 16)),
        ({"block_out_channels": [8] * 4}, (None, 8)),
        ({"encoder_block_out_channels": [8] * 6, "block_out_channels": [8]}, (None, 32)),
        # As the VAE of CogVideoX, which states frames alone.
        ({"temporal_compression_ratio": 4, "block_out_channels": [8] * 4}, (4, 8)),
        ({"spatio_temporal_scaling": [True, True, True, False], "temporal_compression_ratio": None}, (8, 32)),
        ({"spatio_temporal_scaling": [True, False], "patch_size": 2, "spatial_compression_ratio": 5}, (2, 5)),
    ],
)
def test_vaes(config, expected):
    assert vae_factors(config, "config.json") == expected


@pytest.mark.parametrize(
    "config", [{"scale_factor_spatial": 0}, {"block_out_channels": [1] * 13}, {"block_out_channels": 4}]
)
def test_damaged_vaes(config):
    with pytest.raises(ValueError, match="^config.json: '[a-z_]+' must be "):
        vae_factors(config, "config.json")


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("WanTransformer3DModel", {}, (1, 2, 2)),
        ("LTXVideoTransformer3DModel", {"patch_size": 2}, (1, 2, 2)),
        ("FluxTransformer2DModel", {"patch_size": 1}, (2, 2)),
        ("DiTTransformer2DModel", {"patch_size": 4}, (4, 4)),
        ("CogVideoXTransformer3DModel", {}, (1, 2, 2)),
    ],
)
def test_patches(name, config, expected):
    assert patch_sizes(getattr(diffusers, name), config, "config.json") == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_pixels_and_back(name):
    mhla_class = family_for(name).load_class()
    size, grid = SampleSize(family_for(name).vae, mhla_class.patch_sizes({})), mhla_class.default_grid
    assert size.grid(**size.pixels(grid)) == grid
    size.check(**size.pixels(grid))
