# SPDX-License-Identifier: Apache-2.0
"""Quality of a model on held-out data, compared to the original: one figure for each kind of model."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..training.data.batches import BatchSource, Latents, RecordedCalls
from ..training.data.texts import PackedText
from ..training.evaluation import evaluate_batches
from ..training.matching.layers import Batch, evaluating, mhla_layers, on_device, original_heads, run


_BATCH_SIZE = 16
# Tokens of a batch beyond which the logits of a large vocabulary fill the memory.
_MOST_TOKENS = 4096


class Quality:
    """The measure of one model: made while it still has all weights of its original.

    - Diffusion models: the loss of their objective, and by how many percent it is above the original's.
    - Language models: bits per byte of text, and by how many percent they are above the original's.
    - Encoders: cosine similarity of the mean-pooled last hidden states to the original's.
    - Diffusion models without data: cosine similarity of their predictions to the original's.
    - Vision models: the same of their logits, or last hidden states; of classifiers also how often both agree.

    Args:
        model: The converted model, with its original weights.
        source: The held-out data.

    Attributes:
        name: Name of the main figure.
        original: The original's figures.
    """

    def __init__(self, model: nn.Module, source: BatchSource) -> None:
        self.source = source
        self.kind = _kind(model, source)
        self.name = {"latents": "above_softmax_percent", "rows": "above_softmax_percent"}.get(self.kind, "cosine")
        self.reference: list[torch.Tensor] = []
        self.original: dict[str, float] = {}
        if self.kind == "latents":
            assert isinstance(source, Latents)
            self.latents = source.held_out_latents(_BATCH_SIZE, source.draws)
        else:
            length = 1
            if isinstance(source, PackedText):
                length = len(source.table[0])
            self.batches = source.held_out(max(1, min(_BATCH_SIZE, _MOST_TOKENS // length)))
        with original_heads(model, mhla_layers(model)):
            if self.kind in ("latents", "rows"):
                self.original = self._absolute(model)
            else:
                self.reference = self._outputs(model)

    def measure(self, model: nn.Module) -> dict[str, float]:
        """Measure the model."""
        if self.kind in ("latents", "rows"):
            figures = self._absolute(model)
            name = next(iter(figures))
            above = 100 * (figures[name] / self.original[name] - 1)
            return {**figures, "above_softmax_percent": above}
        pairs = list(zip(self._outputs(model), self.reference, strict=True))
        cosines = torch.cat([F.cosine_similarity(mine, theirs, dim=-1) for mine, theirs in pairs])
        figures = {"cosine": cosines.mean().item()}
        if self.kind == "classes":
            agreed = torch.cat([(mine.argmax(-1) == theirs.argmax(-1)).float() for mine, theirs in pairs])
            figures["agreement"] = agreed.mean().item()
        return figures

    def _absolute(self, model: Any) -> dict[str, float]:
        if self.kind == "latents":
            assert isinstance(self.source, Latents)
            return {"loss": evaluate_batches(model, self.latents, self.source.objective).loss}
        assert isinstance(self.source, PackedText)
        nats = sum(_negative_log_likelihood(model, batch) for batch in self.batches)
        return {"bits_per_byte": nats / math.log(2) / self.source.held_out_bytes}

    @torch.no_grad()
    def _outputs(self, model: nn.Module) -> list[torch.Tensor]:
        outputs = []
        with evaluating(model):
            for batch in self.batches:
                batch = on_device(batch, model)
                # The trunk: heads that are not of the checkpoint would be noise.
                trunk = model if self.kind == "classes" else getattr(model, "base_model", model)
                output = run(trunk, batch)[0].float()
                if self.kind == "predictions":
                    output = output.flatten(1)
                elif self.kind != "classes":
                    mask = batch.get("attention_mask", torch.ones(output.shape[:2], device=output.device))
                    mask = mask.unsqueeze(-1).to(output)
                    output = (output * mask).sum(1) / mask.sum(1)
                outputs.append(output.cpu())
        return outputs


def _kind(model: nn.Module, source: BatchSource) -> str:
    if isinstance(source, Latents):
        return "latents"
    if isinstance(source, PackedText):
        return "rows"
    if isinstance(source, RecordedCalls):
        return "predictions"
    return "classes" if type(model).__name__.endswith("ForImageClassification") else "hidden_states"


@torch.no_grad()
def _negative_log_likelihood(model: nn.Module, batch: Batch) -> float:
    """Of all tokens but the first of each row, in nats."""
    batch = on_device(batch, model)
    with evaluating(model):
        logits = run(model, batch)[0][:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="sum").item()
