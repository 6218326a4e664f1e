# SPDX-License-Identifier: Apache-2.0
"""Video files: a folder of them with captions, read into tensors; and written from arrays.

Reading takes imageio-ffmpeg, writing imageio as well (the extra `video`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from diffusers.utils import export_to_gif, export_to_video
from PIL import Image

from ...utils.files import atomic_file
from ...utils.messages import import_extra
from ..config import Bucket
from .folders import DataSample, UnusableSampleError, captioned_samples
from .images import check_size, fit, nearest_bucket, on_background, to_tensor, unreadable


logger = logging.getLogger(__name__)

VIDEO_SUFFIXES = (".mp4", ".gif", ".webm", ".mov", ".mkv", ".avi")
# ffmpeg goes by the content: without this, a playlist of any name makes it read other files.
_FFMPEG_INPUT = ["-protocol_whitelist", "file", "-format_whitelist", "mov,matroska,webm,avi,gif"]
# Without this, ffmpeg fills in frames that it cannot decode from their neighbours.
_FFMPEG_INPUT += ["-xerror", "-err_detect", "explode"]
# "AlphaMode" of Matroska, set: ffmpeg leaves out what is transparent.
_ALPHA_APART, _HEADER_BYTES = b"\x53\xc0\x81\x01", 2**16
# Enlarges the shorter side of pixels, so that frames are as wide as they are shown.
_SQUARE = "scale=iw*max(sar\\,1):ih*max(1/sar\\,1)"


def captioned_videos(
    folder: Path, sizes: Sequence[Bucket], fps: float | None = None, background: str | None = None
) -> list[DataSample]:
    """List the captioned videos of a folder; see `folders.captioned_samples`. Unusable ones raise when read.

    Args:
        folder: The folder.
        sizes: Sizes to scale and crop to, and lengths to cut to, of which each video takes the nearest; videos that
            are too short for all of them are left out.
        fps: Frame rate to sample at; None takes the frames as they are.
        background: See `images.on_background`.

    Raises:
        ValueError: See `folders.captioned_samples`.
    """

    def load(path: Path) -> torch.Tensor:
        size = sizes[0] if len(sizes) == 1 else _choose_bucket(path, sizes, fps)
        if size is not None:
            frames = read_frames(path, size.num_frames, fps, (size.height, size.width), background)
            if len(frames) == size.num_frames:
                return to_tensor(frames)
        wanted = " or ".join(str(each.num_frames) for each in sizes)
        rate = f" at {fps:g} frames per second" if fps else ""
        raise UnusableSampleError(f"{path} has fewer frames that can be read than {wanted}{rate}")

    return captioned_samples(folder, VIDEO_SUFFIXES, "videos", load)


def read_frames(
    path: Path,
    num_frames: int,
    fps: float | None = None,
    size: tuple[int, int] | None = None,
    background: str | None = None,
) -> np.ndarray:
    """Read up to `num_frames` frames as they are shown, uint8 `[F, H, W, 3]`, one at a time.

    Args:
        path: The video file.
        num_frames: Frames to read, from the first.
        fps: Frame rate to sample at, by repeating or leaving out frames; None takes every frame.
        size: Height and width to scale and crop each frame to as it is read.
        background: See `images.on_background`.

    Raises:
        UnusableSampleError: If the file cannot be read as a video, or the size of its frames is out of bounds.
        ValueError: If imageio-ffmpeg is missing.
    """
    frames: list[np.ndarray] = []
    for frame in _frames(path, num_frames, fps):
        frame = on_background(frame, background)
        frames.append(np.asarray(frame) if size is None else fit(frame, *size))
    return np.stack(frames) if frames else np.zeros((0, 1, 1, 3), np.uint8)


def _frames(path: Path, num_frames: int, fps: float | None) -> Iterator[Image.Image]:
    """Decode the first frames of a file, in RGBA and with square pixels; errors as in `read_frames`."""
    options = ["-vf", _SQUARE, "-fps_mode", "passthrough"] if fps is None else ["-vf", f"fps={fps},{_SQUARE}"]
    with path.open("rb") as file:
        if _ALPHA_APART in file.read(_HEADER_BYTES):
            raise UnusableSampleError(f"{path} is VP8 or VP9 with transparency, which is not read: save it without")
    ffmpeg = import_extra("imageio_ffmpeg", "video files", "video")
    reader = ffmpeg.read_frames(
        str(path.absolute()), "rgba", bits_per_pixel=32, input_params=_FFMPEG_INPUT, output_params=options
    )
    try:
        found = next(reader)
        size = found["size"]
        check_size(path, *size)
        if fps and round(found["fps"]) not in (0, round(fps)):
            _say_rate(round(found["fps"]), fps)
        for data in islice(reader, num_frames):
            yield Image.frombytes("RGBA", size, data)
    except Exception as error:
        raise unreadable(path, "a video", error) from error
    finally:
        reader.close()


@lru_cache(maxsize=64)
def _say_rate(found: int, fps: float) -> None:
    """Say once for each rate that videos have another frame rate than is wanted."""
    logger.warning("data: some videos have %d frames per second; they are sampled at %g (fps).", found, fps)


def _choose_bucket(path: Path, buckets: Sequence[Bucket], fps: float | None) -> Bucket | None:
    """Choose the bucket of a video by reading it once: the frame counts of containers are unreliable."""
    count, height, width = 0, 0, 0
    for frame in _frames(path, max(bucket.num_frames for bucket in buckets), fps):
        count, height, width = count + 1, frame.height, frame.width
    return nearest_bucket(buckets, height, width, count) if count else None


def write_video(path: Path, frames: np.ndarray, fps: int = 8) -> Path:
    """Write frames as mp4, or as GIF where imageio-ffmpeg is missing.

    Args:
        path: File to write; its suffix follows the format.
        frames: uint8 `[F, H, W, 3]`.
        fps: Frames per second.

    Returns:
        The path written.
    """
    is_video = all(map(find_spec, ("imageio", "imageio_ffmpeg")))
    path = path.with_suffix(".mp4" if is_video else ".gif")
    images = [Image.fromarray(frame) for frame in frames]
    with atomic_file(path) as temporary:
        if is_video:
            export_to_video(images, str(temporary), fps, quality=8, macro_block_size=1)
        else:
            export_to_gif(images, str(temporary), fps)
    return path
