# SPDX-License-Identifier: Apache-2.0
"""The node that saves frames to ComfyUI's output folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.cli_args
import folder_paths
import numpy as np
import torch

from .messages import CATEGORY, one_line


class SaveFrames:
    """Save frames to ComfyUI's output folder: animated WebP, MP4, or one PNG per frame."""

    CATEGORY, FUNCTION = CATEGORY, "save"
    RETURN_TYPES: tuple[str, ...] = ()
    OUTPUT_NODE = True
    DESCRIPTION = "Saves a video as WebP or MP4, or every frame as PNG. WebP and PNG hold the workflow."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "frames": ("IMAGE",),
                "filename_prefix": ("STRING", {"default": "MHLA"}),
                "format": (["webp", "mp4", "png"],),
                "fps": ("FLOAT", {"default": 16.0, "min": 0.1, "max": 240.0, "step": 0.1}),
            },
            "hidden": {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO"},
        }

    @one_line
    def save(
        self,
        frames: torch.Tensor,
        filename_prefix: str,
        format: str,
        fps: float,
        prompt: Any = None,
        extra_pnginfo: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory(), frames.shape[2], frames.shape[1]
        )
        texts = {} if comfy.cli_args.args.disable_metadata else {"prompt": prompt, **(extra_pnginfo or {})}
        texts = {key: json.dumps(value) for key, value in texts.items() if value is not None}
        pixels = frames.float().clamp(0, 1).cpu().numpy()
        files = []
        for part in pixels[:, None] if format == "png" else [pixels]:
            file = Path(folder) / f"{name}_{counter:05}_.{format}"
            unfinished = file.with_name(f".{file.stem}.unfinished.{format}")
            try:
                WRITERS[format](unfinished, part, fps, texts)
                os.replace(unfinished, file)
            finally:
                unfinished.unlink(missing_ok=True)
            files.append({"filename": file.name, "subfolder": subfolder, "type": "output"})
            counter += 1
        return {"ui": {"images": files, **({} if format == "png" else {"animated": (True,)})}}


def write_png(file: Path, frames: np.ndarray, _: float, texts: dict[str, str]) -> None:
    from PIL.PngImagePlugin import PngInfo

    information = PngInfo()
    for key, text in texts.items():
        information.add_text(key, text)
    pictures(frames)[0].save(file, pnginfo=information)


def write_webp(file: Path, frames: np.ndarray, fps: float, texts: dict[str, str]) -> None:
    first, *others = pictures(frames)
    exif = first.getexif()
    # Where ComfyUI looks for them: the prompt in the tag of camera models, the workflow in that of their makers.
    for tag, (key, text) in zip((0x0110, 0x010F, 0x010E), texts.items()):
        exif[tag] = f"{key}:{text}"
    first.save(file, save_all=True, append_images=others, duration=round(1000 / fps), loop=0, quality=90, exif=exif)


def write_mp4(file: Path, frames: np.ndarray, fps: float, _: dict[str, str]) -> None:
    from diffusers.utils import export_to_video

    export_to_video(list(frames), str(file), fps=fps, macro_block_size=2)


def pictures(frames: np.ndarray) -> list[Any]:
    from PIL import Image

    return [Image.fromarray(frame) for frame in (frames * 255).round().astype(np.uint8)]


WRITERS: dict[str, Callable[[Path, np.ndarray, float, dict[str, str]], None]] = {
    "png": write_png,
    "webp": write_webp,
    "mp4": write_mp4,
}
