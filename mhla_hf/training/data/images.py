# SPDX-License-Identifier: Apache-2.0
"""Picture files: a folder of them with captions, or one folder per class; read into tensors, and grids of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from .buckets import Bucket, nearest_bucket
from .captions import captioned_files
from .class_labels import folder_labels
from .data_folder import DataFolder
from .fitting import fit, open_picture, to_tensor, unreadable
from .samples import DataSample, unusable_sample


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
# Pillow goes by the content: without this, a file of any name may reach Ghostscript and other rarely used readers.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")


def captioned_pictures(folder: Path, *, height: int, width: int, buckets: Sequence[Bucket] = ()) -> list[DataSample]:
    """The captioned pictures of a folder; see `captions.captioned_files`. Those that cannot be used raise when read.

    Args:
        folder: The folder.
        height: Height to scale and crop to.
        width: Width to scale and crop to.
        buckets: Sizes to choose from for each picture, in place of height and width.

    Raises:
        ValueError: See `captions.captioned_files`.
    """
    data, sizes = DataFolder(folder), tuple(buckets) or (Bucket(height, width),)
    return [
        _sample(file.path, file.problem, data, file.caption, sizes)
        for file in captioned_files(data, IMAGE_SUFFIXES, "pictures")
    ]


def class_pictures(
    folder: Path,
    *,
    height: int,
    width: int,
    known_labels: Mapping[str, int],
    num_classes: int,
    buckets: Sequence[Bucket] = (),
) -> list[DataSample]:
    """The pictures of a folder with one subfolder per class.

    The first picture of every class comes first, then the second of every class, and so on: the first part of the
    list has all classes in it.

    Args:
        folder: The folder; `class_labels.folder_labels` says which numbers its classes get.
        height: Height to scale and crop to.
        width: Width to scale and crop to.
        known_labels: Names of classes that the pipeline knows.
        num_classes: How many classes the model has.
        buckets: See `captioned_pictures`.

    Raises:
        ValueError: If the folder does not exist, has no subfolders, or one of them has no pictures; or the classes
            do not fit the model.
    """
    data, sizes = DataFolder(folder), tuple(buckets) or (Bucket(height, width),)
    classes = data.subfolders()
    if not classes:
        raise ValueError(f"data: {folder} must have one folder of pictures per class, and has no folders")
    labels = folder_labels(folder, [path.name for path in classes], known_labels, num_classes)
    placed: list[tuple[int, int, DataSample]] = []
    for directory in classes:
        name = directory.name
        files = data.files(IMAGE_SUFFIXES, directory)
        if not files:
            raise ValueError(f"data: {directory} has no pictures ({', '.join(IMAGE_SUFFIXES)})")
        for place, (path, problem) in enumerate(files):
            placed.append((place, labels[name], _sample(path, problem, data, labels[name], sizes, name)))
    return [sample for _, _, sample in sorted(placed, key=lambda entry: entry[:2])]


def read_picture(path: Path) -> np.ndarray:
    """Reads a picture the way up that its EXIF data say, uint8 `[H, W, 3]`.

    Raises:
        UnusableSampleError: If the file cannot be read as a picture, or its size is out of bounds.
    """
    return np.array(_read_rgb(path))


def fit_picture(picture: np.ndarray, height: int, width: int) -> torch.Tensor:
    """Crops the centre of a picture to the shape of height x width, and scales it.

    Args:
        picture: uint8 `[H, W, 3]`.
        height: Wanted height.
        width: Wanted width.

    Returns:
        `[3, height, width]` in [-1, 1], fp32.
    """
    return _fitted(Image.fromarray(picture), height, width)


def picture_grid(pictures: np.ndarray) -> np.ndarray:
    """Pictures side by side, in rows of about as many as there are rows; places left over are black.

    Args:
        pictures: uint8 `[P, H, W, 3]`.

    Returns:
        uint8 `[rows H, columns W, 3]`.
    """
    count, height, width, _ = pictures.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    grid = np.zeros((rows * columns, height, width, 3), np.uint8)
    grid[:count] = pictures
    return grid.reshape(rows, columns, height, width, 3).swapaxes(1, 2).reshape(rows * height, columns * width, 3)


def _read_rgb(path: Path) -> Image.Image:
    try:
        with open_picture(path, _FORMATS) as image:
            ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I;16"):
                # Pillow would cut these off at 255.
                return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
            return image.convert("RGB")
    except Exception as error:
        raise unreadable(path, "picture", error) from error


def _fitted(picture: Image.Image, height: int, width: int) -> torch.Tensor:
    return to_tensor(fit(picture, height, width)[None])[:, 0]


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
        picture = _read_rgb(path)
        size = nearest_bucket(sizes, picture.height, picture.width)
        assert size is not None
        return _fitted(picture, size.height, size.width)

    return DataSample(folder.key(path), condition, load, class_name)
