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
    size_of_step,
)


TASKS = {"recall": recall_questions, "needle": needle_questions}
MODEL = {"width": 32, "heads": 2, "longest": 64}
SIZES = [(1, 16), (4, 64), (16, 64), (16, 256)]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("pairs, length", SIZES)
def test_questions_can_be_answered(task, pairs, length):
    made = TASKS[task](8, pairs, length, generator_for(0, 0))
    assert made.tokens.shape == (8, length)
    assert made.asked_at.shape == made.answers.shape == made.given_at.shape == (8, pairs)
    asked = made.tokens.gather(1, made.asked_at)
    assert (asked == made.tokens.gather(1, made.given_at)).all()
    assert (made.answers == made.tokens.gather(1, made.given_at + 1)).all()
    assert (made.given_at + 1 < made.asked_at).all()
    assert ((NUM_FILLERS <= asked) & (asked < NUM_FILLERS + NUM_KEYS)).all()
    assert ((NUM_FILLERS + NUM_KEYS <= made.answers) & (made.answers < VOCABULARY)).all()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("pairs, length", SIZES)
def test_answers_stand_nowhere_else(task, pairs, length):
    made = TASKS[task](8, pairs, length, generator_for(0, 0))
    keys = made.tokens.gather(1, made.asked_at)
    for tokens, asked, answers in zip(made.tokens, keys, made.answers, strict=True):
        assert len(set(asked.tolist())) == len(set(answers.tolist())) == pairs
        # A key stands in its pair and where it is asked, a value in its pair alone; all else is filler.
        assert all((tokens == key).sum() == 2 for key in asked)
        assert all((tokens == value).sum() == 1 for value in answers)
        assert (tokens < NUM_FILLERS).sum() == len(tokens) - 3 * pairs


@pytest.mark.parametrize("task", TASKS)
def test_order_of_questions_does_not_tell_the_answers(task):
    made = TASKS[task](64, 8, 64, generator_for(0, 0))
    ranks = made.asked_at.argsort(dim=1).argsort(dim=1), made.given_at.argsort(dim=1).argsort(dim=1)
    same = (ranks[0] == ranks[1]).double().mean().item()
    assert same == pytest.approx(1 / 8, abs=0.06)


def test_keys_are_asked_soon_after_the_pairs():
    made = recall_questions(256, 4, 256, generator_for(0, 0))
    gaps = made.asked_at - 8
    assert gaps.min() == 0 and (gaps % 2 == 0).all()
    assert (gaps < 32).double().mean() > 0.5


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_and_step_give_the_same_batch(task):
    def made(seed, step):
        return TASKS[task](4, 4, 32, generator_for(seed, step)).tokens

    assert torch.equal(made(1, 2), made(1, 2))
    assert not torch.equal(made(1, 2), made(1, 3))
    assert not torch.equal(made(1, 2), made(2, 2))


def test_needles_are_as_deep_as_asked():
    needles, length = 8, 256
    made = needle_questions(32, needles, length, generator_for(0, 0), by_depth=True)
    context = length - 2 * needles
    part = made.given_at * needles // context
    assert (part == torch.arange(needles)).all()
    # Everywhere within a part, not only at its start.
    assert made.given_at[:, 0].unique().numel() > 5


def test_needles_are_asked_at_the_end():
    made = needle_questions(8, 4, 64, generator_for(0, 0))
    assert (made.asked_at >= 64 - 8).all() and (made.given_at < 64 - 8).all()
    assert len({tuple(sorted(places)) for places in made.asked_at.tolist()}) == 1


def test_training_starts_with_the_easiest_sizes():
    chosen = [size_of_step("abcd", step, 100) for step in range(100)]
    assert set(chosen[:25]) == {"a"} and set(chosen[25:40]) == {"a", "b"}
    assert all(chosen[40:].count(size) == 15 for size in "abcd")
    assert {size_of_step("a", step, 10) for step in range(10)} == {"a"}


@pytest.mark.parametrize("task", TASKS)
def test_wrong_sizes_are_refused(task):
    with pytest.raises(ValueError, match="length=15 is too short for 4 pairs"):
        TASKS[task](1, 4, 15, generator_for(0, 0))
    with pytest.raises(ValueError, match="num_pairs=129 must be from 1 to 128"):
        TASKS[task](1, 129, 1024, generator_for(0, 0))


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


def test_models_start_from_the_same_weights():
    softmax = recall_models.build_model(None, frozen_mixing=False, seed=3, **MODEL)
    mhla = recall_models.build_model({"block_size": [16]}, frozen_mixing=True, seed=3, **MODEL)
    shared = softmax.state_dict()
    assert all(torch.equal(mhla.state_dict()[name], value) for name, value in shared.items())
    frozen = [name for name, parameter in mhla.named_parameters() if not parameter.requires_grad]
    assert len(frozen) == 2 and all(name.endswith(".mixing") for name in frozen)
