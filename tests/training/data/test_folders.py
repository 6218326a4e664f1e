# SPDX-License-Identifier: Apache-2.0
"""Damaged, hostile and unusual files in folders of training data: each is left out and named, the others stay."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mhla_hf.training.config import Bucket
from mhla_hf.training.data.folders import UnusableSampleError, captioned_samples
from mhla_hf.training.data.images import IMAGE_SUFFIXES, captioned_images, read_image
from mhla_hf.training.data.videos import captioned_videos, read_frames, write_video


def image(path: Path, size=(24, 16), **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (200, 100, 50)).save(path, **options)
    return path


def gif_header(width: int, height: int) -> bytes:
    """A GIF of one pixel that claims another size, in its screen and in its frame."""
    size = width.to_bytes(2, "little") + height.to_bytes(2, "little")
    screen = b"GIF89a" + size + b"\x80\x00\x00" + bytes(6)
    return screen + b"\x2c" + bytes(4) + size + b"\x00" + b"\x02\x02\x44\x01\x00\x3b"


class TestImages:
    def test_extreme_sizes_are_refused_before_decoding(self, tmp_path, monkeypatch):
        image(tmp_path / "long.png", (30_000, 1))
        with pytest.raises(UnusableSampleError, match=r"long\.png has 30000 x 1 pixels; .* 20 times the other"):
            read_image(tmp_path / "long.png")
        # The limit does not depend on Pillow's.
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
        (tmp_path / "bomb.gif").write_bytes(gif_header(60_000, 60_000))
        with pytest.raises(UnusableSampleError, match="has 60000 x 60000 pixels; at most 89,478,485 are read"):
            read_image(tmp_path / "bomb.gif")


class TestFolders:
    @pytest.fixture
    def folder(self, tmp_path):
        folder = tmp_path / "data"
        image(folder / "good.png")
        (folder / "good.txt").write_text("good")
        return folder

    def samples(self, folder):
        return captioned_images(folder, [Bucket(8, 8)])

    def test_special_files_and_links_out_are_left_out(self, folder, tmp_path, caplog):
        os.mkfifo(folder / "pipe.png")
        secret = image(tmp_path / "secret" / "key.png")
        (folder / "out.png").symlink_to(secret)
        (folder / "inside.png").symlink_to("good.png")
        (folder / "nowhere.png").symlink_to("absent.png")
        (folder / "elsewhere").symlink_to(secret.parent)
        (tmp_path / "private.txt").write_text("private")
        image(folder / "private.png")
        (folder / "private.txt").symlink_to(tmp_path / "private.txt")
        for name in ("out", "inside", "nowhere", "pipe"):
            (folder / f"{name}.txt").write_text(name)
        samples = self.samples(folder)
        assert [sample.condition for sample in samples] == ["good", "inside"]
        for reason in (
            "out.png is a link out of",
            "nowhere.png does not exist",
            "pipe.png does not exist or is not a regular file",
            "elsewhere is a link to a folder",
            "private.txt is a link out of",
        ):
            assert reason in caplog.text


class TestCaptions:
    @pytest.fixture
    def folder(self, tmp_path):
        for name in ("a.png", "b.png"):
            image(tmp_path / name)
        return tmp_path

    def files(self, folder):
        return captioned_samples(folder, IMAGE_SUFFIXES, "images", read_image)

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            (
                "metadata.csv",
                "file_name,text\na.png,café\n".encode("latin-1"),
                "can't decode byte .* save it as UTF-8",
            ),
            ("metadata.csv", b'file_name,text\na.png,"' + b"x\n" * 100_000, "field larger than field limit"),
            ("metadata.csv", b'file_name,text\na.png,"open\nb.png,x\n', "unexpected end of data"),
            ("metadata.jsonl", bytes(2_000_000), "line 1 of .* is not valid JSON"),
            ("metadata.jsonl", b'[{"file_name": "a.png"}]', "line 1 of .* is not a JSON object but list"),
        ],
        ids=lambda value: value[:20] if isinstance(value, str) else "",
    )
    def test_damaged_metadata_is_named(self, folder, name, content, message):
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            self.files(folder)
        assert name in str(caught.value) and len(str(caught.value)) < 400 + len(str(folder))


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    rows = np.random.default_rng(0).integers(0, 255, (24, 40, 3), np.uint8)
    frames = np.stack([np.roll(rows, shift, 1) for shift in range(17)])
    return write_video(tmp_path_factory.mktemp("video") / "a.mp4", frames)


class TestVideos:
    def test_captions_sizes_and_lengths(self, video, tmp_path):
        (tmp_path / "a.mp4").write_bytes(video.read_bytes())
        (tmp_path / "a.txt").write_text("noise\n")
        (sample,) = captioned_videos(tmp_path, [Bucket(16, 16, 5)])
        frames = read_frames(video, 100)
        expected = Image.fromarray(frames[3]).resize((16, 16), Image.Resampling.BICUBIC, box=(8, 0, 32, 24))
        assert frames.shape == (17, 24, 40, 3) and sample.condition == "noise"
        assert np.array_equal(sample.load()[:, 3].add(1).mul(127.5).round().permute(1, 2, 0), np.asarray(expected))
        (sample,) = captioned_videos(tmp_path, [Bucket(16, 16, 18)])
        with pytest.raises(UnusableSampleError, match=r"a\.mp4 has fewer frames that can be read than 18"):
            sample.load()

    def test_damaged_videos_are_named(self, video, tmp_path):
        content = bytearray(video.read_bytes())
        (tmp_path / "cut.mp4").write_bytes(content[: len(content) // 2])
        (tmp_path / "list.mp4").write_text(f"ffconcat version 1.0\nfile {video}\n")
        for name in ("cut.mp4", "list.mp4"):
            with pytest.raises(UnusableSampleError, match=rf"{name} cannot be read as a video: .{{5,200}}$"):
                read_frames(tmp_path / name, 17)
        (tmp_path / "bomb.gif").write_bytes(gif_header(12_000, 12_000))
        with pytest.raises(UnusableSampleError, match="12000 x 12000 pixels; at most"):
            read_frames(tmp_path / "bomb.gif", 3)
        # Frames that cannot be decoded are not filled in from their neighbours.
        places = np.random.default_rng(0).integers(content.index(b"mdat") + 1000, content.index(b"moov") - 4, 20)
        for place in places:
            content[place] ^= 0xFF
        (tmp_path / "damaged.mp4").write_bytes(content)
        with pytest.raises(UnusableSampleError, match=r"damaged\.mp4 cannot be read"):
            read_frames(tmp_path / "damaged.mp4", 17)


class TestAsShown:
    """Pixels are read as a viewer shows them."""

    @staticmethod
    def encode(path, source, *options):
        ffmpeg = pytest.importorskip("imageio_ffmpeg").get_ffmpeg_exe()
        command = [ffmpeg, "-v", "error", "-f", "lavfi", "-i", source, *options, str(path)]
        subprocess.run(command, check=True, capture_output=True)
        return path

    @pytest.mark.parametrize("options", ["a.mov -c:v qtrle", "a.mkv -c:v ffv1 -pix_fmt bgra"])
    def test_transparent_videos(self, tmp_path, options):
        name, *options = options.split()
        hidden = "testsrc=s=32x16:d=0.3:r=10,format=rgba,colorchannelmixer=aa=0"
        path = self.encode(tmp_path / name, hidden, *options)
        assert (read_frames(path, 3) == 255).all()
        (tmp_path / "a.txt").write_text("nothing")
        (sample,) = captioned_videos(tmp_path, [Bucket(16, 16, 3)], background="#ff0000")
        assert sample.load().amin((1, 2, 3)).tolist() == [1, -1, -1]

    def test_transparent_gifs(self, tmp_path):
        frames = [Image.new("RGBA", (8, 8), (0, 0, shade, 0)) for shade in (50, 60)]
        for frame in frames:
            frame.paste((0, 0, 200, 255), (0, 0, 4, 8))
        frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], disposal=2)
        read = read_frames(tmp_path / "a.gif", 1)[0]
        assert (read[:, 4:] == 255).all() and read[:, :4].mean((0, 1)).tolist() == [0, 0, 200]

    @pytest.mark.parametrize("codec", ["libvpx -auto-alt-ref 0", "libvpx-vp9"])
    def test_alpha_that_ffmpeg_leaves_out(self, tmp_path, codec):
        source = "testsrc=s=32x16:d=0.3:r=10,format=yuva420p"
        self.encode(tmp_path / "a.webm", source, "-c:v", *codec.split(), "-pix_fmt", "yuva420p")
        with pytest.raises(UnusableSampleError, match=r"a\.webm is VP8 or VP9 with transparency"):
            read_frames(tmp_path / "a.webm", 1)

    @pytest.mark.parametrize(
        ("ratio", "shape"), [("2/1", (48, 128)), ("1/2", (96, 64)), ("16/15", (48, 68)), ("1", (48, 64))]
    )
    def test_pixels_that_are_not_square(self, tmp_path, ratio, shape):
        path = self.encode(tmp_path / "a.mp4", f"testsrc=s=64x48:d=0.3:r=10,setsar={ratio}", "-pix_fmt", "yuv420p")
        for fps in (None, 20.0):
            assert read_frames(path, 2, fps).shape == (2, *shape, 3)
