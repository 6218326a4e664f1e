# SPDX-License-Identifier: Apache-2.0
"""`MHLA`: the module that owns every parameter that Multi-Head Linear Attention adds to an attention layer.

Shape letters: B batch, T tokens, H feature heads, K query/key width, V value width, M blocks.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..config import MHLAConfig
from ..layouts.blocks import BlockLayout, check_count, positive_axes
from ..layouts.resampling import resample_mixing
from ..layouts.sequences import SequenceLayout
from ..ops import FEATURE_MAPS, choose_backend, extend_mixing
from ..ops.dispatch import attend_on
from ..ops.kernel_check import kernels_pass
from ..ops.operands import (
    Operands,
    accumulation_dtype,
    autocast_type,
    check_layout,
    check_mixing,
    check_sequence_normalizer,
    check_tokens,
    check_valid,
)
from ..ops.sharded import TokenShard, attend_sharded
from ..ops.tables import repeat_heads
from ..utils.messages import shorten_value
from .blocks import check_block_sizes, layout_at, reference_blocks, window_size_for
from .features import LearnedFeatureMap, features_and_plain, token_dtype
from .fused import HeadNorms, OutputNorm, can_fuse, fused_attention, rotated_in_kernel
from .hedgehog import can_fuse_hedgehog, fused_hedgehog_attention
from .lepe import convolved_values, depthwise_convolution
from .mixing import effective_mixing, initial_mixing, mixing_parameter_value
from .sequence import DecodingState, TokenSequence, attend_sequence, decode_sequence, sequence_blocks
from .window import combine_parts, grid_window_attention, sequence_window_attention
from .window_state import empty_window_state, extend_window


# SiLU(x) = 1 here: a gate with this bias and zero weights leaves the output unchanged.
GATE_IDENTITY_BIAS = 1.2784645427610738


@dataclass(frozen=True)
class AttentionParts:
    """The parts of a layer's output, before the gains of the window.

    Attributes:
        attended: MHLA after output norm and gate, `[B, T, H, V]`.
        window: The softmax window, `[B, T, H, V]`; `None` without one.
        positional: The convolution of the values, `[B, T, H, V]`; `None` without one.
        state: State after these tokens, where the sequence had one to decode from.
    """

    attended: torch.Tensor
    window: torch.Tensor | None
    positional: torch.Tensor | None
    state: DecodingState | None = None


class MHLA(nn.Module):
    """Multi-Head Linear Attention between projections that the host model keeps.

    Parameters (all optional except `mixing`): `mixing` `[M, M]` or `[H, M, M]`, `output_norm.weight` `[V]`,
    `gate.weight` `[H·V, hidden]` and `gate.bias`, `lepe.weight` `[H·V, 1, k, ...]` and `lepe.bias`,
    `feature_map_query.weight` and `feature_map_key.weight` `[H, K, K]`, `window_gain` `[2, H, 1]` or `[2, H, V]`
    (row 0 for MHLA, row 1 for the softmax window). Fresh gates, convolutions and windows leave the output unchanged.

    Args:
        config: The options. Needs `blocks`, or a `grid` (its own or `default_grid`) to derive them from.
        hidden_size: Width of the hidden states that the output gate reads.
        num_heads: Number of feature heads H.
        head_dim: Width K of a head's queries and keys.
        value_head_dim: Width V of a head's values; K if not given.
        num_key_value_heads: Number of key/value heads H_kv (grouped-query attention); H if not given.
        num_prefix_tokens: Tokens before those of the grid, which form one block.
        default_grid: Token grid to derive `blocks` from when the config has neither `blocks` nor `grid`.

    Raises:
        ValueError: If the number of blocks cannot be derived or is too large, or a width is no positive integer.
    """

    def __init__(
        self,
        config: MHLAConfig,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
        num_key_value_heads: int | None = None,
        num_prefix_tokens: int = 0,
        default_grid: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        _check_widths(
            hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim, value_head_dim=value_head_dim,
            num_key_value_heads=num_key_value_heads,
        )  # fmt: skip
        check_count("num_prefix_tokens", num_prefix_tokens, minimum=0)
        self.config = config
        # The model's record of its pretrained weights, and the name of this layer in it: see `original.py`.
        self.record: tuple[Any, str] | None = None
        self.num_key_value_heads = num_key_value_heads
        self.num_prefix_tokens = num_prefix_tokens
        self.num_heads, self.head_dim, self.value_head_dim = num_heads, head_dim, value_head_dim
        self.blocks = reference_blocks(config, default_grid)
        check_block_sizes(config, self.blocks)
        count = math.prod(self.blocks) + int(num_prefix_tokens > 0)
        shape = (count, count) if config.mixing_heads == "shared" else (num_heads, count, count)
        self.mixing = nn.Parameter(torch.empty(shape))
        learned = FEATURE_MAPS[config.feature_map].is_learned
        self.feature_map_query = LearnedFeatureMap(num_heads, head_dim, config.feature_map) if learned else None
        self.feature_map_key = (
            LearnedFeatureMap(num_key_value_heads, head_dim, config.feature_map) if learned else None
        )
        self.output_norm = OutputNorm(value_head_dim, eps=1e-6) if config.output_norm else None
        self.gate = nn.Linear(hidden_size, num_heads * value_head_dim) if config.output_gate else None
        self.lepe = None
        if config.lepe_kernel is not None:
            channels = num_heads * value_head_dim
            self.lepe = depthwise_convolution(len(self.blocks), channels, config.lepe_kernel)
        self.window_size = window_size_for(config, len(self.blocks))
        self.window_gain = None
        if config.window is not None:
            channels = 1 if config.window_gains == "per_head" else value_head_dim
            self.window_gain = nn.Parameter(torch.empty(2, num_heads, channels))
        self.reset_parameters()

    @classmethod
    def parameter_shapes(cls, config: MHLAConfig, **widths: Any) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the parameters that such a module would have, without allocating it.

        Args:
            config: The options.
            **widths: As for the constructor.
        """
        with torch.device("meta"):
            module = cls(config, **widths)
        return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}

    def initial_tensor(self, name: str) -> torch.Tensor:
        """Initial value of one parameter, float32 on the CPU, deterministic.

        Args:
            name: Name relative to this module, for example `"mixing"` or `"gate.weight"`.

        Raises:
            AttributeError: If the module has no parameter of that name.
        """
        shape = self.get_parameter(name).shape
        with torch.device("cpu"):
            if name == "mixing":
                weights = initial_mixing(self.config, self.blocks, int(self.num_prefix_tokens > 0)).expand(shape)
                return mixing_parameter_value(self.config, weights).clone()
            if name == "window_gain":
                return torch.tensor([1.0, 0.0])[:, None, None].expand(shape).clone()
            if name == "output_norm.weight":
                return torch.ones(shape)
            if name == "gate.bias":
                return torch.full(shape, GATE_IDENTITY_BIAS)
            if name.startswith("feature_map_"):
                feature_map: Any = self.get_submodule(name.rpartition(".")[0])
                return feature_map.initial_weight()
            return torch.zeros(shape)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Sets every parameter that is not on the meta device to its initial value."""
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                parameter.copy_(self.initial_tensor(name))

    def layout_for(self, grid: Sequence[int]) -> BlockLayout:
        """The layout used on a token grid, following `config.resize`.

        Whenever its blocks differ from those of the stored mixing weights, the weights are resampled over relative
        block coordinates (or extended by distance, for sequences).

        Args:
            grid: Number of tokens along each axis.

        Raises:
            ValueError: If the grid has another number of axes than the blocks.
        """
        return layout_at(self.config, self.blocks, grid, self.num_prefix_tokens)

    def mixing_matrix(self, layout: BlockLayout | None = None) -> torch.Tensor:
        """The effective mixing weights: constraint applied, resampled to `layout` where its blocks differ.

        Args:
            layout: The layout of the tokens; `None` for the blocks that the parameter was made for.

        Returns:
            `[M, M]` or `[H, M, M]`, float32 (float64 for float64 parameters).
        """
        if (
            self.config.mixing_constraint == "none"
            and self.mixing.dtype == torch.float32
            and not self.config.is_sequence
            and (layout is None or tuple(layout.blocks) == tuple(self.blocks))
        ):
            # The usual case, which need not touch autocast.
            return self.mixing
        with torch.autocast(autocast_type(self.mixing.device), enabled=False):
            weights = effective_mixing(self.config, self.mixing.to(accumulation_dtype(self.mixing.dtype)))
            if layout is None or self.config.causal:
                return weights
            if self.config.is_sequence:
                return extend_mixing(weights, layout.num_blocks, causal=False)
            return resample_mixing(weights, self.blocks, layout.blocks, layout.num_prefix_blocks)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        """Attends: the sum of [`MHLA.attention_parts`], MHLA and window times their gains.

        Returns:
            `[B, T, H, V]` in the dtype of `value`; for a `sequence` with a state also the state after its tokens.

        Raises:
            ValueError: As there.
        """
        parts = self.attention_parts(query, key, value, **options)
        output, window, positional = parts.attended, parts.window, parts.positional
        if window is not None:
            assert self.window_gain is not None
            output, positional = combine_parts(output, window, positional, self.window_gain, self.config.backend), None
        if positional is not None:
            output = output + positional
        output = output.to(value.dtype)
        return output if parts.state is None else (output, parts.state)

    def attention_parts(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        grid: Sequence[int] | None = None,
        sequence: TokenSequence | None = None,
        hidden_states: torch.Tensor | None = None,
        rotary: Callable[[torch.Tensor], torch.Tensor] | None = None,
        norms: HeadNorms | None = None,
        scaling: float | None = None,
        identity: bool = False,
        shard: TokenShard | None = None,
    ) -> AttentionParts:
        """Attends, and returns the parts of the output.

        Args:
            query: Projected queries before RoPE, `[B, T, H, K]`; normalised where the model does that, or see `norms`.
            key: Keys, `[B, T, H_kv, K]`.
            value: Values, `[B, T, H_kv, V]`.
            grid: Number of tokens along each axis; T is their product plus `num_prefix_tokens`.
            sequence: For models of sequences, in place of `grid`: padding, documents and decoding state.
            hidden_states: The layer's input `[B, T, hidden]`; needed by the output gate only.
            rotary: Rotates `[B, T, H, K]`; `None` for models without rotary embeddings. A [`PairwiseRotary`] can be
                computed in the kernels.
            norms: Norms of queries and keys over all heads of a token together, which the kernels can compute;
                `None` where there are none, or they have been applied.
            scaling: Scale of q·k in softmax attention; half of it (its root) goes to each side before the
                feature map. `None` for 1 there, and for K^-1/2 in the window.
            identity: Every token attends to itself alone, as perturbed-attention guidance asks, in the window too;
                `query` and `key` are ignored, output norm, gate and LePE are not. Needs `grid`.
            shard: With `grid`, which of its tokens this process holds under context parallelism: T are those, the
                rotary embedding is theirs. Not for windows. Computed in plain torch, whatever the backend. Summaries
                travel in float32, but in bfloat16 for bfloat16 tokens in evaluation mode.

        Returns:
            The parts, in the dtype of `value` or a wider one.

        Raises:
            ValueError: If the grid does not have T tokens, an argument has a wrong type, shape or value, or the gate
                misses its hidden states.
        """
        check_tokens(query, key, value)
        if sequence is not None:
            check_valid(sequence.valid, key)
        if scaling is not None and not (isinstance(scaling, (int, float)) and 0 < scaling <= sys.float_info.max):
            raise ValueError(f"scaling={shorten_value(scaling)} must be a finite number above 0, or None.")
        if shard is not None and (self.window_gain is not None or self.num_prefix_tokens):
            raise ValueError("shard is for layers without a softmax window and without tokens before the grid.")
        layout = None if sequence is not None else self._grid_layout(grid, query.shape[1], shard)
        gate = self._projected_gate(hidden_states)
        state = None if sequence is None else sequence.state
        backend = "torch"
        if shard is None:
            family = _kernel_family(self.config, sequence, query.shape[1])
            width = query.shape[3] * FEATURE_MAPS[self.config.feature_map].width_factor
            # Kernels for one token multiply no matrices. The fused ones are tried first, so no family is checked yet.
            backend = choose_backend(
                self.config.backend, query, key, value,
                products=family != "decode", width=width, family=family, check=False,
            )  # fmt: skip
        rotated, rotary_of_window = None, rotary
        if self.window_gain is not None and not identity:
            # The window needs them outside the kernels in any case.
            if backend == "triton":
                rotated = rotated_in_kernel(query, key, rotary, norms, value.dtype)
            if rotated is None and norms is not None:
                (query, key), norms = norms.apply(query, key), None
            rotary_of_window = rotary if rotated is None else None
            if rotated is not None and self.config.rope == "before_feature_map":
                (query, key), rotary, norms = rotated, None, None
        window = None
        if identity:
            output = repeat_heads(value, self.num_heads, 2)
            window = None if self.window_gain is None else output
            if self.output_norm is not None:
                output = self.output_norm(output)
            if gate is not None:
                output = output * F.silu(gate)
        elif layout is not None and can_fuse(self.config, backend, query, value, rotary, self.output_norm):
            if norms is not None and not norms.are_plain(query.device):
                (query, key), norms = norms.apply(query, key), None
            output = fused_attention(
                self.config,
                query,
                key,
                value,
                self.mixing_matrix(layout),
                layout,
                rotary=rotary,  # type: ignore[arg-type]
                norms=norms,
                scaling=scaling,
                gate=gate,
                output_norm=self.output_norm,
            )
        elif can_fuse_hedgehog(self.config, backend, query, value, rotary, self._feature_maps, sequence):
            output = self._attend_hedgehog(query, key, value, layout, sequence, rotary, norms, scaling)
            if gate is not None:
                output = output * F.silu(gate)
        else:
            if norms is not None:
                query, key = norms.apply(query, key)
            output, state = self._attend(query, key, value, backend, layout, sequence, rotary, scaling, shard)
            if gate is not None:
                output = output * F.silu(gate)
        if self.window_gain is not None and not identity:
            pair = rotated or (query, key)
            window, state = self._attend_window(*pair, value, layout, sequence, state, rotary_of_window, scaling)
        positional = None
        if self.lepe is not None and layout is not None:
            positional = convolved_values(self.lepe, value, layout, self.num_heads, shard)
        return AttentionParts(output, window, positional, state)

    def _attend_window(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: BlockLayout | None,
        sequence: TokenSequence | None,
        state: DecodingState | None,
        rotary: Callable[[torch.Tensor], torch.Tensor] | None,
        scaling: float | None,
    ) -> tuple[torch.Tensor, DecodingState | None]:
        """Softmax attention to the tokens of each token's window, and the state with them in its window.

        Returns:
            `[B, T, H, V]` in the dtype of `value`, and the state.
        """
        window, size = self.config.window, self.window_size
        assert window is not None and size is not None
        with torch.autocast(autocast_type(query.device), enabled=False):
            if rotary is not None:
                query, key = rotary(query), rotary(key)
            tokens = query.to(value.dtype), key.to(value.dtype), value
            if layout is not None:
                prefix = layout.num_prefix_tokens
                output = grid_window_attention(
                    *tokens, window, size, layout.grid, num_prefix_tokens=prefix, scale=scaling
                )
                return output, None
            assert sequence is not None
            if state is None:
                return sequence_window_attention(*tokens, window, size[0], sequence, scale=scaling), None
            past = state.window or empty_window_state(key, value, window, size[0], state.rewindable)
            output, past = extend_window(*tokens, past, window, size[0], valid=sequence.valid, scale=scaling)
            return output, dataclasses.replace(state, window=past)

    def _projected_gate(self, hidden_states: torch.Tensor | None) -> torch.Tensor | None:
        if self.gate is None:
            return None
        if hidden_states is None:
            raise ValueError("hidden_states is needed by the output gate (output_gate=True).")
        return self.gate(hidden_states).unflatten(-1, (self.num_heads, -1))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        backend: str,
        layout: BlockLayout | None,
        sequence: TokenSequence | None,
        rotary: Callable[[torch.Tensor], torch.Tensor] | None,
        scaling: float | None,
        shard: TokenShard | None,
    ) -> tuple[torch.Tensor, DecodingState | None]:
        """Feature map, rotary embedding, operator and output norm.

        Returns:
            `[B, T, H, V]` in the dtype of `value`, and the state after these tokens where the sequence had one.
        """
        config = self.config
        if backend == "triton":
            width = query.shape[3] * FEATURE_MAPS[config.feature_map].width_factor
            if not kernels_pass(_kernel_family(config, sequence, query.shape[1]), query, value, width):
                backend = "torch"
        changed = rotary is not None or scaling is not None
        dtype = token_dtype(config, backend, query, key, value, changed=changed)
        with torch.autocast(autocast_type(query.device), enabled=False):
            query, key = query.to(dtype), key.to(dtype)
            (query, plain_query), (key, plain_key) = (
                features_and_plain(config, tokens, learned, rotary, scaling, backend)
                for tokens, learned in zip((query, key), self._feature_maps)
            )
            operands = Operands(query, key, value.to(dtype), plain_query, plain_key, config.normalizer, config.eps)
            mixing = self.mixing_matrix(layout).to(accumulation_dtype(dtype))
            check_mixing(mixing, query)
            state = None
            if sequence is not None:
                block_size = self._sequence_block_size()
                if sequence.state is None:
                    output = attend_sequence(operands, mixing, block_size, sequence, backend)
                else:
                    output, state = decode_sequence(operands, mixing, block_size, sequence, backend)
            elif shard is not None:
                assert layout is not None
                # Not by whether gradients are recorded: checkpointing computes the same output with and without.
                half = value.dtype == torch.bfloat16 and not self.training
                output = attend_sharded(operands, mixing, layout, shard, torch.bfloat16 if half else None)
            else:
                assert layout is not None
                if config.causal:
                    mixing = extend_mixing(mixing, layout.num_blocks, causal=True)
                output = attend_on(backend, operands, mixing, layout, causal=config.causal)
            if self.output_norm is not None:
                output = self.output_norm(output)
        return output.to(value.dtype), state

    @property
    def _feature_maps(self) -> tuple[LearnedFeatureMap | None, LearnedFeatureMap | None]:
        return self.feature_map_query, self.feature_map_key

    def _attend_hedgehog(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: BlockLayout | None,
        sequence: TokenSequence | None,
        rotary: Callable[[torch.Tensor], torch.Tensor] | None,
        norms: HeadNorms | None,
        scaling: float | None,
    ) -> torch.Tensor:
        """Attention by the kernels that have hedgehog features inside, and output norm."""
        mixing = self.mixing_matrix(layout)
        check_mixing(mixing, query)
        blocks: BlockLayout | SequenceLayout
        if sequence is not None:
            mixing, blocks = sequence_blocks(mixing, query, self._sequence_block_size(), sequence)
        else:
            assert layout is not None
            blocks = layout
        options: dict[str, Any] = {"rotary": rotary, "norms": norms, "scaling": scaling}
        with torch.autocast(autocast_type(query.device), enabled=False):
            maps: Any = self._feature_maps
            output = fused_hedgehog_attention(self.config, query, key, value, maps, mixing, blocks, **options)
            return (output if self.output_norm is None else self.output_norm(output)).to(value.dtype)

    def _sequence_block_size(self) -> int:
        if not self.config.is_sequence or self.config.block_size is None:
            raise ValueError("sequence is for causal=True or resize='extend'; this layer needs grid.")
        check_sequence_normalizer(self.config.normalizer, " for sequences")
        return self.config.block_size[0]

    def _grid_layout(self, grid: Sequence[int] | None, num_tokens: int, shard: TokenShard | None) -> BlockLayout:
        grid = positive_axes("grid", grid)
        if shard is not None:
            shard.check_length(num_tokens)
            num_tokens = shard.num_tokens
        if math.prod(grid) + self.num_prefix_tokens != num_tokens:
            prefix = f" after {self.num_prefix_tokens}" if self.num_prefix_tokens else ""
            raise ValueError(f"grid={tuple(grid)} has {math.prod(grid)} tokens{prefix}, but query has {num_tokens}.")
        layout = self.layout_for(grid)
        check_layout(layout, self.config.normalizer, self.config.causal)
        return layout

    def extra_repr(self) -> str:
        return f"blocks={self.blocks}, normalizer={self.config.normalizer!r}, feature_map={self.config.feature_map!r}"


def _kernel_family(config: MHLAConfig, sequence: TokenSequence | None, num_tokens: int) -> str:
    """The kernels that serve where the fused ones do not, see `ops.kernel_cases`."""
    if sequence is not None and sequence.state is not None:
        return "decode" if num_tokens == 1 else "prompt"
    return "causal" if (config.causal if sequence is None else sequence.causal) else "block"


def _check_widths(**widths: Any) -> None:
    for name, width in widths.items():
        check_count(name, width)
    heads, shared = widths["num_heads"], widths["num_key_value_heads"]
    if heads % shared:
        raise ValueError(f"num_key_value_heads={shared} must divide num_heads={heads}.")
