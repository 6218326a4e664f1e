# SPDX-License-Identifier: Apache-2.0
"""The bar over all stages of a recovery: where it is, what it shows, and what an earlier run has done."""

from __future__ import annotations

import pytest

from mhla_hf.recovery.recipes import parse_recipe
from mhla_hf.recovery.stages import RunProgress


CONTENT = {
    "family": "encoder",
    "calibrate": {"fit_steps": 10},
    "match": {"steps": 20, "batch_size": 2},
    "distill": {"steps": 30, "batch_size": 4},
}
LAYERS = 5
# Steps times layers times samples of a step.
COSTS = {"calibrate": 50, "match": 200, "distill": 600}


@pytest.fixture
def progress(capsys):
    made = RunProgress(parse_recipe(CONTENT, "recipe"), LAYERS, True)
    yield made
    made.bar.close()


def test_a_run_ends_at_all_of_its_steps(progress):
    assert progress.costs == COSTS and progress.bar.total == 850
    advance = progress.follow("calibrate")
    for step in range(1, 51):
        advance("", step)
    assert progress.bar.n == 50
    layers = {f"layers.{index}.attention": 20 for index in range(LAYERS)}
    advance = progress.follow("match", layers)
    for name in layers:
        for step in range(1, 21):
            advance(name, step, 0.5)
    assert progress.bar.n == 250 and progress.bar.desc == "match (2 of 3)"
    assert progress.bar.postfix == "layer=layers.4.attention, step=20, loss=0.5000"
    advance = progress.follow("distill")
    advance("distill", 1, 0.25)
    assert progress.bar.n == 250 + 4 * LAYERS and progress.bar.postfix == "step=1, loss=0.2500"
    for step in range(2, 31):
        advance("distill", step, 0.25)
    # All of it was done in this run.
    assert progress.bar.n == 850 and progress.bar.initial == 0


def test_what_an_earlier_run_has_done_is_not_taken_for_speed(progress):
    """Two stages and half of the third: the time left is that of the half that is left."""
    advance = progress.follow("distill")
    assert progress.bar.n == progress.bar.initial == 250
    advance("distill", 16, 0.5)
    assert progress.bar.n == 250 + 320 and progress.bar.initial == 250 + 300


def test_layers_that_an_earlier_run_has_finished_count(progress):
    layers = {"blocks.0.attention": 30, "blocks.1.attention": 10, "blocks.2.attention": 20}
    advance = progress.follow("match", layers)
    # Blocks are named by what their layers are in.
    advance("blocks.2", 1, 0.5)
    assert progress.bar.n == 50 + 2 * 41 and progress.bar.initial == 50 + 2 * 40


def test_layers_in_turns_are_each_counted(progress):
    """Without kept activations each step trains all layers."""
    advance = progress.follow("match", {"a": 20, "b": 20})
    for step in (1, 2):
        advance("a", step, 0.5)
        advance("b", step, 0.5)
    assert progress.bar.n == 50 + 2 * 4 and progress.bar.initial == 50


def test_no_bar_without_progress(capsys):
    progress = RunProgress(parse_recipe(CONTENT, "recipe"), LAYERS, False)
    progress.follow("calibrate")("", 1)
    progress.follow("distill")("distill", 3, 0.5)
    assert capsys.readouterr().err == ""
