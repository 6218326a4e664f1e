# SPDX-License-Identifier: Apache-2.0
"""Decoding from a state, with grouped heads, padding and rows at different positions, against the dense form."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.ops import MHLAState, empty_state, mhla_extend, mhla_step, rewind_state
from mhla_hf.ops import recurrent as recurrent_module

from . import recurrent_cases
from .recurrent_cases import STATE, assert_same_state, part


BLOCK_SIZE, LENGTH, HEADS, KEY_HEADS = 4, 45, 4, 2


def make_inputs(per_head: bool, seed: int = 0) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Grouped heads; three rows of mixing weights, so that decoding crosses the end of the matrix."""
    sizes = {"heads": HEADS, "key_heads": KEY_HEADS, "per_head": per_head, "rows": 3}
    return recurrent_cases.make_inputs("cpu", LENGTH, **sizes, dtype=torch.float64, seed=seed)


def dense(inputs: dict[str, torch.Tensor], mixing: torch.Tensor, normalizer: str = "query") -> torch.Tensor:
    layout = BlockLayout((inputs["query"].shape[1],), block_size=(BLOCK_SIZE,))
    options = {"causal": True, "normalizer": normalizer, "backend": "naive"}
    return mhla_attention(**inputs, mixing=mixing, layout=layout, **options)


def start(per_head: bool, rewindable: int = 0) -> MHLAState:
    return empty_state(
        2, KEY_HEADS, 5, 3, BLOCK_SIZE, 3,
        num_mixing_heads=HEADS if per_head else KEY_HEADS, rewindable=rewindable, dtype=torch.float64,
    )  # fmt: skip


def sizes(state: MHLAState) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (getattr(state, name).shape, getattr(state, name).dtype) for name in STATE}


@pytest.mark.parametrize("normalizer", ["query", "none"])
@pytest.mark.parametrize("parts", [(0,), (1,), (3,), (4,), (5, 8), (16, 17, 30), (30,)], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_prompts_in_parts_and_steps_equal_the_dense_form_at_every_position(normalizer, parts, per_head):
    inputs, mixing = make_inputs(per_head)
    expected = dense(inputs, mixing, normalizer)
    state, position = start(per_head), 0
    for until in parts:
        if until == 0:
            continue
        output, state = mhla_extend(
            **part(inputs, position, until), mixing=mixing, state=state, normalizer=normalizer
        )  # fmt: skip
        torch.testing.assert_close(output, expected[:, position:until], rtol=1e-10, atol=1e-10)
        position = until
    for position in range(parts[-1], LENGTH):
        assert state.position.tolist() == [position, position]
        output, state = mhla_step(
            **part(inputs, position, position + 1), mixing=mixing, state=state, normalizer=normalizer
        )
        torch.testing.assert_close(output, expected[:, position : position + 1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("pad", [(3, 0), (7, 2), (0, 9)], ids=str)
def test_rows_with_padding_decode_as_if_they_were_alone(per_head, pad):
    inputs, mixing = make_inputs(per_head, seed=1)
    valid = torch.ones(2, LENGTH, dtype=torch.bool)
    for row, count in enumerate(pad):
        valid[row, :count] = False
    # One hole in the middle as well, in the prompt of the first row.
    valid[0, 11] = False
    for name in inputs:
        inputs[name][~valid] = float("nan")
    state = start(per_head)
    output, state = mhla_extend(**part(inputs, 0, 14), mixing=mixing, state=state, valid=valid[:, :14])
    outputs = [output]
    for position in range(14, LENGTH):
        output, state = mhla_step(
            **part(inputs, position, position + 1), mixing=mixing, state=state, valid=valid[:, position : position + 1]
        )
        outputs.append(output)
    output = torch.cat(outputs, dim=1)
    for row in range(2):
        alone = {name: tensor[row : row + 1, valid[row]] for name, tensor in inputs.items()}
        expected = dense(alone, mixing)
        torch.testing.assert_close(output[row : row + 1, valid[row]], expected, rtol=1e-10, atol=1e-10)
    assert state.position.tolist() == valid.sum(dim=1).tolist()
    assert not output[~valid].any()


def test_a_step_without_a_token_leaves_its_row_alone():
    inputs, mixing = make_inputs(True)
    _, state = mhla_extend(**part(inputs, 0, 8), mixing=mixing, state=start(True))
    valid = torch.tensor([[True], [False]])
    _, after = mhla_step(**part(inputs, 8, 9), mixing=mixing, state=state, valid=valid)
    assert after.position.tolist() == [9, 8]
    output, _ = mhla_step(**part(inputs, 8, 9), mixing=mixing, state=after)
    torch.testing.assert_close(output[1:], dense(part(inputs, 0, 9), mixing)[1:, 8:], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("removed", [1, 4, 6, 13, 17])
@pytest.mark.parametrize("per_head", [False, True])
def test_rewinding_takes_tokens_back(removed, per_head):
    inputs, mixing = make_inputs(per_head, seed=2)
    expected = dense(inputs, mixing)
    valid = torch.ones(2, 17, dtype=torch.bool)
    _, state = mhla_extend(**part(inputs, 0, 17), mixing=mixing, state=start(per_head, rewindable=17))
    shapes = sizes(state)
    last = part(inputs, 17 - removed, 17)
    names = ("key", "normalizer_key", "value")
    state = rewind_state(state, mixing, *(last[name] for name in names), valid[:, 17 - removed :])
    assert sizes(state) == shapes, "a state that is rewound again and again must not grow"
    for position in range(17 - removed, 24):
        output, state = mhla_step(**part(inputs, position, position + 1), mixing=mixing, state=state)
        torch.testing.assert_close(output, expected[:, position : position + 1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("per_head", [False, True])
def test_rewinding_keeps_the_tokens_that_it_is_told_to_keep(per_head):
    inputs, mixing = make_inputs(per_head, seed=2)
    valid = torch.rand(2, 17, generator=torch.Generator().manual_seed(3)) < 0.8
    left = valid & (torch.rand(2, 17, generator=torch.Generator().manual_seed(4)) < 0.6)
    left[:, :4] = valid[:, :4]
    tokens = part(inputs, 0, 17)
    _, expected = mhla_extend(**tokens, mixing=mixing, state=start(per_head, rewindable=13), valid=left)
    _, state = mhla_extend(**tokens, mixing=mixing, state=start(per_head, rewindable=13), valid=valid)
    last = [tokens[name][:, 4:] for name in ("key", "normalizer_key", "value")]
    # Those that were not valid are not taken up.
    state = rewind_state(state, mixing, *last, valid[:, 4:], kept=left[:, 4:] | ~valid[:, 4:])
    assert_same_state(state, expected, 1e-9, 1e-9)


@pytest.mark.parametrize("decay", [0.7, 0.0])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("parts", [(6, 8, 11), (6, 20, LENGTH), (30, 33, LENGTH)], ids=str)
def test_gradients_pass_through_a_state(parts, per_head, decay):
    """Of texts whose blocks stay in the ring, or leave it by steps or at once."""
    first, second, length = parts
    inputs, mixing = make_inputs(per_head, seed=3)
    inputs = {name: tensor[:, :length].clone().requires_grad_() for name, tensor in inputs.items()}
    weights = {"mixing": mixing, "mixing_decay": torch.full((HEADS if per_head else 1,), decay, dtype=torch.float64)}
    leaves = [*inputs.values(), *(tensor.requires_grad_() for tensor in weights.values())]

    def stepwise() -> torch.Tensor:
        output, state = mhla_extend(**part(inputs, 0, first), **weights, state=start(per_head))
        outputs = [output]
        for begin, end in ((first, second), *((position, position + 1) for position in range(second, length))):
            run = mhla_step if end - begin == 1 else mhla_extend
            output, state = run(**part(inputs, begin, end), **weights, state=state)
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    cotangent = torch.randn(2, length, HEADS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    actual = torch.autograd.grad(stepwise(), leaves, cotangent)
    layout = BlockLayout((length,), block_size=(BLOCK_SIZE,))
    expected = mhla_attention(**inputs, **weights, layout=layout, causal=True, backend="naive")
    expected = torch.autograd.grad(expected, leaves, cotangent)
    for mine, theirs in zip(actual, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


class Walk:
    """A state and the texts that its two rows have seen, each at its own position, against the dense form in float64.

    Args:
        count: M.
        decay: Of the mixing weights; `None` for 1.
        per_head: Whether heads have weights of their own.
        chance: Chooses what is done.
    """

    REWINDABLE, LENGTH = 7, 200

    def __init__(self, count: int, decay: float | None, per_head: bool, chance: random.Random) -> None:
        generator = torch.Generator().manual_seed(chance.randrange(1000))

        def positive(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.05

        heads, self.chance = HEADS if per_head else 1, chance
        self.block_size = chance.choice([1, 2, 3, 5])
        self.weights = {"mixing": positive(heads, count, count)}
        self.options = {"normalizer": chance.choice(["query", "none"]), "eps": 0.0}
        if decay is not None:
            self.weights["mixing_decay"] = torch.full((heads,), decay, dtype=torch.float64)
        shapes = {"query": HEADS, "key": KEY_HEADS, "normalizer_query": HEADS, "normalizer_key": KEY_HEADS}
        self.tokens = {name: positive(2, self.LENGTH, number, 3) for name, number in shapes.items()}
        self.tokens["value"] = torch.randn(2, self.LENGTH, KEY_HEADS, 2, generator=generator, dtype=torch.float64)
        self.state = empty_state(
            2, KEY_HEADS, 3, 2, self.block_size, count, num_mixing_heads=HEADS if per_head else None,
            rewindable=self.REWINDABLE, dtype=torch.float64,
        )  # fmt: skip
        self.shapes = sizes(self.state)
        # How many of the last tokens can be taken back.
        self.position, self.recent = [0, 0], [0, 0]
        self.expected = self.dense()

    def dense(self) -> torch.Tensor:
        layout = BlockLayout((self.LENGTH,), block_size=(self.block_size,))
        given = {**self.tokens, **self.weights, **self.options}
        return mhla_attention(**given, layout=layout, causal=True, backend="naive")

    def extend(self, length: int) -> None:
        """Goes on by as many tokens or, with padding among them, by some fewer; each row by a number of its own."""
        if max(self.position) + length > self.LENGTH:
            return
        valid = torch.ones(2, length, dtype=torch.bool)
        is_padded = self.chance.random() < 0.4
        if is_padded:
            valid = torch.tensor([[self.chance.random() < 0.7 for _ in range(length)] for _ in range(2)])
        chosen = [list(range(self.position[row], self.position[row] + int(valid[row].sum()))) for row in range(2)]
        given = {name: x.new_full((2, length, *x.shape[2:]), float("nan")) for name, x in self.tokens.items()}
        for name, tensor in self.tokens.items():
            for row in range(2):
                given[name][row, valid[row]] = tensor[row, chosen[row]]
        run = mhla_step if length == 1 else mhla_extend
        output, self.state = run(
            **given, **self.weights, **self.options, state=self.state, valid=valid if is_padded else None
        )
        for row in range(2):
            torch.testing.assert_close(
                output[row, valid[row]], self.expected[row, chosen[row]], rtol=1e-10, atol=1e-10
            )
            self.position[row] += len(chosen[row])
            self.recent[row] = min(self.recent[row] + len(chosen[row]), self.REWINDABLE)

    def rewind(self) -> None:
        """Takes tokens back, of each row as many as it chooses, or one from among the last tokens."""
        length = self.chance.randint(1, self.REWINDABLE)
        counts = [min(length, recent) for recent in self.recent]
        valid, kept = torch.zeros(2, 2, length, dtype=torch.bool)
        given = {name: x.new_zeros(2, length, *x.shape[2:]) for name, x in self.tokens.items()}
        is_partial = self.chance.random() < 0.5
        for row, count in enumerate(counts):
            until = self.position[row]
            valid[row, length - count :] = True
            for name, tensor in self.tokens.items():
                given[name][row, length - count :] = tensor[row, until - count : until]
            if is_partial and count:
                kept[row] = valid[row]
                removed = self.chance.randint(1, count)
                kept[row, -removed] = False
                self.position[row] -= 1
                self.recent[row] -= 1
                # The text goes on where the token stood.
                for tensor in self.tokens.values():
                    tensor[row, until - removed : -1] = tensor[row, until - removed + 1 :].clone()
            else:
                self.position[row] -= count
                self.recent[row] -= count
        given = {name: given[name] for name in ("key", "normalizer_key", "value")}
        self.state = rewind_state(self.state, **self.weights, **given, valid=valid, kept=kept if is_partial else None)
        if is_partial:
            self.expected = self.dense()

    def reorder(self) -> None:
        """Exchanges the rows, or makes the second one a copy of the first, as beams do."""
        rows = self.chance.choice([[1, 0], [0, 0]])
        self.state = dataclasses.replace(self.state, **{name: getattr(self.state, name)[rows] for name in STATE})
        self.tokens = {name: tensor[rows] for name, tensor in self.tokens.items()}
        self.position, self.recent = ([numbers[row] for row in rows] for numbers in (self.position, self.recent))
        self.expected = self.expected[rows]

    def go(self) -> None:
        kind = self.chance.choice(["step", "step", "extend", "long", "rewind", "reorder"])
        if kind in ("rewind", "reorder"):
            getattr(self, kind)()
        else:
            lengths = {"step": (1, 1), "extend": (2, 9), "long": (10, 70)}
            self.extend(self.chance.randint(*lengths[kind]))
        assert sizes(self.state) == self.shapes
        assert self.state.position.tolist() == self.position


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("decay", [None, 0.8, 0.0])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_random_walk_over_a_state(monkeypatch, count, decay, per_head, seed):
    """Of parts of 16 blocks, which the longest texts exceed."""
    monkeypatch.setattr(recurrent_module, "PART_CHUNKS", 1)
    walk = Walk(count, decay, per_head, random.Random(f"{count} {decay} {per_head} {seed}"))
    for _ in range(40):
        walk.go()


@pytest.mark.parametrize("per_head", [False, True])
def test_a_prompt_in_parts_leaves_the_same_state(monkeypatch, per_head):
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "query": torch.rand(2, 150, HEADS, 5, generator=generator, dtype=torch.float64),
        "key": torch.rand(2, 150, KEY_HEADS, 5, generator=generator, dtype=torch.float64),
        "value": torch.randn(2, 150, KEY_HEADS, 3, generator=generator, dtype=torch.float64),
    }
    weights = {"mixing": make_inputs(per_head)[1], "mixing_decay": torch.tensor(0.9, dtype=torch.float64)}
    runs = []
    for chunks in (4, 1):
        monkeypatch.setattr(recurrent_module, "PART_CHUNKS", chunks)
        runs.append(mhla_extend(**inputs, **weights, state=start(per_head)))
    (expected, whole), (output, in_parts) = runs
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert_same_state(in_parts, whole, 1e-12, 1e-12)


def test_a_state_has_no_more_slots_than_it_needs():
    options = {"rewindable": 64, "dtype": torch.float64}
    assert empty_state(2, KEY_HEADS, 5, 3, BLOCK_SIZE, 16, **options).num_slots == 14 + 16
    assert empty_state(2, KEY_HEADS, 5, 3, BLOCK_SIZE, 16).num_slots == 14 + 1
    assert empty_state(2, KEY_HEADS, 5, 3, BLOCK_SIZE, 1).num_slots == 1
    assert empty_state(2, KEY_HEADS, 5, 3, BLOCK_SIZE, 16, **options, max_tokens=45).num_slots == 12


@pytest.mark.parametrize("rewindable", [0, 9])
def test_a_state_for_few_tokens_decodes_them_all(rewindable):
    inputs, mixing = make_inputs(True, seed=4)
    mixing = torch.nn.functional.pad(mixing, (13, 0, 13, 0), value=0.3)
    options = {"num_mixing_heads": HEADS, "rewindable": rewindable, "dtype": torch.float64}
    state = empty_state(2, KEY_HEADS, 5, 3, BLOCK_SIZE, 16, max_tokens=LENGTH, **options)
    assert state.num_slots == 12
    first, state = mhla_extend(**part(inputs, 0, 30), mixing=mixing, state=state)
    outputs = [first]
    for position in range(30, LENGTH):
        output, state = mhla_step(**part(inputs, position, position + 1), mixing=mixing, state=state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), dense(inputs, mixing), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("decay", [None, 0.9, 0.0])
def test_blocks_in_bfloat16_stay_within_their_rounding_over_a_thousand_tokens(decay):
    """bfloat16 rounds a summary by at most 2⁻⁹ of itself; an output is a mean of values of blocks rounded so."""
    generator = torch.Generator().manual_seed(0)
    length, count = 1000, 8
    inputs = {
        "query": torch.rand(2, length, HEADS, 5, generator=generator) + 0.05,
        "key": torch.rand(2, length, KEY_HEADS, 5, generator=generator) + 0.05,
        "value": torch.rand(2, length, KEY_HEADS, 3, generator=generator),
    }
    weights = {"mixing": torch.rand(count, count, generator=generator) + 0.1}
    if decay is not None:
        weights["mixing_decay"] = torch.tensor(decay)
    layout = BlockLayout((length,), block_size=(BLOCK_SIZE,))
    exact = {name: tensor.double() for name, tensor in (inputs | weights).items()}
    expected = mhla_attention(**exact, layout=layout, causal=True, backend="naive")
    state = empty_state(2, KEY_HEADS, 5, 3, BLOCK_SIZE, count, summary_dtype=torch.bfloat16)
    shapes, outputs = sizes(state), []
    for position in range(length):
        output, state = mhla_step(**part(inputs, position, position + 1), **weights, state=state, backend="torch")
        outputs.append(output)
    assert sizes(state) == shapes and state.summaries.dtype == torch.bfloat16
    error = ((torch.cat(outputs, dim=1) - expected) / expected).abs().amax(dim=(0, 2, 3))
    # Numerator and denominator both, and no more at the end than at the beginning.
    assert error.max() < 2**-8
    assert error[-200:].max() < 2 * error[:200].max()
