#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Small softmax models to recover, pretrained once on a CPU: a DiT, a ViT and a language model.

    python -m benchmarks.pretrained vit runs/pretrained

Nothing is downloaded. Each model gets a folder of its own name, in which `pretrained.json` is written last; training
that was interrupted resumes from its last checkpoint. `benchmarks.recovery` makes what it needs itself.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiTPipeline, DiTTransformer2DModel
from PIL import Image
from torch import nn
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification, ViTImageProcessor

from benchmarks import minilm, python_language_model
from benchmarks.experiments.classifier import accuracy, training_loss
from benchmarks.experiments.digit_canvases import DigitCanvases
from benchmarks.optimization import descend, follow_cosine, make_optimizers
from benchmarks.quality_dit.models import initialize_as_dit
from conversion.digits.checkpoints import load_checkpoint, save_checkpoint
from mhla_hf.families.noise_prediction import no_label_dropout
from mhla_hf.training import DiTObjective
from mhla_hf.training.data.batches import drawn_held_out, evaluation_batches, make_batch
from mhla_hf.training.data.digits import DIGIT_WORDS, digit_images
from mhla_hf.training.data.order import DataOrder
from mhla_hf.training.evaluation import evaluate_batches
from mhla_hf.utils.files import write_json


RECORD = "pretrained.json"
IMAGES = "images"
"""Folder of the ViT's own training images, beside its weights."""

NUM_CLASSES = len(DIGIT_WORDS)
CHECKPOINT_EVERY = 50
LANGUAGE_MINUTES = 25.0
_KL_WEIGHT, _CLASS_DROPOUT = 1e-4, 0.1
_DIT_HELD_OUT = 96
"""As many as the default recipe holds out, and the same ones: the DiT is not trained on them."""

_VIT_SIDE, _VIT_SIZES, _VIT_COPIES = 56, (40, 44, 48), 4
_WARMUP_STEPS = 20


def pretrain(name: str, folder: Path) -> Path:
    """Returns the directory of a model, which is made if it is not finished."""
    directory = folder / name
    if not (directory / RECORD).is_file():
        directory.mkdir(parents=True, exist_ok=True)
        write_json(directory / RECORD, MODELS[name](directory))
    return directory


def train(
    model: nn.Module,
    loss_of: Callable[[int], torch.Tensor],
    checkpoint: Path,
    *,
    steps: int,
    matrix_rate: float = 0.0,
    other_rate: float,
) -> float:
    """Trains a model in place, from its last checkpoint on.

    Args:
        model: The model.
        loss_of: The loss of a step, a function of its number and the model alone.
        checkpoint: The file of the checkpoint.
        steps: How many steps.
        matrix_rate: Peak learning rate of the matrices of transformer layers.
        other_rate: That of all other parameters.

    Returns:
        CPU seconds, those before the checkpoint included.

    Raises:
        FloatingPointError: If the loss is not finite.
    """
    optimizers = make_optimizers(model, matrix_rate=matrix_rate, other_rate=other_rate)
    seconds, first = 0.0, 0
    if (state := load_checkpoint(checkpoint)) is not None:
        model.load_state_dict(state["model"])
        for optimizer, values in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        seconds, first = state["cpu_seconds"], state["step"]
    started = time.process_time() - seconds
    model.train()
    for step in range(first, steps):
        follow_cosine(optimizers, step, warmup_steps=_WARMUP_STEPS, steps=steps)
        loss = loss_of(step)
        descend(model, optimizers, loss)
        done = step + 1
        if done % CHECKPOINT_EVERY == 0 or done == steps:
            if not loss.isfinite():
                raise FloatingPointError(f"The loss of {checkpoint.stem} is {loss.item()} at step {step}.")
            seconds = time.process_time() - started
            print(f"{checkpoint.stem}: step {done}, loss {loss.item():.4f}, {seconds:.0f} CPU s", flush=True)
            states = [optimizer.state_dict() for optimizer in optimizers]
            state = {"model": model.state_dict(), "optimizers": states, "cpu_seconds": seconds, "step": done}
            save_checkpoint(checkpoint, state)
    model.eval()
    return seconds


def make_dit(
    directory: Path,
    *,
    steps: int = 1000,
    vae_steps: int = 300,
    samples: int = 2048,
    layers: int = 6,
    width: int = 64,
    batch_size: int = 12,
) -> dict[str, Any]:
    """Pretrains a class-conditional DiT of 16x16 tokens, and its autoencoder, on digits of 32x32 pixels.

    Args:
        directory: Where the pipeline is written.
        steps: Steps of the transformer.
        vae_steps: Steps of the autoencoder.
        samples: Digits to train on, if there are so many.
        layers: Transformer blocks.
        width: Their width, a multiple of 8.
        batch_size: Images of a step.

    Returns:
        CPU seconds and `loss`, that on held-out digits.
    """
    digits = digit_images(samples, 32, captions=False)
    images, labels = torch.stack([digit.load() for digit in digits]), torch.tensor([d.condition for d in digits])
    chosen, held_out = (list(part) for part in drawn_held_out(len(digits), _DIT_HELD_OUT))
    torch.manual_seed(0)
    vae = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=32,
        mid_block_add_attention=False,
    )

    def vae_loss(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        index = torch.randint(len(chosen), (batch_size,), generator=generator).tolist()
        batch = images[[chosen[i] for i in index]]
        posterior = vae.encode(batch).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator)
        error = vae.decode(posterior.mean + posterior.std * noise).sample - batch
        divergence = 0.5 * (posterior.mean.square() + posterior.var - 1.0 - posterior.logvar).mean()
        return error.abs().mean() + error.square().mean() + _KL_WEIGHT * divergence

    seconds = train(vae, vae_loss, directory / "vae.pt", steps=vae_steps, other_rate=3e-3)
    with torch.no_grad():
        latents = torch.cat([vae.encode(part).latent_dist.mean for part in images.split(64)])
    vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 4))
    latents = latents * vae.config.scaling_factor
    dataset = [{"latents": each, "class_label": label} for each, label in zip(latents, labels, strict=True)]
    dit = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=width // 4,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        sample_size=16,
        patch_size=1,
        num_embeds_ada_norm=NUM_CLASSES,
    )
    initialize_as_dit(dit)
    scheduler = DDIMScheduler(clip_sample=False)
    objective = DiTObjective(scheduler=dict(scheduler.config))
    training = [dataset[index] for index in chosen]
    order = DataOrder(dataset_size=len(training), batch_size=batch_size, seed=0, stage="pretraining")
    no_class = {"class_label": torch.tensor(NUM_CLASSES)}

    def dit_loss(step: int) -> torch.Tensor:
        batch = make_batch(training, order, step, 0, objective, _CLASS_DROPOUT, no_class)
        return objective.losses(dit, batch, dit.dtype).mean()

    with no_label_dropout(dit):
        rates = {"matrix_rate": 3e-3, "other_rate": 1.5e-3}
        seconds += train(dit, dit_loss, directory / "transformer.pt", steps=steps, **rates)
    tests = evaluation_batches([dataset[index] for index in held_out], objective, batch_size=batch_size)
    pipeline = DiTPipeline(dit, vae, scheduler, id2label=dict(enumerate(DIGIT_WORDS)))
    pipeline.save_pretrained(directory)
    return {"cpu_seconds": seconds, "loss": evaluate_batches(dit, tests, objective).loss}


def make_vit(
    directory: Path, *, steps: int = 1200, images: int = 2240, layers: int = 4, width: int = 64, batch_size: int = 16
) -> dict[str, Any]:
    """Pretrains a ViT of 14x14 tokens on digits of random size at random places, and saves images like them.

    Args:
        directory: Where the model, its image processor and the images are written.
        steps: Training steps.
        images: How many images are saved.
        layers: Transformer layers.
        width: Their width, a multiple of 4.
        batch_size: Images of a step.

    Returns:
        CPU seconds and `accuracy` on held-out scans.
    """
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        image_size=_VIT_SIDE,
        patch_size=4,
        num_labels=NUM_CLASSES,
        initializer_range=width**-0.5,
    )
    torch.manual_seed(0)
    model = ViTForImageClassification(config)
    canvases = DigitCanvases("train", _VIT_SIDE, _VIT_SIZES, channels=3)

    def loss_of(step: int) -> torch.Tensor:
        return training_loss(model, *canvases.training_batch(batch_size, 0, step))

    rates = {"matrix_rate": 4e-3, "other_rate": 2e-3}
    seconds = train(model, loss_of, directory / "model.pt", steps=steps, **rates)
    folder = directory / IMAGES
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, image in enumerate(canvases.training_batch(images, 1, 0)[0]):
        pixels = ((image[0] + 1) * 127.5).round().byte().numpy()
        Image.fromarray(np.asarray(pixels)).save(folder / f"{number:04d}.png")
    ViTImageProcessor(do_resize=False, size={"height": _VIT_SIDE, "width": _VIT_SIDE}).save_pretrained(directory)
    model.save_pretrained(directory)
    return {"cpu_seconds": seconds, "accuracy": vit_accuracy(directory)}


def vit_accuracy(directory: Path) -> float:
    """Share of the held-out scans, at several places, that a model in a directory classifies correctly."""
    model = AutoModelForImageClassification.from_pretrained(directory)
    return accuracy(model, DigitCanvases("held_out", _VIT_SIDE, _VIT_SIZES, channels=3), _VIT_COPIES)


def make_language(directory: Path, *, minutes: float = LANGUAGE_MINUTES) -> dict[str, Any]:
    """Pretrains the language model of `python_language_model.py`.

    Returns:
        Minutes of training.
    """
    python_language_model.main([str(directory), "--minutes", str(minutes)])
    return {"minutes": minutes}


MODELS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "dit": make_dit,
    "vit": make_vit,
    "language": make_language,
    "minilm": minilm.prepare,
}
"""What makes each model; that of the encoder, which is there already, collects texts and embeds them."""


def main() -> None:
    """Makes one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=list(MODELS))
    parser.add_argument("folder", type=Path, help="where its directory is made")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(pretrain(arguments.name, arguments.folder))


if __name__ == "__main__":
    main()
