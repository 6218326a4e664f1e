# SPDX-License-Identifier: Apache-2.0
"""Video files: a folder of them with captions, read into tensors; and written from arrays.

Reading takes imageio with imageio-ffmpeg (`pip install mhla-hf[video]`); GIF files take Pillow alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from ..files import atomic_file
from .samples import DataSample, UnusableSampleError, captioned_files, file_key


VIDEO_SUFFIXES = (".mp4", ".gif", ".webm", ".mov", ".mkv", ".avi")


def captioned_videos(
    folder: Path, *, num_frames: int, height: int, width: int, fps: float | None = None
) -> list[DataSample]:
    """The captioned videos of a folder; see `samples.captioned_files`.

    Args:
        folder: The folder.
        num_frames: Frames to take, from the first; videos with fewer are left out.
        height: Height to scale and crop to.
        width: Width to scale and crop to.
        fps: Frame rate to sample at; None takes the frames as they are.

    Raises:
        ValueError: See `samples.captioned_files`.
    """

    def sample(path: Path, caption: str) -> DataSample:
        def load() -> torch.Tensor:
            frames = read_frames(path, num_frames, fps)
            if len(frames) < num_frames:
                raise UnusableSampleError(f"{path} has fewer than {num_frames} frames")
            return fit_frames(frames, height, width)

        return DataSample(file_key(path, folder), caption, load)

    return [sample(path, caption) for path, caption in captioned_files(folder, VIDEO_SUFFIXES, "videos")]


def read_frames(path: Path, num_frames: int, fps: float | None = None) -> np.ndarray:
    """Reads up to `num_frames` frames, uint8 `[F, H, W, 3]`.

    Args:
        path: The video file.
        num_frames: Frames to read, from the first.
        fps: Frame rate to sample at, by repeating or leaving out frames; None takes every frame.

    Raises:
        UnusableSampleError: If the file cannot be read as a video.
        ValueError: If imageio is missing.
    """
    try:
        frames, source_fps = (_read_gif if path.suffix.lower() == ".gif" else _read_video)(path, num_frames, fps)
    except (OSError, RuntimeError, IndexError) as error:
        raise UnusableSampleError(f"{path} cannot be read as a video: {error}") from error
    if fps is not None and source_fps and frames:
        wanted = [round(number * source_fps / fps) for number in range(num_frames)]
        frames = [frames[index] for index in wanted if index < len(frames)]
    if not frames:
        raise UnusableSampleError(f"{path} has no frames")
    return np.stack(frames[:num_frames])


def _frames_needed(num_frames: int, fps: float | None, source_fps: float) -> int:
    return num_frames if fps is None or not source_fps else round((num_frames - 1) * source_fps / fps) + 1


def _read_gif(path: Path, num_frames: int, fps: float | None) -> tuple[list[np.ndarray], float]:
    from PIL import Image, ImageSequence

    with Image.open(path) as image:
        duration = image.info.get("duration", 0)
        source_fps = 1000 / duration if duration else 0.0
        needed = _frames_needed(num_frames, fps, source_fps)
        frames = []
        for frame in ImageSequence.Iterator(image):
            frames.append(np.asarray(frame.convert("RGB")))
            if len(frames) >= needed:
                break
    return frames, source_fps


def _read_video(path: Path, num_frames: int, fps: float | None) -> tuple[list[np.ndarray], float]:
    imageio = _imageio()
    reader = imageio.get_reader(str(path), "ffmpeg")
    try:
        source_fps = float(reader.get_meta_data().get("fps") or 0)
        needed = _frames_needed(num_frames, fps, source_fps)
        frames = []
        for frame in reader:
            frames.append(np.asarray(frame)[..., :3])
            if len(frames) >= needed:
                break
    finally:
        reader.close()
    return frames, source_fps


def _imageio():
    try:
        import imageio.v2 as imageio
        import imageio_ffmpeg  # noqa: F401
    except ImportError as error:
        raise ValueError("video files need imageio and imageio-ffmpeg: pip install 'mhla-hf[video]'") from error
    return imageio


def fit_frames(frames: np.ndarray, height: int, width: int) -> torch.Tensor:
    """Scales frames to cover height x width, and crops the centre.

    Args:
        frames: uint8 `[F, H, W, 3]`.
        height: Wanted height.
        width: Wanted width.

    Returns:
        `[3, F, height, width]` in [-1, 1], fp32.
    """
    video = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float() / 127.5 - 1
    scale = max(height / video.shape[2], width / video.shape[3])
    size = (max(height, round(video.shape[2] * scale)), max(width, round(video.shape[3] * scale)))
    if size != tuple(video.shape[2:]):
        video = F.interpolate(video, size=size, mode="bicubic", align_corners=False, antialias=True).clamp(-1, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return video[:, :, top : top + height, left : left + width].transpose(0, 1).contiguous()


def write_video(path: Path, frames: np.ndarray, fps: int = 8) -> Path:
    """Writes frames as mp4, or as GIF where imageio-ffmpeg is missing.

    Args:
        path: File to write; its suffix follows the format.
        frames: uint8 `[F, H, W, 3]`.
        fps: Frames per second.

    Returns:
        The path written.
    """
    try:
        imageio = _imageio()
    except ValueError:
        from PIL import Image

        path = path.with_suffix(".gif")
        pictures = [Image.fromarray(frame) for frame in frames]
        with atomic_file(path) as temporary:
            pictures[0].save(
                temporary, save_all=True, append_images=pictures[1:], duration=round(1000 / fps), loop=0, format="GIF"
            )
        return path
    path = path.with_suffix(".mp4")
    with atomic_file(path) as temporary:
        imageio.mimwrite(temporary, list(frames), fps=fps, macro_block_size=1, quality=8)
    return path
