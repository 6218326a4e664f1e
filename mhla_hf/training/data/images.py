# SPDX-License-Identifier: Apache-2.0
"""Image files: safe decoding, cropping and scaling; folders of images with captions or one subfolder per class."""

from __future__ import annotations

import errno
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from .buckets import Bucket, nearest_bucket
from .class_labels import folder_labels
from .folders import DataFolder, DataSample, UnusableSampleError, captioned_files, unusable_sample


MAX_PIXELS = 2**30 // 12
"""Most pixels of an image or frame, 89 million: one in RGB and 32 bits fills a gibibyte. Pillow warns from here."""

MAX_ASPECT_RATIO = 20
"""Of the longer to the shorter side; next to nothing would be left of an image beyond it."""

# Errors of the machine and not of a file: a sample must not be missing because of them.
_MACHINE_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
_LONGEST_REASON = 200
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
# Pillow goes by the content: without this, a file of any name may reach Ghostscript and other rarely used readers.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")


def check_size(path: Path, width: int, height: int) -> None:
    """Checks the size of an image or of the frames of a video, before they are decoded.

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


def open_image(path: Path, formats: tuple[str, ...]) -> Image.Image:
    """Opens a file of one of some formats, as Pillow names them, without decoding it.

    Raises:
        UnusableSampleError: If its size is out of bounds.
        Exception: Pillow's errors for damaged files, of nearly any type.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # Such a size is refused right below.
        image = Image.open(path, formats=formats)
    try:
        check_size(path, *image.size)
    except UnusableSampleError:
        image.close()
        raise
    return image


def fit(image: Image.Image, height: int, width: int) -> np.ndarray:
    """Crops the centre of an image to the wanted shape and scales it (bicubic).

    Args:
        image: In RGB.
        height: Wanted height.
        width: Wanted width.

    Returns:
        uint8 `[height, width, 3]`.
    """
    return np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC))


def to_tensor(frames: np.ndarray) -> torch.Tensor:
    """Frames, uint8 `[F, H, W, 3]`, as fp32 `[3, F, H, W]` in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(frames.transpose(3, 0, 1, 2))).float().div_(127.5).sub_(1)


def unreadable(path: Path, kind: str, error: Exception) -> Exception:
    """Exception to raise for a file that cannot be decoded.

    Args:
        path: The file.
        kind: Expected kind of file, "an image" or "a video".
        error: Error of the decoder, of nearly any type.

    Returns:
        `UnusableSampleError` with the last line of the error; the error itself where the machine is at fault.
    """
    if isinstance(error, UnusableSampleError | MemoryError) or getattr(error, "errno", None) in _MACHINE_ERRORS:
        return error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[-1] if lines else type(error).__name__
    return UnusableSampleError(f"{path} cannot be read as {kind}: {reason[:_LONGEST_REASON]}")


def captioned_images(folder: Path, *, height: int, width: int, buckets: Sequence[Bucket] = ()) -> list[DataSample]:
    """The captioned images of a folder; see `folders.captioned_files`. Those that cannot be used raise when read.

    Args:
        folder: The folder.
        height: Height to scale and crop to.
        width: Width to scale and crop to.
        buckets: Sizes to choose from for each image, in place of height and width.

    Raises:
        ValueError: See `folders.captioned_files`.
    """
    data, sizes = DataFolder(folder), tuple(buckets) or (Bucket(height, width),)
    return [
        _sample(file.path, file.problem, data, file.caption, sizes)
        for file in captioned_files(data, IMAGE_SUFFIXES, "images")
    ]


def class_images(
    folder: Path,
    *,
    height: int,
    width: int,
    known_labels: Mapping[str, int],
    num_classes: int,
    buckets: Sequence[Bucket] = (),
) -> list[DataSample]:
    """The images of a folder with one subfolder per class.

    The first image of every class comes first, then the second of every class, and so on: the first part of the
    list has all classes in it.

    Args:
        folder: The folder; `class_labels.folder_labels` says which numbers its classes get.
        height: Height to scale and crop to.
        width: Width to scale and crop to.
        known_labels: Names of classes that the pipeline knows.
        num_classes: Number of classes of the model.
        buckets: See `captioned_images`.

    Raises:
        ValueError: If the folder does not exist, has no subfolders, or one of them has no images; or the classes
            do not fit the model.
    """
    data, sizes = DataFolder(folder), tuple(buckets) or (Bucket(height, width),)
    classes = data.subfolders()
    if not classes:
        raise ValueError(f"data: {folder} must have one folder of images per class, and has no folders")
    labels = folder_labels(folder, [path.name for path in classes], known_labels, num_classes)
    placed: list[tuple[int, int, DataSample]] = []
    for directory in classes:
        name = directory.name
        files = data.files(IMAGE_SUFFIXES, directory)
        if not files:
            raise ValueError(f"data: {directory} has no images ({', '.join(IMAGE_SUFFIXES)})")
        for place, (path, problem) in enumerate(files):
            placed.append((place, labels[name], _sample(path, problem, data, labels[name], sizes, name)))
    return [sample for _, _, sample in sorted(placed, key=lambda entry: entry[:2])]


def read_image(path: Path) -> np.ndarray:
    """Reads an image the way up that its EXIF data say, uint8 `[H, W, 3]`.

    Raises:
        UnusableSampleError: If the file cannot be read as an image, or its size is out of bounds.
    """
    return np.array(_read_rgb(path))


def image_grid(images: np.ndarray) -> np.ndarray:
    """Images side by side, in rows of about as many as there are rows; places left over are black.

    Args:
        images: uint8 `[P, H, W, 3]`.

    Returns:
        uint8 `[rows H, columns W, 3]`.
    """
    count, height, width, _ = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    grid = np.zeros((rows * columns, height, width, 3), np.uint8)
    grid[:count] = images
    return grid.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)


def _read_rgb(path: Path) -> Image.Image:
    try:
        with open_image(path, _FORMATS) as image:
            ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I;16"):
                # Pillow would cut these off at 255.
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            return image.convert("RGB")
    except Exception as error:
        raise unreadable(path, "an image", error) from error


def _fitted(image: Image.Image, height: int, width: int) -> torch.Tensor:
    return to_tensor(fit(image, height, width)[None])[:, 0]


def _sample(
    path: Path,
    problem: str | None,
    folder: DataFolder,
    condition: str | int,
    sizes: Sequence[Bucket],
    class_name: str | None = None,
) -> DataSample:
    if problem is not None:
        return unusable_sample(problem, condition, class_name)

    def load() -> torch.Tensor:
        image = _read_rgb(path)
        size = nearest_bucket(sizes, image.height, image.width)
        assert size is not None
        return _fitted(image, size.height, size.width)

    return DataSample(folder.key(path), condition, load, class_name)
