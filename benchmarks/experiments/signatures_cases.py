# SPDX-License-Identifier: Apache-2.0
"""Short trainings in which one thing goes wrong: of a classifier, and of a language model of bytes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from mhla_hf import convert
from mhla_hf.analysis import AttentionTracker
from mhla_hf.training.data.order import stable_seed

from ..optimization import descend, follow_cosine, freeze_mixing
from .classifier import accuracy, classifier_optimizers, make_classifier, take_step
from .digit_canvases import DigitCanvases


# Modules of the standard library whose source is the language: to train on, and held out.
_TRAINING = (
    "argparse",
    "ast",
    "datetime",
    "decimal",
    "doctest",
    "inspect",
    "optparse",
    "pathlib",
    "pickle",
    "tarfile",
)
_HELD_OUT = ("typing", "zipfile")


def train_classifier(
    *,
    mhla: Mapping[str, Any],
    frozen_mixing: bool = False,
    mixing_learning_rate: float = 4e-3,
    query_shift: float = 0.0,
    seed: int,
    steps: int,
    track_every: int,
    batch_size: int,
    image_size: int,
    digit_sizes: Sequence[int],
    device: torch.device,
) -> dict[str, Any]:
    """Trains the classifier of [`benchmarks.experiments.classifier`][], and tracks its attention.

    Args:
        mhla: Options of MHLA.
        frozen_mixing: Keep the mixing weights as they start.
        mixing_learning_rate: Peak learning rate of the mixing weights.
        query_shift: Taken from the queries of the first head of the second layer at the start.
        seed: Chooses the first weights and the images.
        steps: Training steps.
        track_every: Steps from one record to the next.
        batch_size: Images of a step.
        image_size: Side of an image in pixels; patches have four.
        digit_sizes: Sides of the digits.
        device: Device to train on.

    Returns:
        `accuracy` on held-out scans, and `signatures`, see [`first_reports`].
    """
    training, held_out = (DigitCanvases(split, image_size, digit_sizes) for split in ("train", "held_out"))
    model = make_classifier(
        seed=seed, mhla=mhla, layers=2, hidden_size=48, heads=3, image_size=image_size, patch_size=4, mlp_ratio=2.0
    ).to(device)
    if frozen_mixing:
        freeze_mixing(model)
    if query_shift:
        with torch.no_grad():
            model.deit.layers[1].attention.q_proj.bias[: 48 // 3].sub_(query_shift)
    optimizers = classifier_optimizers(model, 8e-3, 4e-3, mixing_learning_rate)
    tracker = AttentionTracker({"pixel_values": held_out.probe(2)}, every=track_every, settle=steps // 2)
    model.train()
    for step in range(steps + 1):
        if tracker.is_due(step):
            tracker.record(model, step)
        if step == steps:
            break
        follow_cosine(optimizers, step, warmup_steps=steps // 10, steps=steps)
        images, labels = (tensor.to(device) for tensor in training.training_batch(batch_size, seed, step))
        take_step(model, optimizers, images, labels)
    return {"accuracy": accuracy(model, held_out, 1), **_reports(tracker)}


def train_language_model(
    *,
    mhla: Mapping[str, Any],
    seed: int,
    steps: int,
    track_every: int,
    batch_size: int,
    length: int,
    longer: int,
    device: torch.device,
) -> dict[str, Any]:
    """Trains a language model of bytes on short texts, and tracks its attention on long ones.

    Args:
        mhla: Options of MHLA.
        seed: Chooses the first weights and the texts.
        steps: Training steps.
        track_every: Steps from one record to the next.
        batch_size: Texts of a step.
        length: Bytes of a text.
        longer: Bytes of a text over `length`, in the probe and in the longer test.
        device: Device to train on.

    Returns:
        `bits_per_byte` of held-out texts at `length`, `bits_per_byte_longer` of the last `length` bytes of texts
        `longer` times as long, and `signatures`, see [`first_reports`].
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(stable_seed(seed, "signatures", "weights"))
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=256,
        max_position_embeddings=length * longer, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = convert(LlamaForCausalLM(config), dict(mhla)).to(device)
    text, held_out = _source(_TRAINING), _source(_HELD_OUT)
    probe = held_out[: length * longer][None]
    tracker = AttentionTracker({"input_ids": probe}, every=track_every, settle=steps // 2)
    optimizers = classifier_optimizers(model, 8e-3, 4e-3, 4e-3)
    generator = torch.Generator().manual_seed(stable_seed(seed, "signatures", "texts"))
    model.train()
    for step in range(steps + 1):
        if tracker.is_due(step):
            tracker.record(model, step)
        if step == steps:
            break
        follow_cosine(optimizers, step, warmup_steps=steps // 10, steps=steps)
        starts = torch.randint(len(text) - length, (batch_size,), generator=generator).tolist()
        batch = torch.stack([text[start : start + length] for start in starts]).to(device)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        descend(model, optimizers, loss)
    model.eval()
    short, long = (
        _bits_per_byte(model, held_out[: 4 * length * longer].reshape(-1, size).to(device), length)
        for size in (length, length * longer)
    )
    return {"bits_per_byte": short, "bits_per_byte_longer": long, **_reports(tracker)}


def first_reports(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The failure signatures of a history: name, layer, and step and figure of the first report, in their order."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in history:
        for each in row["signatures"]:
            report = {"name": each["name"], "layer": each["layer"], "step": row["step"], "figure": each["figure"]}
            found.setdefault((each["name"], each["layer"]), report)
    return list(found.values())


def _reports(tracker: AttentionTracker) -> dict[str, Any]:
    return {
        "signatures": first_reports(tracker.history),
        "records": len(tracker.history),
        "record_seconds": sum(row["seconds"] for row in tracker.history) / len(tracker.history),
    }


def _source(modules: Sequence[str]) -> torch.Tensor:
    text = "\n".join(inspect.getsource(import_module(name)) for name in modules)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


@torch.no_grad()
def _bits_per_byte(model: Any, texts: torch.Tensor, last: int) -> float:
    """Of the last bytes of each text."""
    losses = []
    for text in texts.split(8):
        logits = model(input_ids=text, use_cache=False).logits[:, -last:-1]
        losses.append(F.cross_entropy(logits.flatten(0, 1), text[:, -last + 1 :].flatten(), reduction="none"))
    return torch.cat(losses).mean().item() / 0.6931471805599453
