# SPDX-License-Identifier: Apache-2.0
"""From a picture of any size to one of the wanted size: the centre is cropped to the wanted shape, then scaled."""

from __future__ import annotations

import errno
import warnings
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from .samples import UnusableSampleError


MAX_PIXELS = 2**30 // 12
"""Most pixels of a picture or frame, 89 million: one in RGB and 32 bits fills a gibibyte. Pillow warns from here."""

MAX_ASPECT_RATIO = 20
"""Of the longer to the shorter side; next to nothing would be left of a picture beyond it."""

# Errors of the machine and not of a file: a sample must not be missing because of them.
_MACHINE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
_LONGEST_REASON = 200


def check_size(path: Path, width: int, height: int) -> None:
    """Checks the size of a picture or of the frames of a video, before they are decoded.

    Raises:
        UnusableSampleError: If there are too many pixels, or one side is far longer than the other.
    """
    if width < 1 or height < 1:
        raise UnusableSampleError(f"{path} has no pixels")
    if width * height > MAX_PIXELS:
        raise UnusableSampleError(
            f"{path} has {width} x {height} pixels; at most {MAX_PIXELS:,} are read, so scale it down"
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise UnusableSampleError(
            f"{path} has {width} x {height} pixels; one side may be {MAX_ASPECT_RATIO} times the other, so crop it"
        )


def open_picture(path: Path, formats: tuple[str, ...]) -> Image.Image:
    """Opens a file of one of some formats, as Pillow names them, without decoding it.

    Raises:
        UnusableSampleError: If its size is out of bounds.
        Exception: What Pillow raises for damaged files, which is of nearly every type.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # Such a size is refused right below.
        picture = Image.open(path, formats=formats)
    try:
        check_size(path, *picture.size)
    except UnusableSampleError:
        picture.close()
        raise
    return picture


def fit(picture: Image.Image, height: int, width: int) -> np.ndarray:
    """Crops the centre of a picture to the wanted shape and scales it (bicubic).

    Args:
        picture: In RGB.
        height: Wanted height.
        width: Wanted width.

    Returns:
        uint8 `[height, width, 3]`.
    """
    return np.asarray(ImageOps.fit(picture, (width, height), Image.Resampling.BICUBIC))


def to_tensor(frames: np.ndarray) -> torch.Tensor:
    """Frames, uint8 `[F, H, W, 3]`, as fp32 `[3, F, H, W]` in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(frames.transpose(3, 0, 1, 2))).float().div_(127.5).sub_(1)


def unreadable(path: Path, kind: str, error: Exception) -> Exception:
    """What to raise where a file cannot be decoded.

    Args:
        path: The file.
        kind: What it should be: "picture", "video".
        error: What the decoder raised; decoders raise nearly every type for damaged files.

    Returns:
        `UnusableSampleError` with the last line of the error; the error itself where the machine is at fault.
    """
    if isinstance(error, UnusableSampleError | MemoryError) or getattr(error, "errno", None) in _MACHINE_ERRORS:
        return error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[-1] if lines else type(error).__name__
    return UnusableSampleError(f"{path} cannot be read as a {kind}: {reason[:_LONGEST_REASON]}")
