#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What a caption does to a recovered model with joint attention, measured on a small Flux.

    python -m benchmarks.captions runs/captions

A real `FluxPipeline` of 12 x 12 tokens is pretrained on digits with captions, which reach the image through attention
alone, and recovered by `mhla-hf recover` with exact text, and with text as a block beside nine of the grid or one. The
effect of a caption is the difference of the model's outputs with the right caption and with one of another image; its
relative error is the main figure. Then a plain distillation shows what the floor under the normaliser is for. Figures
and samples go to `benchmarks/results/`. What is finished in the folder is not done again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

import mhla_hf
from benchmarks.pretrained import RECORD, train
from mhla_hf.config import MHLAConfig
from mhla_hf.families.objectives import sample_sigmas
from mhla_hf.layers.mixing import constrained
from mhla_hf.pipelines import load_pipeline
from mhla_hf.recovery.recover import WORK
from mhla_hf.training.data.digits import DIGIT_WORDS, load_scans
from mhla_hf.training.layers import mhla_layers
from mhla_hf.training.parameters import learning_rate_factor, set_learning_rate
from mhla_hf.training.teacher import SharedTeacher
from mhla_hf.utils.figures import new_figure, save_figure
from mhla_hf.utils.files import read_json, write_json
from mhla_hf.utils.machine import processor_name


RESULTS = Path(__file__).parent / "results"
SIDE, WORDS = 24, 8
"""Height and width of images in pixels, each of which is a latent; tokens of a caption."""

PLACES, STYLES = ("top-left", "top-right", "bottom-left", "bottom-right"), ("bright", "dim", "inverted")
VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "relu": {"mhla.feature_map": "relu", "mhla.rope": "after_feature_map"},
    "block": {"mhla.text": "block"},
    "linear": {"mhla.text": "block", "mhla.blocks": [1, 1], "mhla.mixing_init": "uniform"},
}
"""Changes to the default recipe."""

TITLES = {
    "original": "original",
    "softmax": "MHLA, exact text",
    "relu": "the same with ReLU",
    "block": "MHLA, text as a block",
    "linear": "one block for the grid, one for the text",
}
DISTILLED: dict[str, dict[str, Any]] = {
    "without a floor": {"eps": 1e-6},
    "floor of 5 %": {"eps": 0.05},
    "nonnegative mixing weights": {"eps": 1e-6, "mixing_constraint": "nonnegative"},
}
"""Options of the layers of a distillation, ReLU after calibration."""

STAGES = ("converted", "calibrate", "match", "blockwise")
_NEXT_DIGIT = dict(zip(DIGIT_WORDS, DIGIT_WORDS[1:] + DIGIT_WORDS[:1]))
PROMPTS = (
    "seven top-left bright",
    "two bottom-right dim",
    "three top-right eight bottom-left bright",
    "zero top-left five bottom-right inverted",
    "nine bottom-left four top-right dim",
    "six top-right one top-left bright",
)
_HELD_OUT = 256


def canvases(count: int, split: str, seed: int) -> tuple[torch.Tensor, list[str]]:
    """Draws images of one or two digits in quadrants, `[N, 3, 24, 24]` in [-1, 1], and their captions."""
    scans, labels = load_scans(split, 8)
    draw = np.random.default_rng(seed)
    images, captions = -np.ones((count, SIDE, SIDE), np.float32), []
    for image in images:
        words = []
        for place in draw.permutation(4)[: 1 + (draw.random() < 0.6)]:
            index, (down, right) = draw.integers(len(scans)), draw.integers(5, size=2)
            row, column = 12 * (place // 2) + down, 12 * (place % 2) + right
            image[row : row + 8, column : column + 8] = 2 * scans[index] - 1
            words += [DIGIT_WORDS[labels[index]], PLACES[place]]
        style = draw.integers(3)
        image[:] = (image, (image + 1) / 2 - 1, -image)[style]
        captions.append(" ".join([*words, STYLES[style]]))
    return torch.from_numpy(images)[:, None].expand(-1, 3, -1, -1).contiguous(), captions


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, in the vocabulary of the captions."""
    words = ["<pad>", "</s>", "<unk>", *DIGIT_WORDS, *PLACES, *STYLES]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=WORDS
    )


class Painter(nn.Module):
    """The parts of the pipeline that learn from captions: text encoder and transformer."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokenizer = make_tokenizer()
        size = len(self.tokenizer)
        self.text_encoder = T5EncoderModel(
            T5Config(vocab_size=size, d_model=32, d_ff=64, d_kv=16, num_layers=1, num_heads=2, dropout_rate=0.0)
        )
        self.transformer = FluxTransformer2DModel(
            in_channels=4,
            num_layers=layers,
            num_single_layers=layers,
            attention_head_dim=width // 2,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=8,
            axes_dims_rope=(8, (width // 2 - 8) // 2, (width // 2 - 8) // 2),
            guidance_embeds=False,
        )

    def inputs(self, noisy: torch.Tensor, sigmas: torch.Tensor, captions: Sequence[str]) -> dict[str, Any]:
        """Arguments of the transformer for noisy latents `[B, 1, H, W]`, as the pipeline makes them."""
        tokens = self.tokenizer(list(captions), padding="max_length", max_length=WORDS, return_tensors="pt")
        sides = [size // 2 for size in noisy.shape[2:]]
        return {
            "hidden_states": FluxPipeline._pack_latents(noisy, *noisy.shape),
            "encoder_hidden_states": self.text_encoder(tokens.input_ids)[0],
            "pooled_projections": torch.zeros(len(noisy), 8),
            "timestep": sigmas,
            "img_ids": FluxPipeline._prepare_latent_image_ids(1, *sides, noisy.device, noisy.dtype),
            "txt_ids": torch.zeros(WORDS, 3),
        }


def noised(latents: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noisy latents, noise levels `[B]`, and the packed direction from data to noise."""
    sigmas = sample_sigmas(len(latents), generator=generator)
    noise, at = torch.randn(latents.shape, generator=generator), sigmas[:, None, None, None]
    target = FluxPipeline._pack_latents(noise - latents, *latents.shape)
    return (1 - at) * latents + at * noise, sigmas, target


def make_pipeline(
    directory: Path, seed: int, *, steps: int = 5000, vae_steps: int = 300, images: int = 6000, width: int = 64
) -> None:
    """Pretrains the pipeline.

    Args:
        directory: Where it is written.
        seed: Of weights and data.
        steps: Steps of transformer and text encoder, of 16 images.
        vae_steps: Steps of the autoencoder.
        images: Images to train on.
        width: Width of the transformer, of two heads.
    """
    if (directory / RECORD).is_file():
        return
    directory.mkdir(parents=True, exist_ok=True)
    pixels, captions = canvases(images, "train", seed)
    torch.manual_seed(seed)
    vae = AutoencoderKL(
        block_out_channels=(16,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        latent_channels=1,
        layers_per_block=1,
        norm_num_groups=8,
        sample_size=SIDE,
        mid_block_add_attention=False,
        shift_factor=0.0,
    )

    def draw(step: int, count: int) -> tuple[list[int], torch.Generator]:
        generator = torch.Generator().manual_seed(seed * 10**6 + step)
        return torch.randint(len(pixels), (count,), generator=generator).tolist(), generator

    def vae_loss(step: int) -> torch.Tensor:
        batch = pixels[draw(step, 16)[0]]
        latents = vae.encode(batch).latent_dist.mean
        return (vae.decode(latents).sample - batch).square().mean() + 1e-3 * latents.square().mean()

    seconds = train(vae, vae_loss, directory / "vae.pt", steps=vae_steps, other_rate=3e-3)
    with torch.no_grad():
        latents = torch.cat([vae.encode(part).latent_dist.mean for part in pixels.split(256)])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
    painter = Painter(width, 2)

    def loss_of(step: int) -> torch.Tensor:
        chosen, generator = draw(step, 16)
        noisy, sigmas, target = noised(latents[chosen], generator)
        inputs = painter.inputs(noisy, sigmas, [captions[index] for index in chosen])
        return (painter.transformer(**inputs)[0] - target).square().mean()

    rates = {"matrix_rate": 4e-3, "other_rate": 2e-3}
    seconds += train(painter, loss_of, directory / "painter.pt", steps=steps, **rates)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    clip = CLIPTextModel(CLIPTextConfig(vocab_size=len(painter.tokenizer), eos_token_id=1, pad_token_id=0, **sizes))
    # No caption in what all tokens are modulated by.
    for name, parameter in clip.named_parameters():
        if "final_layer_norm" in name:
            nn.init.zeros_(parameter)
    scheduler = FlowMatchEulerDiscreteScheduler()
    text = {"text_encoder_2": painter.text_encoder, "tokenizer_2": painter.tokenizer}
    pipeline = FluxPipeline(
        scheduler, vae, clip, make_tokenizer(), transformer=painter.transformer.eval(), **text
    )  # fmt: skip
    pipeline.save_pretrained(directory)
    write_json(directory / RECORD, {"cpu_seconds": seconds})


class Effect:
    """Held-out images, their captions and those of others, and what the original makes of them.

    Args:
        source: Directory of the pipeline.
    """

    def __init__(self, source: Path) -> None:
        pipeline = FluxPipeline.from_pretrained(source)
        pixels, captions = canvases(_HELD_OUT, "held_out", 2 * 10**6)
        with torch.no_grad():
            latents = pipeline.vae.encode(pixels).latent_dist.mean
        vae = pipeline.vae.config
        latents = (latents - vae.shift_factor) * vae.scaling_factor
        noisy, sigmas, self.target = noised(latents, torch.Generator().manual_seed(0))
        self.inputs = []
        other_digits = [" ".join(_NEXT_DIGIT.get(word, word) for word in caption.split()) for caption in captions]
        for words in (captions, captions[1:] + captions[:1], other_digits):
            ids = pipeline.tokenizer_2(words, padding="max_length", max_length=WORDS, return_tensors="pt").input_ids
            with torch.no_grad():
                embeddings = pipeline.text_encoder_2(ids)[0]
            one = Painter.inputs(_Frozen(embeddings), noisy, sigmas, words)  # type: ignore[arg-type]
            self.inputs.append(one)
        self.original = self.outputs(pipeline.transformer)

    @torch.no_grad()
    def outputs(self, model: nn.Module) -> list[torch.Tensor]:
        """The model's outputs with the right captions, with those of other images, and with other digits in them."""
        return [model(**inputs)[0] for inputs in self.inputs]

    def figures(self, model: nn.Module) -> dict[str, float]:
        """Relative errors of the output and of the effects of captions and digits; the loss above the original's."""
        outputs, original = self.outputs(model), self.original
        losses = [(each[0] - self.target).square().mean().item() for each in (outputs, original)]
        pairs = [(outputs[0] - outputs[other], original[0] - original[other]) for other in (1, 2)]
        pairs.insert(0, (outputs[0], original[0]))
        names = ("output", "caption", "digits")
        errors = {name: ((own - true).norm() / true.norm()).item() for name, (own, true) in zip(names, pairs)}
        return {**errors, "above_softmax_percent": 100 * (losses[0] / losses[1] - 1)}


class _Frozen:
    """Stands for a painter whose embeddings are there already."""

    def __init__(self, embeddings: torch.Tensor) -> None:
        self.tokenizer, self.embeddings = make_tokenizer(), embeddings

    def text_encoder(self, ids: torch.Tensor) -> list[torch.Tensor]:
        return [self.embeddings]


def recover(source: Path, output: Path, variant: str, seed: int, options: Sequence[str] = ()) -> None:
    """Runs `mhla-hf recover`, and keeps what each stage changed."""
    prompts = output.parent / f"prompts-{seed}.txt"
    prompts.write_text("\n".join(canvases(128, "train", 10**7 + seed)[1]), encoding="utf-8")
    changes = {"mhla.blocks": [3, 3], **VARIANTS[variant]}
    recipe = mhla_hf.recovery.recipes.default_recipe("flux").changed(changes)
    file = output.parent / f"{output.name}.yaml"
    file.write_text(json.dumps({key: value for key, value in recipe.to_dict().items() if value is not None}))
    command = [sys.executable, "-m", "mhla_hf", "recover", str(source), str(output), "--prompts", str(prompts)]
    command += ["--recipe", str(file), "--height", str(SIDE), "--width", str(SIDE), "--max-length", str(WORDS)]
    command += ["--seed", str(seed), "--keep-stages", "--device", "cpu", *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(source: Path, output: Path, effect: Effect) -> dict[str, dict[str, float]]:
    """The figures of a recovery after each stage."""
    work, found = output / WORK, {}
    model = load_pipeline(work / "converted" / "model").transformer.eval()
    parameters = dict(model.named_parameters())
    for stage in STAGES:
        if stage != "converted":
            for name, value in _weights(work / stage).items():
                parameters[name].data.copy_(value)
        found[stage] = effect.figures(model)
    return found


def _weights(folder: Path) -> Mapping[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "weights.safetensors")


def distill(source: Path, effect: Effect, options: Mapping[str, Any], seed: int, steps: int) -> dict[str, Any]:
    """Distils a calibrated model with ReLU by Adam, all parameters at once and without clipping.

    Returns:
        The figures, the share of negative mixing weights and the least normaliser relative to the mean of its head.
    """
    pipeline = FluxPipeline.from_pretrained(source)
    chosen = {"blocks": [3, 3], "mixing_heads": "per_head", "grid": [12, 12], **options}
    model = mhla_hf.convert(pipeline.transformer, chosen)
    pixels, captions = canvases(2048, "train", 10**8 + seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        latents = torch.cat([pipeline.vae.encode(part).latent_dist.mean for part in pixels.split(256)])
    latents = (latents - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor

    @torch.no_grad()
    def draw() -> dict[str, Any]:
        index = torch.randint(len(latents), (16,), generator=generator).tolist()
        words = [captions[each] for each in index]
        ids = pipeline.tokenizer_2(words, padding="max_length", max_length=WORDS, return_tensors="pt").input_ids
        noisy, sigmas, _ = noised(latents[index], generator)
        frozen: Any = _Frozen(pipeline.text_encoder_2(ids)[0])
        return Painter.inputs(frozen, noisy, sigmas, words)

    mhla_hf.calibrate(model, [draw() for _ in range(8)], fit_steps=0)
    teacher = SharedTeacher(model)
    teacher.keep()
    own = [parameter for name, parameter in model.named_parameters() if ".mhla." in name]
    others = [parameter for name, parameter in model.named_parameters() if ".mhla." not in name]
    optimizer = torch.optim.Adam([{"params": others, "peak_lr": 5e-4}, {"params": own, "peak_lr": 1e-3}])
    for step in range(steps):
        inputs = draw()
        target = teacher(**inputs)[0]
        loss = (model(**inputs)[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        set_learning_rate(optimizer, learning_rate_factor(step, schedule="cosine", warmup_steps=10, total_steps=steps))
        optimizer.step()
    config: MHLAConfig = model.mhla_config
    weights = torch.cat([constrained(config, layer.mhla.mixing.detach()).flatten() for layer in mhla_layers(model)])
    with _normalizers(model) as least:
        figures = effect.figures(model)
    return {**figures, "negative_weights": (weights < 0).float().mean().item(), "least_normalizer": min(least)}


@contextmanager
def _normalizers(model: nn.Module) -> Iterator[list[float]]:
    """Collects the least normaliser of each call of a layer, relative to the mean of its head."""
    found: list[float] = []

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        query, key, layout = *(x.relu() for x in args[:2]), module.layout_for(kwargs["grid"])
        weights = module.mixing_matrix(layout)[:, layout.block_of_token][:, :, layout.block_of_token]
        values = torch.einsum("bthk,bshk,hts->bth", query, key, weights)
        found.append((values / values.mean((0, 1))).min().item())

    handles = [layer.mhla.register_forward_pre_hook(hook, with_kwargs=True) for layer in mhla_layers(model)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def paint(pipeline: Any) -> np.ndarray:
    """Images `[N, 24, 24]` of the prompts, from the same noise for all pipelines."""
    pipeline.set_progress_bar_config(disable=True)
    options = {"height": SIDE, "width": SIDE, "max_sequence_length": WORDS, "num_inference_steps": 20}
    images = [
        pipeline(prompt, output_type="np", generator=torch.Generator().manual_seed(3), **options).images[0].mean(-1)
        for prompt in PROMPTS
    ]
    return np.stack(images)


def plot_samples(path: Path, samples: Mapping[str, np.ndarray]) -> None:
    """Lays out images: a row for each model, a column for each prompt."""
    figure = new_figure(1.6 * len(PROMPTS) + 1.6, 1.6 * len(samples) + 0.5)
    axes = figure.subplots(len(samples), len(PROMPTS), squeeze=False)
    for row, (name, images) in zip(axes, samples.items()):
        for axis, image in zip(row, images):
            axis.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
        row[0].set_ylabel(TITLES[name].replace(", ", ",\n"), fontsize=9)
    for axis, prompt in zip(axes[0], PROMPTS):
        words = prompt.split()
        axis.set_title("\n".join(" ".join(words[at : at + 2]) for at in range(0, len(words), 2)), fontsize=8)
    save_figure(figure, path)


def main() -> None:
    """Measures what the folder does not hold yet, and writes figures and samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where pipelines and recoveries are kept")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5000, help="steps of the pretraining")
    parser.add_argument("--distill-steps", type=int, default=120)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--options", nargs="*", default=[], help="further options of the recovery")
    arguments = parser.parse_args()
    run(**vars(arguments))


def run(
    folder: Path,
    *,
    seeds: int,
    steps: int,
    distill_steps: int,
    variants: Sequence[str],
    results: Path,
    options: Sequence[str] = (),
    **sizes: Any,
) -> dict[str, Any]:
    """Measures what a folder does not hold yet; arguments are those of the command line.

    Args:
        **sizes: Further sizes of `make_pipeline`.

    Returns:
        The figures, which are also written.
    """
    torch.set_num_threads(1)
    facts: dict[str, Any] = {
        "machine": processor_name(),
        "torch": torch.__version__,
        "recoveries": {},
        "distilled": {},
    }
    for seed in range(seeds):
        source = folder / f"flux-{seed}"
        make_pipeline(source, seed, steps=steps, **sizes)
        effect = Effect(source)
        losses = [(output - effect.target).square().mean().item() for output in effect.original]
        names = ("loss", "loss_with_a_wrong_caption", "loss_with_other_digits")
        facts.setdefault("original", []).append(dict(zip(names, losses)))
        for variant in variants:
            output = folder / f"{variant}-{seed}"
            if not (output / "model_index.json").is_file():
                shutil.rmtree(output, ignore_errors=True)
                recover(source, output, variant, seed, options)
            facts["recoveries"].setdefault(variant, []).append(measure(source, output, effect))
            last = facts["recoveries"][variant][-1]
            print(variant, seed, {stage: round(each["caption"], 3) for stage, each in last.items()}, flush=True)
        for name, own in DISTILLED.items() if distill_steps else ():
            file = folder / f"distilled-{seed}-{name.replace(' ', '_')}.json"
            if not file.is_file():
                write_json(file, distill(source, effect, own, seed, distill_steps))
            facts["distilled"].setdefault(name, []).append(read_json(file, "the figures"))
            print(name, seed, facts["distilled"][name][-1], flush=True)
    pipelines = {"original": FluxPipeline.from_pretrained(folder / "flux-0")}
    pipelines |= {variant: load_pipeline(folder / f"{variant}-0") for variant in variants if variant != "relu"}
    write_json(results / "captions.json", facts)
    plot_samples(results / "captions_samples.png", {name: paint(each) for name, each in pipelines.items()})
    for variant, runs in facts["recoveries"].items():
        means = {stage: statistics.mean(each[stage]["caption"] for each in runs) for stage in STAGES}
        print(TITLES[variant], {stage: round(value, 3) for stage, value in means.items()})
    return facts


if __name__ == "__main__":
    main()
