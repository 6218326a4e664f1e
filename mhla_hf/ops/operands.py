# SPDX-License-Identifier: Apache-2.0
"""What the forms of the operator take: tokens with their normaliser, mixing weights of blocks, and the decoding state.

Checks read types, shapes and devices alone, so that none waits for a device; torch.compile traces through them and
leaves nothing. They run once, in the public functions. Every error is a `ValueError` that names the argument.

Shape letters: B batch, T tokens, H query heads, H_kv key/value heads, K query/key width, V value width, M blocks, N
tokens of a block, R slots of a state's ring. Summaries carry the normaliser z as their last column, hence V + 1. H_m
is H_kv where all heads share the mixing weights, else H.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from ..layouts.blocks import BlockLayout
from ..layouts.sequences import SequenceLayout
from ..utils.messages import check_choice, shorten_value
from .definitions import NORMALIZERS, SEQUENCE_NORMALIZERS, Normalizer
from .sums import repeat_heads


_TOKENS = ("query", "key", "value", "normalizer_query", "normalizer_key")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that summaries and normalisers are accumulated in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_type(device: torch.device) -> str:
    """Return the type of device to turn autocast off for; the meta device, which has no autocast, counts as a CPU."""
    return "cpu" if device.type == "meta" else device.type


def records_gradients(*tensors: torch.Tensor | None) -> bool:
    """Return whether autograd records results of any of these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def surely_none(flags: torch.Tensor) -> bool:
    """True if no flag is set and this is known without a device sync or graph break."""
    if type(flags) is not torch.Tensor or flags.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not flags.any()


@dataclass
class Operands:
    """The tokens and the normaliser that every form of the operator takes; see [`mhla_hf.ops.mhla_attention`].

    Attributes:
        query: Feature-mapped queries `[B, T, H, K]`.
        key: Feature-mapped keys `[B, T, H_kv, K]`.
        value: Values `[B, T, H_kv, V]`.
        normalizer_query: Queries for the denominator; `query` if not given.
        normalizer_key: Keys for the denominator; `key` if not given.
        normalizer: Name of the normaliser.
        eps: Added to the denominator.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    normalizer_query: Any = None
    normalizer_key: Any = None
    normalizer: str = "query"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.normalizer_query is None:
            self.normalizer_query = self.query
        if self.normalizer_key is None:
            self.normalizer_key = self.key

    @property
    def tokens(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Query and key for the denominator; `None` for both where they are query and key themselves."""
        if self.normalizer_query is self.query and self.normalizer_key is self.key:
            return None, None
        return self.normalizer_query, self.normalizer_key

    def cut(self, part: slice) -> Operands:
        """Return some of the tokens."""
        tokens: Any = [None if x is None else x[:, part] for x in (*self.tokens, *self.pair)]
        return Operands(*tokens, self.normalizer, self.eps)  # type: ignore[call-arg]

    @property
    def entry(self) -> Normalizer:
        """The normaliser."""
        return NORMALIZERS[self.normalizer]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that sums are accumulated in."""
        return accumulation_dtype(self.value.dtype)


@dataclass(frozen=True)
class MHLAState:
    """Decoding state of one causal MHLA layer, of constant size from as many blocks on as the ring holds.

    [`mhla_step`] writes into `summaries`: go on with what it returns.

    Attributes:
        summaries: A ring of the last finished blocks, `[B, H_kv, R, K, V + 1]`: block b lies in slot b mod R. Zeros
            where none does.
        current: The current block's summary so far, `[B, H_kv, K, V + 1]`. A full block stays the current one until
            the next token comes.
        prefix: Σ_{b<i} m_ib S_b for the current block i, `[B, H_m, K, V + 1]`.
        upcoming: The same for block i + 1, as far as it is summed up, `[B, H_m, K, V + 1]`.
        left: Sum of the blocks that have left the ring, each times the decay of the mixing weights to the power of its
            distance from the last one, `[B, H_m, K, V + 1]`.
        num_left: Number of these blocks, LongTensor `[B]`.
        position: Tokens seen so far, LongTensor `[B]`.
        block_size: Tokens of a block.
        num_stored_blocks: M of the mixing weights that the ring is large enough for.
        is_empty: Whether no entry has seen a token, where this is known without asking the device.
    """

    summaries: torch.Tensor
    current: torch.Tensor
    prefix: torch.Tensor
    upcoming: torch.Tensor
    left: torch.Tensor
    num_left: torch.Tensor
    position: torch.Tensor
    block_size: int
    num_stored_blocks: int
    is_empty: bool = False

    @property
    def num_slots(self) -> int:
        """Number R of finished blocks that the ring holds."""
        return self.summaries.shape[2]

    def with_room(self, max_tokens: int | None, rewindable: int = 0) -> MHLAState:
        """Return the state for more tokens than it was made for, which it must not have seen yet.

        Args:
            max_tokens: See [`mhla_hf.ops.empty_state`], like `rewindable`.
            rewindable: As the state was made with.
        """
        missing = ring_slots(self.block_size, self.num_stored_blocks, rewindable, max_tokens) - self.num_slots
        if missing <= 0:
            return self
        return replace(self, summaries=F.pad(self.summaries, (0, 0, 0, 0, 0, missing)))


def tensors_of(state: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a state by the names of its fields."""
    return {name: value for name, value in vars(state).items() if isinstance(value, torch.Tensor)}


def ring_slots(block_size: int, num_stored_blocks: int, rewindable: int, max_tokens: int | None) -> int:
    """Return how many finished blocks a state holds; see [`mhla_hf.ops.empty_state`]."""
    slots = max(num_stored_blocks - 2, 0) + max(1, -(-rewindable // block_size))
    # Compilers take a size of 1 for another case than all greater ones.
    return slots if max_tokens is None else min(slots, max(2, -(-max_tokens // block_size)))


def current_block(position: torch.Tensor, block_size: int) -> torch.Tensor:
    """Return the index of the block that the last token went to, `[B]`."""
    return (position - 1).clamp(min=0) // block_size


def head_blocks(
    tokens: torch.Tensor, layout: BlockLayout | SequenceLayout, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Group `[B, T, H, D]` by head and block in another type: `[B, H, M, N, D]`, zeros in empty slots."""
    if isinstance(layout, BlockLayout):
        return layout.to_head_blocks(tokens, dtype)
    return layout.to_blocks(tokens if dtype is None else tokens.to(dtype)).permute(0, 3, 1, 2, 4)


def from_head_blocks(blocks: torch.Tensor, layout: BlockLayout | SequenceLayout) -> torch.Tensor:
    """Undo [`head_blocks`]: `[B, T, H, D]`."""
    return layout.from_blocks(blocks.permute(0, 2, 3, 1, 4))


def divide(
    operands: Operands, output: torch.Tensor, product: torch.Tensor | None, layout: BlockLayout | SequenceLayout
) -> torch.Tensor:
    """Take the numerator out of its blocks and divide it, in place where no gradient is recorded.

    Args:
        operands: The tokens and the normaliser.
        output: The numerator `[B, H, M, N, V]`.
        product: What the divisor is made of, `[B, H, M, N, 1]`; `None` where there is none.
        layout: The blocks.

    Returns:
        `[B, T, H, V]`.
    """
    if not layout.is_uniform:
        # The empty slots of ragged blocks have no denominator.
        output = from_head_blocks(output, layout)
        product = None if product is None else from_head_blocks(product, layout)
    if product is not None:
        # A product has a cheaper gradient than a quotient.
        factor = operands.entry.divisor(product, operands.eps).reciprocal()
        output = output * factor if output.requires_grad else output.mul_(factor)
    return from_head_blocks(output, layout) if layout.is_uniform else output


def finite_tokens(operands: Operands) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return keys, keys of the normaliser and values with zeros for bad tokens, and which those are, `[B, T, H_kv]`.

    The products of chunks multiply what a token must not see by zero, which does not stop a NaN. `None` stands for no
    bad tokens where that is known without waiting for a device.
    """
    key, normalizer_key, value = tokens = operands.key, operands.normalizer_key, operands.value
    # Sums are not finite if a number is not, and take one pass.
    total: Any = sum(
        x.sum(-1, dtype=accumulation_dtype(x.dtype))
        for x in (tokens if operands.pair[1] is not None else (key, value))
    )
    bad = ~total.isfinite()
    if surely_none(bad):
        return key, normalizer_key, value, None
    key, normalizer_key, value = (x.masked_fill(bad.unsqueeze(-1), 0) for x in tokens)
    return key, normalizer_key, value, bad


def first_blocks(layout: BlockLayout | SequenceLayout) -> torch.Tensor | None:
    """Return the first block of each block's document, LongTensor `[B, M]`; `None` where there are no documents."""
    return layout.first_blocks() if isinstance(layout, SequenceLayout) else None


def counted_before(flags: torch.Tensor, first: torch.Tensor | None) -> torch.Tensor:
    """Return how many flags earlier blocks of a document have, `[B, H, M]`.

    Args:
        flags: The number in each block, `[B, H, M]`.
        first: See [`first_blocks`].
    """
    before = flags.cumsum(dim=-1) - flags
    return before if first is None else before - before.gather(-1, first[:, None].expand_as(before))


def spoil_tokens(
    output: torch.Tensor, bad: torch.Tensor | None, layout: BlockLayout | SequenceLayout, causal: bool = True
) -> torch.Tensor:
    """Make the outputs `[B, T, H, V]` that see a bad token `[B, T, H_kv]` of their document and head NaN.

    Those are at the token and after it; all of a document where attention is not `causal`, which is for packed ones.
    """
    if bad is None:
        return output
    flags, first = head_blocks(bad.unsqueeze(-1), layout, torch.int32).squeeze(-1), first_blocks(layout)
    sums = flags.sum(dim=-1)
    if causal or first is None:
        counts = flags.cumsum(dim=-1) + counted_before(sums, first).unsqueeze(-1)
    else:
        document = first[:, None].expand_as(sums)
        sums = torch.zeros_like(sums).scatter_add(-1, document, sums).gather(-1, document)
        counts = sums.unsqueeze(-1).expand_as(flags)
    spoilt = repeat_heads(from_head_blocks(counts.unsqueeze(-1), layout), output.shape[2], 2) > 0
    return output.masked_fill(spoilt, float("nan"))


def check_attention(operands: Operands, mixing: Any, layout: Any, causal: Any, decay: Any = None) -> None:
    """Check the arguments of [`mhla_hf.ops.mhla_attention`] beside the backend."""
    check_operands(operands)
    if not isinstance(causal, bool):
        raise ValueError(f"causal={shorten_value(causal)} must be True or False.")
    check_layout(layout, operands.normalizer, causal)
    layout.check_length(operands.query.shape[1], "query")
    check_mixing(mixing, operands.query, operands.query.shape[2])
    check_decay(decay, operands.query, operands.query.shape[2])
    if decay is not None and not causal and isinstance(layout, BlockLayout):
        raise ValueError("mixing_decay is for sequences: causal=True, or a SequenceLayout.")
    if not causal and isinstance(layout, BlockLayout) and mixing.shape[-1] != layout.num_blocks:
        raise ValueError(
            f"mixing has {mixing.shape[-1]} blocks, but the layout has {layout.num_blocks} ({layout.blocks})."
        )


def check_operands(operands: Operands) -> None:
    """Check the tokens against each other, the normaliser's name and eps."""
    check_choice("normalizer", operands.normalizer, NORMALIZERS)
    eps = operands.eps
    # Integers beyond the largest float count as infinite.
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= sys.float_info.max:
        raise ValueError(f"eps={shorten_value(eps)} must be a finite number of at least 0.")
    check_tokens(operands)


def check_tokens(operands: Operands) -> None:
    """Check the tensors of tokens against each other."""
    sizes = {name: _token_sizes(name, getattr(operands, name), operands.query) for name in _TOKENS}
    batch, length, heads, width = sizes["query"]
    key_heads = sizes["key"][2]
    if key_heads < 1 or heads % key_heads:
        key_heads = heads
    # The denominator's pair may be as wide as it likes, as long as the two agree.
    expected = {
        "query": (batch, length, heads, width),
        "key": (batch, length, key_heads, width),
        "value": (batch, length, key_heads, sizes["value"][3]),
        "normalizer_query": (batch, length, heads, sizes["normalizer_key"][3]),
        "normalizer_key": (batch, length, key_heads, sizes["normalizer_query"][3]),
    }
    for name, shape in expected.items():
        if sizes[name] != shape or shape[2] < 1 or shape[3] < 1:
            raise ValueError(f"{name} has [batch, tokens, heads, width] = {sizes[name]}, but it must have {shape}.")


def check_mixing(mixing: Any, tokens: torch.Tensor, num_heads: int | None) -> None:
    """Check mixing weights `[M, M]` or `[H, M, M]` on the device of tokens; H is `num_heads` if given."""
    is_tensor = isinstance(mixing, torch.Tensor)
    shape = tuple(mixing.shape) if is_tensor and mixing.is_floating_point() and mixing.device == tokens.device else ()
    is_good = len(shape) in (2, 3) and shape[-1] == shape[-2] >= 1
    if not is_good or (num_heads is not None and len(shape) == 3 and shape[0] not in (1, num_heads)):
        raise ValueError(
            f"mixing must be a floating-point tensor [blocks, blocks] or [heads, blocks, blocks] on {tokens.device}"
            f"{'' if num_heads is None else f' with {num_heads} heads'}, got {_describe(mixing)}."
        )


def check_decay(decay: Any, tokens: torch.Tensor, num_heads: int | None) -> None:
    """Check the decay of mixing weights, `None` or a tensor of no axes, `[1]` or `[H]` on the device of tokens."""
    if decay is None:
        return
    is_good = isinstance(decay, torch.Tensor) and decay.is_floating_point() and decay.device == tokens.device
    if not is_good or decay.dim() > 1 or (num_heads is not None and decay.numel() not in (1, num_heads)):
        raise ValueError(
            f"mixing_decay must be None, or a floating-point tensor [] or [heads] on {tokens.device}"
            f"{'' if num_heads is None else f' with {num_heads} heads'}, got {_describe(decay)}."
        )


def check_layout(layout: Any, normalizer: str, causal: bool) -> None:
    """Check that a layout has the blocks that causal attention or the normaliser needs."""
    if not isinstance(layout, (BlockLayout, SequenceLayout)):
        raise ValueError(f"layout must be a BlockLayout or a SequenceLayout, got {type(layout).__name__}.")
    if causal and isinstance(layout, BlockLayout):
        lengths = layout.tile_lengths[0]
        if len(layout.grid) != 1 or any(length != lengths[0] for length in lengths[:-1]) or lengths[-1] > lengths[0]:
            raise ValueError(f"causal=True needs a 1-D layout made with block_size, got {layout!r}.")
    if not NORMALIZERS[normalizer].mixes_sums and not causal and not layout.is_uniform:
        raise ValueError(
            f"normalizer={normalizer!r} pairs tokens at the same position of each block and needs blocks of equal "
            f"shape, but {layout!r} has uneven ones. Use normalizer='query', or a grid that the blocks divide."
        )


def check_valid(valid: Any, tokens: torch.Tensor, name: str = "valid") -> None:
    """Refuse a mask that is neither `None` nor a BoolTensor `[B, T]` beside tokens `[B, T, H, D]`."""
    if valid is None:
        return
    is_tensor, shape = isinstance(valid, torch.Tensor), tuple(tokens.shape[:2])
    if not is_tensor or (valid.dtype, tuple(valid.shape), valid.device) != (torch.bool, shape, tokens.device):
        raise ValueError(
            f"{name} must be a bool tensor [batch, tokens] = {shape} on {tokens.device}, got {_describe(valid)}."
        )


def check_recurrent(operands: Operands, mixing: Any, decay: Any, state: Any, valid: Any) -> None:
    """Check the arguments of [`mhla_hf.ops.mhla_step`] and [`mhla_hf.ops.mhla_extend`] beside the backend."""
    check_choice("normalizer", operands.normalizer, SEQUENCE_NORMALIZERS, " for decoding token by token")
    check_operands(operands)
    query, key, value = operands.tokens
    # Summaries carry z as a column.
    if operands.normalizer_query.shape != query.shape:
        raise ValueError(f"normalizer_query must have the shape {tuple(query.shape)} of query for decoding.")
    check_mixing(mixing, query, query.shape[2])
    check_decay(decay, query, query.shape[2])
    check_valid(valid, key)
    check_state(state, key, value, mixing, decay, query.shape[2])


def check_state(
    state: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    decay: torch.Tensor | None,
    num_heads: int | None = None,
) -> None:
    """Check that a state is one of these tokens' batch, heads, widths, dtype and device.

    Args:
        state: The state.
        key: `[B, T, H_kv, K]`.
        value: `[B, T, H_kv, V]`.
        mixing: `[M, M]` or `[H, M, M]`.
        decay: `[]`, `[1]` or `[H]`, or `None`.
        num_heads: H; `None` where there are no queries.
    """
    dtype = accumulation_dtype(value.dtype)
    if not isinstance(state, MHLAState) or state.current.dtype != dtype:
        found = f"one of {state.current.dtype}" if isinstance(state, MHLAState) else type(state).__name__
        raise ValueError(f"state must be an MHLAState of {dtype} (see mhla_hf.ops.empty_state), got {found}.")
    batch, _, heads, width = key.shape
    columns = value.shape[3] + 1
    weight_heads = max(mixing.shape[0] if mixing.dim() == 3 else 1, 1 if decay is None else decay.numel())
    mixed = weight_heads if weight_heads > 1 else heads
    if num_heads is not None and state.prefix.shape[1] == num_heads:
        # A state made for weights per head serves shared ones too.
        mixed = num_heads
    shapes = {
        "summaries": (batch, heads, state.num_slots, width, columns),
        "current": (batch, heads, width, columns),
        "prefix": (batch, mixed, width, columns),
        "upcoming": (batch, mixed, width, columns),
        "left": (batch, mixed, width, columns),
        "num_left": (batch,),
        "position": (batch,),
    }
    if state.num_stored_blocks != mixing.shape[-1]:
        raise ValueError(
            f"state was made for weights of {state.num_stored_blocks} blocks, but mixing has {mixing.shape[-1]}."
        )
    for name, shape in shapes.items():
        tensor = getattr(state, name)
        if tensor.shape != shape or tensor.device != key.device:
            raise ValueError(
                f"state.{name} has shape {tuple(tensor.shape)} on {tensor.device}, but these tokens need {shape} on "
                f"{key.device}: see mhla_hf.ops.empty_state, with num_mixing_heads for weights per head."
            )


def _token_sizes(name: str, tensor: Any, query: Any) -> tuple[int, int, int, int]:
    """Sizes of a dense floating-point tensor of four axes, on the device of `query`."""
    is_tensor = isinstance(tensor, torch.Tensor)
    is_good = is_tensor and tensor.is_floating_point() and tensor.layout == torch.strided and tensor.dim() == 4
    if not is_good or tensor.device != query.device:
        raise ValueError(
            f"{name} must be a dense floating-point tensor [batch, tokens, heads, width] on one device, got "
            f"{_describe(tensor)}."
        )
    # Taken apart once: slices of shapes cost more than all comparisons.
    batch, length, heads, width = tensor.shape
    return batch, length, heads, width


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    return type(value).__name__
