# SPDX-License-Identifier: Apache-2.0
"""Video files: a folder of them with captions, read into tensors; and written from arrays.

Reading takes imageio-ffmpeg, writing imageio as well (the extra `video`); GIF files take Pillow alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageSequence

from ...utils.files import atomic_file
from ...utils.messages import how_to_install
from ..config import Bucket
from .folders import DataSample, UnusableSampleError, captioned_samples
from .images import check_size, fit, nearest_bucket, open_image, to_tensor, unreadable


VIDEO_SUFFIXES = (".mp4", ".gif", ".webm", ".mov", ".mkv", ".avi")
# ffmpeg goes by the content: without this, a playlist of any name makes it read other files.
_FFMPEG_INPUT = ["-protocol_whitelist", "file", "-format_whitelist", "mov,matroska,webm,avi"]
# Without this, ffmpeg fills in frames that it cannot decode from their neighbours.
_FFMPEG_INPUT += ["-xerror", "-err_detect", "explode"]
# Damaged files claim any rate, and all frames up to the last one that is wanted are decoded.
_HIGHEST_FPS = 1000


def captioned_videos(folder: Path, sizes: Sequence[Bucket], fps: float | None = None) -> list[DataSample]:
    """List the captioned videos of a folder; see `folders.captioned_samples`. Unusable ones raise when read.

    Args:
        folder: The folder.
        sizes: Sizes to scale and crop to, and lengths to cut to, of which each video takes the nearest; videos that
            are too short for all of them are left out.
        fps: Frame rate to sample at; None takes the frames as they are.

    Raises:
        ValueError: See `folders.captioned_samples`.
    """

    def load(path: Path) -> torch.Tensor:
        size = sizes[0] if len(sizes) == 1 else _choose_bucket(path, sizes, fps)
        if size is not None:
            frames = read_frames(path, size.num_frames, fps, (size.height, size.width))
            if len(frames) == size.num_frames:
                return to_tensor(frames)
        wanted = " or ".join(str(each.num_frames) for each in sizes)
        raise UnusableSampleError(f"{path} has fewer frames that can be read than {wanted}")

    return captioned_samples(folder, VIDEO_SUFFIXES, "videos", load)


def read_frames(
    path: Path, num_frames: int, fps: float | None = None, size: tuple[int, int] | None = None
) -> np.ndarray:
    """Read up to `num_frames` frames, uint8 `[F, H, W, 3]`, one at a time.

    Args:
        path: The video file.
        num_frames: Frames to read, from the first.
        fps: Frame rate to sample at, by repeating or leaving out frames; None takes every frame.
        size: Height and width to scale and crop each frame to as it is read.

    Raises:
        UnusableSampleError: If the file cannot be read as a video, or the size of its frames is out of bounds.
        ValueError: If imageio-ffmpeg is missing.
    """
    frames: list[np.ndarray] = []
    for frame, repeats in _frames(path, num_frames, fps):
        pixels = np.asarray(frame) if size is None else fit(frame, *size)
        frames += [pixels] * repeats
    return np.stack(frames) if frames else np.zeros((0, 1, 1, 3), np.uint8)


def _frames(path: Path, num_frames: int, fps: float | None) -> Iterator[tuple[Image.Image, int]]:
    """The frames of a file and how often each is taken; errors as in `read_frames`."""
    if path.suffix.lower() == ".gif":
        read = _gif_frames
    else:
        _ffmpeg()  # What is missing here is no fault of the file.
        read = _video_frames
    try:
        yield from read(path, num_frames, fps)
    except Exception as error:
        raise unreadable(path, "a video", error) from error


def _choose_bucket(path: Path, buckets: Sequence[Bucket], fps: float | None) -> Bucket | None:
    """Choose the bucket of a video by reading it once: the frame counts of containers are unreliable."""
    count, height, width = 0, 0, 0
    for frame, repeats in _frames(path, max(bucket.num_frames for bucket in buckets), fps):
        count, height, width = count + repeats, frame.height, frame.width
    return nearest_bucket(buckets, height, width, count) if count else None


def _repeats(path: Path, num_frames: int, fps: float | None, source_fps: float) -> Iterator[int]:
    """Number of times each source frame is used, from the first frame to the last one needed."""
    if fps is None or not source_fps:
        yield from (1 for _ in range(num_frames))
        return
    if not 0 < source_fps <= _HIGHEST_FPS:
        raise UnusableSampleError(f"{path} claims {source_fps:g} frames per second; encode it again")
    taken, frame = 0, 0
    while taken < num_frames:
        before = taken
        while taken < num_frames and round(taken * source_fps / fps) == frame:
            taken += 1
        frame += 1
        yield taken - before


def _gif_frames(path: Path, num_frames: int, fps: float | None) -> Iterator[tuple[Image.Image, int]]:
    with open_image(path, ("GIF",)) as image:
        check_size(path, *image.size)
        duration = image.info.get("duration", 0)
        repeats = _repeats(path, num_frames, fps, 1000 / duration if duration else 0.0)
        # The counts come first: no frame is decoded after the last that is wanted.
        for count, frame in zip(repeats, ImageSequence.Iterator(image)):
            if count:
                yield frame.convert("RGB"), count


def _video_frames(path: Path, num_frames: int, fps: float | None) -> Iterator[tuple[Image.Image, int]]:
    reader = _ffmpeg().read_frames(str(path.absolute()), input_params=_FFMPEG_INPUT)
    try:
        facts = next(reader)
        check_size(path, *facts["size"])
        source_fps = float(facts.get("fps") or 0)
        for count, data in zip(_repeats(path, num_frames, fps, source_fps), reader):
            if count:
                yield Image.frombytes("RGB", facts["size"], data), count
    finally:
        reader.close()


def _ffmpeg():
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"video files need imageio and imageio-ffmpeg: {how_to_install('video')}") from error
    return imageio_ffmpeg


def write_video(path: Path, frames: np.ndarray, fps: int = 8) -> Path:
    """Write frames as mp4, or as GIF where imageio-ffmpeg is missing.

    Args:
        path: File to write; its suffix follows the format.
        frames: uint8 `[F, H, W, 3]`.
        fps: Frames per second.

    Returns:
        The path written.
    """
    try:
        _ffmpeg()
        import imageio.v2 as imageio
    except (ValueError, ImportError):
        path = path.with_suffix(".gif")
        images = [Image.fromarray(frame) for frame in frames]
        with atomic_file(path) as temporary:
            images[0].save(
                temporary, save_all=True, append_images=images[1:], duration=round(1000 / fps), loop=0, format="GIF"
            )
        return path
    path = path.with_suffix(".mp4")
    with atomic_file(path) as temporary:
        imageio.mimwrite(temporary, list(frames), fps=fps, macro_block_size=1, quality=8)
    return path
