# SPDX-License-Identifier: Apache-2.0
"""Synthetic tasks that ask for what was said before: associative recall, and needles in a long context.

A vocabulary has fillers, keys and values, in this order. The task gives pairs of a key and its value, asks for some of
the keys later, and wants the value of each at the place where its key is asked.

Shape letters: B sequences, T tokens, P pairs, each of which is asked once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


NUM_FILLERS = 32
NUM_KEYS = 128
NUM_VALUES = 128
VOCABULARY = NUM_FILLERS + NUM_KEYS + NUM_VALUES
# Exponent of the gaps before a key is asked, as in arXiv 2312.04927: most are asked soon after the pairs.
_GAP_POWER = 0.01


@dataclass(frozen=True)
class Questions:
    """A batch of sequences.

    Attributes:
        tokens: LongTensor `[B, T]`.
        asked_at: Places of the keys that are asked, LongTensor `[B, P]`.
        answers: Their values, LongTensor `[B, P]`.
        given_at: Places of these keys in their pairs; the value follows. LongTensor `[B, P]`.
    """

    tokens: torch.Tensor
    asked_at: torch.Tensor
    answers: torch.Tensor
    given_at: torch.Tensor

    def to(self, device: torch.device) -> Questions:
        """The same on a device."""
        return Questions(*(getattr(self, name).to(device) for name in self.__dataclass_fields__))


def generator_for(seed: int, step: int) -> torch.Generator:
    """Random numbers of one step of a training with some seed."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def size_of_step(sizes: Sequence[Any], step: int, steps: int) -> Any:
    """The size of a step's task: the first for a quarter of the steps, the first two until 40 %, then all in turn.

    Attention finds out how to match keys from few pairs far sooner than from many.

    Args:
        sizes: From easy to hard.
        step: The step, from 0.
        steps: Steps of the training.
    """
    count = 1 if step < 0.25 * steps else 2 if step < 0.4 * steps else len(sizes)
    return sizes[:count][step % min(count, len(sizes))]


def recall_questions(num_sequences: int, num_pairs: int, length: int, generator: torch.Generator) -> Questions:
    """Multi-query associative recall (MQAR; Arora et al., "Zoology", arXiv 2312.04927).

    The pairs come first, one after the other. Each key is asked once in the rest, at gaps that follow a power law;
    the other tokens there are fillers.

    Args:
        num_sequences: B.
        num_pairs: P.
        length: T, at least 4 P.
        generator: Source of random numbers.

    Raises:
        ValueError: If there are not enough keys or tokens.
    """
    _check(num_pairs, length)
    places = (length - 2 * num_pairs) // 2
    chances = torch.arange(1, places + 1, dtype=torch.float64) ** (_GAP_POWER - 1)
    gaps = chances.expand(num_sequences, -1).multinomial(num_pairs, generator=generator)
    given_at = (2 * torch.arange(num_pairs)).expand(num_sequences, -1)
    return _assemble(given_at, 2 * num_pairs + 2 * gaps, length, generator)


def needle_questions(
    num_sequences: int, num_needles: int, length: int, generator: torch.Generator, *, by_depth: bool = False
) -> Questions:
    """Needles, pairs of a key and its value, anywhere among fillers; all are asked at the end, in random order.

    Args:
        num_sequences: B.
        num_needles: P.
        length: T, at least 4 P.
        generator: Source of random numbers.
        by_depth: Divide the context into P parts of equal length and hide one needle in each, from the first part on,
            in place of anywhere.

    Raises:
        ValueError: If there are not enough keys or tokens.
    """
    _check(num_needles, length)
    places = (length - 2 * num_needles) // 2
    if by_depth:
        edges = torch.linspace(0, places, num_needles + 1).long()
        within = torch.rand(num_sequences, num_needles, generator=generator) * edges.diff()
        chosen = edges[:-1] + within.long()
    else:
        chosen = torch.rand(num_sequences, places, generator=generator).argsort(dim=1)[:, :num_needles]
    order = torch.rand(num_sequences, num_needles, generator=generator).argsort(dim=1)
    return _assemble(2 * chosen, length - 2 * num_needles + 2 * order, length, generator)


def _assemble(given_at: torch.Tensor, asked_at: torch.Tensor, length: int, generator: torch.Generator) -> Questions:
    """Sequences with pairs at some places, and questions at others."""
    num_sequences, num_pairs = asked_at.shape
    tokens = torch.randint(NUM_FILLERS, (num_sequences, length), generator=generator)
    keys, values = (
        torch.rand(num_sequences, count, generator=generator).argsort(dim=1)[:, :num_pairs]
        for count in (NUM_KEYS, NUM_VALUES)
    )
    keys, values = keys + NUM_FILLERS, values + NUM_FILLERS + NUM_KEYS
    tokens.scatter_(1, given_at, keys).scatter_(1, given_at + 1, values).scatter_(1, asked_at, keys)
    return Questions(tokens, asked_at, values, given_at.contiguous())


def _check(num_pairs: int, length: int) -> None:
    most = min(NUM_KEYS, NUM_VALUES)
    if not 1 <= num_pairs <= most:
        raise ValueError(f"num_pairs={num_pairs} must be from 1 to {most}.")
    if length < 4 * num_pairs:
        raise ValueError(f"length={length} is too short for {num_pairs} pairs, which need {4 * num_pairs} tokens.")
