# SPDX-License-Identifier: Apache-2.0
"""Small language models for the recall tasks, and their training.

Shape letters: B sequences, T tokens, P questions a sequence, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import mhla_hf  # noqa: F401  (registers MHLA with transformers)

from ..optimization import descend, follow_cosine, freeze_mixing, make_optimizers
from .recall_tasks import VOCABULARY, Questions


LAYERS = 2
MATRIX_RATE = 2e-2
OTHER_RATE = 1e-2
WARMUP = 20

# After the language model of the paper (arXiv 2601.07832) and the package's preset for it, without its gate.
_PAPER = {
    "block_size": [16],
    "feature_map": "relu",
    "rope": "after_feature_map",
    "normalizer": "none",
    "mixing_init": "uniform",
    "mixing_constraint": "none",
    "output_norm": True,
    "window": None,
}
# The package's default for language models, but for the size of blocks and without the window.
_DEFAULT = {"block_size": [16], "window": None}

ATTENTION: dict[str, dict[str, Any]] = {
    "softmax": {"mhla": None, "frozen_mixing": False},
    # Equal weights that stay equal; the output norm makes their number drop out.
    "linear": {"mhla": _PAPER, "frozen_mixing": True},
    "mhla": {"mhla": _PAPER, "frozen_mixing": False},
    "hedgehog": {"mhla": _DEFAULT, "frozen_mixing": False},
    "window": {"mhla": {**_PAPER, "window": "adjacent"}, "frozen_mixing": False},
    # The paper's hybrid for video keeps the first layer softmax, too.
    "hybrid": {"mhla": {**_PAPER, "layers": [1]}, "frozen_mixing": False},
    "hybrid-mhla-first": {"mhla": {**_PAPER, "layers": [0]}, "frozen_mixing": False},
    "mhla-locality": {"mhla": {**_PAPER, "mixing_init": "linear"}, "frozen_mixing": False},
    "mhla-per-head": {"mhla": {**_PAPER, "mixing_heads": "per_head"}, "frozen_mixing": False},
    "mhla-rope-before": {"mhla": {**_PAPER, "rope": "before_feature_map"}, "frozen_mixing": False},
}
"""Kinds of attention by name, as arguments of [`build_model`]."""

LABELS = {
    "softmax": "softmax",
    "linear": "linear",
    "mhla": "MHLA, as in the paper",
    "hedgehog": "MHLA, package default",
    "window": "MHLA + window",
    "hybrid": "hybrid: softmax, then MHLA",
    "hybrid-mhla-first": "hybrid: MHLA, then softmax",
    "mhla-locality": "locality initialisation",
    "mhla-per-head": "mixing per head",
    "mhla-rope-before": "RoPE before the feature map",
}
COLORS = {
    "softmax": "#444444",
    "linear": "#d95f02",
    "mhla": "#1f77b4",
    "hedgehog": "#17becf",
    "window": "#2ca02c",
    "hybrid": "#9467bd",
    "hybrid-mhla-first": "#8c564b",
    "mhla-locality": "#2ca02c",
    "mhla-per-head": "#9467bd",
    "mhla-rope-before": "#e377c2",
}


class RecallModel(nn.Module):
    """A Llama whose token embeddings include the token before, as a short convolution provides.

    Args:
        llama: The language model.
    """

    def __init__(self, llama: LlamaForCausalLM) -> None:
        super().__init__()
        self.llama = llama
        self.previous = nn.Embedding(llama.config.vocab_size, llama.config.hidden_size)
        nn.init.normal_(self.previous.weight, std=llama.config.initializer_range)

    def forward(self, questions: Questions) -> torch.Tensor:
        """Logits at the questions, `[B, P, vocabulary]`."""
        tokens = questions.tokens
        embeddings = self.llama.get_input_embeddings()(tokens)
        embeddings = embeddings + F.pad(self.previous(tokens[:, :-1]), (0, 0, 1, 0))
        states = self.llama.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        asked = questions.asked_at[..., None].expand(-1, -1, states.shape[-1])
        return self.llama.lm_head(states.gather(1, asked))


def build_model(
    mhla: Mapping[str, Any] | None, *, frozen_mixing: bool, width: int, heads: int, longest: int, seed: int
) -> RecallModel:
    """An untrained model; weights that kinds of attention share are the same for all.

    Args:
        mhla: Options of MHLA; `None` for softmax.
        frozen_mixing: Whether the mixing weights stay as they are.
        width: D.
        heads: Attention heads of a layer.
        longest: Tokens of the longest sequence that it is trained on.
        seed: Of the weights.
    """
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": longest,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    softmax = RecallModel(LlamaForCausalLM(LlamaConfig(**sizes)))
    if mhla is None:
        return softmax
    config = LlamaConfig(**sizes, mhla=dict(mhla))
    model = RecallModel(LlamaForCausalLM._from_config(config, attn_implementation="mhla"))
    model.load_state_dict(softmax.state_dict(), strict=False)
    if frozen_mixing:
        freeze_mixing(model)
    return model


def train_model(
    model: RecallModel, questions: Callable[[int], Questions], steps: int, device: torch.device
) -> list[float]:
    """Trains on the cross-entropy of the answers, by Muon for the matrices of the Llama and AdamW for the rest.

    Args:
        model: The model.
        questions: Batch of a step.
        steps: Number of steps; the learning rate rises over `WARMUP` of them and then falls to 0 with a cosine.
        device: Device to train on.

    Returns:
        Loss of each step.
    """
    optimizers = make_optimizers(model, matrix_rate=MATRIX_RATE, other_rate=OTHER_RATE, betas=(0.9, 0.98))
    losses = []
    for step in range(steps):
        batch = questions(step).to(device)
        loss = F.cross_entropy(model(batch).flatten(0, 1).float(), batch.answers.flatten())
        follow_cosine(optimizers, step, warmup_steps=WARMUP, steps=steps)
        descend(model, optimizers, loss)
        losses.append(loss.item())
    return losses


@torch.no_grad()
def correct_answers(model: RecallModel, questions: Questions) -> torch.Tensor:
    """Which questions the model answers right, BoolTensor `[B, P]` on the CPU."""
    return (model(questions).argmax(-1) == questions.answers).cpu()


def smoothed(losses: list[float], points: int = 50) -> list[list[float]]:
    """Steps and the mean losses up to them, at most so many."""
    size = max(1, -(-len(losses) // points))
    ends = range(size, len(losses) + 1, size)
    return [[end, sum(losses[end - size : end]) / size] for end in ends]


def percentages(curve: Mapping[str, Any], seeds: int) -> list[str]:
    """Cells of a table: mean accuracies, and half the range over seeds where there are several."""
    values = zip(curve["mean"], curve["lowest"], curve["highest"], strict=True)
    return [
        f"{100 * mean:.0f}" + (f" ± {50 * (highest - lowest):.0f}" if seeds > 1 else "")
        for mean, lowest, highest in values
    ]


def number_of_seeds(report: Mapping[str, Any]) -> int:
    """Seeds of the cases of a report."""
    return len({case["options"]["seed"] for case in report["cases"].values()})
