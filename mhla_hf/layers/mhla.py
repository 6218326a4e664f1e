# SPDX-License-Identifier: Apache-2.0
"""`MHLA`: the module that owns every parameter that Multi-Head Linear Attention adds to an attention layer.

A layer is computed by the fused kernels, or step by step by kernels or plain torch. All compute the same: φ(q) and
φ(k), rotated; block summaries and their mixture ([`mhla_hf.ops.mhla_attention`]); then output norm and gate. A softmax
window and a convolution of the values are added to that.

Shape letters: B batch, T tokens, H feature heads, K query/key width, V value width, M blocks.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn as nn
import torch.nn.functional as F

from ..config import MHLAConfig
from ..layouts.blocks import BlockLayout, check_count, positive_axes
from ..layouts.resampling import resample_mixing
from ..layouts.sequences import SequenceLayout
from ..ops.band import StoredMixing, extend_mixing, sequence_mixing
from ..ops.definitions import FEATURE_MAPS, SEQUENCE_NORMALIZERS
from ..ops.forms import attend_on
from ..ops.operands import (
    Operands,
    accumulation_dtype,
    autocast_type,
    check_layout,
    check_tokens,
    check_valid,
    records_gradients,
)
from ..ops.plans import decide, decided, has_plans, is_capturing, is_plain, kind_of, planned
from ..ops.sharded import TokenShard, attend_sharded, sharded_convolution
from ..ops.sums import BlockMixing, HeadGroups, repeat_heads
from ..utils.messages import check_choice, shorten_value
from .convolution import DepthwiseConv3d
from .fused import (
    AttentionParts,
    Call,
    HeadNorms,
    OutputNorm,
    features_by_kernel,
    fused_attention,
    has_features_kernel,
)
from .kinds import choose_path, kind_of_call
from .mixing import (
    LOW_RANK_FROM,
    LearnedFeatureMap,
    ResampledMixing,
    effective_mixing,
    features_and_normalizer,
    initial_decay,
    initial_mixing,
    layout_at,
    mixing_parameter_value,
    reference_blocks,
    token_dtype,
    with_window_size,
)
from .sequence_window import empty_window_state, extend_window, sequence_window_attention
from .state import DecodingState, TokenSequence, decode, without_sinks
from .window import from_rows, grid_window_attention, join_window, to_rows


_CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: DepthwiseConv3d}
# SiLU(x) = 1 here: a gate with this bias and zero weights leaves the output unchanged.
GATE_IDENTITY_BIAS = 1.2784645427610738


class MHLA(nn.Module):
    """Multi-Head Linear Attention between projections that the host model keeps.

    Parameters (all optional except `mixing`): `mixing` `[M, M]` or `[H, M, M]`, by distance `[M]` or `[H, M]`;
    `mixing_decay` `[1]` or `[H]` (the logit of the decay of a tail), `output_norm.weight` `[V]`,
    `gate.weight` `[H·V, hidden]` and `gate.bias`, `lepe.weight` `[H·V, 1, k, ...]` and `lepe.bias`,
    `feature_map_query.weight` and `feature_map_key.weight` `[H, K, K]`, `window_bias` `[H]` (added to the logarithm of
    what the softmax over tokens outside of the window is estimated to be), `window_query` `[H, K]` (its product with
    the query is added to that bias). Fresh gates and convolutions leave the
    output unchanged.

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

    Attributes:
        streams: What the host's attention returns, by the names of its arguments, where it returns text beside the
            grid; empty where it returns one tensor.
        replaces_linear: Whether the host's own attention is linear, as in SANA, and not softmax.
        groups: Which of the host's groups of heads are this layer's; `None` for all.
    """

    streams: ClassVar[tuple[str, ...]] = ()
    replaces_linear = False
    groups: HeadGroups | None = None

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
        widths = {"hidden_size": hidden_size, "num_heads": num_heads, "num_key_value_heads": num_key_value_heads}
        for name, width in {**widths, "head_dim": head_dim, "value_head_dim": value_head_dim}.items():
            check_count(name, width)
        check_count("num_prefix_tokens", num_prefix_tokens, minimum=0)
        if num_heads % num_key_value_heads:
            raise ValueError(f"num_key_value_heads={num_key_value_heads} must divide num_heads={num_heads}.")
        limit = 0 if self.streams else num_prefix_tokens
        if config.sink_tokens > limit and not config.is_sequence:
            raise ValueError(
                f"sink_tokens={shorten_value(config.sink_tokens)} is more than the {limit} tokens that are before the "
                "grid (class and register tokens): only these can be sinks of a grid."
            )
        self.config = config
        # The model's record of its pretrained weights, and the name of this layer in it: see `weight_record.py`.
        self.record: tuple[Any, str] | None = None
        self.num_key_value_heads = num_key_value_heads
        self.num_prefix_tokens = num_prefix_tokens
        self.num_heads, self.head_dim, self.value_head_dim = num_heads, head_dim, value_head_dim
        self.blocks = reference_blocks(config, default_grid)
        count = math.prod(self.blocks) + int(num_prefix_tokens > 0)
        heads = () if config.mixing_heads == "shared" else (num_heads,)
        shape = (count, count) if config.mixing_storage == "matrix" else (count,)
        self.mixing = nn.Parameter(torch.empty(*heads, *shape))
        self.mixing_decay = nn.Parameter(torch.empty(heads or 1)) if config.mixing_tail == "decay" else None
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
            kernel = config.lepe_kernel
            convolution = _CONVOLUTIONS[len(self.blocks)]
            self.lepe = convolution(channels, channels, kernel, padding=kernel // 2, groups=channels)
        self.window_size = with_window_size(config, len(self.blocks)).window_size
        self.window_bias = None if config.window is None else nn.Parameter(torch.empty(num_heads))
        by_query = config.window is not None and config.window_share == "query"
        self.window_query = nn.Parameter(torch.empty(num_heads, head_dim)) if by_query else None
        self.reset_parameters()

    def initial_tensor(self, name: str) -> torch.Tensor:
        """Return the initial value of one parameter, float32 on the CPU, deterministic.

        Args:
            name: Name relative to this module, for example `"mixing"` or `"gate.weight"`.

        Raises:
            AttributeError: If the module has no parameter of that name.
        """
        shape = self.get_parameter(name).shape
        with torch.device("cpu"):
            if name == "mixing":
                weights = initial_mixing(self.config, self.blocks, int(self.num_prefix_tokens > 0))
                return mixing_parameter_value(self.config, weights).expand(shape).clone()
            if name == "mixing_decay":
                return torch.full(shape, initial_decay(self.config.mixing_tail_half_life))
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
        """Set every parameter that is not on the meta device to its initial value."""
        for name, parameter in self.named_parameters():
            if not parameter.is_meta:
                parameter.copy_(self.initial_tensor(name))

    def layout_for(self, grid: Sequence[int], block_order: bool = False) -> BlockLayout:
        """Return the layout used on a token grid, following `config.resize`.

        Whenever its blocks differ from those of the stored mixing weights, the weights are resampled over relative
        block coordinates (or extended by distance, for sequences).

        Args:
            grid: Number of tokens along each axis.
            block_order: Whether the tokens come block by block, see [`BlockLayout`][mhla_hf.BlockLayout].

        Raises:
            ValueError: If the grid has another number of axes than the blocks.
        """
        return layout_at(self.config, self.blocks, grid, self.num_prefix_tokens, block_order)

    def mixing_matrix(self, layout: BlockLayout | None = None, causal: bool | None = None) -> torch.Tensor:
        """Return the effective mixing weights: constraint applied, resampled to `layout` where its blocks differ.

        Args:
            layout: The layout of the tokens; `None` for the blocks that the parameter was made for.
            causal: Whether a sequence looks back only; `None` for what the configuration says.

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
            if layout is None:
                return weights
            if self.config.is_sequence:
                causal = self.config.causal if causal is None else causal
                return extend_mixing(weights, layout.num_blocks, causal=causal, mixing_decay=self._decay(weights))
            return resample_mixing(weights, self.blocks, layout.blocks, layout.num_prefix_blocks)

    def stored_mixing(self, dtype: torch.dtype | None = None) -> StoredMixing:
        """Return the stored weights of a sequence's blocks, and how they go on beyond, in a dtype."""
        weights = self.mixing_matrix()
        return StoredMixing.of(weights, self._decay(weights), dtype)

    def _decay(self, weights: torch.Tensor) -> torch.Tensor | None:
        """The decay of the tail in the dtype of the weights, `[1]` or `[H]`; `None` for a constant tail."""
        if self.mixing_decay is not None:
            return self.mixing_decay.to(weights.dtype).sigmoid()
        return None if self.config.mixing_tail == "constant" else weights.new_zeros(1)

    @property
    def all_heads(self) -> int:
        """Number of the host's query heads."""
        return self.num_heads if self.groups is None else self.num_heads // len(self.groups.own) * self.groups.count

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        exact: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Attend: the sum of [`MHLA.attention_parts`], MHLA and window by their shares.

        Args:
            query: `[B, T, H, K]`.
            key: `[B, T, H_kv, K]`.
            value: `[B, T, H_kv, V]`.
            exact: The softmax heads of a layer with `groups`, `[B, T, all heads - H, V]`, which are put to the others.
            **options: Further arguments of [`MHLA.attention_parts`].

        Returns:
            `[B, T, all heads, V]` in the dtype of `value`; for a `sequence` with a state also the state after its
            tokens.

        Raises:
            ValueError: See [`MHLA.attention_parts`].
        """
        parts = self.attention_parts(query, key, value, **options)
        output = self.join(parts).to(value.dtype)
        if exact is not None and self.groups is not None:
            output = self.groups.join(output, exact)
        return output if parts.state is None else (output, parts.state)

    def join(self, parts: AttentionParts) -> torch.Tensor:
        """The parts of [`MHLA.attention_parts`] by their shares, `[B, T, H, V]`."""
        output = parts.attended
        if parts.window is not None:
            output = join_window(output, parts.window, self.window_biases(parts.query))
        return output if parts.positional is None else output + parts.positional

    def window_biases(self, query: Any) -> torch.Tensor:
        """The bias of the share of tokens outside the window, `[H]`, or `[B, T, H]` for `window_share="query"`.

        Args:
            query: Queries before their rotation, `[B, T, H, K]`.
        """
        assert self.window_bias is not None
        if self.window_query is None:
            return self.window_bias
        dtype = accumulation_dtype(query.dtype)
        return self.window_bias + (query.to(dtype) * self.window_query.to(dtype)).sum(-1)

    def attention_parts(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        grid: Sequence[int] | None = None,
        block_order: bool = False,
        sequence: TokenSequence | None = None,
        hidden_states: torch.Tensor | None = None,
        rotary: Callable[[torch.Tensor], torch.Tensor] | None = None,
        norms: HeadNorms | None = None,
        scaling: float | None = None,
        identity: bool = False,
        shard: TokenShard | None = None,
        attended_alone: bool = False,
    ) -> AttentionParts:
        """Attend, and return the parts of the output.

        Args:
            query: Projected queries before RoPE, `[B, T, H, K]`; normalised where the model does that, or see `norms`.
            key: Keys, `[B, T, H_kv, K]`.
            value: Values, `[B, T, H_kv, V]`.
            grid: Number of tokens along each axis; T is their product plus `num_prefix_tokens`.
            block_order: Whether the tokens of the grid come block by block, as `layout_for(grid).to_block_order` puts
                them, and not row by row.
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
                rotary embedding is theirs. Not for windows. Always computed in plain torch. Summaries
                travel in float32, but in bfloat16 for bfloat16 tokens in evaluation mode.
            attended_alone: Leave window and convolution out.

        Returns:
            The parts, in the dtype of `value` or a wider one.

        Raises:
            ValueError: If the grid does not have T tokens, an argument has a wrong type, shape or value, or the gate
                misses its hidden states.
        """
        call = Call(query, key, value, None, sequence, None, rotary, norms, scaling, shard)
        kind: Any = None
        tensors: tuple[torch.Tensor | None, ...] = call.tensors
        can_gate = self.gate is None or hidden_states is not None
        if not identity and can_gate and not torch.compiler.is_compiling() and has_plans(query):
            kind, tensors = kind_of_call(self, call, grid, block_order, attended_alone)
        if self.gate is not None and kind is not None:
            gate = self.gate(hidden_states)
            tensors = *tensors, gate
            kind = (kind, kind_of((gate,))) if is_plain((gate,)) else None
        else:
            gate = None
        is_whole = attended_alone or (self.window_bias is None and self.lepe is None)

        def attend(*_: Any) -> AttentionParts:
            return self._attend_whole(call, kind, grid, block_order, hidden_states, gate, identity, attended_alone)

        if kind is None or not is_whole or records_gradients(*tensors):
            return attend()
        return AttentionParts(planned(kind, lambda *_: attend().attended, tensors), None, None)

    def _attend_whole(
        self,
        call: Call,
        kind: Any,
        grid: Sequence[int] | None,
        block_order: bool,
        hidden_states: torch.Tensor | None,
        gate: torch.Tensor | None,
        identity: bool,
        attended_alone: bool,
    ) -> AttentionParts:
        """[`MHLA.attention_parts`], whose arguments are checked unless those of a call of this kind have been."""
        query, value, sequence = call.query, call.value, call.sequence
        layout, path = decided(kind) or (None, None)
        if path is None:
            scaling = call.scaling
            check_tokens(Operands(query, call.key, value))
            if scaling is not None and not (isinstance(scaling, (int, float)) and 0 < scaling <= sys.float_info.max):
                raise ValueError(f"scaling={shorten_value(scaling)} must be a finite number above 0, or None.")
            if sequence is not None:
                layout = self._sequence_layout(sequence, query)
            else:
                layout = self._grid_layout(grid, query.shape[1], call.shard, block_order)
            if self.gate is not None and hidden_states is None:
                raise ValueError("hidden_states is needed by the output gate (output_gate=True).")
        if self.gate is not None:
            gate = (self.gate(hidden_states) if gate is None else gate).unflatten(-1, (self.num_heads, -1))
        call = dataclasses.replace(call, layout=layout, gate=gate)
        has_window = self.window_bias is not None and not identity and not attended_alone
        if has_window and call.norms is not None:
            # The window needs queries and keys after their norms, outside of the kernels.
            call = call.normed()
        state = None
        if path is None:
            path = "identity" if identity else choose_path(self.config, call, self.output_norm)
            if kind is not None and not is_capturing((query,)):
                # The configuration lives as long as kinds know it by its id.
                decide(kind, (layout, path), self.config)
        if path == "identity":
            output = self._finish(repeat_heads(value, self.num_heads, 2), call)
        elif path == "fused":
            output = fused_attention(self.config, call, self._matrix_of(call), self.output_norm)
        else:
            output, state = self._attend(call, path)
            output = self._finish(output, call)
        if attended_alone:
            return AttentionParts(output, None, None, state)
        window = None
        if has_window:
            window, state = self._attend_window(call, state)
        positional = None if self.lepe is None else self._convolve(call)
        return AttentionParts(output, window, positional, state, query=call.query if has_window else None)

    def _sequence_layout(self, sequence: TokenSequence, query: torch.Tensor) -> BlockLayout | SequenceLayout | None:
        """The blocks of a sequence; `None` where its tokens go on from a state."""
        if not self.config.is_sequence or self.config.block_size is None:
            raise ValueError("sequence is for causal=True or resize='extend'; this layer needs grid.")
        if sequence.state is not None and sequence.documents is not None:
            raise ValueError("Packed sequences cannot be decoded with a cache: pass use_cache=False.")
        check_valid(sequence.valid, query)
        if not sequence.causal and self.config.mixing_storage == "distance":
            raise ValueError("mixing_storage='distance' has no weights of later blocks: this layer looks back only.")
        if not sequence.causal or sequence.state is not None:
            use = "decoding with a cache" if sequence.causal else "sequences that look both ways"
            check_choice("normalizer", self.config.normalizer, SEQUENCE_NORMALIZERS, f" for {use}")
        return None if sequence.state is not None else sequence.layout(query, self.config.block_size[0])

    def _grid_layout(
        self, grid: Sequence[int] | None, num_tokens: int, shard: TokenShard | None, block_order: bool
    ) -> BlockLayout:
        grid = positive_axes("grid", grid)
        if self.config.is_sequence and self.config.sink_tokens:
            raise ValueError("Sinks of a sequence need sequence, in place of grid.")
        if shard is not None:
            if self.window_bias is not None or self.num_prefix_tokens or self.config.causal or block_order:
                raise ValueError(
                    "shard is for layers that look both ways, without a softmax window and without tokens before the "
                    "grid, which come row by row."
                )
            shard.check_length(num_tokens)
            num_tokens = shard.num_tokens
        if math.prod(grid) + self.num_prefix_tokens != num_tokens:
            prefix = f" after {self.num_prefix_tokens}" if self.num_prefix_tokens else ""
            raise ValueError(f"grid={grid} has {math.prod(grid)} tokens{prefix}, but query has {num_tokens}.")
        layout = self.layout_for(grid, block_order)
        check_layout(layout, self.config.normalizer, self.config.causal)
        return layout

    def _finish(self, output: torch.Tensor, call: Call) -> torch.Tensor:
        """Output norm and gate; the result is in the dtype of the values."""
        if self.output_norm is not None:
            with torch.autocast(autocast_type(output.device), enabled=False):
                output = self.output_norm(output)
        output = output.to(call.value.dtype)
        return output if call.gate is None else output * F.silu(call.gate)

    def _attend(self, call: Call, backend: str) -> tuple[torch.Tensor, DecodingState | None]:
        """MHLA step by step: norms, feature map and rotary embedding, then the operator in one of its forms."""
        config, sequence, layout = self.config, call.sequence, call.layout
        by_kernel = backend == "triton" and has_features_kernel(config, call, self._feature_maps)
        if call.norms is not None and not by_kernel:
            call = call.normed()
        query, key, value = call.query, call.key, call.value
        changed = call.rotary is not None or call.scaling is not None
        dtype = token_dtype(config, backend, query, key, value, changed=changed)
        with torch.autocast(autocast_type(query.device), enabled=False):
            if by_kernel:
                query, key = normalizer_query, normalizer_key = features_by_kernel(config, call, self._feature_maps)
            else:
                (query, normalizer_query), (key, normalizer_key) = (
                    features_and_normalizer(config, tokens.to(dtype), learned, call.rotary, call.scaling)
                    for tokens, learned in zip((query, key), self._feature_maps)
                )
            if config.sink_tokens:
                key, normalizer_key = without_sinks(key, normalizer_key, sequence, config.sink_tokens)
            operands = Operands(
                query, key, value.to(dtype), normalizer_query, normalizer_key, config.normalizer, config.eps
            )
            if sequence is not None and sequence.state is not None:
                assert config.block_size is not None
                return decode(operands, self.stored_mixing(operands.dtype), config.block_size[0], sequence, backend)
            assert layout is not None
            if call.shard is not None:
                # Not by whether gradients are recorded: checkpointing computes the same output with and without.
                half = value.dtype == torch.bfloat16 and not self.training
                assert isinstance(layout, BlockLayout)
                return attend_sharded(
                    operands, self._matrix_of(call), layout, call.shard, torch.bfloat16 if half else None
                ), None
            causal = config.causal if sequence is None else sequence.causal
            return attend_on(backend, operands, self._mixing_of(call), layout, causal=causal), None

    @property
    def _feature_maps(self) -> tuple[LearnedFeatureMap | None, LearnedFeatureMap | None]:
        return self.feature_map_query, self.feature_map_key

    def _mixing_of(self, call: Call) -> torch.Tensor | StoredMixing | BlockMixing:
        """How the layout's blocks are mixed: by a matrix `[M, M]` or `[H, M, M]` unless there are many."""
        assert call.layout is not None
        if not self.config.is_sequence:
            assert isinstance(call.layout, BlockLayout)
            if call.layout.num_blocks <= LOW_RANK_FROM * self.mixing.shape[-1]:
                return self.mixing_matrix(call.layout).to(accumulation_dtype(call.value.dtype))
            blocks = self.blocks, call.layout.blocks, call.layout.num_prefix_blocks
            return ResampledMixing(self.mixing_matrix(), *blocks)
        causal = self.config.causal if call.sequence is None else call.sequence.causal
        stored = self.stored_mixing(accumulation_dtype(call.value.dtype))
        return stored if causal else sequence_mixing(stored, call.layout)

    def _matrix_of(self, call: Call) -> torch.Tensor:
        """The same for kernels that look both ways, as a matrix."""
        mixing = self._mixing_of(call)
        assert not isinstance(mixing, StoredMixing)
        return mixing if isinstance(mixing, torch.Tensor) else mixing.matrix()

    def _attend_window(self, call: Call, state: DecodingState | None) -> tuple[torch.Tensor, DecodingState | None]:
        """Softmax attention to the tokens of each token's window, and the state with them in its window.

        Returns:
            `[B, T, H, W]` in the dtype of the values, and the state.
        """
        window, size, sequence = self.config.window, self.window_size, call.sequence
        assert window is not None and size is not None
        query, key, value = call.query, call.key, call.value
        with torch.autocast(autocast_type(query.device), enabled=False):
            if call.rotary is not None:
                query, key = call.rotary(query), call.rotary(key)
            tokens = query.to(value.dtype), key.to(value.dtype), value
            if sequence is None:
                assert isinstance(call.layout, BlockLayout)
                layout = call.layout
                query, key, value = to_rows(layout, *tokens)
                rows = layout.in_rows()
                output = grid_window_attention(query, key, value, window, size, rows, scale=call.scaling)
                return from_rows(layout, output), None
            if state is None:
                options: dict[str, Any] = {"scale": call.scaling, "sink_tokens": self.config.sink_tokens}
                return sequence_window_attention(*tokens, window, size[0], sequence, **options), None
            sizes = size[0], state.rewindable, self.config.sink_tokens
            past = state.window or empty_window_state(key, value, window, *sizes)
            output, past = extend_window(*tokens, past, window, size[0], valid=sequence.valid, scale=call.scaling)
            return output, dataclasses.replace(state, window=past)

    def _convolve(self, call: Call) -> torch.Tensor:
        """Convolution of the values over the token grid (LePE), zero for tokens before it: `[B, T, H, V]`."""
        layout, convolution = call.layout, self.lepe
        assert isinstance(layout, BlockLayout) and convolution is not None
        value = repeat_heads(call.value, self.num_heads, 2)
        if call.shard is not None:
            tokens = sharded_convolution(convolution, value.flatten(2), layout.grid, call.shard)
            return tokens.unflatten(-1, value.shape[2:])
        (value,) = to_rows(layout, value)
        image = value[:, layout.num_prefix_tokens :].flatten(2).transpose(1, 2).unflatten(2, layout.grid)
        tokens = convolution(image).flatten(2).transpose(1, 2).unflatten(-1, (self.num_heads, -1))
        return from_rows(layout, F.pad(tokens, (0, 0, 0, 0, layout.num_prefix_tokens, 0)))

    def text_parts(self, *tokens: torch.Tensor, **options: Any) -> torch.Tensor | None:
        """The part of the output that is softmax attention to text, from the arguments of a call; `None` without."""
        return None

    def fit_text(self, calls: Iterable[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]) -> dict[Any, torch.Tensor]:
        """New values for the parameters that a layer has for its text, in closed form.

        Args:
            calls: Queries, keys and keyword arguments of each call.
        """
        return {}

    def extra_repr(self) -> str:
        return f"blocks={self.blocks}, normalizer={self.config.normalizer!r}, feature_map={self.config.feature_map!r}"
