# SPDX-License-Identifier: Apache-2.0
"""The cache of MHLA layers: block summaries in place of keys and values.

`generate` and users bring any `Cache`; the layers that belong to MHLA attention are exchanged for [`MHLACacheLayer`]s
while they are still empty. `Cache.update` runs before attention and only counts tokens; attention takes the state from
[`MHLACacheLayer.decoding_state`] and stores the one that the layer returns.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, StaticLayer

from ...layers.state import DecodingState, WindowState
from ...ops.band import StoredMixing
from ...ops.operands import MHLAState, records_gradients, tensors_of
from ...ops.recurrent import rewind
from ...ops.sums import HeadGroups
from ...utils.compat.transformers import cache_names


# How many of the last tokens can be taken back (assisted decoding drafts fewer).
REWINDABLE_TOKENS = 64
_OTHER_MASK = (
    "attention_mask does not begin with the mask that the tokens in the cache were passed with (no mask means all "
    f"ones). An MHLA cache keeps summaries: it can still hide some of its last {REWINDABLE_TOKENS} tokens, but no "
    "earlier ones and none whose place among the sinks another would take, and cannot show tokens that were hidden. "
    "Pass the former mask, extended for the new tokens, or start again with a new cache and the whole text."
)


class MHLACacheLayer(CacheLayerMixin):
    """Decoding state of one MHLA layer: block summaries as far as mixing weights reach, and the sum of those before.

    A layer with a softmax window also keeps the keys and values of one or two of its blocks, and the sum of all
    keys before them.

    `keys` and `values` are those of the last tokens alone, as in a layer of a sliding window.

    Args:
        max_cache_len: For static caches, the number of tokens to make room for at once; otherwise the state grows with
            the text, until its blocks are as many as mixing weights reach.
        is_compileable: Whether `generate` may compile decoding with this cache.
        groups: The groups of heads that are MHLA; `None` for all. Keys and values of the others are kept whole.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self, max_cache_len: int | None = None, is_compileable: bool = False, groups: HeadGroups | None = None
    ) -> None:
        # The last tokens, each tensor a ring of `REWINDABLE_TOKENS` columns.
        self._last: dict[str, torch.Tensor] = {}
        self._groups = groups
        self._softmax = None if groups is None else _softmax_layer(max_cache_len)
        # In a static cache, the tensors that everything is written into: CUDA graphs know them by their addresses.
        self._fixed: dict[str, torch.Tensor] = {}
        super().__init__()
        self.max_cache_len = max_cache_len
        self.is_compileable = is_compileable and max_cache_len is not None
        self.state: MHLAState | None = None
        self.window_state: WindowState | None = None
        # In a static cache a number on the device. In others the width of an empty tensor: unlike an integer it is not
        # compiled into a graph as a constant.
        self._seen: torch.Tensor | None = None
        self._before: int | torch.Tensor = 0
        # The first column that the rings may hold.
        self._oldest: int | torch.Tensor = 0
        self._mixing: StoredMixing | None = None
        self.unusable: str | None = None
        # Hash of the columns that are hidden as padding, LongTensor `[B]`, and whether there may be any.
        self._hidden: torch.Tensor | None = None
        self._may_hide = False

    # What transformers' caches have.

    @property
    def keys(self) -> torch.Tensor | None:
        """Keys of the last tokens as the model gave them, `[B, H_kv, T, K]`; `None` before the first token.

        A copy: attention reads summaries. T is at most 64. A static cache has all its columns from the start, zeros
        behind its tokens.
        """
        return self._recorded("model_key")

    @keys.setter
    def keys(self, tensor: torch.Tensor | None) -> None:
        self._refuse_assignment(tensor)

    @property
    def values(self) -> torch.Tensor | None:
        """Values of the same tokens, `[B, H_kv, T, V]`."""
        return self._recorded("value")

    @values.setter
    def values(self, tensor: torch.Tensor | None) -> None:
        self._refuse_assignment(tensor)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note dtype and device; the state itself is made by the first attention."""
        self.dtype, self.device, self.batch_size = key_states.dtype, key_states.device, key_states.shape[0]
        if self.max_cache_len is not None:
            self._set_length(torch.zeros((), dtype=torch.long, device=self.device))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the new tokens and returns their keys and values as they are.

        Raises:
            ValueError: If the cache holds another number of sequences.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.batch_size != key_states.shape[0]:
            raise ValueError(f"The cache has a batch of {self.batch_size}, but the input has {key_states.shape[0]}.")
        new = key_states.shape[-2]
        before = self._length
        self._before = self._kept("before", before) if isinstance(before, torch.Tensor) else before
        self._set_length(before + new)
        own = key_states, value_states
        if self._groups is not None and self._softmax is not None:
            own, others = zip(*(self._groups.split(states, 1) for states in own))
            self._softmax.update(*others, *args, **kwargs)
        self._record(model_key=own[0].transpose(1, 2), value=own[1].transpose(1, 2))
        return key_states, value_states

    @property
    def softmax_tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the softmax heads, of all tokens, `[B, softmax key/value heads, T, K]`."""
        assert self._softmax is not None
        return self._softmax.keys, self._softmax.values

    def get_seq_length(self) -> int | torch.Tensor:
        """Tokens seen, padding included."""
        return self._length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int | torch.Tensor, int]:
        """Length and offset of the keys that a mask is made for."""
        if self.max_cache_len is not None:
            return self.max_cache_len, 0
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        """Maximum number of tokens: -1 for none, unless room was made for a fixed number."""
        return -1 if self.max_cache_len is None else self.max_cache_len

    # Its name up to transformers 5.17.
    get_max_cache_shape = get_max_length

    def activate_past_recording(self) -> None:
        """Nothing to do: the last tokens are always kept for [`MHLACacheLayer.crop`]."""

    def offload(self) -> None:
        """Nothing to do: attention needs the state, and keys of softmax heads, right after `update`."""

    def prefetch(self) -> None:
        """Nothing to do, see [`MHLACacheLayer.offload`]."""

    def reset(self) -> None:
        """Forget everything."""
        self.state = self.window_state = self._mixing = self.unusable = None
        self._last = {}
        self._seen, self._before, self._oldest = None, 0, 0
        self._hidden, self._may_hide = None, False
        self.is_initialized = False
        self._softmax = None if self._groups is None else _softmax_layer(self.max_cache_len)
        # Callers find out by `hasattr` whether there is one.
        self.__dict__.pop("batch_size", None)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Rearrange the batch for beam search."""
        self._map_batch(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch entry."""
        self._map_batch(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some batch entries."""
        self._map_batch(lambda tensor: tensor[indices.to(tensor.device), ...])

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back.

        Args:
            tokens_to_remove: Minus their number.

        Raises:
            ValueError: If there are more than the last 64 tokens.
        """
        count, length = -int(tokens_to_remove), int(self._length)
        if count == 0 or self.state is None:
            return
        if count >= length:
            self.reset()
            return
        rewindable = int(self._rewindable)
        if not 0 < count <= rewindable or self._mixing is None:
            raise ValueError(
                f"An MHLA cache can take back its last {REWINDABLE_TOKENS} tokens, of which {rewindable} "
                f"are left, not {count}: it keeps summaries. Assisted decoding must draft fewer (num_assistant_tokens "
                "or prompt_lookup_num_tokens); else start again from the beginning of the text."
            )
        if self._softmax is not None and self.max_cache_len is None:
            self._softmax.crop(-count)
        elif self._softmax is not None:
            # A static layer cannot crop itself; what is behind its length is masked, and overwritten.
            self._softmax.cumulative_length.sub_(count)
        columns = torch.arange(length - count, length, device=self.device)
        valid = self._last["valid"].index_select(1, columns % REWINDABLE_TOKENS)
        self._take_out(columns, valid)
        assert self._hidden is not None
        self._hidden = self._kept("hidden", self._hidden - _hash_of_hidden(valid, columns))
        self._oldest = self._length - rewindable
        self._set_length(self._length - count)

    # What attention uses.

    @property
    def _length(self) -> int | torch.Tensor:
        """Tokens seen."""
        if self.max_cache_len is not None:
            return 0 if self._seen is None else self._seen
        return 0 if self._seen is None else self._seen.shape[1]

    def _set_length(self, length: int | torch.Tensor) -> None:
        if isinstance(length, torch.Tensor):
            self._seen = self._kept("seen", length)
        else:
            self._seen = torch.empty(0, length, device="cpu")
            _allow_other_sizes(self._seen, 1)

    @property
    def _rewindable(self) -> int | torch.Tensor:
        """Number of tokens that can be taken back now."""
        count = self._length - self._oldest
        return count.clamp(max=REWINDABLE_TOKENS) if isinstance(count, torch.Tensor) else min(count, REWINDABLE_TOKENS)

    @property
    def num_bytes(self) -> int:
        """Memory of the state, the tokens kept for taking back included."""
        states = [state for state in (self.state, self.window_state) if state is not None]
        tensors = [*self._last.values(), *(tensor for state in states for tensor in tensors_of(state).values())]
        tensors += [] if self._softmax is None or not self._softmax.is_initialized else self.softmax_tokens
        return sum(tensor.nbytes for tensor in (*tensors, *([] if self._hidden is None else [self._hidden])))

    def new_tokens(self, mask: torch.Tensor, length: int) -> torch.Tensor:
        """The part of a padding mask `[B, all tokens]` that belongs to the `length` tokens of this call."""
        if isinstance(self._before, int):
            return mask[:, self._before : self._before + length]
        return mask.index_select(1, self._before + torch.arange(length, device=mask.device))

    def decoding_state(self, new_tokens: int) -> DecodingState:
        """The state before the tokens of this call, with room for them.

        Args:
            new_tokens: Tokens that [`MHLACacheLayer.update`] just counted.

        Raises:
            ValueError: If the cache cannot be used any more, or a static cache is full.
        """
        if self.unusable is not None:
            raise ValueError(self.unusable)
        self._check_room(new_tokens)
        # Finished blocks are kept in bfloat16 for bfloat16 models; fp16 has too little range for sums.
        summary_dtype = torch.bfloat16 if self.dtype == torch.bfloat16 else None
        blocks, room, length = self.state, self.max_cache_len, self._length
        if room is None and not isinstance(length, torch.Tensor):
            room = length
            if blocks is not None and room > blocks.num_slots * blocks.block_size:
                # Half as many again, or every block would copy those before; the ring of a long text does not grow.
                blocks = blocks.with_room(room * 3 // 2, REWINDABLE_TOKENS)
        return DecodingState(blocks, self.window_state, room, summary_dtype, REWINDABLE_TOKENS)

    def hide(self, mask: torch.Tensor) -> bool:
        """Take tokens out of the state that a mask hides and the one that they were passed with did not.

        The others keep their keys and values, as in a cache of softmax attention.

        Args:
            mask: BoolTensor `[B, N]` that begins with the tokens seen, False for padding.

        Returns:
            Whether that is possible: the mask may hide some of the last 64 tokens, and show none that were hidden.
        """
        length = int(self._length)
        columns = torch.arange(length - int(self._rewindable), length, device=self.device)
        valid = self._last["valid"].index_select(1, columns % REWINDABLE_TOKENS)
        assert self._hidden is not None
        mask = mask.to(self.device)
        kept = valid & mask.index_select(1, columns)
        hidden = _hash_of_hidden(mask[:, :length], torch.arange(length, device=self.device))
        if self._mixing is None or not torch.equal(self._hidden, hidden - _hash_of_hidden(kept | ~valid, columns)):
            return False
        if self.state is not None and self.window_state is not None and self.window_state.sink_tokens:
            # Summaries have no sinks. A token that moves up among them would have to leave, and is kept as it went in.
            before = (self.state.position - valid.sum(dim=1))[:, None]
            was, becomes = before + valid.long().cumsum(1), before + kept.long().cumsum(1)
            sinks = self.window_state.sink_tokens
            if bool((kept & (was > sinks) & (becomes <= sinks)).any()):
                return False
        self._take_out(columns, valid, kept)
        self._last["valid"].index_copy_(1, columns % REWINDABLE_TOKENS, kept)
        self._hidden = self._kept("hidden", hidden)
        return True

    def store(self, state: DecodingState, valid: torch.Tensor | None, hidden: torch.Tensor | None = None) -> None:
        """Keep the state after the tokens of this call, and what taking the last tokens back needs.

        Args:
            state: As a layer returned it.
            valid: BoolTensor `[B, T]`, False for padding; `None` for no padding.
            hidden: Result of [`follow_mask`].
        """
        last = state.last
        assert state.blocks is not None and last is not None
        if valid is None:
            valid = torch.ones(last.key.shape[:2], dtype=torch.bool, device=last.key.device)
        self._record(key=last.key, normalizer_key=last.normalizer_key, valid=valid)
        weights, decay = last.mixing.weights, last.mixing.decay
        decay = None if decay is None else self._kept("decay", decay)
        self._mixing = StoredMixing(self._kept("mixing", weights), decay)
        self._keep(state.blocks, state.window)
        if self.max_cache_len is None:
            _allow_other_sizes(state.blocks.summaries, 2)
        if hidden is not None:
            # The flag is written and not read, or graphs would be compiled for either value.
            self._hidden, self._may_hide = self._kept("hidden", hidden), True
        elif self._hidden is None:
            self._hidden = self._kept("hidden", torch.zeros_like(state.blocks.position))

    def _take_out(self, columns: torch.Tensor, valid: torch.Tensor, kept: torch.Tensor | None = None) -> None:
        """Take the tokens of the last columns out of the state, but those that are kept."""
        assert self.state is not None and self._mixing is not None
        slots = columns % REWINDABLE_TOKENS
        tokens = {name: self._last[name].index_select(1, slots) for name in ("key", "normalizer_key", "value")}
        state = rewind(self.state, self._mixing, **tokens, valid=valid, kept=kept)
        self._keep(state, None if self.window_state is None else self.window_state.rewound(valid, kept))

    def _keep(
        self,
        state: MHLAState | None,
        window: WindowState | None,
        change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        """Keep a new state, after a change to each of its tensors."""
        for name, new in (("state", state), ("window_state", window)):
            if new is not None:
                tensors = tensors_of(new).items()
                changed: dict[str, Any] = {key: self._kept(f"{name} {key}", change(tensor)) for key, tensor in tensors}
                new = dataclasses.replace(new, **changed)
            setattr(self, name, new)

    def _kept(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor to keep under a name: in a static cache always the same one, into which `tensor` is copied.

        Compiled decoding runs as CUDA graphs. What a graph returns is overwritten by the next one, and the tensors
        that it changes have to stay where they are.
        """
        if self.max_cache_len is None or records_gradients(tensor):
            return tensor
        fixed = self._fixed.get(name)
        if fixed is None or (fixed.shape, fixed.dtype, fixed.device) != (tensor.shape, tensor.dtype, tensor.device):
            fixed = self._fixed[name] = torch.empty_like(tensor)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(fixed)
        if fixed is not tensor:
            fixed.copy_(tensor)
        # Not what `copy_` returns, nor `tensor`: compiled code would take them for new ones, and return them.
        return fixed

    def _check_room(self, new_tokens: int) -> None:
        """Refuse tokens that a static cache was not made for."""
        if not isinstance(self._length, torch.Tensor) or self.max_cache_len is None:
            return
        if new_tokens == 1 or torch.compiler.is_compiling():
            # Nothing is read back while decoding, and a number in the message would be compiled in.
            torch._assert_async(self._length <= self.max_cache_len, "The static cache is full.")
        elif int(self._length) > self.max_cache_len:
            raise ValueError(f"The static cache is full: it was made for {self.max_cache_len} tokens.")

    def _record(self, **tokens: torch.Tensor) -> None:
        """Write the last of these tokens `[B, T, ...]` into their rings, in the order of their columns."""
        first = next(iter(tokens.values()))
        length = first.shape[1]
        kept = min(length, REWINDABLE_TOKENS)
        columns = None
        # A single known column is written as it lies, in one operation. Compiled code would be made anew for each.
        if kept > 1 or isinstance(self._before, torch.Tensor) or torch.compiler.is_compiling():
            columns = self._before + torch.arange(length - kept, length, device=first.device)
            columns = columns % REWINDABLE_TOKENS
        for name, tensor in tokens.items():
            if name not in self._last:
                shape = [tensor.shape[0], REWINDABLE_TOKENS, *tensor.shape[2:]]
                self._last[name] = self._kept(f"last {name}", tensor.new_zeros(shape))
            ring, new = self._last[name], tensor.detach().narrow(1, length - kept, kept)
            if columns is None:
                ring.narrow(1, self._before % REWINDABLE_TOKENS, 1).copy_(new)
            else:
                ring.index_copy_(1, columns, new)

    def _recorded(self, name: str) -> torch.Tensor | None:
        """The last tokens in the order of their columns."""
        if name not in self._last:
            return None
        count = self._rewindable
        most = min(self.max_cache_len or REWINDABLE_TOKENS, REWINDABLE_TOKENS)
        size = most if isinstance(count, torch.Tensor) else count
        index = torch.arange(size, device=self._last[name].device)
        tokens = self._last[name].index_select(1, (self._length - count + index) % REWINDABLE_TOKENS)
        return tokens.transpose(1, 2).masked_fill((index >= count)[:, None], 0)

    def _refuse_assignment(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            raise ValueError(
                "An MHLA cache keeps summaries: its keys and values cannot be set. Use reorder_cache, "
                "batch_repeat_interleave, batch_select_indices, crop or reset, or fill a new cache with the text."
            )

    def _map_batch(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._keep(self.state, self.window_state, function)
        if self._softmax is not None and self._softmax.is_initialized:
            self._softmax.keys, self._softmax.values = map(function, self.softmax_tokens)
        self._last = {name: self._kept(f"last {name}", function(tensor)) for name, tensor in self._last.items()}
        self.batch_size = self._last["value"].shape[0]
        if self._hidden is not None:
            self._hidden = self._kept("hidden", function(self._hidden))


class MHLACache(DynamicCache):
    """A `DynamicCache`, made with its arguments, that reports its memory; its MHLA layers are exchanged on first use.

    Examples:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM
        >>> from mhla_hf import MHLACache, from_preset
        >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
        >>> config = from_preset("mhla-lm-340m", vocab_size=259, num_key_value_heads=2, **sizes)
        >>> model = AutoModelForCausalLM.from_config(config).eval()
        >>> cache = MHLACache(config=model.config)
        >>> options = {"past_key_values": cache}  # "cache" from transformers 5.24 on
        >>> tokens = model.generate(torch.ones(1, 5, dtype=torch.long), max_new_tokens=3, **options)
        >>> cache.num_bytes > 0
        True
    """

    @property
    def num_bytes(self) -> int:
        """Memory of all layers, in bytes."""
        return sum(cache_layer_bytes(layer) for layer in self.layers)


def cache_layer_bytes(layer: Any) -> int:
    """Memory of one layer of any cache, in bytes."""
    if isinstance(layer, MHLACacheLayer):
        return layer.num_bytes
    tensors = [tensor for tensor in (layer.keys, layer.values) if isinstance(tensor, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def _softmax_layer(max_cache_len: int | None) -> Any:
    """A layer of transformers for keys and values."""
    return DynamicLayer() if max_cache_len is None else StaticLayer(max_cache_len=max_cache_len)


def mhla_cache_layer(cache: Any, index: int, *, only_mhla: bool, groups: HeadGroups | None = None) -> MHLACacheLayer:
    """The layer of a cache that keeps an MHLA layer's state; exchanges an empty one that keeps keys and values.

    Args:
        cache: A transformers `Cache`.
        index: The layer's index.
        only_mhla: Whether every layer of the model is MHLA. Other models' masks cannot be made outside the model, so
            `generate` must not compile them.
        groups: The layer's groups of heads that are MHLA; `None` for all.

    Raises:
        ValueError: If the layer holds keys and values already, or its kind cannot hold MHLA state.
    """
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if isinstance(layer, MHLACacheLayer):
        return layer
    if type(layer) not in (DynamicLayer, StaticLayer):
        raise ValueError(
            f"{type(layer).__name__} (layer {index} of {type(cache).__name__}) cannot keep MHLA state. "
            f"Use cache_implementation='dynamic', 'static' or 'offloaded', or pass {cache_names()[0]}=MHLACache(...); "
            "model.to(torch.bfloat16) halves the state."
        )
    if layer.is_initialized and int(layer.get_seq_length()) > 0:
        raise ValueError(
            f"Layer {index} of the cache holds the keys and values of softmax attention already (from another "
            "attention implementation, or prefix tuning). MHLA needs an empty cache."
        )
    static = layer.max_cache_len if isinstance(layer, StaticLayer) else None
    cache.layers[index] = MHLACacheLayer(static, only_mhla, groups)
    return cache.layers[index]


def follow_mask(layers: Sequence[Any], mask: torch.Tensor | None, new_tokens: int) -> torch.Tensor | None:
    """Compare a mask with the one that the tokens in a cache were passed with, and hides what it hides besides.

    The cache knows the hash of the former mask. The two are compared on the device, once for a forward pass, and eager
    code reads the answer, as transformers reads masks for SDPA. Code that is compiled or captured asserts it.

    Args:
        layers: Layers of the cache, of which those with MHLA state count.
        mask: BoolTensor `[B, N]` of all tokens, those in the cache first, False for padding; `None` for no padding.
        new_tokens: Number of tokens of this call.

    Returns:
        Hash of the padding with the new tokens, LongTensor `[B]`, for [`MHLACacheLayer.store`]; `None` where there
        is none.

    Raises:
        ValueError: If the cache cannot follow; the message says what to do.
    """
    layers = [layer for layer in layers if isinstance(layer, MHLACacheLayer) and layer._hidden is not None]
    first = layers[0] if layers else None
    if mask is None and (first is None or not first._may_hide):
        return None
    past: int | torch.Tensor = 0 if first is None else first._length
    before = after = None
    if mask is not None:
        columns = torch.arange(mask.shape[1], device=mask.device)
        past = past.to(mask.device) if isinstance(past, torch.Tensor) else past
        before = _hash_of_hidden(mask | (columns >= past), columns)
        after = _hash_of_hidden(mask | (columns >= past + new_tokens), columns)
    # Another batch size is refused by the layers, as is a mask that is too short.
    if first is None or (mask is not None and mask.shape[0] != first.batch_size):
        return after
    former = first._hidden
    assert former is not None
    agree = (former == 0 if before is None else former.to(before.device) == before).all()
    if not can_be_read(agree):
        torch._assert_async(agree, _OTHER_MASK)
    elif not agree:
        is_long_enough = mask is not None and mask.shape[1] >= int(past) + new_tokens
        if mask is None or (is_long_enough and not all(layer.hide(mask) for layer in layers)):
            raise ValueError(_OTHER_MASK)
    return after


def _hash_of_hidden(mask: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Hash of the columns `[N]` that a mask `[B, N]` hides: a sum, so that columns can be added and taken out.

    Each column has a pseudo-random number of 40 bits. Nothing overflows, as what is compiled may not rely on that.
    """
    numbers = (columns ^ 0x2C7E9D15) * 0x19D699A5
    numbers = (numbers ^ (numbers >> 31)) & 0x3FFFFFFF
    return (numbers * (numbers ^ 0x1B873593) >> 20).masked_fill(mask, 0).sum(dim=1)


def can_be_read(tensor: torch.Tensor) -> bool:
    """Return whether code may look at a tensor's values: not while it is compiled, captured or run without data."""
    if torch.compiler.is_compiling() or tensor.is_meta:
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _allow_other_sizes(tensor: torch.Tensor, dim: int) -> None:
    """Let graphs that are compiled for this tensor serve other sizes from the start, where a compiler is in use."""
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None and not torch.compiler.is_compiling():
        compiler.maybe_mark_dynamic(tensor, dim)
