# SPDX-License-Identifier: Apache-2.0
"""The demo from end to end: recover three copies of a pipeline, generate, compare, report.

Encoded videos are kept, and `recover` resumes what it has begun, so a killed demo goes on where it stopped.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from safetensors.torch import load_file, save_file

from ..analysis import mixing_figure, mixing_summary, reference_layout
from ..families.objectives import encode_media
from ..hub import CardText, write_card
from ..models.directory import ModelDirectory
from ..recovery.recover import recover
from ..recovery.report import TITLES as STATES
from ..recovery.report import kept_figures
from ..training import objective_for
from ..training.data.batches import Latents
from ..training.data.digits import MovingDigits, stack_videos
from ..training.layers import mhla_layers
from ..training.processes import TrainingStopped
from ..utils.destinations import LOCK, RunFolder, differences, lock_output
from ..utils.figures import save_figure
from ..utils.files import atomic_file, read_json, write_json
from ..utils.locations import PIPELINE_INDEX
from ..utils.machine import machine_facts
from .config import BLOCKS, GRID, SIZE, TITLES, DemoConfig
from .long_videos import time_long_videos


VARIANTS = ("mhla", "mhla_window", "linear")
"""Copies to recover: MHLA, MHLA with a softmax window beside it, and linear attention (MHLA with a single block)."""

TEXT_LENGTH = 24
"""Tokens of the longest caption, four digits: 19 words and the end mark."""

_OPTIONS, _DATA, LONG_VIDEOS = "options.json", "data", "long_videos.png"
# Options in which a resumed demo may differ.
_FREE = ("output", "resume", "progress")
_DRAWS, _ENCODE_BATCH, _CHECKPOINT_EVERY = 2, 8, 50

_TEMPLATE = Path(__file__).parent / "templates" / "report.md.jinja"
_FRAMES_PER_SECOND, _SCALE = 8, 4

_SUMMARY = """A very small text-to-video pipeline, whose videos of 17 frames of 64×64 pixels show moving handwritten
digits. It demonstrates the conversion from softmax attention and has no other use.

Captions are "a *digit* moves *direction*", up to four of them joined by "and"; digits are `zero` to `nine`,
directions `left`, `right`, `up`, `down`. All data are videos made from the scans in scikit-learn's `load_digits`; the
softmax pipeline was trained on them as well."""


class DigitLatents:
    """Encoded videos in the form that `mhla_hf.training` reads.

    Args:
        latents: `[N, C, F, H, W]`, normalised.
        prompt_embeds: `[N, L, D]`, padded with zeros.
        null_prompt_embeds: `[L, D]`, of the empty caption.
    """

    def __init__(self, latents: torch.Tensor, prompt_embeds: torch.Tensor, null_prompt_embeds: torch.Tensor) -> None:
        self.latents, self.prompt_embeds = latents, prompt_embeds
        self.null_condition = {"prompt_embeds": null_prompt_embeds}

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"latents": self.latents[index], "prompt_embeds": self.prompt_embeds[index]}


def run_demo(config: DemoConfig) -> dict[str, Any]:
    """Run the demo, or what an earlier run did not finish.

    Copies are recovered in processes of their own: a script calls this under `if __name__ == "__main__":`.

    Returns:
        The report, as in `OUTPUT/report.json`.

    Raises:
        ValueError: If `output` holds a demo with other options or files of something else, another demo is running
            there, or the base is no Wan pipeline.
    """
    _hide_progress_bars()
    began = time.perf_counter()
    console = Console(stderr=True, quiet=not config.progress)
    with _claimed(config):
        with _shown(console, "Encode videos"):
            train, held_out = digit_latents(config)
        results = _recover_all(config, train, held_out, console)
        with _one_thread():
            videos, costs = {}, {}
            for name in ("softmax", *VARIANTS):
                with _shown(console, f"Generate with {name}"):
                    folder = config.base_directory if name == "softmax" else config.directory / name
                    videos[name], costs[name] = _generate(config, folder)
            with _shown(console, "Time longer videos"):
                long_videos = _long_videos(config)
            with _shown(console, "Write the report"):
                return write_outputs(config, videos, results, costs, long_videos, time.perf_counter() - began)


def _hide_progress_bars() -> None:
    """Hide those of loading models."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread, as recoveries do, so that CPU seconds are those of an idle machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def digit_latents(config: DemoConfig) -> tuple[DigitLatents, DigitLatents]:
    """Encode training and held-out videos with the base pipeline, or read those of an earlier run."""
    from diffusers import WanPipeline

    pipeline, sets = None, []
    for split, count in (("train", config.train_videos), ("held_out", config.held_out_videos)):
        path = config.directory / _DATA / f"{split}.safetensors"
        if not path.is_file():
            base = config.base_directory
            pipeline = pipeline or WanPipeline.from_pretrained(base, transformer=None, use_safetensors=True)
            # Not the seed of the pretraining: the same scans in other videos.
            dataset = MovingDigits(split, count, seed=1000 + config.seed)
            captions = [dataset[index].caption for index in range(count)]
            with torch.no_grad():
                prompts, null = pipeline.encode_prompt(captions, max_sequence_length=TEXT_LENGTH)
            latents = encode_moving_digits(pipeline.vae, dataset, 0, count)
            tensors = {"latents": latents, "prompt_embeds": prompts.float(), "null_prompt_embeds": null[0].float()}
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as temporary:
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
        sets.append(DigitLatents(**load_file(path)))
    return sets[0], sets[1]


def encode_moving_digits(vae: Any, dataset: MovingDigits, start: int, stop: int) -> torch.Tensor:
    """Encode videos `start` to `stop` (exclusive) of a data set.

    Returns:
        Latents `[stop - start, C, F, H, W]` on the CPU, normalised.
    """
    threads = torch.get_num_threads()
    workers = min(threads, 8) if vae.device.type == "cpu" else 1

    def encode(first: int) -> torch.Tensor:
        videos, _ = stack_videos(dataset, first, min(first + _ENCODE_BATCH, stop))
        # A copy, since the VAE caches the frames that it has seen.
        return encode_media(copy.deepcopy(vae), videos).cpu()

    # Small convolutions gain little from several threads each, but several batches at a time keep all cores busy.
    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        parts = list(pool.map(encode, range(start, stop, _ENCODE_BATCH)))
    torch.set_num_threads(threads)
    return torch.cat(parts)


def _recover_all(
    config: DemoConfig, train: DigitLatents, held_out: DigitLatents, console: Console
) -> dict[str, dict[str, Any]]:
    """Recover all copies, one process for each core; returns the reports by variant."""
    # Layers this small gain little from several threads. Where other programs keep the cores busy, each of thousands
    # of short operations would wait, spinning, for a thread that is not running.
    workers, start = min(len(VARIANTS), os.cpu_count() or 1), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, start, _prepare_worker) as pool:
        futures = {name: pool.submit(_recover_in_worker, config, name, train, held_out) for name in VARIANTS}
        results = {}
        try:
            for name, future in futures.items():
                with _shown(console, f"Recover {name}"):
                    results[name] = future.result()
        except BaseException as error:
            pool.shutdown(cancel_futures=True)
            errors = [future.exception() for future in futures.values() if not future.cancelled()]
            # What was saved, and how to go on.
            stops = [each for each in errors if isinstance(each, TrainingStopped)]
            if stops and isinstance(error, KeyboardInterrupt):
                raise stops[0] from None
            raise
    return results


def _recover_in_worker(*arguments: Any) -> dict[str, Any]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return recover_variant(*arguments)
    finally:
        signal.signal(signal.SIGINT, before)


def _prepare_worker() -> None:
    """Compute on one thread, and end with the process that started this one, even if that is killed."""
    _hide_progress_bars()
    torch.set_num_threads(1)
    # An idle worker ignores Ctrl-C, which is for those at work and for the process that waits for them.
    signal.signal(signal.SIGINT, lambda *_: None)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def recover_variant(
    config: DemoConfig,
    variant: str,
    train: DigitLatents,
    held_out: DigitLatents,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Recover a copy of the base into `OUTPUT/VARIANT`, unless that is done, and return the report of its recovery.

    Args:
        config: Options of the demo.
        variant: One of [`VARIANTS`].
        train: Videos to train on.
        held_out: Videos to measure with.
        changes: Values of the recipe in place of the variant's, by their path.
    """
    base = config.base_directory

    def data(model: torch.nn.Module) -> Latents:
        return Latents(train, objective_for(model, base), model, held_out, config.seed, draws=_DRAWS)

    blocks = (1, 1, 1) if variant == "linear" else BLOCKS
    recipe: dict[str, Any] = {"mhla.grid": list(GRID), "mhla.blocks": list(blocks)}
    # Blocks grow with the video: so small ones, many times as many in a long one, would have to be mixed in pairs.
    recipe["mhla.resize"] = "blocks"
    names = {"match": "match", "blocks": "blockwise", "distill": "distill"}
    steps = {f"{name}.steps": getattr(config, f"{option}_steps") for option, name in names.items()}
    recipe |= {name: number for name, number in steps.items() if number is not None}
    # A window of neighbours in the frame, and of the same place in all frames.
    options: dict[str, Any] = {
        "window": "cross" if variant == "mhla_window" else None,
        "layers": config.layers,
        "seed": config.seed,
    }
    fixed: dict[str, Any] = {"resume": True, "device": "cpu", "save_every": _CHECKPOINT_EVERY, "progress": False}
    recipe |= changes or {}
    return recover(base, config.directory / variant, data, changes=recipe, **options, **fixed).to_dict()


def _generate(config: DemoConfig, directory: Path) -> tuple[np.ndarray, dict[str, float]]:
    """Videos `[prompts, F, H, W, 3]` uint8 of a pipeline, the CPU seconds of their generation, and its parameters."""
    # Plain diffusers, as a user of the converted pipeline would load it.
    from diffusers import DiffusionPipeline

    pipeline = DiffusionPipeline.from_pretrained(directory, use_safetensors=True)
    pipeline.set_progress_bar_config(disable=True)
    # One generator per caption: its noise does not depend on how many captions there are.
    seeds = [config.seed * 1000 + number for number in range(len(config.prompts))]
    options = {"num_inference_steps": config.inference_steps, "guidance_scale": config.guidance, **SIZE}
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    began = time.process_time()
    frames = pipeline(list(config.prompts), generator=generators, max_sequence_length=32, **options).frames
    cost = {"generation_seconds": time.process_time() - began}
    cost["parameters"] = sum(parameter.numel() for parameter in pipeline.transformer.parameters())
    return np.rint(np.asarray(frames) * 255.0).clip(0, 255).astype(np.uint8), cost


def _long_videos(config: DemoConfig) -> dict[str, Any]:
    """Time longer videos, or read what an earlier run measured."""
    record, picture = config.directory / _DATA / "long_videos.json", config.directory / LONG_VIDEOS
    if record.is_file() and picture.is_file():
        return read_json(record, "the times of longer videos")
    report = time_long_videos(config, picture)
    write_json(record, report)
    return report


@contextmanager
def _claimed(config: DemoConfig) -> Iterator[None]:
    """A context in which this demo alone writes to its output, which is empty or holds a demo with its options."""
    output, options = config.directory, config.to_dict()
    if not (config.base_directory / PIPELINE_INDEX).is_file():
        raise ValueError(f"original={str(config.base_directory)!r} is not the directory of a pipeline.")
    with lock_output(output):
        folder = RunFolder(output, _OPTIONS)
        before = folder.identity()
        # Other programs may call a file like this, too.
        is_demo = before.keys() == options.keys()
        if is_demo and not config.resume:
            for name in (_DATA, *VARIANTS):
                shutil.rmtree(output / name, ignore_errors=True)
        elif is_demo:
            if changed := differences(before, options | {name: before[name] for name in _FREE}):
                raise ValueError(
                    f"{output} holds a demo with {changed}; start again with --no-resume or choose another directory"
                )
        elif any(entry.name != LOCK and not entry.name.startswith(".tmp-") for entry in output.iterdir()):
            raise ValueError(f"{output} is not empty and no output of a demo; choose another directory")
        write_json(folder.record, options)
        yield


@contextmanager
def _shown(console: Console, title: str) -> Iterator[None]:
    """Show a spinner while the block runs, then a line with its seconds."""
    began = time.perf_counter()
    with console.status(title):
        yield
    console.print(f"{title}: {time.perf_counter() - began:.1f} s", highlight=False)


def write_outputs(
    config: DemoConfig,
    videos: Mapping[str, np.ndarray],
    results: Mapping[str, dict[str, Any]],
    costs: Mapping[str, dict[str, float]],
    long_videos: Mapping[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """Write pictures, report and model card into the output directory.

    Args:
        config: Options of the demo.
        videos: `[prompts, F, H, W, 3]` uint8 by model.
        results: Reports of the recoveries by variant.
        costs: CPU seconds to generate the videos and number of parameters, by model.
        long_videos: Times of longer videos.
        seconds: Seconds of this run of the demo.

    Returns:
        The report, as in `report.json`.
    """
    output = config.directory
    variants = {
        name: {
            "held_out": {stage: figures for stage, figures in kept_figures(result).items() if stage != "softmax"},
            "discarded": result.get("discarded", []),
            "cpu_seconds": {stage: taken["cpu_seconds"] for stage, taken in result["seconds"].items()},
            **costs[name],
        }
        for name, result in results.items()
    }
    report = {
        "seconds": seconds,
        "options": config.to_dict(),
        "recipe": results["mhla"]["recipe"],
        "softmax": {"held_out_loss": results["mhla"]["figures"]["softmax"]["loss"], **costs["softmax"]},
        "variants": variants,
        "long_videos": long_videos,
        "machine": machine_facts(torch.device("cpu")),
    }
    _plot_mixing(output / "mixing.png", output / "mhla")
    frames = side_by_side(videos, config.prompts)
    for path in (output / "side_by_side.gif", output / "mhla" / "sample.gif"):
        _write_gif(path, frames)
    card = CardText(
        name="Moving digits, Wan with MHLA",
        summary=_SUMMARY,
        prompt=config.prompts[0],
        arguments={**SIZE, "num_inference_steps": config.inference_steps, "guidance_scale": config.guidance},
        license="apache-2.0",
    )
    write_card(output / "mhla", text=card, overwrite=True)
    template = jinja2.Template(_TEMPLATE.read_text(encoding="utf-8"), keep_trailing_newline=True)
    with atomic_file(output / "report.md") as temporary:
        stages = stage_titles(report)
        text = template.render(report, stages=stages, titles=TITLES, layers=config.layers)
        temporary.write_text(text, encoding="utf-8")
    write_json(output / "report.json", report)
    return report


def stage_titles(report: Mapping[str, Any]) -> dict[str, str]:
    """Titles of the stages that the copies of a demo went through."""
    return {stage: STATES[stage] for stage in report["variants"]["mhla"]["held_out"]}


def side_by_side(videos: Mapping[str, np.ndarray], prompts: Sequence[str]) -> list[Image.Image]:
    """Frames with all videos and labels: a row for each caption, a column for each model.

    Args:
        videos: `[prompts, F, H, W, 3]` uint8 by model.
        prompts: The captions.
    """
    count, length, height, width, _ = next(iter(videos.values())).shape
    cell, gap, bar = (width * _SCALE, height * _SCALE), 16, 32
    font = ImageFont.load_default(size=18)
    size = (len(videos) * (cell[0] + gap) + gap, count * (cell[1] + bar) + bar + gap)
    frames = []
    for frame in range(length):
        canvas = Image.new("RGB", size, (38, 38, 42))
        draw = ImageDraw.Draw(canvas)
        for column, (name, video) in enumerate(videos.items()):
            left = gap + column * (cell[0] + gap)
            draw.text((left + cell[0] / 2, bar / 2), TITLES[name], "white", font, anchor="mm")
            for row in range(count):
                image = Image.fromarray(video[row, frame]).resize(cell, Image.Resampling.BICUBIC)
                canvas.paste(image, (left, bar + row * (cell[1] + bar)))
        for row, prompt in enumerate(prompts):
            middle = bar + row * (cell[1] + bar) + cell[1] + bar / 2
            draw.text((size[0] / 2, middle), prompt, (200, 200, 205), font, anchor="mm")
        frames.append(canvas)
    return frames


def _write_gif(path: Path, frames: Sequence[Image.Image]) -> None:
    from diffusers.utils import export_to_gif

    # One palette for all frames: with separate ones the background flickers.
    palette = frames[len(frames) // 2].quantize(128)
    images = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    with atomic_file(path) as temporary:
        export_to_gif(images, str(temporary), fps=_FRAMES_PER_SECOND)


def _plot_mixing(path: Path, pipeline: Path) -> None:
    layers = mhla_layers(ModelDirectory.read(pipeline).load())
    matrices: Any = {layer.name.split(".")[1]: mixing_summary(layer.mhla).matrix for layer in layers}
    save_figure(mixing_figure(matrices, reference_layout(layers[0].mhla)), path)
