# SPDX-License-Identifier: Apache-2.0
"""From one call of an MHLA layer to the attention matrices of its samples.

Shape letters: B batch, T tokens, R query tokens, H heads, H_kv key/value heads, K query/key width, V value width,
F features, M blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import MHLAConfig
from ..layers.features import LearnedFeatureMap, features_and_plain
from ..layers.fused import HeadNorms
from ..layers.mhla import MHLA
from ..layers.sequence import TokenSequence
from ..layouts.blocks import BlockLayout
from ..layouts.sequences import extend_mixing
from ..ops.mixing import repeat_heads
from ..utils.messages import check_choice
from .matrices import linear_matrix, mhla_divisor, mhla_matrix, softmax_matrix, window_mask


KINDS = ("original", "mhla", "linear")
"""Attention of the host model, MHLA, and linear attention with the feature map of MHLA."""

Tokens = dict[str, torch.Tensor | None]
"""Feature-mapped tokens by the name of an argument."""

# SANA's own attention, see `mhla_hf.layers.original`.
_LINEAR = MHLAConfig(feature_map="relu", rope="after_feature_map")
LINEAR_EPS = 1e-15


@dataclass(frozen=True)
class LayerTokens:
    """One sample of a layer's call, without padding, in float64; makes its attention matrices.

    Attributes:
        mhla: The layer.
        layout: Blocks of its T tokens.
        mixing: Mixing weights of these blocks, `[M, M]` or `[H, M, M]`.
        causal: Whether token t sees j ≤ t only.
        features: Feature-mapped queries and keys, arguments of [`mhla_matrix`][mhla_hf.analysis.mhla_matrix] by name,
            `[1, T, H, F]`.
        original: Arguments of [`linear_matrix`][mhla_hf.analysis.linear_matrix] for a host model whose own attention
            is linear, as SANA's; `None` for softmax.
        query: Queries of softmax attention `[1, T, H, K]`, normed and rotated.
        key: Keys of softmax attention `[1, T, H, K]`, likewise.
        value: `[1, T, H, V]`.
        scaling: Scale of q·k in softmax; `None` for K^-1/2.
    """

    mhla: MHLA
    layout: BlockLayout
    mixing: torch.Tensor
    causal: bool
    features: Tokens
    original: Tokens | None
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float | None

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.layout.num_tokens

    @property
    def num_heads(self) -> int:
        """H."""
        return self.query.shape[2]

    @property
    def num_features(self) -> int:
        """F."""
        assert self.features["key"] is not None
        return self.features["key"].shape[3]

    def matrix(self, kind: str, *, head: int | None = None, rows: torch.Tensor | None = None) -> torch.Tensor:
        """An attention matrix: what the values are multiplied by.

        That of MHLA has its normaliser, the scale that an output norm gives to each row, and the softmax window with
        the gains of both. It leaves out what no matrix over tokens has: the convolution of the values (LePE), the
        output gate, and the weights of an output norm. Of gains for each channel it takes the mean.

        Args:
            kind: `"original"`, `"mhla"` or `"linear"`.
            head: One head; `None` for all.
            rows: Query tokens whose rows are wanted, LongTensor `[R]`; `None` for all T.

        Returns:
            `[R, T]`, or `[H, R, T]` for all heads; float64.

        Raises:
            ValueError: If there is no such kind.
        """
        check_choice("kind", kind, KINDS)
        heads = slice(None) if head is None else slice(head, head + 1)
        rows = None if rows is None else rows.to(self.query.device)
        matrix = {"original": self._original, "mhla": self._mhla, "linear": self._linear}[kind](heads, rows)[0]
        return matrix if head is None else matrix[0]

    @property
    def kind(self) -> str:
        """`"mhla"`, or `"linear"` for one block of all tokens without a softmax window."""
        return "linear" if self.layout.num_blocks == 1 and self.mhla.window_gain is None else "mhla"

    def attention_matrix(self, *, head: int | None = None, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The matrix of what the layer computes: [`LayerTokens.matrix`][mhla_hf.analysis.LayerTokens] of MHLA."""
        return self.matrix("mhla", head=head, rows=rows)

    def visible(self, rows: torch.Tensor | None = None) -> torch.Tensor | None:
        """Number of tokens that each row sees, `[R]`; `None` for all T."""
        return count_seen(self.num_tokens, rows) if self.causal else None

    def normalizer_terms(
        self, *, head: int, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What MHLA's normaliser divides, and what it divides by.

        Args:
            head: A head.
            rows: Query tokens, LongTensor `[R]`; `None` for all T.

        Returns:
            Sum of each row's absolute weights before they are divided, `[R]`, and the divisors, `[R]`, `eps` included
            (`None` for the normaliser `"none"`); without output norm and window.
        """
        rows = None if rows is None else rows.to(self.query.device)
        mixing = self.mixing if self.mixing.dim() == 2 else self.mixing[head : head + 1]
        features = of_heads(self.features, slice(head, head + 1))
        options = {**self._options, "layout": self.layout, "mixing": mixing}
        weights = mhla_matrix(**features, **{**options, "normalizer": "none"}, rows=rows)[0, 0]
        divisor = mhla_divisor(**features, **options)
        if divisor is not None:
            divisor = divisor[0, :, 0, 0] if rows is None else divisor[0, rows, 0, 0]
        return weights.abs().sum(-1), divisor

    @property
    def _options(self) -> dict[str, Any]:
        config = self.mhla.config
        return {"normalizer": config.normalizer, "causal": self.causal, "eps": config.eps}

    def _original(self, heads: slice, rows: torch.Tensor | None) -> torch.Tensor:
        if self.original is not None:
            return linear_matrix(**of_heads(self.original, heads), eps=LINEAR_EPS, rows=rows)
        query, key = self.query[:, :, heads], self.key[:, :, heads]
        return softmax_matrix(query, key, scale=self.scaling, causal=self.causal, rows=rows)

    def _linear(self, heads: slice, rows: torch.Tensor | None) -> torch.Tensor:
        return linear_matrix(**of_heads(self.features, heads), **self._options, rows=rows)

    def _mhla(self, heads: slice, rows: torch.Tensor | None) -> torch.Tensor:
        mhla, mixing = self.mhla, self.mixing if self.mixing.dim() == 2 else self.mixing[heads]
        features = of_heads(self.features, heads)
        matrix = mhla_matrix(**features, mixing=mixing, layout=self.layout, **self._options, rows=rows)
        if mhla.output_norm is not None:
            output = matrix @ self.value[:, :, heads].transpose(1, 2)
            matrix = matrix / (output.square().mean(-1, keepdim=True) + (mhla.output_norm.eps or 0.0)).sqrt()
        if mhla.window_gain is None:
            return matrix
        gains = mhla.window_gain.detach().to(matrix)[:, heads].mean(-1)[..., None, None]
        return gains[0] * matrix + gains[1] * self._window(heads, rows)

    def _window(self, heads: slice, rows: torch.Tensor | None) -> torch.Tensor:
        window, size = self.mhla.config.window, self.mhla.window_size
        assert window is not None and size is not None
        prefix = self.layout.num_prefix_tokens
        layout = BlockLayout(self.layout.grid, block_size=size, num_prefix_tokens=prefix)
        wanted = torch.arange(self.num_tokens, device=self.query.device) if rows is None else rows
        seen = window_mask(window, layout, causal=self.causal, rows=wanted)
        query, key = self.query[:, :, heads], self.key[:, :, heads]
        return softmax_matrix(query, key, scale=self.scaling, seen=seen, rows=rows)


@torch.no_grad()
def layer_tokens(
    mhla: MHLA,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    grid: Sequence[int] | None = None,
    sequence: TokenSequence | None = None,
    rotary: Callable[[torch.Tensor], torch.Tensor] | None = None,
    norms: HeadNorms | None = None,
    scaling: float | None = None,
    linear: bool = False,
    **unused: Any,
) -> list[LayerTokens]:
    """The samples of one call of an MHLA layer, ready to write out their attention matrices.

    Args:
        mhla: The layer.
        query: As in [`MHLA.attention_parts`][mhla_hf.MHLA], like all that follow but `linear`:
            `[B, T, H, K]`.
        key: `[B, T, H_kv, K]`.
        value: `[B, T, H_kv, V]`.
        linear: Whether the host model's own attention is linear, as SANA's.
        **unused: `hidden_states` of the output gate, which is no part of a matrix.

    Returns:
        One entry for each sample; padding is left out.

    Raises:
        ValueError: For packed documents, a decoding state, context parallelism, perturbed attention, or a sample that
            is padding alone.

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
    if unused.get("shard") is not None or unused.get("identity"):
        raise ValueError("Attention matrices are of whole sequences, without perturbed attention.")
    if sequence is not None and (sequence.documents is not None or sequence.state is not None):
        raise ValueError("Attention matrices are of one text a row, computed without a cache.")
    with torch.autocast(query.device.type, enabled=False):
        if norms is not None:
            query, key = norms.apply(query, key)
        query, key, value = query.double(), key.double(), value.double()
        maps = mhla.feature_map_query, mhla.feature_map_key
        features = _features(mhla.config, (query, key), maps, rotary, scaling)
        original = _features(_LINEAR, (query, key), (None, None), rotary, None) if linear else None
        if rotary is not None:
            query, key = rotary(query), rotary(key)
    query, key, value = (repeat_heads(tokens, mhla.num_heads, 2) for tokens in (query, key, value))
    samples = []
    for index in range(query.shape[0]):
        keep: slice | torch.Tensor = slice(None)
        if sequence is not None and sequence.valid is not None:
            keep = sequence.valid[index]
            check_tokens(keep, index)
        layout = mhla.layout_for((query[index, keep].shape[0],) if grid is None else grid)
        causal = mhla.config.causal if sequence is None else sequence.causal
        samples.append(
            LayerTokens(
                mhla=mhla,
                layout=layout,
                mixing=_mixing(mhla, layout, causal),
                causal=causal,
                features=_of_sample(features, index, keep),
                original=None if original is None else _of_sample(original, index, keep),
                query=query[index : index + 1, keep],
                key=key[index : index + 1, keep],
                value=value[index : index + 1, keep],
                scaling=scaling,
            )
        )
    return samples


def check_tokens(valid: torch.Tensor, index: int) -> None:
    """Checks that a sample has tokens.

    Args:
        valid: False for padding, BoolTensor `[T]`.
        index: Number of the sample in its batch.

    Raises:
        ValueError: If all are padding.
    """
    if not valid.any():
        raise ValueError(f"Sample {index} of the batch is padding alone, and has no attention; leave it out.")


def count_seen(num_tokens: int, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Number of tokens that each row of causal attention sees, `[R]`."""
    return (torch.arange(num_tokens) if rows is None else rows) + 1


def _features(
    config: MHLAConfig,
    tokens: tuple[torch.Tensor, torch.Tensor],
    maps: tuple[LearnedFeatureMap | None, LearnedFeatureMap | None],
    rotary: Callable[[torch.Tensor], torch.Tensor] | None,
    scaling: float | None,
) -> Tokens:
    (query, plain_query), (key, plain_key) = (
        features_and_plain(config, each, learned, rotary, scaling) for each, learned in zip(tokens, maps)
    )
    key = repeat_heads(key, query.shape[2], 2)
    if plain_key is not None:
        plain_key = repeat_heads(plain_key, query.shape[2], 2)
    return {"query": query, "key": key, "normalizer_query": plain_query, "normalizer_key": plain_key}


def of_heads(tokens: Tokens, heads: slice) -> dict[str, Any]:
    """Tokens of some heads, as arguments by name."""
    return {name: None if value is None else value[:, :, heads] for name, value in tokens.items()}


def _of_sample(tokens: Tokens, index: int, keep: slice | torch.Tensor) -> Tokens:
    return {name: None if value is None else value[index : index + 1, keep] for name, value in tokens.items()}


def _mixing(mhla: MHLA, layout: BlockLayout, causal: bool) -> torch.Tensor:
    """Mixing weights among the blocks of a layout."""
    if mhla.config.is_sequence:
        return extend_mixing(mhla.mixing_matrix().detach().double(), layout.num_blocks, causal=causal)
    return mhla.mixing_matrix(layout).detach().double()
