# SPDX-License-Identifier: Apache-2.0
"""The recurrent form of causal MHLA: decoding one token at a time from a state of block summaries.

Shape letters: B batch, H feature heads, K query/key width, V value width, n finished blocks. Summaries carry the
normaliser z as their last column, hence V + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .block import accumulation_dtype
from .causal import causal_mhla_attention, causal_mixing_row


@dataclass(frozen=True)
class MHLAState:
    """Decoding state of one causal MHLA layer; steps return a new one and leave the old one valid.

    Attributes:
        summaries: Finished blocks, `[B, H, n, K, V + 1]`, float32 (float64 for float64 inputs).
        current: The current block's summary so far, `[B, H, K, V + 1]`.
        prefix: Σ_{b<i} m_ib S_b of the current block i, `[B, H, K, V + 1]`; computed once per block.
        block_size: Tokens of a block.
        filled: Tokens already in the current block, 0 to `block_size`.
    """

    summaries: torch.Tensor
    current: torch.Tensor
    prefix: torch.Tensor
    block_size: int
    filled: int

    @property
    def num_tokens(self) -> int:
        """Tokens seen so far."""
        return self.summaries.shape[2] * self.block_size + self.filled


def empty_state(
    batch_size: int,
    num_heads: int,
    key_width: int,
    value_width: int,
    block_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> MHLAState:
    """Returns the state before the first token. `dtype` is the accumulation dtype."""
    zeros = torch.zeros(batch_size, num_heads, key_width, value_width + 1, dtype=dtype, device=device)
    return MHLAState(zeros[:, :, None][:, :, :0], zeros, zeros, block_size, 0)


def mhla_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    block_size: int,
    *,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    eps: float = 1e-6,
) -> tuple[torch.Tensor, MHLAState]:
    """Runs a prompt through the chunked form and returns the state to go on decoding from.

    Args:
        query: Feature-mapped queries `[B, T, H, K]`.
        key: Feature-mapped keys `[B, T, H, K]`.
        value: Values `[B, T, H, V]`.
        mixing: `[M, M]` or `[H, M, M]`, lower triangle used.
        block_size: Tokens of a block.
        normalizer_query: Unrotated queries where they differ from `query`.
        normalizer_key: Unrotated keys where they differ from `key`.
        normalizer: `"query"` or `"none"`.
        eps: Added to the denominator.

    Returns:
        The output `[B, T, H, V]` and the [`MHLAState`] after token T.

    Raises:
        ValueError: If `normalizer` is `"block_query"`, whose state would grow with every token, there is no token, or
            `block_size` is not positive.
    """
    _check_normalizer(normalizer)
    if query.shape[1] < 1:
        raise ValueError("query has no tokens; start decoding without a prompt from empty_state.")
    if block_size < 1:
        raise ValueError(f"block_size={block_size} must be a positive integer.")
    output = causal_mhla_attention(
        query, key, value, mixing, block_size,
        normalizer_query=normalizer_query, normalizer_key=normalizer_key, normalizer=normalizer, eps=eps,
    )  # fmt: skip
    dtype = accumulation_dtype(value.dtype)
    with torch.autocast(query.device.type, enabled=False):
        blocks = torch.stack(
            [
                _summary(key_block, plain_block, value_block, dtype)
                for key_block, plain_block, value_block in zip(
                    key.split(block_size, dim=1),
                    (key if normalizer_key is None else normalizer_key).split(block_size, dim=1),
                    value.split(block_size, dim=1),
                )
            ],
            dim=2,
        )
    filled = (query.shape[1] - 1) % block_size + 1
    finished, current = blocks[:, :, :-1], blocks[:, :, -1]
    return output, MHLAState(finished, current, _prefix(finished, mixing), block_size, filled)


def mhla_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    state: MHLAState,
    *,
    normalizer_query: torch.Tensor | None = None,
    normalizer_key: torch.Tensor | None = None,
    normalizer: str = "query",
    eps: float = 1e-6,
) -> tuple[torch.Tensor, MHLAState]:
    """Decodes one token in O(K·V), plus O(n·K·V) once per block.

    Args:
        query: Feature-mapped query of the token, `[B, 1, H, K]`.
        key: Feature-mapped key, `[B, 1, H, K]`.
        value: Value, `[B, 1, H, V]`.
        mixing: As in [`mhla_prefill`].
        state: The state after the tokens before.
        normalizer_query: Unrotated query where it differs from `query`.
        normalizer_key: Unrotated key where it differs from `key`.
        normalizer: `"query"` or `"none"`.
        eps: Added to the denominator.

    Returns:
        The output `[B, 1, H, V]` in the dtype of `value`, and the state after this token.

    Raises:
        ValueError: If more than one token is given, or `normalizer` is `"block_query"`.
    """
    _check_normalizer(normalizer)
    if query.shape[1] != 1:
        raise ValueError(f"mhla_step takes one token, got query with {query.shape[1]}; use mhla_prefill for a prompt.")
    summaries, current, prefix, filled = state.summaries, state.current, state.prefix, state.filled
    if filled == state.block_size:
        summaries = torch.cat([summaries, current.unsqueeze(2)], dim=2)
        current, prefix, filled = torch.zeros_like(current), _prefix(summaries, mixing), 0
    dtype, index = current.dtype, summaries.shape[2]
    with torch.autocast(query.device.type, enabled=False):
        plain_key = key if normalizer_key is None else normalizer_key
        current = current + _summary(key, plain_key, value, dtype)
        diagonal = min(index, mixing.shape[-1] - 1)
        own = mixing[..., diagonal, diagonal].to(dtype)
        mixed = prefix + own.reshape(-1, 1, 1) * current
        # [B, H, 1, K] rows against the value columns and the normaliser column.
        output = query.to(dtype).transpose(1, 2) @ mixed[..., :-1]
        if normalizer == "query":
            plain_query = (query if normalizer_query is None else normalizer_query).to(dtype).transpose(1, 2)
            output = output / (plain_query @ mixed[..., -1:] + eps)
    state = MHLAState(summaries, current, prefix, state.block_size, filled + 1)
    return output.transpose(1, 2).to(value.dtype), state


def _check_normalizer(normalizer: str) -> None:
    if normalizer not in ("query", "none"):
        raise ValueError(f"normalizer={normalizer!r} cannot be decoded token by token; allowed: 'query', 'none'.")


def _summary(key: torch.Tensor, plain_key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """S = Σ φ(k) vᵀ with z = Σ φ(k) as last column: `[B, H, K, V + 1]`."""
    products = torch.einsum("bthk,bthv->bhkv", key.to(dtype), value.to(dtype))
    return torch.cat([products, plain_key.to(dtype).sum(dim=1).unsqueeze(-1)], dim=-1)


def _prefix(summaries: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Σ_{b<i} m_ib S_b for block i = n: `[B, H, K, V + 1]`; zeros before the first finished block."""
    count = summaries.shape[2]
    row = causal_mixing_row(mixing, count)[..., :count].to(summaries.dtype)
    with torch.autocast(summaries.device.type, enabled=False):
        mixed = row.unsqueeze(-2) @ summaries.flatten(-2)
    return mixed.squeeze(-2).unflatten(-1, summaries.shape[-2:])
