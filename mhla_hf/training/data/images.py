# SPDX-License-Identifier: Apache-2.0
"""Image files: safe decoding, cropping and scaling, folders of images with captions or classes, and their batches."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from ...utils.compat import forward_parameters
from ...utils.files import read_json
from ...utils.messages import shorten_list, shorten_text, shorten_value
from ..config import DIGITS, Bucket
from ..layers import Batch
from . import folders
from .batches import BatchSource, drawn_held_out
from .digits import digit_images
from .order import stable_seed


logger = logging.getLogger(__name__)

MAX_PIXELS = 2**30 // 12
"""Most pixels of an image or frame, 89 million: one in RGB and 32 bits fills a gibibyte. Pillow warns from here."""

MAX_ASPECT_RATIO = 20
"""Ratio of the longer side to the shorter one; cropping would leave next to nothing of longer images."""

CLASSES_FILE = "classes.json"
"""File of a data folder that gives its classes their numbers."""

# Buckets whose aspect ratios differ by less than this, relatively, crop about as much of an image.
_SAME_RATIO = 0.05
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
# Tags of TIFF, and a value: Pillow turns greys of white at zero around in 8 bits only.
_TIFF_BITS, _TIFF_COLOURS, _WHITE_IS_ZERO = 258, 262, 0
# Pillow goes by the content: without this, a file of any name may reach Ghostscript and other rarely used readers.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")


def check_size(path: Path, width: int, height: int) -> None:
    """Check the size of an image or of the frames of a video, before they are decoded.

    Raises:
        UnusableSampleError: If there are too many pixels or none, or one side is far longer than the other.
    """
    if not 0 < width * height <= MAX_PIXELS or max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise folders.UnusableSampleError(
            f"{path} has {width} x {height} pixels; at most {MAX_PIXELS:,} are read, and one side may be "
            f"{MAX_ASPECT_RATIO} times the other: scale it down or crop it"
        )


def fit(image: Image.Image, height: int, width: int) -> np.ndarray:
    """Crop the centre of an image to the wanted shape and scale it (bicubic).

    Args:
        image: In RGB.
        height: Wanted height.
        width: Wanted width.

    Returns:
        uint8 `[height, width, 3]`.
    """
    return np.asarray(ImageOps.fit(image, (width, height), Image.Resampling.BICUBIC))


def to_tensor(frames: np.ndarray) -> torch.Tensor:
    """Convert frames, uint8 `[F, H, W, 3]`, to fp32 `[3, F, H, W]` in [-1, 1]."""
    return torch.from_numpy(np.ascontiguousarray(frames.transpose(3, 0, 1, 2))).float().div_(127.5).sub_(1)


def on_background(image: Image.Image, background: str | None = None) -> Image.Image:
    """Lay an image on a colour, which shows where it is transparent.

    Args:
        image: With or without transparency.
        background: A name or hexadecimal value of a colour, as Pillow reads them; white by default.

    Returns:
        The image in RGB.
    """
    if not image.has_transparency_data:
        return image.convert("RGB")
    below = Image.new("RGBA", image.size, background or "white")
    return Image.alpha_composite(below, image.convert("RGBA")).convert("RGB")


def unreadable(path: Path, kind: str, error: Exception) -> Exception:
    """Choose the exception for a file that cannot be decoded.

    Args:
        path: The file.
        kind: Expected kind of file, "an image" or "a video".
        error: Error of the decoder, of nearly any type.

    Returns:
        `UnusableSampleError` with the last line of the error; the error itself where the machine is at fault.
    """
    if isinstance(error, folders.UnusableSampleError | MemoryError) or getattr(error, "errno", None) is not None:
        return error
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return folders.UnusableSampleError(f"{path} cannot be read as {kind}: {shorten_text(lines[-1], 200)}")


def captioned_images(folder: Path, sizes: Sequence[Bucket], background: str | None = None) -> list[folders.DataSample]:
    """List the captioned images of a folder; see `folders.captioned_samples`. Unusable ones raise when read.

    Args:
        folder: The folder.
        sizes: Sizes to scale and crop to; each image goes to the nearest.
        background: See `on_background`.

    Raises:
        ValueError: See `folders.captioned_samples`.
    """
    return folders.captioned_samples(
        folder, IMAGE_SUFFIXES, "images", partial(_load, sizes=sizes, background=background)
    )


def class_images(
    folder: Path,
    sizes: Sequence[Bucket],
    *,
    known_labels: Mapping[str, int],
    num_classes: int,
    background: str | None = None,
) -> list[folders.DataSample]:
    """List the images of a folder with one subfolder per class.

    The first image of every class comes first, then the second of every class, and so on: the first part of the
    list has all classes in it.

    Args:
        folder: The folder; see `folder_labels` for the numbers of its classes.
        sizes: See `captioned_images`.
        known_labels: Names of classes that the pipeline knows.
        num_classes: Number of classes of the model.
        background: See `on_background`.

    Raises:
        ValueError: If the folder does not exist, has no subfolders, or one of them has no images; or the classes
            do not fit the model.
    """
    data = folders.DataFolder(folder)
    classes = data.subfolders()
    files = {path.name: data.files(IMAGE_SUFFIXES, path) for path in classes}
    empty = [name for name, found in files.items() if not found]
    if empty or not files:
        lacking = f"these have none: {shorten_list(empty)}" if empty else "it has no folders"
        raise ValueError(f"data: {folder} must have one folder of images per class; {lacking}")
    labels = folder_labels(folder, files, known_labels, num_classes)
    folders.log_problems(data.problems)
    placed = sorted(
        (place, labels[name], name, path) for name, found in files.items() for place, path in enumerate(found)
    )
    load = partial(_load, sizes=sizes, background=background)
    return [folders.DataSample(data.key(path), label, partial(load, path), name) for _, label, name, path in placed]


def read_image(path: Path) -> np.ndarray:
    """Read an image as it is shown, uint8 `[H, W, 3]`: turned as its EXIF data say, on white where it is transparent.

    Raises:
        UnusableSampleError: If the file cannot be read as an image, or its size is out of bounds.
    """
    return np.array(_read_rgb(path))


def nearest_bucket(buckets: Sequence[Bucket], height: int, width: int, num_frames: int = 1) -> Bucket | None:
    """Choose the bucket of an image or video.

    Of the buckets that have no more frames than the video, the aspect ratio comes first. Of those with about the
    nearest one, it is one of those with most frames: the largest that enlarges nothing, and else the smallest.

    Args:
        buckets: To choose from.
        height: Height of the image or video.
        width: Its width.
        num_frames: Number of frames.

    Returns:
        None if the video is too short for all buckets.
    """

    def crop(bucket: Bucket) -> float:
        return abs(math.log(bucket.height / bucket.width) - math.log(height / width))

    long_enough = [bucket for bucket in buckets if bucket.num_frames <= num_frames]
    if not long_enough:
        return None
    nearest = min(map(crop, long_enough)) + math.log1p(_SAME_RATIO)

    def rank(bucket: Bucket) -> tuple[bool, int, bool, int]:
        enlarges = bucket.height > height or bucket.width > width
        area = bucket.height * bucket.width
        return crop(bucket) > nearest, -bucket.num_frames, enlarges, area if enlarges else -area

    return min(long_enough, key=rank)


def image_grid(images: np.ndarray) -> np.ndarray:
    """Arrange images in a grid that is about square; places left over are black.

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


def _read_rgb(path: Path, background: str | None = None) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `check_size` refuses such a size.
            opened = Image.open(path, formats=_FORMATS)
        with opened as image:
            check_size(path, *image.size)
            ImageOps.exif_transpose(image, in_place=True)
            # Pillow before 11.3 has this mode for PNGs of 16 bits, too.
            if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
                return _from_16_bits(image, background)
            if image.mode in ("I", "F"):
                raise folders.UnusableSampleError(
                    f"{path} has greys of 32 bits, which have no range to show them in: save it with 8 or 16 bits"
                )
            return on_background(image, background)
    except Exception as error:
        raise unreadable(path, "an image", error) from error


def _from_16_bits(image: Image.Image, background: str | None) -> Image.Image:
    """Scale greys of 16 bits, which Pillow would cut off at 255."""
    tags, values = getattr(image, "tag_v2", {}), np.asarray(image)
    bits = tags.get(_TIFF_BITS, (16,))[0]
    greys = (values >> (bits - 8)).astype(np.uint8)
    if tags.get(_TIFF_COLOURS) == _WHITE_IS_ZERO:
        greys = 255 - greys
    alpha = np.where(values == image.info.get("transparency", -1), 0, 255).astype(np.uint8)
    return on_background(Image.merge("LA", [Image.fromarray(greys), Image.fromarray(alpha)]), background)


def _load(path: Path, sizes: Sequence[Bucket], background: str | None = None) -> torch.Tensor:
    image = _read_rgb(path, background)
    size = nearest_bucket(sizes, image.height, image.width)
    assert size is not None  # Every image has the one frame of a bucket of images.
    return to_tensor(fit(image, size.height, size.width)[None])[:, 0]


def pipeline_labels(id2label: Any) -> dict[str, int]:
    """Read class names of a pipeline with their numbers; empty if it has none.

    Args:
        id2label: That entry of `model_index.json`: by number a name, or several synonyms separated by commas.

    Raises:
        ValueError: If it is anything else.
    """
    try:
        entries = [(int(number), names.split(",")) for number, names in (id2label or {}).items()]
    except (AttributeError, ValueError) as error:
        raise ValueError(
            "the pipeline's model_index.json: 'id2label' must map numbers of classes to their names."
        ) from error
    return {name.strip(): number for number, names in entries for name in names}


def folder_labels(folder: Path, names: Iterable[str], known: Mapping[str, int], num_classes: int) -> dict[str, int]:
    """Number the classes of a data folder.

    The first rule that applies gives all numbers: `classes.json` in the folder; names that are numbers; numbers of
    the pipeline, if it knows the names (with `_` for spaces, too); 0, 1, 2, ... in the order of the names. The last
    one warns where the model has more classes, since a pretrained one knows others by these numbers.

    Args:
        folder: The folder of data.
        names: The classes.
        known: See `pipeline_labels`.
        num_classes: Number of classes of the model.

    Raises:
        ValueError: If `classes.json` is not valid, a class has no number or that of another, or the model has too few
            classes.
    """
    names = sorted(names)
    path = folders.DataFolder(folder).own_file(CLASSES_FILE)
    numbers: dict[str, Any] = {name: _number(name) for name in names}
    if path is not None:
        stored = read_json(path, "data:")
        numbers = {name: stored.get(name) for name in names}
    elif None in numbers.values():
        numbers = {name: known.get(name, known.get(name.replace("_", " "))) for name in names}
        if not any(number is not None for number in numbers.values()):
            numbers = {name: number for number, name in enumerate(names)}
            if len(names) < num_classes:
                logger.warning(
                    "data: the pipeline knows no class of %s by its name; they are numbered 0 to %d in the order of "
                    "the names. If the model was trained on other classes by these numbers, give the numbers in %s.",
                    folder, len(names) - 1, CLASSES_FILE,
                )  # fmt: skip
    valid = {number for number in numbers.values() if type(number) is int and 0 <= number < num_classes}
    if len(valid) < len(names):
        raise ValueError(
            f"data: the classes of {folder} must have different numbers from 0 to {num_classes - 1}, as the model has "
            f"{num_classes} classes; got {shorten_list(f'{name!r} {number}' for name, number in numbers.items())}. "
            f"Rename them, or give every class its number in {CLASSES_FILE}"
        )
    return numbers


def find_label(name: str, known: Mapping[str, int], num_classes: int) -> int:
    """Return the class number for a name or a number given by the user.

    Raises:
        ValueError: If there is no such class.
    """
    number = known.get(name, _number(name))
    if number is None or (name not in known and number >= num_classes):
        names = f" or by name ({shorten_list(known)})" if known else ""
        raise ValueError(
            f"validation_prompts must be classes, by number (0 to {num_classes - 1}){names}, got {shorten_value(name)}"
        )
    return number


def _number(name: str) -> int | None:
    """Value of a decimal name; `None` for other names."""
    # Python refuses to convert thousands of digits; names of folders are shorter.
    return int(name) if name.isdecimal() and len(name) < 256 else None


class Images(BatchSource):
    """Images for vision models, as their image processor makes them: `pixel_values` `[B, C, H, W]`.

    Args:
        images: uint8 `[H, W, 3]` each, by a function that reads one.
        processor: The model's own.
        held_out: Most images to hold out.
        fingerprint: Hash that identifies the samples.
        seed: Seed of their order.
        left_out: Number of files that could not be read.
        size: Height and width in pixels; `None` for those of the image processor.
        arguments: Further arguments of the model.
    """

    kind = "images"

    def __init__(
        self,
        images: Sequence[Any],
        processor: Any,
        held_out: int,
        fingerprint: str,
        seed: int = 0,
        left_out: int = 0,
        size: tuple[int, int] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(seed, fingerprint, *drawn_held_out(len(images), held_out))
        self.images, self.processor, self.facts = images, processor, {"left_out": left_out}
        self.size, self.arguments = size, arguments or {}

    def _make(self, indices: Sequence[int]) -> Batch:
        images, options = [self.images[index]() for index in indices], {}
        if self.size is not None:
            images = [fit(Image.fromarray(image), *self.size) for image in images]
            options = {"do_resize": False, "do_center_crop": False}
        # Told, not guessed: an image of three rows has its channels last, too.
        made = self.processor(images=images, return_tensors="pt", input_data_format="channels_last", **options)
        return {**self.arguments, **{key: each for key, each in made.items() if isinstance(each, torch.Tensor)}}


def image_batches(
    model: Any,
    directory: Path,
    data: str,
    *,
    samples: int,
    held_out: int = 192,
    seed: int = 0,
    size: tuple[int, int] | None = None,
) -> BatchSource:
    """Open images for a vision model.

    Args:
        model: The model.
        directory: Where its image processor is.
        data: A folder of images, with or without folders in it, or `digits`: the scans that scikit-learn has.
        samples: Maximum number of images to train on.
        held_out: Images to hold out, a fifth of all at most.
        seed: Seed of their order.
        size: Height and width in pixels; `None` for those of the image processor.

    Raises:
        ValueError: If there are no such data.
        OSError: From transformers, if there is no image processor.
    """
    processor, images, left_out = open_images(model.config, directory, data, samples + held_out)
    resizes = size is not None and "interpolate_pos_encoding" in forward_parameters(model)
    arguments = {"interpolate_pos_encoding": True} if resizes else {}
    fingerprint = f"{stable_seed(*images, *([] if size is None else map(str, size))):016x}"
    return Images([*images.values()], processor, held_out, fingerprint, seed, left_out, size, arguments)


def open_images(
    config: Any, directory: Path, data: str, count: int = 2
) -> tuple[Any, dict[str, Callable[[], np.ndarray]], int]:
    """Open images and the image processor of a model; arguments and errors are those of [`image_batches`].

    Args:
        config: The model's configuration, converted or not.
        count: Number of images to look for.

    Returns:
        The image processor, functions that read images by their identities, and the number of files left out.
    """
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(directory)
    images: dict[str, Callable[[], np.ndarray]] = {}
    if data == DIGITS:
        size = getattr(config, "image_size", 64)
        side = int(size[0] if isinstance(size, (list, tuple)) else size)
        digits = digit_images(count, side, captions=False)
        images = {f"{sample.key}:{side}": partial(_as_bytes, sample) for sample in digits}
        return processor, images, 0
    folder = folders.DataFolder(Path(data).expanduser())
    # Only a part of a large folder is read: it must not be the first classes.
    files = folder.files(IMAGE_SUFFIXES)
    files.sort(key=lambda path: stable_seed(folders.printable(path.relative_to(folder.path).as_posix())))
    for path in files:
        if len(images) == count:
            break
        try:
            read_image(path)
            images[folder.key(path)] = partial(read_image, path)
        except folders.UnusableSampleError as error:
            folder.problems.append(str(error))
    folders.log_problems(folder.problems)
    if len(images) < 2:
        problem = f" ({folder.problems[0]})" if folder.problems else ""
        raise ValueError(f"data: {data} has {len(images)} images that can be read; at least 2 are needed{problem}")
    return processor, images, len(folder.problems)


def _as_bytes(sample: folders.DataSample) -> np.ndarray:
    """uint8 `[H, W, 3]` of an image `[3, H, W]` in [-1, 1]."""
    return ((sample.load() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
