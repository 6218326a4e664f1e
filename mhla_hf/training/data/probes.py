# SPDX-License-Identifier: Apache-2.0
"""Probes of pipelines: inputs of their transformers while they make samples, to calibrate on."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn

from ...models.registry import is_mhla_class
from ...models.sizes import SampleSize
from ...utils.compat import forward_parameters
from ...utils.compat.diffusers import progress_bar_options, vae_factor
from ...utils.messages import check_count
from ..layers import Batch, mhla_layers, original_heads
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
                stack.enter_context(original_heads(mhla_layers(model)))
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


def pipeline_size(pipeline: Any, model: Any) -> SampleSize | None:
    """Return what turns the size of a pipeline's sample into a token grid; `None` where the pipeline does not say."""
    pixels = vae_factor(pipeline, "spatial")
    if pixels is None:
        return None
    return SampleSize((vae_factor(pipeline, "temporal") or 1, pixels), model.patch_sizes(model.config))


def sample_size(pipeline: Any, models: Mapping[str, nn.Module]) -> dict[str, int]:
    """Return height, width and number of frames for the token grid that the mixing weights were made for."""
    model: Any = next(iter(models.values()))
    grids = {layer.mhla.config.grid for layer in mhla_layers(model)}
    grid = (grids.pop() if len(grids) == 1 else None) or model.config_grid(model.config)
    size = pipeline_size(pipeline, model)
    return {} if grid is None or size is None else size.pixels(grid)


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
