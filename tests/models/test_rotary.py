# SPDX-License-Identifier: Apache-2.0
"""Rotary tables that carry a token grid: what every layer is handed of them."""

from __future__ import annotations

import pytest
import torch

from mhla_hf.layers import mhla
from mhla_hf.models.attention import tables_of_layer, tables_with_grid
from tests.models.cases import WanCase


GRID = (2, 3, 4)


@pytest.fixture
def upstream():
    """Cosines and sines `[1, T, 1, K]`, each value twice."""
    angles = torch.rand(1, 24, 1, 3, generator=torch.Generator().manual_seed(0)).repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def test_mhla_layers_get_each_value_once(upstream):
    tables, grid = tables_of_layer(tables_with_grid(upstream, GRID), is_mhla=True)
    assert grid == GRID
    for table, given in zip(tables, upstream, strict=True):
        assert table.is_contiguous() and torch.equal(table.repeat_interleave(2, dim=-1), given)


def test_other_layers_get_what_upstream_made(upstream):
    tables, grid = tables_of_layer(tables_with_grid(upstream, GRID), is_mhla=False)
    assert grid == GRID and all(torch.equal(*pair) for pair in zip(tables, upstream, strict=True))
    assert tables_of_layer(upstream, is_mhla=False) == (upstream, None)


def test_all_layers_read_the_same_tables(monkeypatch):
    """Otherwise each would keep a copy for its backward pass."""
    pytest.importorskip("triton")
    case, seen, plain = WanCase(), [], mhla.fused_attention
    model = case.make_mhla(backend="triton")

    def spy(*args, rotary, **options):
        seen.append((rotary.cosine.data_ptr(), rotary.sine.data_ptr(), rotary.cosine.is_contiguous()))
        return plain(*args, rotary=rotary, **options)

    monkeypatch.setattr(mhla, "fused_attention", spy)
    case.run(model)
    assert len(seen) > 1 and len(set(seen)) == 1 and seen[0][2]
