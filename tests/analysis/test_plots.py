# SPDX-License-Identifier: Apache-2.0
"""Figures of mixing matrices over sequences, images and videos."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from mhla_hf import BlockLayout
from mhla_hf.analysis import mixing_figure, plot_history, plot_mixing
from mhla_hf.analysis.grids import frames_shown, middle_block, weights_on_grid


LAYOUTS = {
    "sequence": BlockLayout(grid=(50,), block_size=(16,)),
    "image": BlockLayout(grid=(6, 9), blocks=(2, 3)),
    "image-with-class-token": BlockLayout(grid=(6, 9), blocks=(2, 3), num_prefix_tokens=1),
    "video": BlockLayout(grid=(3, 4, 6), blocks=(3, 2, 2)),
    "long-video": BlockLayout(grid=(21, 4, 4), blocks=(21, 2, 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_each_token_has_the_weight_of_its_block(layout):
    weights = torch.randn(layout.num_blocks)
    on_grid = weights_on_grid(weights, layout)
    assert on_grid.shape == (1,) * (3 - len(layout.grid)) + layout.grid
    expected = torch.stack([weights[block] for block in layout.block_of_token])[layout.num_prefix_tokens :]
    assert torch.equal(on_grid.flatten(), expected)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("block", (None, 2))
def test_figures_show_matrix_row_and_block(layout, block):
    mixing = torch.randn(2, layout.num_blocks, layout.num_blocks)
    figure = mixing_figure({3: mixing}, layout, block=block)
    block = middle_block(layout) if block is None else block
    matrix, *frames, _ = figure.axes
    np.testing.assert_allclose(matrix.images[0].get_array(), mixing.mean(0))
    assert matrix.get_ylabel() == "layer 3"
    shown = frames_shown(layout, block)
    assert len(frames) == len(shown)
    on_grid = weights_on_grid(mixing.mean(0)[block], layout)
    for axis, frame in zip(frames, shown):
        np.testing.assert_allclose(axis.images[0].get_array(), on_grid[frame])
    # The outline covers the tokens of the block in the frames shown.
    of_block = weights_on_grid(torch.eye(layout.num_blocks)[block], layout)[list(shown)]
    areas = [patch.get_width() * patch.get_height() for axis in frames for patch in axis.patches]
    assert sum(areas) == of_block.sum() > 0


def test_frames_of_long_videos_include_one_of_the_block():
    layout = LAYOUTS["long-video"]
    for block in range(layout.num_blocks):
        shown = list(frames_shown(layout, block))
        assert len(shown) == 6 and shown == sorted(set(shown))
        assert block // 4 in shown


def test_figure_is_written_whole(tmp_path):
    layout = LAYOUTS["image"]
    plot_mixing(tmp_path / "new" / "mixing.png", {0: torch.eye(6), 1: torch.zeros(6, 6)}, layout)
    with Image.open(tmp_path / "new" / "mixing.png") as image:
        assert image.format == "PNG"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mixing.png"]


@pytest.mark.parametrize(
    ("matrices", "block", "message"),
    [
        ({}, None, "matrices has no entry"),
        ({0: torch.eye(5)}, None, r"one of shape \(5, 5\), but the layout has 6 blocks"),
        ({0: torch.eye(6)}, 6, "block=6 must be a block on the token grid: 0 to 5"),
        ({0: torch.eye(6)}, "middle", "block='middle' must be"),
    ],
)
def test_wrong_arguments_are_named(matrices, block, message):
    with pytest.raises(ValueError, match=message):
        mixing_figure(matrices, LAYOUTS["image"], block=block)


def test_history_of_a_training(tmp_path):
    row = {"rank": 12.0, "effective_rank": 5.0, "relative_entropy": 0.7}
    history = [
        {
            "step": step,
            "layers": {
                "blocks.0": {**row, "kind": "softmax"},
                "blocks.1": {**row, "kind": "mhla", "rank": None if step == 20 else 10.0},
            },
            "signatures": [{"name": "uniform-mixing", "layer": "blocks.1"}] if step else [],
        }
        for step in (0, 10, 20)
    ]
    plot_history(history, tmp_path / "history.png")
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="history has no rows"):
        plot_history([], tmp_path / "none.png")
