# SPDX-License-Identifier: Apache-2.0
"""The recall tasks: every question can be answered from the tokens before it, and from nothing else."""

from __future__ import annotations

import pytest
import torch

from benchmarks.experiments import recall_models
from benchmarks.experiments.recall_tasks import (
    NUM_FILLERS,
    NUM_KEYS,
    VOCABULARY,
    generator_for,
    needle_questions,
    recall_questions,
)


pytestmark = pytest.mark.slow


TASKS = {"recall": recall_questions, "needle": needle_questions}
MODEL = {"width": 32, "heads": 2, "longest": 64}
SIZES = [(1, 16), (4, 64), (16, 64), (16, 256)]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("pairs, length", SIZES)
def test_questions_can_be_answered_from_one_place(task, pairs, length):
    made = TASKS[task](8, pairs, length, generator_for(0, 0))
    assert made.tokens.shape == (8, length)
    assert made.asked_at.shape == made.answers.shape == made.given_at.shape == (8, pairs)
    asked = made.tokens.gather(1, made.asked_at)
    assert (asked == made.tokens.gather(1, made.given_at)).all()
    assert (made.answers == made.tokens.gather(1, made.given_at + 1)).all()
    assert (made.given_at + 1 < made.asked_at).all()
    assert ((NUM_FILLERS <= asked) & (asked < NUM_FILLERS + NUM_KEYS)).all()
    assert ((NUM_FILLERS + NUM_KEYS <= made.answers) & (made.answers < VOCABULARY)).all()
    # And nowhere else.
    for tokens, keys, answers in zip(made.tokens, asked, made.answers, strict=True):
        assert len(set(keys.tolist())) == len(set(answers.tolist())) == pairs
        # A key stands in its pair and where it is asked, a value in its pair alone; all else is filler.
        assert all((tokens == key).sum() == 2 for key in keys)
        assert all((tokens == value).sum() == 1 for value in answers)
        assert (tokens < NUM_FILLERS).sum() == len(tokens) - 3 * pairs


@pytest.mark.parametrize("mhla", [None, {"block_size": [16]}, {"block_size": [16], "layers": [0]}])
def test_models_do_not_look_ahead_of_a_question(mhla):
    made = recall_questions(2, 4, 64, generator_for(0, 0))
    model = recall_models.build_model(mhla, frozen_mixing=False, seed=0, **MODEL)
    first = made.asked_at.argmin(dim=1, keepdim=True)
    later = torch.arange(64) > made.asked_at.min(dim=1, keepdim=True).values
    changed = type(made)(made.tokens.where(~later, 0), made.asked_at, made.answers, made.given_at)
    with torch.no_grad():
        before, after = (
            model(each).gather(1, first[..., None].expand(-1, -1, VOCABULARY)) for each in (made, changed)
        )
    torch.testing.assert_close(before, after)
