# SPDX-License-Identifier: Apache-2.0
"""The MHLA operator in all its forms: dense (the oracle), block-parallel, causal chunked and recurrent."""

from ..layouts.sequences import extend_mixing, mixing_at
from .backends import choose_backend, triton_obstacle
from .block import block_mhla_attention
from .causal import causal_mhla_attention
from .checks import OPERATOR_BACKENDS
from .dispatch import attend_blocks, mhla_attention
from .naive import naive_mhla_attention, naive_mhla_weights
from .recurrent import MHLAState, empty_state, rewind_state
from .recurrent_extend import mhla_extend
from .recurrent_step import mhla_step


__all__ = [
    "OPERATOR_BACKENDS",
    "MHLAState",
    "attend_blocks",
    "block_mhla_attention",
    "causal_mhla_attention",
    "choose_backend",
    "empty_state",
    "extend_mixing",
    "mhla_attention",
    "mhla_extend",
    "mhla_step",
    "mixing_at",
    "naive_mhla_attention",
    "naive_mhla_weights",
    "rewind_state",
    "triton_obstacle",
]
