# SPDX-License-Identifier: Apache-2.0
"""The MHLA operator in all its forms: dense (the oracle), block-parallel, causal chunked and recurrent."""

from ..sequence_layout import extend_mixing, mixing_at
from .block import block_mhla_attention
from .causal import causal_mhla_attention
from .dispatch import BACKENDS, mhla_attention
from .naive import naive_mhla_attention, naive_mhla_weights
from .recurrent import MHLAState, empty_state, mhla_extend, mhla_step, rewind_state


__all__ = [
    "BACKENDS",
    "MHLAState",
    "block_mhla_attention",
    "causal_mhla_attention",
    "empty_state",
    "extend_mixing",
    "mhla_attention",
    "mhla_extend",
    "mhla_step",
    "mixing_at",
    "naive_mhla_attention",
    "naive_mhla_weights",
    "rewind_state",
]
