# SPDX-License-Identifier: Apache-2.0
"""Probes of pipelines: inputs of their transformers while they make samples, to calibrate on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn

from ...models.directory import ModelDirectory
from ...models.registry import FAMILIES, family_for, is_mhla_class
from ...utils.compat import forward_parameters
from ...utils.compat.diffusers import progress_bar_options, vae_factor
from ...utils.files import read_json
from ...utils.messages import check_count
from ..matching.layers import Batch, mhla_layers, original_heads
from .order import stable_seed


DEFAULT_SAMPLES = 32
DEFAULT_STEPS = 8
PROMPTS = (
    "a person walks along a street in the rain",
    "waves break on a rocky coast at sunset",
    "a dog runs across a field of grass",
    "a close-up of a cup of coffee on a wooden table",
    "a city at night, seen from above",
    "a train crosses a bridge between mountains",
    "two children play with a ball on a beach",
    "a bowl of fruit beside an open window",
)
"""Default prompts."""
LEAST_SAMPLES, MOST_SAMPLES = 4, 2**16
"""Samples of a probe: one of four is held out, and all of them are kept in memory."""
_MOST_STEPS = 1000
_TEXT_TOKENS = 512
# Frames, and pixels of a side, that one latent stands for where no VAE tells; of SANA.
_COMPRESSION, _SANA_COMPRESSION = (4, 8), (1, 32)
# Entries of a patch's sides in the configuration of LTX's VAE, and their defaults.
_PATCHES = (("patch_size_t", 1), ("patch_size", 4))
# What configurations call the width of the text's embeddings; where they have several, the first counts.
_TEXT_WIDTHS = (
    "text_dim", "joint_attention_dim", "text_embed_dim", "caption_channels", "cap_feat_dim", "cross_attention_dim",
)  # fmt: skip


def mhla_components(pipeline: Any) -> dict[str, nn.Module]:
    """Return the MHLA models of a diffusers pipeline by name.

    Raises:
        ValueError: If there is none.
    """
    found = {
        name: component
        for name, component in pipeline.components.items()
        if isinstance(component, nn.Module) and is_mhla_class(type(component).__name__)
    }
    if not found:
        raise ValueError(f"This {type(pipeline).__name__} has no MHLA model: convert it first (mhla_hf.convert).")
    return found


def pipeline_batches(
    pipeline: Any,
    *,
    samples: int = DEFAULT_SAMPLES,
    prompts: Sequence[str] | None = None,
    steps: int = DEFAULT_STEPS,
    seed: int = 0,
    original: bool = True,
    **call_options: Any,
) -> dict[str, list[Batch]]:
    """Record the inputs of a pipeline's MHLA models while it makes samples.

    Random denoising steps of every sample are kept, so that all noise levels occur. Samples are not decoded if the
    pipeline can return latents.

    Args:
        pipeline: A diffusers pipeline from text, or from classes.
        samples: Calls of each model to keep.
        prompts: Prompts; by default neutral captions. Classes are drawn.
        steps: Denoising steps.
        seed: Seed of noise, classes and of the steps that are kept.
        original: Make the samples with the models' original attention; else with MHLA.
        **call_options: Other arguments of the pipeline's call, such as `height`, `width` and `num_frames`. By default
            the size that the mixing weights were made for, where the model's options or its configuration say it.

    Returns:
        Batches by component. Those of one sample are four places apart, so that they are held out together.

    Raises:
        ValueError: If the pipeline takes neither prompts nor classes, needs other inputs, or an argument is wrong.
    """
    check_count("samples", samples, LEAST_SAMPLES, MOST_SAMPLES)
    check_count("steps", steps, 1, _MOST_STEPS)
    models = mhla_components(pipeline)
    parameters = inspect.signature(type(pipeline).__call__).parameters
    subjects = _subjects(pipeline, parameters, prompts, samples, steps, seed)
    options: dict[str, Any] = {
        name: value for name, value in sample_size(pipeline, models).items() if name in parameters
    }
    options.update({name: value for name, value in call_options.items() if value is not None})
    if "output_type" in parameters:
        options.setdefault("output_type", "latent")
    if "use_resolution_binning" in parameters:
        options.setdefault("use_resolution_binning", False)
    # In perturbed layers of LTX-2 there is no attention to learn from.
    options = {**{name: 0.0 for name in ("stg_scale", "audio_stg_scale") if name in parameters}, **options}
    taken: dict[str, list[list[Batch]]] = {name: [] for name in models}
    bar = progress_bar_options(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    try:
        with ExitStack() as stack:
            for model in models.values() if original else ():
                stack.enter_context(original_heads(model, mhla_layers(model)))
            for number, subject in enumerate(subjects):
                generator = torch.Generator().manual_seed(stable_seed(seed, "probe", number))
                with _recorded(models) as calls, torch.no_grad():
                    pipeline(**subject, **options, num_inference_steps=steps, generator=generator)
                for name in models:
                    taken[name].append(calls[name])
    except TypeError as error:
        raise ValueError(
            f"{type(pipeline).__name__} makes no samples from prompts or classes alone ({error}): give it batches, or "
            "inspect it with samples=0."
        ) from error
    finally:
        pipeline.set_progress_bar_config(**bar)
    idle = [name for name, calls in taken.items() if not all(calls)]
    if idle:
        raise ValueError(f"{', '.join(idle)} is not called in {steps} denoising steps; take more of them (steps).")
    return {name: _drawn(calls, samples, seed) for name, calls in taken.items()}


def _subjects(
    pipeline: Any, parameters: Mapping[str, Any], prompts: Sequence[str] | None, samples: int, steps: int, seed: int
) -> list[dict[str, Any]]:
    """Choose the prompt or class of each sample: at least one per prompt, and enough for the requested calls."""
    if isinstance(prompts, str) or (prompts is not None and not prompts):
        raise ValueError(f"prompts must be a list of one prompt at least, got {prompts!r:.100}.")
    # At most half of the steps of a sample are kept; a multiple of four keeps held-out samples apart.
    count = max(LEAST_SAMPLES, -(-samples // max(1, steps // 2)), len(prompts or ()))
    count = -(-count // LEAST_SAMPLES) * LEAST_SAMPLES
    if "prompt" in parameters:
        given = list(prompts or PROMPTS)
        return [{"prompt": given[number % len(given)]} for number in range(count)]
    if prompts is not None or "class_labels" not in parameters:
        raise ValueError(f"{type(pipeline).__name__} makes no samples of prompts; leave prompts out, or give batches.")
    classes = pipeline.transformer.config.num_embeds_ada_norm
    generator = torch.Generator().manual_seed(stable_seed(seed, "classes"))
    return [{"class_labels": [label]} for label in torch.randint(classes, (count,), generator=generator).tolist()]


def sample_size(pipeline: Any, models: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return height, width and number of frames for the token grid that the mixing weights were made for."""
    model: Any = next(iter(models.values()))
    grids = {layer.mhla.config.grid for layer in mhla_layers(model)}
    grid = (grids.pop() if len(grids) == 1 else None) or model.config_grid(model.config)
    if grid is None or len(grid) < 2:
        return {}
    patch = model.patch_sizes(model.config)
    patches = (patch,) * len(grid) if isinstance(patch, int) else tuple(patch)
    factor = vae_factor(pipeline, "spatial") or getattr(pipeline, "vae_scale_factor", None)
    if factor is None:
        return {}
    height, width = (length * side * factor for length, side in zip(grid[-2:], patches[-2:]))
    size = {"height": height, "width": width}
    if len(grid) == 3:
        size["num_frames"] = (grid[0] * patches[0] - 1) * (vae_factor(pipeline, "temporal") or 1) + 1
    return size


@contextmanager
def _recorded(models: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Batch]]]:
    """Record the arguments of all calls of models within a context, on the CPU."""
    calls: dict[str, list[Batch]] = {name: [] for name in models}

    def keep(name: str, names: Sequence[str]) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = {**dict(zip(names, args)), **kwargs}
            # Samplers write into their latents.
            calls[name].append(recursively_apply(lambda value: value.detach().to("cpu", copy=True), arguments))

        return hook

    with ExitStack() as hooks:
        for name, model in models.items():
            names = list(forward_parameters(model))
            hooks.callback(model.register_forward_pre_hook(keep(name, names), with_kwargs=True).remove)
        yield calls


def _drawn(calls: Sequence[Sequence[Batch]], samples: int, seed: int) -> list[Batch]:
    """Pick random calls of every sample, those of one sample as far apart as there are samples."""
    # An expert that sees a part of the noise levels alone is not called for all of them.
    each = min(-(-samples // len(calls)), *map(len, calls))
    generator = torch.Generator().manual_seed(stable_seed(seed, "steps"))
    chosen = [torch.randperm(len(own), generator=generator)[:each].tolist() for own in calls]
    return [own[picks[turn]] for turn in range(each) for own, picks in zip(calls, chosen)]


def sample_grid(directory: ModelDirectory, model: Any, **given: int) -> tuple[int, ...]:
    """Return the tokens along each axis of a sample of a diffusion transformer; what is not given is the model's own.

    Args:
        directory: Its configurations, supported or not.
        model: The model, for instance on the meta device.
        **given: `tokens`, or `height` and `width` in pixels and `num_frames`.

    Raises:
        ValueError: If the model does not have what is given, or nothing tells the size.
    """
    patch = _patch(model)
    if tokens := given.get("tokens"):
        side = next(side for side in range(math.isqrt(tokens), 0, -1) if tokens % side == 0)
        return (*(1,) * (len(patch) - 2), side, tokens // side)
    if "num_frames" in given and len(patch) == 2:
        raise ValueError(f"num_frames is for videos, and {directory.class_name} makes images.")
    frames, pixels = _compression(directory)
    latents = [given[name] // pixels if name in given else None for name in ("height", "width")]
    if len(patch) == 3:
        latents.insert(0, (given["num_frames"] - 1) // frames + 1 if "num_frames" in given else None)
    own = _own_grid(directory, patch) if None in latents else patch
    found = tuple(size if side is None else side // each for size, side, each in zip(own, latents, patch))
    if 0 in found:
        raise ValueError(f"height must be at least {pixels * patch[-1]}, the side of one token, as must width.")
    return found


def _own_grid(directory: ModelDirectory, patch: tuple[int, ...]) -> tuple[int, ...]:
    if directory.class_name in FAMILIES:
        mhla_class = family_for(directory.class_name).load_class()
        return mhla_class.reference_grid(directory.config, directory.vae_compression)
    size = directory.config.get("sample_size")
    if len(patch) == 3 or not isinstance(size, int):
        others = "width and num_frames" if len(patch) == 3 else "width"
        raise ValueError(
            f"height must be given with {others}, or tokens: the configuration does not tell the size of samples."
        )
    return (size // patch[0], size // patch[1])


def _patch(model: Any) -> tuple[int, ...]:
    """Latents that make one token, along each axis."""
    config, patch = model.config, model.config.get("patch_size") or 1
    if packs_latents(model):
        return (2, 2)
    if isinstance(patch, (tuple, list)):
        return tuple(patch)
    is_video = "patch_size_t" in config or "3D" in type(model).__name__
    return (config.get("patch_size_t") or 1, patch, patch) if is_video else (patch, patch)


def _compression(directory: ModelDirectory) -> tuple[int, int]:
    """Frames, and pixels of a side, that one latent stands for."""
    found, path, name = directory.vae_compression, directory.root / "vae" / "config.json", directory.class_name
    if found is None and directory.index is not None and path.is_file():
        vae = read_json(path, "the VAE's configuration")
        stages = vae.get("encoder_block_out_channels") or vae.get("block_out_channels")
        found = (1, 2 ** (len(stages) - 1)) if isinstance(stages, list) and stages else None
        if isinstance(scaling := vae.get("spatio_temporal_scaling"), list):
            # As the VAEs of LTX compute it where their configurations do not have it.
            found = tuple((vae.get(each) or least) * 2 ** sum(map(bool, scaling)) for each, least in _PATCHES)
    if found is None and "3D" in name and name in FAMILIES:
        mhla_class = family_for(name).load_class()
        frames, height, _ = mhla_class.video_size
        latents = [
            size * side for size, side in zip(mhla_class.default_grid, mhla_class.patch_sizes(directory.config))
        ]
        found = ((frames - 1) // (latents[0] - 1), height // latents[1])
    return found or (_SANA_COMPRESSION if name == "SanaTransformer2DModel" else _COMPRESSION)


def inputs_at(model: Any, grid: Sequence[int], dtype: torch.dtype, device: Any, text: int = 0) -> dict[str, Any]:
    """Return random arguments of a diffusion transformer for a token grid; see [`diffusion_inputs`].

    Args:
        model: The model.
        grid: Tokens along each axis.
        dtype: dtype of the arguments.
        device: Their device.
        text: Tokens of the text; 0 for 512, or as many as the configuration says.
    """
    text = text or model.config.get("max_text_seq_length") or _TEXT_TOKENS
    latents = [size * side for size, side in zip(grid, _patch(model))]
    # As many queries as keys would count as self-attention.
    return diffusion_inputs(model, latents, dtype, device, text=text - (text == math.prod(grid)))


def packs_latents(model: Any) -> bool:
    """Return whether a diffusion transformer of any class takes latents that its pipeline made a sequence of."""
    taken = inspect.signature(model.forward).parameters
    return not taken.keys().isdisjoint(("img_ids", "img_shapes"))


def diffusion_inputs(
    model: Any,
    latents: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    text: int,
    batch: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """Random arguments of the `forward` of a diffusion transformer, by the names that diffusers gives them.

    Args:
        model: A model of diffusers, supported or not; its configuration tells the widths.
        latents: Size of the latents, channels left out. Those of a model that [`packs_latents`] are of 2 × 2.
        dtype: dtype of all but labels and masks.
        device: Their device. What a model asks for its values is on the CPU in place of the meta device.
        text: Tokens of the text.
        batch: B.
        seed: Seed of the numbers, ignored on the meta device.
    """
    config, taken = model.config, inspect.signature(model.forward).parameters
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
    random = partial(torch.randn, generator=generator, device=device, dtype=dtype)
    grid = tuple(latents)
    if packs_latents(model):
        grid = (*grid[:-2], grid[-2] // 2, grid[-1] // 2)
    if packs_latents(model) or {"num_frames", "height"} <= taken.keys():
        hidden_states = random(batch, math.prod(grid), config.in_channels)
    else:
        hidden_states = random(batch, config.in_channels, *grid)
    if type(model).__name__.startswith("CogVideoX"):
        hidden_states = hidden_states.transpose(1, 2)
    width = next((config[name] for name in _TEXT_WIDTHS if config.get(name)), 0)
    axes = len(config.get("axes_dims_rope") or ())
    known: dict[str, Any] = {
        next(iter(taken)): hidden_states,
        "timestep": torch.full((batch,), 500.0, device=device),
        "guidance": random(batch) if config.get("guidance_embeds") else None,
        "pooled_projections": random(batch, config.get("pooled_projection_dim") or 0),
        "img_ids": random(math.prod(grid), axes),
        "txt_ids": random(text, axes),
        "img_shapes": [[(1, *grid)]] * batch,
        # Values of `img_ids` tell the grid, and there are none on the meta device.
        "joint_attention_kwargs": {"grid": grid} if "img_ids" in taken and hasattr(model, "mhla_config") else None,
        "num_frames": grid[0],
        "height": grid[-2],
        "width": grid[-1],
    }
    if "class_labels" in taken and config.get("num_embeds_ada_norm"):
        known["class_labels"] = torch.randint(config.num_embeds_ada_norm, (batch,), generator=generator, device=device)
    elif "encoder_hidden_states" in taken:
        known["encoder_hidden_states"] = random(batch, text, width)
        if getattr(taken.get("encoder_attention_mask"), "default", None) is inspect.Parameter.empty:
            known["encoder_attention_mask"] = torch.ones(batch, text, dtype=torch.long, device=device)
    if "image_embeds" in taken and config.get("text_embed_2_dim"):
        # As pipelines from text call HunyuanVideo-1.5, which sorts its text by masks: glyphs, and no image.
        kept = torch.device("cpu") if device.type == "meta" else device
        known["encoder_hidden_states_2"] = random(batch, 256, config.text_embed_2_dim)
        known["encoder_attention_mask"] = torch.ones(batch, text, dtype=torch.long, device=kept)
        known["encoder_attention_mask_2"] = torch.ones(batch, 256, dtype=torch.long, device=kept)
        known["image_embeds"] = torch.zeros(batch, 729, config.image_embed_dim, dtype=dtype, device=kept)
    if "control_hidden_states" in taken:
        known["control_hidden_states"] = random(batch, config.vace_in_channels, *grid)
    if "pose_hidden_states" in taken:
        # The first latent frame is that of the reference image; the others stand for four frames each.
        frames, side = grid[0], config.motion_encoder_size
        known["pose_hidden_states"] = random(batch, config.latent_channels, frames - 1, *grid[1:])
        known["face_pixel_values"] = random(batch, 3, 4 * frames - 7, side, side)
        known["encoder_hidden_states_image"] = random(batch, 257, config.image_dim)
    if "audio_hidden_states" in taken:
        # 25 latents of audio for a second of 24 frames.
        sound = round(25 * (8 * grid[0] - 7) / 24)
        known |= {"audio_hidden_states": random(batch, sound, config.audio_in_channels), "audio_num_frames": sound}
        known["audio_encoder_hidden_states"] = random(batch, text, width)
    if getattr(model, "use_additional_conditions", False):
        known["added_cond_kwargs"] = {"resolution": random(batch, 2), "aspect_ratio": random(batch, 1)}
    return {name: value for name, value in known.items() if name in taken and value is not None}
