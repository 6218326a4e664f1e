# SPDX-License-Identifier: Apache-2.0
"""Attention matrices: of MHLA, softmax and linear attention, from queries and keys or from the call of a layer.

They take O(R · T) memory for R of the T query tokens of a head, in the dtype of their inputs.

Shape letters: B batch, T tokens, R query tokens, H heads, H_kv key/value heads, K query/key width, V value width,
F features, M blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..config import MHLAConfig
from ..layers.fused import HeadNorms
from ..layers.joint import TextTokens, of_all_tokens
from ..layers.mhla import MHLA
from ..layers.mixing import features_and_normalizer, layout_at
from ..layers.original import LINEAR_EPS
from ..layers.state import TokenSequence, without_sinks
from ..layouts.blocks import BlockLayout
from ..ops.band import StoredMixing, extend_mixing
from ..ops.normalizers import PRODUCTS
from ..ops.operands import Operands, check_attention, from_head_blocks, head_blocks
from ..ops.sums import repeat_heads
from ..utils.messages import check_choice
from .statistics import rank_bound


KINDS = ("original", "mhla", "linear")
"""Attention of the host model, MHLA, and linear attention with the feature map of MHLA."""

Tokens = dict[str, torch.Tensor | None]
"""Feature-mapped tokens by the name of an argument."""

_CAUSAL_BLOCK_SIZE = 64
# SANA's own attention, see `mhla_hf.layers.original`.
_LINEAR = MHLAConfig(feature_map="relu", rope="after_feature_map")


def mhla_matrix(
    query: torch.Tensor,
    key: torch.Tensor,
    mixing: torch.Tensor,
    layout: BlockLayout,
    *,
    causal: bool = False,
    rows: torch.Tensor | None = None,
    **normalizer: Any,
) -> torch.Tensor:
    """Compute the matrix of MHLA: m_{b(t),b(j)} · φ(q_t)·φ(k_j), divided by the normaliser of token t.

    Args:
        query: Feature-mapped queries `[B, T, H, K]`.
        key: Feature-mapped keys `[B, T, H_kv, K]`.
        mixing: `[M, M]` or `[H, M, M]`.
        layout: Blocks of the T tokens.
        causal: Token t sees j ≤ t only.
        rows: Query tokens to compute, LongTensor `[R]`; `None` for all T.
        **normalizer: `normalizer`, a name of [`MHLAConfig`][mhla_hf.MHLAConfig], by default `"query"`; `eps` added to
            it, by default 1e-6; `normalizer_query` and `normalizer_key`, its queries and keys if they differ (without
            rotary embedding).

    Returns:
        `[B, H, R, T]` in the dtype of `query`.

    Raises:
        ValueError: If an argument has a wrong shape, dtype, device or value; the message names the argument.

    Examples:
        >>> import torch
        >>> from mhla_hf import BlockLayout
        >>> from mhla_hf.analysis import mhla_matrix
        >>> features = torch.ones(1, 6, 1, 4)
        >>> mhla_matrix(features, features, torch.eye(2), BlockLayout(grid=(6,), blocks=(2,)))[0, 0, 0]
        tensor([0.3333, 0.3333, 0.3333, 0.0000, 0.0000, 0.0000])
    """
    operands = Operands(query, key, key, **normalizer)
    check_attention(operands, mixing, layout, causal)
    if causal:
        mixing = extend_mixing(mixing, layout.num_blocks, causal=True)
    mixing = mixing.to(query.dtype)
    rows = torch.arange(query.shape[1], device=query.device) if rows is None else rows.to(query.device)
    block = layout.block_of_token.to(query.device)
    weights = _scores(query, key, rows) * mixing[..., block[rows][:, None], block]
    if causal:
        weights = weights * _seen(rows, query.shape[1])
    entry = operands.entry
    normalizer_query, normalizer_key = (
        head_blocks(tokens, layout) for tokens in (operands.normalizer_query, operands.normalizer_key)
    )
    if not entry.divides:
        return weights
    if causal:
        product = PRODUCTS[operands.normalizer].chunked(
            normalizer_query, normalizer_key, StoredMixing.of(mixing), None
        )
    else:
        product = PRODUCTS[operands.normalizer].block(normalizer_query, normalizer_key.sum(dim=-2), mixing)
    return weights / entry.divisor(from_head_blocks(product, layout), operands.eps)[:, rows].transpose(1, 2)


def linear_matrix(
    query: torch.Tensor, key: torch.Tensor, *, normalizer: str = "query", causal: bool = False, **options: Any
) -> torch.Tensor:
    """Compute the matrix of linear attention: [`mhla_matrix`][mhla_hf.analysis.mhla_matrix] with one block.

    Args:
        query: Feature-mapped queries `[B, T, H, K]`.
        key: Feature-mapped keys `[B, T, H_kv, K]`.
        normalizer: Name of the normaliser.
        causal: Token t sees j ≤ t only.
        **options: `normalizer_query`, `normalizer_key`, `eps` and `rows`, as there.

    Returns:
        `[B, H, R, T]`.
    """
    length = query.shape[1]
    # The causal normaliser writes out all weights within a block; one mixing weight serves any number of blocks.
    layout = BlockLayout((length,), block_size=(min(length, _CAUSAL_BLOCK_SIZE) if causal else length,))
    mixing = torch.ones(1, 1, dtype=query.dtype, device=query.device)
    # With one block, the queries of all blocks at a token's position are the token's own.
    normalizer = "none" if normalizer == "none" else "query"
    return mhla_matrix(query, key, mixing, layout, normalizer=normalizer, causal=causal, **options)


def softmax_matrix(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    bias: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the matrix of softmax attention.

    Args:
        query: Queries `[B, T, H, K]`, normed and rotated as in the model.
        key: Keys `[B, T, H_kv, K]`, likewise.
        scale: Scale of q·k; `None` for K^-1/2.
        causal: Token t sees j ≤ t only.
        bias: Added to the logits, `[R, T]` or `[H, R, T]`, minus infinity for hidden tokens; `None` for nothing.
        rows: Query tokens to compute, LongTensor `[R]`; `None` for all T.

    Returns:
        `[B, H, R, T]` in the dtype of `query`.
    """
    rows = torch.arange(query.shape[1], device=query.device) if rows is None else rows.to(query.device)
    logits = _scores(query, key, rows) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias
    if causal:
        logits = logits.masked_fill(~_seen(rows, query.shape[1]), float("-inf"))
    return logits.softmax(dim=-1)


@dataclass(frozen=True, kw_only=True)
class SoftmaxTokens:
    """One sample of the call of a softmax layer: its queries and keys without padding, in float64.

    Attributes:
        query: `[1, T, H, K]`, normed and rotated as for softmax.
        key: `[1, T, H, K]`, likewise.
        scaling: Scale of q·k in softmax; `None` for K^-1/2.
        causal: Whether token t sees j ≤ t only.
        bias: Added to the logits, minus infinity for hidden tokens, `[1 or H, T, T]`; `None` for nothing.
    """

    query: torch.Tensor
    key: torch.Tensor
    scaling: float | None
    causal: bool
    bias: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.query.shape[1]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.query.shape[2]

    @property
    def kind(self) -> str:
        """`"softmax"`, `"mhla"`, or `"linear"` for MHLA with one block of all tokens and no softmax window."""
        return "softmax"

    @property
    def rank_bound(self) -> int | None:
        """Bound of the rank of the layer's T × T matrices; `None` for softmax, windows and causal attention."""
        return None

    def visible(self, rows: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return the number of tokens that each row sees, `[R]`; `None` for all T."""
        rows = torch.arange(self.num_tokens) if rows is None else rows.cpu()
        if self.bias is not None:
            return (self.bias[0] > float("-inf")).sum(-1).cpu()[rows]
        return rows + 1 if self.causal else None

    def matrix(
        self, kind: str | None = None, *, head: int | None = None, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute the attention matrix `[R, T]`, or `[H, R, T]` for all heads."""
        heads, bias = _slice(head), self.bias
        if bias is not None:
            bias = bias[heads] if bias.shape[0] > 1 else bias
            bias = bias if rows is None else bias[:, rows.to(bias.device)]
        query, key = self.query[:, :, heads], self.key[:, :, heads]
        matrix = softmax_matrix(query, key, scale=self.scaling, causal=self.causal, bias=bias, rows=rows)[0]
        return matrix if head is None else matrix[0]


@dataclass(frozen=True, kw_only=True)
class LayerTokens(SoftmaxTokens):
    """One sample of the call of an MHLA layer, which has an attention matrix of each kind.

    Attributes:
        mhla: The layer.
        layout: Blocks of its T tokens.
        mixing: Mixing weights of these blocks, `[M, M]` or `[H, M, M]`.
        features: Feature-mapped queries and keys, arguments of [`mhla_matrix`][mhla_hf.analysis.mhla_matrix] by name,
            `[1, T, H, F]`.
        original: Arguments of [`linear_matrix`][mhla_hf.analysis.linear_matrix] if the host model's own attention is
            linear, as in SANA; `None` for softmax.
        value: `[1, T, H, V]`.
        text: Keys of the text beside the grid, rotated, `[1, X, H, K]`; `None` where there is none, or where it is a
            block of its own among the tokens.
        window_bias: What is added to the logarithm of what tokens outside the window of each query are estimated to
            get, `[1, T, H]`; `None` without a window.
    """

    mhla: MHLA
    layout: BlockLayout
    mixing: torch.Tensor
    features: Tokens
    original: Tokens | None
    value: torch.Tensor
    text: torch.Tensor | None = None
    window_bias: torch.Tensor | None = None

    @property
    def kind(self) -> str:
        """`"mhla"`, or `"linear"` for one block of all tokens without a softmax window."""
        return "linear" if self.layout.num_blocks == 1 and self.mhla.window_bias is None else "mhla"

    @property
    def num_features(self) -> int:
        """F."""
        assert self.features["key"] is not None
        return self.features["key"].shape[3]

    @property
    def rank_bound(self) -> int | None:
        """Bound of the rank of MHLA's T × T matrices; `None` for windows and causal attention."""
        if self.causal or self.mhla.window_bias is not None:
            return None
        return rank_bound(self.layout, self.num_features)

    def matrix(
        self, kind: str | None = None, *, head: int | None = None, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute an attention matrix, by which the values are multiplied.

        For MHLA it includes the normaliser, the scale that an output norm gives to each row, and the softmax window
        with the shares of both. The convolution of the values (LePE), the output gate and the weights of an output
        norm act on channels and are left out.

        Args:
            kind: `"original"`, `"mhla"` (the default) or `"linear"`.
            head: One head; `None` for all.
            rows: Query tokens to compute, LongTensor `[R]`; `None` for all T.

        Returns:
            `[R, T]`, or `[H, R, T]` for all heads; float64.

        Raises:
            ValueError: If there is no such kind.
        """
        kind, heads = kind or "mhla", _slice(head)
        check_choice("kind", kind, KINDS)
        if kind == "mhla":
            matrix = self._mhla(heads, rows)
        elif kind == "linear":
            matrix = linear_matrix(**_of_heads(self.features, heads), **self._options, rows=rows)
        elif self.original is not None:
            matrix = linear_matrix(**_of_heads(self.original, heads), eps=LINEAR_EPS, rows=rows)
        else:
            return super().matrix(head=head, rows=rows)
        return matrix[0] if head is None else matrix[0, 0]

    def text_share(self, rows: torch.Tensor | None = None) -> dict[str, list[float]]:
        """Compute how much of the grid's attention goes to the text, mean over queries.

        Args:
            rows: Query tokens, LongTensor `[R]`; `None` for all.

        Returns:
            The share of each head, for the `"original"` attention and for `"mhla"`; empty without text.
        """
        mhla: Any = self.mhla
        if not mhla.streams:
            return {}
        rows = torch.arange(self.num_tokens, device=self.query.device) if rows is None else rows.to(self.query.device)
        if self.text is None:
            count = self.layout.num_prefix_tokens
            shares = {kind: self.matrix(kind, rows=rows[rows >= count])[..., :count].sum(-1) for kind in KINDS[:2]}
        else:
            words, grid = (
                (_scores(self.query, key, rows)[0] * self.query.shape[3] ** -0.5).logsumexp(-1)
                for key in (self.text, self.key)
            )
            error = mhla.landmark_error(self.query[:, rows], self.key, grid=self.layout.grid)[0].T
            bias = mhla.text_bias.detach().to(grid)[:, None]
            shares = {"original": (words - grid).sigmoid(), "mhla": (words - grid + error - bias).sigmoid()}
        return {kind: share.mean(-1).tolist() for kind, share in shares.items()}

    def normalizer_terms(self, *, head: int, rows: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what MHLA's normaliser divides, and what it divides by, without output norm and window.

        Args:
            head: A head.
            rows: Query tokens, LongTensor `[R]`; `None` for all T.

        Returns:
            Sum of each row's absolute weights before the division, `[R]`, and the divisors, `[R]`, NaN for rows of
            zeros (`None` for the normalizer `"none"`).
        """
        heads = _slice(head)
        weights = self._blockwise(heads, rows, normalizer="none")[0, 0]
        total = weights.abs().sum(-1)
        if self.mhla.config.normalizer == "none":
            return total, None
        largest = weights.abs().argmax(-1, keepdim=True)
        quotient = self._blockwise(heads, rows)[0, 0].gather(-1, largest)
        return total, (weights.gather(-1, largest) / quotient).squeeze(-1)

    @property
    def _options(self) -> dict[str, Any]:
        config = self.mhla.config
        return {"normalizer": config.normalizer, "causal": self.causal, "eps": config.eps}

    def _blockwise(self, heads: slice, rows: torch.Tensor | None, **options: Any) -> torch.Tensor:
        mixing = self.mixing if self.mixing.dim() == 2 else self.mixing[heads]
        features, sinks = _of_heads(self.features, heads), self.mhla.config.sink_tokens
        if sinks:
            key, normalizer_key = features["key"], features["normalizer_key"]
            pair = key, key if normalizer_key is None else normalizer_key
            features["key"], features["normalizer_key"] = without_sinks(*pair, None, sinks)
        return mhla_matrix(**features, mixing=mixing, layout=self.layout, rows=rows, **self._options | options)

    def _mhla(self, heads: slice, rows: torch.Tensor | None) -> torch.Tensor:
        mhla, matrix = self.mhla, self._blockwise(heads, rows)
        if mhla.output_norm is not None:
            output = matrix @ self.value[:, :, heads].transpose(1, 2)
            matrix = matrix / (output.square().mean(-1, keepdim=True) + (mhla.output_norm.eps or 0.0)).sqrt()
        if mhla.window_bias is None:
            return matrix
        seen, beyond = self._window(torch.arange(self.num_tokens) if rows is None else rows)
        bias = torch.zeros_like(matrix[0, 0]).masked_fill(~seen.to(matrix.device), float("-inf"))
        tokens = self.query[:, :, heads], self.key[:, :, heads]
        window = softmax_matrix(*tokens, scale=self.scaling, bias=bias, rows=rows)
        query, key = (x.transpose(1, 2) for x in tokens)
        scale = query.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        query = (query if rows is None else query[:, :, rows]) * scale
        inside = (query @ key.mT + bias).logsumexp(-1, keepdim=True)
        beyond = beyond.to(matrix)
        if mhla.config.is_sequence:
            count = beyond.sum(-1, keepdim=True)
            logits = (query * (beyond @ key / count.clamp(min=1))).sum(-1, keepdim=True)
        else:
            members = F.one_hot(self.layout.block_of_token).to(matrix)
            count, logits = beyond @ members, query @ (members.T @ key / members.sum(0)[:, None]).mT
        rest = (logits + count.log()).logsumexp(-1, keepdim=True)
        assert self.window_bias is not None
        of_window = self.window_bias[:, :, heads] if rows is None else self.window_bias[:, rows, heads]
        share = (inside - rest - of_window.transpose(1, 2).unsqueeze(-1)).sigmoid()
        return share * window + (1 - share) * matrix

    def _window(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that the softmax window lets each row see, and those of its landmarks, BoolTensors `[R, T]`."""
        config, prefix = self.mhla.config, self.layout.num_prefix_tokens
        assert self.mhla.window_size is not None
        layout = BlockLayout(self.layout.grid, block_size=self.mhla.window_size, num_prefix_tokens=prefix)
        rows = rows.cpu()
        block = layout.block_of_token - layout.num_prefix_blocks
        places = torch.stack(torch.unravel_index(block.clamp(min=0), layout.blocks), dim=-1)
        apart = (places[rows][:, None] - places).abs()
        if config.window == "block":
            seen = (apart == 0).all(-1)
        elif config.window == "adjacent":
            seen = (apart <= 1).all(-1)
        else:
            seen = (apart[..., 1:] == 0).all(-1) | ((apart[..., 0] == 0) & (apart[..., 1:] <= 1).all(-1))
        # Prefix tokens see, and are seen by, all others.
        seen = seen | (block < 0) | (block[rows] < 0)[:, None] | (torch.arange(len(block)) < config.sink_tokens)
        if not self.causal:
            return seen, ~seen
        causal = _seen(rows, layout.num_tokens)
        return seen & causal, ~seen & causal


@torch.no_grad()
def layer_tokens(
    mhla: MHLA,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: Sequence[int] | None = None,
    sequence: TokenSequence | None = None,
    rotary: Any = None,
    norms: HeadNorms | None = None,
    scaling: float | None = None,
    text: TextTokens | None = None,
    **unused: Any,
) -> list[LayerTokens]:
    """Split one call of an MHLA layer into samples, which compute attention matrices.

    Args:
        mhla: The layer.
        query: As in [`MHLA.attention_parts`][mhla_hf.MHLA], like all that follow: `[B, T, H, K]`.
        key: `[B, T, H_kv, K]`.
        value: `[B, T, H_kv, V]`.
        text: The text of joint attention. With `text="softmax"` matrices are of the grid alone, whose weights add up
            to one; with `text="block"` of text and grid.
        **unused: `hidden_states` of the output gate, which is no part of a matrix.

    Returns:
        One entry for each sample; padding is left out.

    Raises:
        ValueError: For packed documents, a decoding state, context parallelism, perturbed attention, or a sample of
            padding only.

    Examples:
        >>> import torch
        >>> from mhla_hf import MHLAConfig
        >>> from mhla_hf.analysis import layer_tokens
        >>> from mhla_hf.layers import MHLA
        >>> layer = MHLA(MHLAConfig(blocks=(2, 2)), hidden_size=16, num_heads=2, head_dim=8)
        >>> tokens = [torch.randn(1, 36, 2, 8) for _ in range(3)]
        >>> layer_tokens(layer, *tokens, grid=(6, 6))[0].matrix("mhla").shape
        torch.Size([2, 36, 36])
    """
    packed = sequence is not None and (sequence.documents is not None or sequence.state is not None)
    if packed or unused.get("shard") is not None or unused.get("identity") or unused.get("block_order"):
        raise ValueError(
            "Attention matrices are of one whole sequence, row by row, without a cache or perturbed attention."
        )
    causal, valid = mhla.config.causal, None
    if sequence is not None:
        causal, valid = sequence.causal, sequence.valid
    if text is not None:
        words = text.key if text.rotary is None else text.rotary(text.key)
        if mhla.num_prefix_tokens:
            valid = None if text.valid is None else F.pad(text.valid, (0, query.shape[1]), value=True)
            rotary = of_all_tokens(text, rotary)["rotary"]
            pairs = ((text.query, query), (text.key, key), (text.value, value))
            query, key, value = (torch.cat(pair, dim=1) for pair in pairs)
    original: Tokens = {}
    with torch.autocast(query.device.type, enabled=False):
        if norms is not None:
            query, key = norms.apply(query, key)
        query, key, value = query.double(), key.double(), value.double()
        learned = mhla.feature_map_query, mhla.feature_map_key
        features = _features(mhla.config, (query, key), learned, rotary, scaling)
        biases = None if mhla.window_bias is None else mhla.window_biases(query).double().expand(query.shape[:3])
        if mhla.replaces_linear:
            original = _features(_LINEAR, (query, key), (None, None), rotary, None)
        if rotary is not None:
            query, key = rotary(query), rotary(key)
    names, heads = ("query", "key", "value"), mhla.num_heads
    tokens: Tokens = {name: repeat_heads(each, heads, 2) for name, each in zip(names, (query, key, value))}
    samples = []
    for index in range(len(query)):
        keep = slice(None) if valid is None else _checked(valid[index], index)
        own = _of_sample(tokens, index, keep)
        count = own["query"].shape[1]
        axes = (count - mhla.num_prefix_tokens,) if grid is None else grid
        layout = layout_at(mhla.config, mhla.blocks, axes, count - math.prod(axes))
        mixing = mhla.mixing_matrix(layout, causal).detach()
        own |= {"mhla": mhla, "layout": layout, "mixing": mixing.double(), "causal": causal, "scaling": scaling}
        if text is not None and not mhla.num_prefix_tokens:
            own["text"] = words[index : index + 1, slice(None) if text.valid is None else text.valid[index]].double()
        own["window_bias"] = None if biases is None else biases[index : index + 1, keep]
        own["original"] = _of_sample(original, index, keep) if original else None
        samples.append(LayerTokens(**own, features=_of_sample(features, index, keep)))
    return samples


@torch.no_grad()
def softmax_tokens(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    **unused: Any,
) -> Iterator[SoftmaxTokens]:
    """Split one call of `torch.nn.functional.scaled_dot_product_attention`, whose arguments these are, into samples.

    They come one by one, since masks of long inputs in float64 are large.

    Yields:
        Each sample without padding, which is tokens that do not see themselves; nothing for cross-attention.

    Raises:
        ValueError: If a sample is padding only.
    """
    length = query.shape[2]
    if key.shape[2] != length:
        return
    query, key = query.transpose(1, 2), key.transpose(1, 2)
    for index in range(len(query)):
        keep, bias = slice(None), None
        if attn_mask is not None:
            mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + attn_mask.shape)
            mask = mask[index if mask.shape[0] > 1 else 0].expand(-1, length, length)
            # Masks hold the least number of their type, or half of it, in place of minus infinity.
            hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 4
            added = torch.zeros_like(mask, dtype=torch.double) if mask.dtype == torch.bool else mask.double()
            keep = _checked(~hidden.diagonal(dim1=-2, dim2=-1).all(0), index)
            bias = added.masked_fill(hidden, float("-inf"))[:, keep][:, :, keep]
        own = slice(index, index + 1)
        yield SoftmaxTokens(
            query=query[own, keep].double(),
            key=repeat_heads(key[own, keep].double(), query.shape[2], 2),
            scaling=scale,
            causal=is_causal,
            bias=bias if bias is not None and bias.any() else None,
        )


def _checked(valid: torch.Tensor, index: int) -> Any:
    """Refuse samples of padding only."""
    if not valid.any():
        raise ValueError(f"Sample {index} of the batch is padding only, which has no attention; leave it out.")
    return valid


def _features(
    config: MHLAConfig, tokens: tuple[Any, Any], learned: tuple[Any, Any], rotary: Any, scaling: float | None
) -> Tokens:
    """Feature-mapped queries and keys, and those of the normaliser."""
    found: Tokens = {}
    for name, each, feature_map in zip(("query", "key"), tokens, learned):
        features, normalizer = features_and_normalizer(config, each, feature_map, rotary, scaling)
        found[name] = repeat_heads(features, tokens[0].shape[2], 2)
        found[f"normalizer_{name}"] = (
            None if normalizer is features else repeat_heads(normalizer, tokens[0].shape[2], 2)
        )
    return found


def _slice(head: int | None) -> slice:
    return slice(None) if head is None else slice(head, head + 1)


def _of_heads(tokens: Tokens, heads: slice) -> dict[str, Any]:
    return {name: None if value is None else value[:, :, heads] for name, value in tokens.items()}


def _of_sample(tokens: Tokens, index: int, keep: slice | torch.Tensor) -> dict[str, Any]:
    return {name: None if value is None else value[index : index + 1, keep] for name, value in tokens.items()}


def _scores(query: torch.Tensor, key: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Products of some queries with all keys, `[B, H, R, T]`."""
    key = repeat_heads(key, query.shape[2], 2)
    return query[:, rows].transpose(1, 2) @ key.permute(0, 2, 3, 1)


def _seen(rows: torch.Tensor, length: int) -> torch.Tensor:
    return torch.arange(length, device=rows.device) <= rows[:, None]
