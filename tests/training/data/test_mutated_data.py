# SPDX-License-Identifier: Apache-2.0
"""Real files of training data with random bytes changed: they are read, or left out with one short line."""

import io
import json
import random

import numpy as np
import pytest
from PIL import Image

from mhla_hf.training.data.folders import DataFolder, UnusableSampleError, captioned_files
from mhla_hf.training.data.images import IMAGE_SUFFIXES, captioned_images, read_image
from mhla_hf.training.data.videos import read_frames, write_video


# Pillow warns of some damage, and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NOISE = np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8)


def mutated(content: bytes, generator: random.Random) -> bytes:
    """Some bytes changed, cut out, put in or repeated, most of them in the header."""
    result = bytearray(content)
    for _ in range(generator.choice((1, 2, 4, 10))):
        end = len(result) if generator.random() < 0.5 else min(len(result), 80)
        place, size = generator.randrange(end), generator.randrange(1, 20)
        kind = generator.randrange(6)
        if kind == 0:
            result[place] ^= 1 << generator.randrange(8)
        elif kind == 1:
            result[place] = generator.choice(b'\0\xff\x7f\x80\n\r",\\{[')
        elif kind == 2:
            del result[place : place + min(size, len(result) - 1)]
        elif kind == 3:
            result[place:place] = generator.randbytes(size)
        elif kind == 4:
            result[place : place + 4] = generator.choice((b"\xff" * 4, b"\x7f\xff\xff\xff", bytes(4)))
        else:
            other = generator.randrange(len(result))
            result[place:place] = result[other : other + 10 * size]
    return bytes(result)


def encoded(image: Image.Image, form: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def images():
    image, exif = Image.fromarray(NOISE), Image.Exif()
    exif[0x0112] = 6
    return [
        encoded(image, "PNG", exif=exif), encoded(image.convert("P"), "PNG"), encoded(image, "JPEG", exif=exif),
        encoded(image, "JPEG", progressive=True), encoded(image, "WEBP"), encoded(image, "BMP"),
        encoded(image, "TIFF", compression="tiff_lzw"), encoded(image.convert("CMYK"), "TIFF"),
        encoded(image, "GIF"),
    ]  # fmt: skip


def read_all(read, path, contents, seed, rounds):
    """Reads mutations of every content; only `UnusableSampleError` with a short line may come of it."""
    generator = random.Random(seed)
    for content in contents:
        for _ in range(rounds):
            path.write_bytes(mutated(content, generator))
            try:
                read(path)
            except UnusableSampleError as error:
                assert len(str(error)) < 300 + len(str(path)) and "\n" not in str(error)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_images(seed, tmp_path):
    read_all(read_image, tmp_path / "a.png", images(), seed, rounds=40)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_gif_videos(seed, tmp_path):
    frames = [Image.fromarray(np.roll(NOISE, number, 1)) for number in range(5)]
    options = ({}, {"duration": 50}, {"disposal": 2, "duration": [10, 0, 30, 40, 50]})
    contents = [encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], **each) for each in options]
    read_all(lambda path: read_frames(path, 4, 8.0, (16, 16)), tmp_path / "a.gif", contents, seed, rounds=40)


@pytest.mark.slow
def test_videos(tmp_path):
    write_video(tmp_path / "whole.mp4", np.stack([np.roll(NOISE, number, 1) for number in range(17)]))
    content = (tmp_path / "whole.mp4").read_bytes()
    read_all(lambda path: read_frames(path, 17, 8.0, (16, 16)), tmp_path / "a.mp4", [content], 0, rounds=150)


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "0.txt"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))])
def test_captions(name, seed, tmp_path):
    rows = [{"file_name": f"{number}.png", "text": f"café {number}", "more": [1, {"a": None}]} for number in range(3)]
    contents = {
        "metadata.jsonl": "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        "metadata.csv": '\ufefffile_name,text\r\n0.png,"a, ""quoted"" café"\r\n1.png,two\r\n2.png,"li\nnes"\n',
        "0.txt": "\ufeffcafé 中\n",
    }
    for number in range(3):
        Image.fromarray(NOISE).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text("text")
    generator = random.Random(seed)
    for _ in range(100):
        (tmp_path / name).write_bytes(mutated(contents[name].encode(), generator))
        try:
            found = captioned_files(DataFolder(tmp_path), IMAGE_SUFFIXES, "images")
            samples = captioned_images(tmp_path, height=8, width=8)
        except ValueError as error:
            assert len(str(error)) < 600 + 4 * len(str(tmp_path))
            continue
        for file, sample in zip(found, samples, strict=True):
            # Both become a hash and metadata of the cache.
            file.caption.encode(), sample.key.encode()
            assert file.path.is_relative_to(tmp_path)
