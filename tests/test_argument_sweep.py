# SPDX-License-Identifier: Apache-2.0
"""Anything at all in place of any argument of the public functions: accepted where it is meant, or one line."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mhla_hf import BlockLayout, MHLAConfig, mhla_attention
from mhla_hf.layers.mhla import MHLA
from mhla_hf.layers.mixing import initial_mixing
from mhla_hf.layers.sequence import TokenSequence, sequence_attention
from mhla_hf.layouts.blocks import choose_blocks
from mhla_hf.layouts.resampling import interpolation_matrix, resample_mixing
from mhla_hf.layouts.sequences import SequenceLayout
from mhla_hf.ops import empty_state, extend_mixing, mhla_extend, mhla_step


HUGE = 10**400
ANYTHING: list[Any] = [
    "x", "x" * 10_000, b"x", 1.5, -1, True, float("nan"), float("inf"), HUGE, [], {}, object(), (1.5,), (0,), (-1,),
    (HUGE,), (10**12,), ("a",), (2, 2, 2, 2), torch.ones(2), torch.ones(2, 3), torch.ones(()), torch.ones(2, 2).long(),
]  # fmt: skip


def random(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


LAYOUT = BlockLayout((8,), block_size=(4,))
CONFIG = MHLAConfig(blocks=(2,))
TOKENS = {name: random(1, 8, 2, 4) for name in ("query", "key", "value")}
ONE = {name: random(1, 1, 2, 4) for name in ("query", "key", "value")}
WIDTHS = {"hidden_size": 8, "num_heads": 2, "head_dim": 4}
STATE = empty_state(1, 2, 4, 4, 4, num_blocks=2)
OPTIONS = {"normalizer": "query", "eps": 1e-6, "backend": "auto"}
PAIR = {"normalizer_query": None, "normalizer_key": None}

# Arguments of a function, and which of ANYTHING (by `repr`, the longest cut) may be accepted for them.
CASES = {
    "attention": (
        mhla_attention,
        {**TOKENS, "mixing": random(2, 2), "layout": LAYOUT, "causal": True, **OPTIONS, **PAIR},
        {"eps": ["1.5"]},
    ),
    "extend": (mhla_extend, {**TOKENS, "mixing": random(2, 2), "state": STATE, **OPTIONS, **PAIR}, {"eps": ["1.5"]}),
    "step": (mhla_step, {**ONE, "mixing": random(2, 2), "state": STATE, **OPTIONS, **PAIR}, {"eps": ["1.5"]}),
    "state": (
        empty_state,
        {"batch_size": 1, "num_heads": 2, "key_width": 4, "value_width": 4, "block_size": 4, "num_blocks": 1},
        {},
    ),
    "layout": (
        BlockLayout,
        {"grid": (8,), "blocks": (2,), "num_prefix_tokens": 0},
        {"grid": [str((10**12,))]},
    ),
    "layout by size": (
        BlockLayout,
        {"grid": (8,), "block_size": (2,)},
        {"block_size": [str((10**12,))]},
    ),
    "sequence layout": (
        SequenceLayout,
        {"valid": torch.ones(1, 8, dtype=torch.bool), "block_size": 4},
        {"block_size": []},
    ),
    "extended": (extend_mixing, {"mixing": random(2, 2), "num_blocks": 3, "causal": True}, {}),
    "resampled": (
        resample_mixing,
        {"mixing": random(2, 2), "source_blocks": (2,), "target_blocks": (3,), "num_prefix_blocks": 0},
        {},
    ),
    "interpolated": (interpolation_matrix, {"source_blocks": (2,), "target_blocks": (3,)}, {}),
    "chosen": (choose_blocks, {"grid": (8,)}, {}),
    "initial": (initial_mixing, {"config": CONFIG, "blocks": (2,), "num_prefix_blocks": 0}, {}),
    "layer": (MHLA, {"config": CONFIG, **WIDTHS, "num_prefix_tokens": 0}, {}),
    "call": (
        MHLA(CONFIG, **WIDTHS).forward,
        {**TOKENS, "grid": (8,), "scaling": 0.5},
        {"scaling": ["1.5", "True"]},
    ),
    "sequence": (
        sequence_attention,
        {**TOKENS, "mixing": random(2, 2), "block_size": 4, "sequence": TokenSequence(causal=True), **OPTIONS},
        {"eps": ["1.5"], "block_size": []},
    ),
    "options": (
        MHLAConfig,
        {
            name: None if name in ("block_size", "mixing_range", "lepe_kernel", "layers") else value
            for name, value in dataclasses.asdict(CONFIG).items()
            if name != "grid"
        },
        {},
    ),
}
# Objects are not looked into; wrong classes of these end in Python's own words.
UNCHECKED = {"config", "sequence"}
MEANT = {
    # A number or list that is a value as good as another.
    "options": {
        "eps": ["1.5"],
        "feature_map_eps": ["1.5"],
        "mixing_range": ["1.5"],
        "layers": ["(0,)", "(10", "(1000"],
    },
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_anything_in_place_of_an_argument(case):
    function, arguments, accepted = CASES[case]
    function(**arguments)
    wrong = []
    for name in arguments:
        for value in ANYTHING if name not in UNCHECKED else []:
            allowed = [*accepted.get(name, []), *MEANT.get(case, {}).get(name, [])]
            if isinstance(arguments[name], bool):
                allowed.append("True")
            try:
                function(**{**arguments, name: value})
            except ValueError as error:
                message = str(error)
                if "\n" in message or len(message) > 400:
                    wrong.append(f"{name}={value!r:.40}: a message of {len(message)} characters: {message:.80}")
            except Exception as error:
                wrong.append(f"{name}={value!r:.40}: {type(error).__name__}: {error!s:.80}")
            else:
                if not any(repr(value).startswith(entry[:30]) for entry in allowed):
                    wrong.append(f"{name}={value!r:.40}: accepted")
    assert not wrong, "\n" + "\n".join(wrong)
