# SPDX-License-Identifier: Apache-2.0
"""Rotary tables that carry a token grid: what every layer is handed of them."""

from __future__ import annotations

import pytest
import torch

from mhla_hf import BlockLayout
from mhla_hf.models.attention import tables_of_layer, tables_with_grid


GRID = (2, 3, 4)


@pytest.fixture
def upstream():
    """Cosines and sines `[1, T, 1, K]`, each value twice."""
    angles = torch.rand(1, 24, 1, 3, generator=torch.Generator().manual_seed(0)).repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def test_mhla_layers_get_each_value_once(upstream):
    tables, grid, block_order = tables_of_layer(tables_with_grid(upstream, GRID), is_mhla=True)
    assert grid == GRID and not block_order
    for table, given in zip(tables, upstream, strict=True):
        assert table.is_contiguous() and torch.equal(table.repeat_interleave(2, dim=-1), given)


def test_other_layers_get_what_upstream_made(upstream):
    tables, grid, block_order = tables_of_layer(tables_with_grid(upstream, GRID), is_mhla=False)
    assert grid == GRID and all(torch.equal(*pair) for pair in zip(tables, upstream, strict=True))
    assert not block_order and tables_of_layer(upstream, is_mhla=False) == (upstream, None, False)


@pytest.mark.parametrize("is_mhla", [False, True])
def test_tables_tell_block_order(upstream, is_mhla):
    layout = BlockLayout(GRID, blocks=(1, 2, 2))
    tables, grid, block_order = tables_of_layer(tables_with_grid(upstream, GRID, layout), is_mhla)
    rows = tables_of_layer(tables_with_grid(upstream, GRID), is_mhla)[0]
    assert grid == GRID and block_order
    for table, row_table in zip(tables, rows, strict=True):
        assert torch.equal(layout.from_block_order(table), row_table)
