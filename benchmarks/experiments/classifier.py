# SPDX-License-Identifier: Apache-2.0
"""Training of transformers' DeiT on digits at random places, which the experiments about classification share.

Contestants of a seed start from the same weights and see the same images in the same order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from mhla_hf import convert
from mhla_hf.analysis import AttentionTracker, mean_distance, mixing_summary
from mhla_hf.bench import peak_memory
from mhla_hf.layers import MHLA
from mhla_hf.training.data.order import stable_seed

from ..optimization import descend, follow_cosine, freeze_mixing, make_optimizers
from .digit_canvases import DigitCanvases


NUM_CLASSES = 10
STATISTICS = ("rank", "effective_rank", "relative_entropy", "top_share", "rank_bound", "tokens")
"""What is kept of a layer's attention."""
SMALL_MIXING = 20
"""Blocks up to which mixing weights are kept in reports, the one of class and distillation token included."""


def make_classifier(
    *, seed: int, mhla: Mapping[str, Any] | None, layers: int, hidden_size: int, heads: int, image_size: int,
    patch_size: int, mlp_ratio: float,
) -> Any:  # fmt: skip
    """Makes a DeiT; the weights that all contestants have are the same for a seed.

    Class and distillation token stay; under MHLA they are a block of their own, beside those of the grid.

    Args:
        seed: Chooses the weights.
        mhla: Options of MHLA; `None` for softmax attention.
        layers: Transformer blocks.
        hidden_size: Width.
        heads: Attention heads.
        image_size: Side of an image in pixels.
        patch_size: Side of a token in pixels.
        mlp_ratio: Width of the MLP over that of the model.
    """
    from transformers import DeiTConfig, DeiTForImageClassification

    config = DeiTConfig(
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=int(mlp_ratio * hidden_size),
        image_size=image_size,
        patch_size=patch_size,
        num_channels=1,
        num_labels=NUM_CLASSES,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=hidden_size**-0.5,
    )
    torch.manual_seed(stable_seed(seed, "classifier", "weights"))
    model = DeiTForImageClassification(config)
    # As DeiT; transformers leaves them zero.
    for name, parameter in model.deit.embeddings.named_parameters(recurse=False):
        if name.endswith(("token", "embeddings")):
            nn.init.trunc_normal_(parameter, std=config.initializer_range)
    return model if mhla is None else convert(model, dict(mhla))


def classifier_optimizers(
    model: Any, matrix_learning_rate: float, learning_rate: float, mixing_learning_rate: float
) -> list[torch.optim.Optimizer]:
    """The optimizers of [`benchmarks.training`][], the rate of the mixing weights divided by the number of blocks."""
    blocks = [module.mixing.shape[-1] for module in model.modules() if isinstance(module, MHLA)]
    return make_optimizers(
        model,
        matrix_rate=matrix_learning_rate,
        other_rate=learning_rate,
        mixing_rate=mixing_learning_rate / blocks[0] if blocks else None,
    )


def train_classifiers_case(*, seeds: Sequence[int], device: torch.device, **options: Any) -> dict[str, Any]:
    """Trains a classifier with each of some seeds.

    Args:
        seeds: The seeds.
        device: Device to train on.
        **options: See [`train_classifier_case`].

    Returns:
        `runs`, what that returns for each seed; mixing weights themselves are those of the first alone.
    """
    runs = [train_classifier_case(seed=seed, device=device, **options) for seed in seeds]
    for run in runs[1:]:
        for layer in run["mixing"]:
            del layer["matrix"]
    return {"runs": runs}


def train_classifier_case(
    *,
    attention: str,
    mhla: Mapping[str, Any] | None = None,
    frozen_mixing: bool = False,
    seed: int = 0,
    steps: int = 240,
    batch_size: int = 16,
    image_size: int = 56,
    patch_size: int = 4,
    digit_sizes: Sequence[int] = (40, 44, 48),
    layers: int = 3,
    hidden_size: int = 64,
    heads: int = 2,
    mlp_ratio: float = 2.0,
    matrix_learning_rate: float = 8e-3,
    learning_rate: float = 4e-3,
    mixing_learning_rate: float = 3e-2,
    warmup_steps: int = 20,
    held_out_copies: int = 4,
    track_every: int = 0,
    probe_images: int = 4,
    device: torch.device,
) -> dict[str, Any]:
    """Trains one classifier.

    Args:
        attention: `"softmax"` or `"mhla"`; linear attention is MHLA with one block and frozen uniform mixing weights.
        mhla: Options of MHLA.
        frozen_mixing: Keep the mixing weights as they start.
        seed: Chooses the first weights and the images.
        steps: Training steps.
        batch_size: Images of a step.
        image_size: See [`make_classifier`], like the other sizes.
        digit_sizes: See [`DigitCanvases`].
        matrix_learning_rate: Peak learning rate of Muon, which trains the matrices of the transformer blocks.
        learning_rate: Peak learning rate of AdamW, which trains the rest.
        mixing_learning_rate: That of the mixing weights, by AdamW too, relative to their mean of one over the blocks.
        warmup_steps: Steps in which all rise to the peak; then they fall to zero along a cosine.
        held_out_copies: Places at which every held-out scan is shown in the end; half-way tests show it at one.
        track_every: Steps from one record of attention statistics and accuracy to the next; 0 for none.
        probe_images: Held-out images that attention statistics are recorded on.
        device: Device to train on.

    Returns:
        `accuracy` on held-out scans, `parameters`, `losses` (means of ten steps), over the steps `accuracies` and
        `attention`, what an `AttentionTracker` recorded of `STATISTICS`, `mixing` (see [`mixing_figures`]),
        `step_milliseconds` (median), and `peak_memory_bytes` of a step.

    Raises:
        ValueError: If `attention` is neither.
        FloatingPointError: If the loss is not finite.
    """
    if attention not in ("softmax", "mhla"):
        raise ValueError(f"attention must be 'softmax' or 'mhla'; got {attention!r}.")
    training, held_out = (DigitCanvases(split, image_size, digit_sizes) for split in ("train", "held_out"))
    model = make_classifier(
        seed=seed,
        mhla=None if attention == "softmax" else mhla or {},
        layers=layers,
        hidden_size=hidden_size,
        heads=heads,
        image_size=image_size,
        patch_size=patch_size,
        mlp_ratio=mlp_ratio,
    ).to(device)
    if frozen_mixing:
        freeze_mixing(model)
    optimizers = classifier_optimizers(model, matrix_learning_rate, learning_rate, mixing_learning_rate)
    tracker = None
    if track_every:
        tracker = AttentionTracker({"pixel_values": held_out.probe(probe_images)}, every=track_every)
    accuracies: list[dict[str, float]] = []

    def track(step: int) -> None:
        if tracker is not None and (tracker.is_due(step) or step == steps):
            tracker.record(model, step)
            accuracies.append({"step": step, "accuracy": accuracy(model, held_out, 1)})

    losses, times = [], []
    model.train()
    track(0)
    for step in range(steps):
        follow_cosine(optimizers, step, warmup_steps=warmup_steps, steps=steps)
        images, labels = (tensor.to(device) for tensor in training.training_batch(batch_size, seed, step))
        start = time.perf_counter()
        losses.append(take_step(model, optimizers, images, labels))
        times.append(time.perf_counter() - start)
        track(step + 1)
    if not np.isfinite(losses).all():
        raise FloatingPointError(f"The loss with seed {seed} and {mhla or attention} is no longer finite.")
    return {
        "accuracy": accuracy(model, held_out, held_out_copies),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "losses": [round(statistics.fmean(losses[first : first + 10]), 4) for first in range(0, steps, 10)],
        "accuracies": accuracies,
        "attention": [] if tracker is None else [shortened(record) for record in tracker.history],
        "mixing": mixing_figures(model),
        "step_milliseconds": 1e3 * statistics.median(times),
        "peak_memory_bytes": peak_memory(lambda: training_loss(model, images, labels).backward(), device),
    }


def training_loss(model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy over a batch."""
    return F.cross_entropy(model(pixel_values=images).logits, labels)


def shortened(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of an `AttentionTracker` with `STATISTICS` alone, rounded."""

    def rounded(value: Any) -> Any:
        return round(value, 4) if isinstance(value, float) else value

    layers = {name: {key: rounded(layer[key]) for key in STATISTICS} for name, layer in record["layers"].items()}
    return {"step": record["step"], "layers": layers}


def take_step(
    model: Any, optimizers: Sequence[torch.optim.Optimizer], images: torch.Tensor, labels: torch.Tensor
) -> float:
    """One step of training.

    Returns:
        The loss.
    """
    loss = training_loss(model, images, labels)
    descend(model, optimizers, loss)
    return loss.item()


@torch.no_grad()
def accuracy(model: Any, data: DigitCanvases, copies: int) -> float:
    """Share of images that a model classifies correctly."""
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    correct = total = 0
    for images, labels in data.evaluation_batches(copies):
        correct += (model(pixel_values=images.to(device)).logits.argmax(-1).cpu() == labels).sum().item()
        total += len(labels)
    model.train(was_training)
    return correct / total


def mixing_figures(model: nn.Module) -> list[dict[str, Any]]:
    """What the mixing weights of each MHLA layer have learned; empty without such layers.

    Returns:
        For each layer `movement`, how far the weights moved from their start, relative to its norm, `mean_distance` of
        the blocks that blocks attend to and `initial_mean_distance`, `negative_share`, and for at most `SMALL_MIXING`
        blocks the `matrix` itself. Rows are scaled to an absolute sum of 1, since their scale has no effect.
    """
    figures = []
    for module in model.modules():
        if isinstance(module, MHLA):
            summary = mixing_summary(module)
            matrix, initial = (
                weights / weights.abs().sum(-1, keepdim=True) for weights in (summary.mean_matrix, summary.initial)
            )
            figures.append(
                {
                    "movement": statistics.fmean(summary.pattern_movement),
                    "mean_distance": mean_distance(matrix, summary.layout),
                    "initial_mean_distance": mean_distance(initial, summary.layout),
                    "negative_share": summary.negative_share,
                    "matrix": [[round(value, 4) for value in row] for row in matrix.tolist()]
                    if len(matrix) <= SMALL_MIXING
                    else None,
                }
            )
    return figures
