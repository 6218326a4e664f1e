# SPDX-License-Identifier: Apache-2.0
"""Nodes that load a pipeline from a directory or the Hub, and generate an image or a video with it.

mhla_hf and diffusers are imported when a node runs, so that ComfyUI starts quickly and shows a missing package on the
node that needs it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.utils
import folder_paths
import numpy as np
import torch

from .messages import CATEGORY, one_line


PIPELINE = "MHLA_PIPELINE"
PIPELINES = ("WanPipeline", "WanImageToVideoPipeline", "SanaPipeline", "SanaSprintPipeline", "SanaVideoPipeline")
TYPED = "(path below)"
INDEX = "model_index.json"
DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MAX_SIZE = 8192
MAX_FRAMES = 4097


def pipeline_directories() -> dict[str, Path]:
    """Pipelines in ComfyUI's folders `models/diffusers`, by their names there: `name` or `owner/name`."""
    found: dict[str, Path] = {}
    for folder in map(Path, folder_paths.get_folder_paths("diffusers")):
        for index in sorted([*folder.glob(f"*/{INDEX}"), *folder.glob(f"*/*/{INDEX}")]):
            found.setdefault(index.parent.relative_to(folder).as_posix(), index.parent)
    return found


class LoadPipeline:
    """Load a converted Wan or SANA pipeline after checking its directory."""

    CATEGORY, FUNCTION = CATEGORY, "load"
    RETURN_TYPES, RETURN_NAMES = (PIPELINE,), ("pipeline",)
    DESCRIPTION = "Loads a Wan or SANA pipeline of diffusers that was converted to MHLA."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": (
                    [*pipeline_directories(), TYPED],
                    {"tooltip": f"A pipeline in models/diffusers, or {TYPED}."},
                ),
                "path": ("STRING", {"default": "", "tooltip": f"With {TYPED}: a directory, or a Hub id owner/name."}),
                "dtype": (
                    list(DTYPES),
                    {"tooltip": "auto: bfloat16 on a GPU that has it, else float32. Wan's autoencoder stays float32."},
                ),
                "device": (["auto", "cpu"], {"tooltip": "auto: the device that ComfyUI uses."}),
                "offload": (
                    ["none", "model"],
                    {"tooltip": "none: all parts on the GPU. model: each only while it runs, which is slower."},
                ),
            }
        }

    @classmethod
    def IS_CHANGED(cls, model: str, path: str, **_: Any) -> str:
        """Names, sizes and times of the files: ComfyUI reloads the pipeline only when they change."""
        directory = pipeline_directories().get(model, Path(path.strip()).expanduser())
        return repr(sorted(file_states(directory))) if (directory / INDEX).is_file() else ""

    @one_line
    def load(self, model: str, path: str, dtype: str, device: str, offload: str) -> tuple[Any]:
        from mhla_hf import load_pipeline
        from mhla_hf.hub.checks import check_directory

        place = torch.device("cpu") if device == "cpu" else comfy.model_management.get_torch_device()
        directory = find_directory(model, path)
        errors = [problem for problem in check_directory(directory, values=False) if problem.level == "error"]
        if errors:
            raise ValueError(
                f"{directory.name} cannot be loaded: {errors[0]} (`mhla-hf doctor {directory}` lists all problems.)"
            )
        if not (directory / INDEX).is_file():
            raise ValueError(f"{directory.name} has no {INDEX}: it is not the directory of a pipeline.")
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        if index["_class_name"] not in PIPELINES:
            raise ValueError(f"{directory.name} is a {index['_class_name']}; these nodes run {', '.join(PIPELINES)}.")
        types: dict[str, torch.dtype] = {"default": DTYPES[dtype] or automatic_dtype(place)}
        if index["vae"][1] == "AutoencoderKLWan":
            types["vae"] = torch.float32
        make_room(place)
        pipeline = load_pipeline(directory, attn_implementation=None, torch_dtype=types)
        if offload == "model":
            pipeline.enable_model_cpu_offload(device=place)
        else:
            pipeline.to(place)
        return (pipeline,)


class Sample:
    """Generate an image or the frames of a video."""

    CATEGORY, FUNCTION = CATEGORY, "sample"
    RETURN_TYPES, RETURN_NAMES = ("IMAGE",), ("frames",)
    DESCRIPTION = "Generates an image or a video. 0 stands for the pipeline's own default."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        size = {"default": 0, "min": 0, "max": MAX_SIZE, "step": 16, "tooltip": "0: the pipeline's default."}
        return {
            "required": {
                "pipeline": (PIPELINE,),
                "prompt": ("STRING", {"multiline": True, "default": ""}),
                "negative_prompt": ("STRING", {"multiline": True, "default": ""}),
                "seed": ("INT", {"default": 0, "min": 0, "max": 2**64 - 1, "control_after_generate": True}),
                "steps": ("INT", {"default": 0, "min": 0, "max": 1000, "tooltip": "0: the pipeline's default."}),
                "guidance": ("FLOAT", {"default": 5.0, "min": 0.0, "max": 100.0, "step": 0.1}),
                "width": ("INT", size),
                "height": ("INT", size),
                "frames": (
                    "INT",
                    {
                        "default": 0,
                        "min": 0,
                        "max": MAX_FRAMES,
                        "tooltip": "Of videos: a multiple of 4, and one more. 0: the pipeline's default.",
                    },
                ),
            },
            "optional": {"image": ("IMAGE", {"tooltip": "First frame, for image-to-video pipelines."})},
        }

    @one_line
    def sample(
        self,
        pipeline: Any,
        prompt: str,
        negative_prompt: str,
        seed: int,
        steps: int,
        guidance: float,
        width: int,
        height: int,
        frames: int,
        image: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor]:
        parameters = inspect.signature(pipeline.__call__).parameters
        steps = steps or parameters["num_inference_steps"].default
        options: dict[str, Any] = {"prompt": prompt, "num_inference_steps": steps, "guidance_scale": guidance}
        options.update({name: value for name, value in (("width", width), ("height", height)) if value})
        options.update(optional_inputs(pipeline, parameters, negative_prompt, frames, image))
        if "intermediate_timesteps" in parameters and steps != 2:
            # SANA-Sprint's default is for two steps alone.
            options["intermediate_timesteps"] = None
        check_positions(pipeline, options)
        progress = comfy.utils.ProgressBar(steps)

        def after_step(_: Any, step: int, *unused: Any) -> dict[str, Any]:
            progress.update_absolute(step + 1, steps)
            comfy.model_management.throw_exception_if_processing_interrupted()
            return {}

        make_room(pipeline._execution_device)
        try:
            output = pipeline(
                **options,
                generator=torch.Generator("cpu").manual_seed(seed),
                callback_on_step_end=after_step,
                output_type="np",
            )
        except BaseException:
            # Move offloaded parts back to the CPU, also after an interruption.
            pipeline.maybe_free_model_hooks()
            raise
        result = torch.from_numpy(np.asarray(output.frames[0] if hasattr(output, "frames") else output.images))
        if not torch.isfinite(result).all():
            raise ValueError("The pipeline made NaN or infinite pixels: load it with dtype bfloat16 or float32.")
        return (result.float().clamp(0, 1),)


def file_states(directory: Path) -> Iterator[tuple[str, int, int]]:
    for file in directory.rglob("*"):
        if file.is_file():
            state = file.stat()
            yield file.relative_to(directory).as_posix(), state.st_size, state.st_mtime_ns


def find_directory(model: str, path: str) -> Path:
    """Return the chosen or typed directory; of a Hub repository, download the safetensors files first."""
    if model != TYPED:
        directory = pipeline_directories().get(model)
        if directory is None:
            raise ValueError(f"{model} is no longer in models/diffusers.")
        return directory
    path = path.strip()
    if not path:
        raise ValueError(f"model is {TYPED}: type a directory or a Hub id (owner/name) as path, or choose a model.")
    directory = Path(path).expanduser()
    if directory.is_dir():
        return directory
    if path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise ValueError(f"path {path} is neither a directory nor a Hub id (owner/name).")
    from diffusers import DiffusionPipeline

    return Path(DiffusionPipeline.download(path, use_safetensors=True))


def automatic_dtype(device: torch.device) -> torch.dtype:
    on_gpu = device.type != "cpu" and comfy.model_management.should_use_bf16(device)
    return torch.bfloat16 if on_gpu else torch.float32


def make_room(device: torch.device) -> None:
    """Make ComfyUI unload its own models, since it does not know how much memory a pipeline needs."""
    if device.type != "cpu":
        comfy.model_management.unload_all_models()
        comfy.model_management.soft_empty_cache()


def optional_inputs(
    pipeline: Any, parameters: Any, negative_prompt: str, frames: int, image: torch.Tensor | None
) -> dict[str, Any]:
    """Collect optional inputs of the pipeline; refuse those that it would ignore."""
    name = type(pipeline).__name__
    options: dict[str, Any] = {}
    if "negative_prompt" in parameters:
        options["negative_prompt"] = negative_prompt
    elif negative_prompt:
        raise ValueError(f"{name} takes no negative_prompt: leave it empty.")
    length = next((key for key in ("num_frames", "frames") if key in parameters), None)
    if length is None and frames > 1:
        raise ValueError(f"{name} makes single images: set frames to 0.")
    if length is not None and frames:
        step = pipeline.vae_scale_factor_temporal
        if frames % step != 1 % step:
            raise ValueError(
                f"frames={frames} is not a multiple of {step} and one more, such as {frames // step * step + 1}."
            )
        options[length] = frames
    if ("image" in parameters) != (image is not None):
        raise ValueError(f"{name} takes no image." if image is not None else f"{name} needs an image: connect one.")
    if image is not None:
        options["image"] = first_frame(image)
    return options


def first_frame(image: torch.Tensor) -> Any:
    """Make an RGB picture of an input of the node, on white where it is transparent."""
    from PIL import Image

    if image.ndim != 4 or len(image) != 1 or image.shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"image has the shape {tuple(image.shape)}: connect one picture [1, height, width, channels] of 1, 3 or 4 "
            "channels; ImageFromBatch takes one out of several."
        )
    pixels = image[0].float().clamp(0, 1).cpu()
    if pixels.shape[-1] == 4:
        alpha = pixels[..., 3:]
        pixels = pixels[..., :3] * alpha + (1 - alpha)
    return Image.fromarray((pixels.expand(-1, -1, 3).numpy() * 255).round().astype(np.uint8))


def check_positions(pipeline: Any, options: dict[str, Any]) -> None:
    """Refuse sizes beyond the transformer's table of positions, if it has one."""
    config = getattr(pipeline.transformer, "config", None)
    limit, patch = getattr(config, "rope_max_seq_len", None), getattr(config, "patch_size", None)
    if limit is None or not isinstance(patch, (list, tuple)):
        return
    scale = pipeline.vae_scale_factor_spatial
    for name, pixels in (("height", scale * patch[1]), ("width", scale * patch[2])):
        if options.get(name, 0) > limit * pixels:
            raise ValueError(f"{name}={options[name]} is more than this model has positions for, {limit * pixels}.")
