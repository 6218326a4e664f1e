# SPDX-License-Identifier: Apache-2.0
"""Text conditioning for pretraining: equal to the Wan pipeline's, at a fraction of its cost.

A Wan pipeline pads the embeddings of a prompt with zeros to `max_sequence_length` (512 by default) and lets the cross
attention attend to the padding, unmasked. All padding keys of one layer are equal, so a softmax over `n` words and
`p` paddings is the same as one over `n` words and one padding whose score is raised by `log(p)`. So any padded length
costs pretraining no more than a short one.
"""

from __future__ import annotations

import math

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from transformers import PreTrainedTokenizerBase, UMT5EncoderModel

from mhla_hf.demo.run import TEXT_LENGTH


def tokenize(
    tokenizer: PreTrainedTokenizerBase, captions: list[str], length: int = TEXT_LENGTH
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokenizes captions.

    Returns:
        Token ids `[N, length]` int64, and the number of tokens of each caption `[N]` int64.
    """
    encoded = tokenizer(captions, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return encoded.input_ids, encoded.attention_mask.sum(dim=1)


def encode_text(encoder: UMT5EncoderModel, token_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Encodes tokens as the Wan pipeline does, with zeros in place of the padding.

    Args:
        encoder: The text encoder; gradients flow through it.
        token_ids: `[B, L]` int64.
        lengths: `[B]` int64, tokens other than padding.

    Returns:
        `[B, L, text_dim]`.
    """
    mask = torch.arange(token_ids.shape[1], device=token_ids.device)[None] < lengths[:, None]
    embeddings = encoder(token_ids, mask.long()).last_hidden_state
    return embeddings * mask[..., None].to(embeddings.dtype)


def padding_bias(lengths: torch.Tensor, length: int, padded_length: int) -> torch.Tensor:
    """Computes scores to add to the keys of a short text so that it acts like a longer one.

    Args:
        lengths: `[B]` int64, tokens other than padding; all below `length`.
        length: Positions of the keys.
        padded_length: Positions that they represent.

    Returns:
        `[B, 1, 1, length]` float32: zero on words, elsewhere `log` of the number of paddings that each represents.
    """
    positions = torch.arange(length, device=lengths.device)[None]
    weight = (padded_length - lengths).clamp(min=1) / (length - lengths).clamp(min=1)
    return torch.where(positions < lengths[:, None], 0.0, weight.log()[:, None].float())[:, None, None]


class PaddedTextProcessor(WanAttnProcessor):
    """Cross-attention processor that adds `bias` to the scores of the text keys."""

    def __init__(self) -> None:
        super().__init__()
        self.bias: torch.Tensor | None = None

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None):
        return super().__call__(attn, hidden_states, encoder_hidden_states, self.bias, rotary_emb)


def install_padded_text(transformer: WanTransformer3DModel) -> PaddedTextProcessor:
    """Sets one `PaddedTextProcessor`, which holds no weights, in all cross-attention layers, and returns it."""
    processor = PaddedTextProcessor()
    for block in transformer.blocks:
        block.attn2.set_processor(processor)
    return processor


def draw_padded_length(generator: torch.Generator) -> int:
    """Draws the padded text length of one batch: short as in the demo's training, or 512 as in the pipeline."""
    choices = (TEXT_LENGTH, 64, 226, 512)
    weights = torch.tensor([0.45, 0.05, 0.05, 0.45])
    return choices[int(torch.multinomial(weights, 1, generator=generator))]


def normal_quantiles(count: int, generator: torch.Generator) -> torch.Tensor:
    """Draws `count` standard normal numbers, one from each of `count` equally likely intervals.

    Stratified noise levels make the loss of a small batch much less noisy than independent ones.
    """
    uniform = (torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)) / count
    return math.sqrt(2.0) * torch.erfinv((2.0 * uniform - 1.0).clamp(-1.0 + 1e-6, 1.0 - 1e-6))
