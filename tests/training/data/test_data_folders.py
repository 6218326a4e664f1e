# SPDX-License-Identifier: Apache-2.0
"""Damaged, hostile and unusual files in folders of training data: the one is left out and listed, the others stay."""

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator
from PIL import Image

from mhla_hf.training import LatentDataset, TrainingConfig
from mhla_hf.training.config import CacheConfig
from mhla_hf.training.data.cache_building import make_cache
from mhla_hf.training.data.folders import DataFolder, UnusableSampleError, captioned_files
from mhla_hf.training.data.images import IMAGE_SUFFIXES, MAX_PIXELS, captioned_images, class_images, read_image
from mhla_hf.training.data.videos import captioned_videos, read_frames, write_video

from ... import tiny_images


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


def image(path: Path, size=(24, 16), **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (200, 100, 50)).save(path, **options)
    return path


def gif_header(width: int, height: int) -> bytes:
    """A GIF of one pixel that claims another size, in its screen and in its frame."""
    size = width.to_bytes(2, "little") + height.to_bytes(2, "little")
    screen = b"GIF89a" + size + b"\x80\x00\x00" + bytes(6)
    return screen + b"\x2c" + bytes(4) + size + b"\x00" + b"\x02\x02\x44\x01\x00\x3b"


def problem_of(samples, name):
    """What reading the sample says whose key or error names a file."""
    for sample in samples:
        try:
            sample.load()
        except UnusableSampleError as error:
            if name in str(error):
                return str(error)
    raise AssertionError(f"{name} can be read")


class TestImages:
    def test_extreme_sizes_are_refused_before_decoding(self, tmp_path):
        image(tmp_path / "long.png", (30_000, 1))
        with pytest.raises(UnusableSampleError, match=r"long\.png has 30000 x 1 pixels; one side may be 20 times"):
            read_image(tmp_path / "long.png")
        for name, content in (("bomb.gif", gif_header(60_000, 60_000)), ("bomb.png", gif_header(12_000, 12_000))):
            (tmp_path / name).write_bytes(content)
            # Pillow itself refuses the first, and only warns of the second.
            with pytest.raises(UnusableSampleError, match=r"bomb\.\w+ (has 12000 x 12000 pixels|cannot be read)"):
                read_image(tmp_path / name)
        assert MAX_PIXELS == 89_478_485

    @pytest.mark.parametrize("limit", [None, 10**12], ids=["no limit", "high limit"])
    def test_the_limit_does_not_depend_on_pillows(self, limit, tmp_path, monkeypatch):
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        (tmp_path / "bomb.gif").write_bytes(gif_header(60_000, 60_000))
        with pytest.raises(UnusableSampleError, match="has 60000 x 60000 pixels; at most 89,478,485 are read"):
            read_image(tmp_path / "bomb.gif")

    def test_only_image_formats_are_read(self, tmp_path, monkeypatch):
        from PIL import EpsImagePlugin

        monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kwargs: pytest.fail("Ghostscript was run"))
        Image.new("RGB", (8, 8)).save(tmp_path / "a.ppm")
        for name, content in (("eps.png", EPS), ("ppm.png", (tmp_path / "a.ppm").read_bytes()), ("zero.png", b"")):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(UnusableSampleError, match=f"{name} cannot be read as an image: cannot identify"):
                read_image(tmp_path / name)

    def test_the_formats_of_the_suffixes_are_read(self, tmp_path):
        for suffix in IMAGE_SUFFIXES:
            assert read_image(image(tmp_path / f"a{suffix}")).shape == (16, 24, 3)
        # What phones call .jpg may hold a second image.
        image(tmp_path / "b.jpg", format="MPO", save_all=True, append_images=[Image.new("RGB", (24, 16))])
        assert read_image(tmp_path / "b.jpg").shape == (16, 24, 3)

    @pytest.mark.slow
    def test_the_crop_comes_before_scaling(self, tmp_path):
        """At the limit of the ratio, scaling first would make an image of 20 times the wanted width."""
        image(tmp_path / "a.png", (2000, 100))
        (tmp_path / "a.txt").write_text("long")
        code = (
            "import resource, sys\nfrom pathlib import Path\n"
            "from mhla_hf.training.data.images import captioned_images\n"
            "samples = captioned_images(Path(sys.argv[1]), height=2048, width=512)\n"
            "used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "assert samples[0].load().shape == (3, 2048, 512)\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used)"
        )
        done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
        # Two times the result in float32; the scaled image alone would have 1 GB.
        assert int(done.stdout) < 60_000


class TestFolders:
    @pytest.fixture
    def folder(self, tmp_path):
        folder = tmp_path / "data"
        image(folder / "good.png")
        (folder / "good.txt").write_text("good")
        return folder

    def samples(self, folder):
        return captioned_images(folder, height=8, width=8)

    def test_special_files_do_not_hang(self, folder):
        os.mkfifo(folder / "pipe.png")
        os.mkfifo(folder / "caption.txt")
        image(folder / "caption.png")
        (folder / "device.png").symlink_to("/dev/zero")
        (folder / "folder.png").mkdir()
        with socket.socket(socket.AF_UNIX) as listener:
            here = os.getcwd()
            os.chdir(folder)  # Names of sockets have a hundred bytes at most.
            try:
                listener.bind("socket.png")
            finally:
                os.chdir(here)
        samples = self.samples(folder)
        assert len(samples) == 6
        for name, reason in (
            ("pipe.png", "pipe.png is not a regular file"),
            ("socket.png", "socket.png is not a regular file"),
            ("device.png", "device.png is not a regular file"),
            ("folder.png", "folder.png is a folder, not a file"),
            ("caption.png", "caption.txt is not a regular file"),
        ):
            assert reason in problem_of(samples, name)

    def test_links_are_followed_inside_only(self, folder, tmp_path):
        secret = image(tmp_path / "secret" / "key.png")
        (folder / "out.png").symlink_to(secret)
        (folder / "inside.png").symlink_to("good.png")
        (folder / "loop.png").symlink_to("loop.png")
        (folder / "nowhere.png").symlink_to("absent.png")
        (folder / "around").symlink_to("..")
        (folder / "elsewhere").symlink_to(secret.parent)
        for name in ("out", "inside", "loop", "nowhere"):
            (folder / f"{name}.txt").write_text(name)
        samples = self.samples(folder)
        assert [sample.condition for sample in samples if sample.condition] == ["good", "inside"]
        for name, reason in (
            ("out.png", "is a link out of"),
            ("loop.png", "cannot be read"),
            ("nowhere.png", "a link that leads nowhere"),
            ("around", "is a link to a folder"),
            ("elsewhere", "is a link to a folder"),
        ):
            assert reason in problem_of(samples, name)

    def test_a_caption_that_is_a_link_out_is_not_read(self, folder, tmp_path):
        (tmp_path / "private.txt").write_text("private")
        image(folder / "a.png")
        (folder / "a.txt").symlink_to(tmp_path / "private.txt")
        assert "a.txt is a link out of" in problem_of(self.samples(folder), "a.png")

    def test_snapshots_of_the_hub_are_read(self, folder, tmp_path):
        snapshot = tmp_path / "datasets--a--b" / "snapshots" / "0123"
        blobs = tmp_path / "datasets--a--b" / "blobs"
        for path in (snapshot, blobs):
            path.mkdir(parents=True)
        for name in ("good.png", "good.txt"):
            (folder / name).rename(blobs / name.replace(".", "-"))
            (snapshot / name).symlink_to(Path("../../blobs") / name.replace(".", "-"))
        assert self.samples(snapshot)[0].load().shape == (3, 8, 8)

    def test_folders_deeper_than_pythons_recursion(self, folder):
        deep = folder
        here = os.getcwd()
        os.chdir(folder)
        try:
            for _ in range(1200):
                os.mkdir("d")
                os.chdir("d")
            deep = Path(os.getcwd())
        finally:
            os.chdir(here)
        try:
            image(deep / "a.png")
            (deep / "a.txt").write_text("deep")
            assert {sample.condition for sample in self.samples(folder)} == {"good", "deep"}
        finally:
            # Python's own removal of trees, which pytest uses, does not get that far down.
            subprocess.run(["rm", "-rf", str(folder / "d")], check=True)

    def test_files_without_permission_are_named(self):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            folder.chmod(0o755)
            for stem in ("a", "b"):
                image(folder / f"{stem}.png").chmod(0o644)
                (folder / f"{stem}.txt").write_text(stem)
            image(folder / "closed" / "c.png")
            (folder / "b.png").chmod(0)
            (folder / "closed").chmod(0)
            as_other = os.geteuid() == 0
            try:
                if as_other:
                    os.seteuid(65534)
                samples = self.samples(folder)
            finally:
                if as_other:
                    os.seteuid(0)
                (folder / "closed").chmod(0o755)
        assert [sample.condition for sample in samples] == ["a", "", ""]
        assert "b.png cannot be read (Permission denied)" in problem_of(samples[1:], "b.png")
        assert "closed cannot be listed (Permission denied)" in problem_of(samples[2:], "closed")

    def test_names_that_are_no_text(self, folder):
        raw = os.fsencode(folder) + b"/\xff.png"
        (folder / "good.png").rename(os.fsdecode(raw))
        (folder / "good.txt").rename(os.fsdecode(os.fsencode(folder) + b"/\xff.txt"))
        sample = self.samples(folder)[0]
        assert sample.load().shape == (3, 8, 8) and sample.key.startswith("\\udcff.png:")
        sample.key.encode()

    def test_class_folders(self, tmp_path):
        def samples():
            return class_images(tmp_path / "data", height=8, width=8, known_labels={}, num_classes=3)

        image(tmp_path / "data" / "cat" / "1.png")
        os.mkfifo(tmp_path / "data" / "cat" / "2.png")
        found = samples()
        assert "2.png is not a regular file" in problem_of(found, "2.png")
        assert [(sample.condition, sample.class_name) for sample in found] == [(0, "cat")] * 2
        image(tmp_path / "other" / "1.png")
        (tmp_path / "data" / "bird").symlink_to(tmp_path / "other")
        with pytest.raises(ValueError, match="bird is a link out of"):
            samples()
        (tmp_path / "data" / "bird").unlink()
        (tmp_path / "data" / "bird").symlink_to("bird")
        with pytest.raises(ValueError, match="bird is a link that leads nowhere"):
            samples()
        (tmp_path / "data" / "bird").unlink()
        os.mkfifo(tmp_path / "data" / "classes.json")
        with pytest.raises(ValueError, match=r"classes\.json is not a regular file"):
            samples()

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("[1]", "not a JSON object but a list"),
            ("[" * 500, "not valid JSON"),
            ('{"cat": NaN}', "must be a JSON object"),
        ],
    )
    def test_class_numbers(self, content, message, tmp_path):
        image(tmp_path / "cat" / "1.png")
        (tmp_path / "classes.json").write_text(content)
        with pytest.raises(ValueError, match=message) as caught:
            class_images(tmp_path, height=8, width=8, known_labels={}, num_classes=3)
        assert "classes.json" in str(caught.value)


class TestCaptions:
    @pytest.fixture
    def folder(self, tmp_path):
        for name in ("a.png", "b.png"):
            image(tmp_path / name)
        return tmp_path

    def files(self, folder):
        return captioned_files(DataFolder(folder), IMAGE_SUFFIXES, "images")

    @pytest.mark.parametrize(
        ("name", "content"),
        [
            ("metadata.csv", b"\xef\xbb\xbffile_name,text\r\na.png,caf\xc3\xa9\r\n"),
            ("metadata.csv", b'\xef\xbb\xbf"file_name","text"\n"a.png","caf\xc3\xa9"\n'),
            ("metadata.csv", b"file_name,text\ra.png,caf\xc3\xa9\r"),
            ("metadata.jsonl", b'\xef\xbb\xbf{"file_name": "a.png", "text": "caf\xc3\xa9"}\r\n\r\n'),
            ("a.txt", b"\xef\xbb\xbfcaf\xc3\xa9\r\n"),
        ],
        ids=["csv", "quoted csv", "old Macs", "jsonl", "text"],
    )
    def test_byte_order_marks_and_line_ends(self, folder, name, content):
        (folder / name).write_bytes(content)
        assert [(file.path.name, file.caption) for file in self.files(folder) if not file.problem] == [
            ("a.png", "café")
        ]

    def test_quoted_captions_may_have_several_lines(self, folder):
        (folder / "metadata.csv").write_text('file_name,text\na.png,"two\nlines, ""quoted"""\nb.png,one\n')
        assert [file.caption for file in self.files(folder)] == ['two\nlines, "quoted"', "one"]

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("metadata.csv", "file_name,text\na.png,café\n".encode("latin-1"), "line 2 of .*csv is not UTF-8 text"),
            ("metadata.csv", "file_name,text\na.png,x\n".encode("utf-16"), "line 1 of .*csv is not UTF-8 text"),
            ("metadata.jsonl", b'{"file_name": "a.png", "text": "\xe9"}', "line 1 of .*jsonl is not UTF-8 text"),
            ("metadata.csv", b'file_name,text\na.png,"' + b"x\n" * 100_000, "field larger than field limit"),
            ("metadata.csv", b'file_name,text\na.png,"open\nb.png,x\n', "line 3 of .* is not valid CSV"),
            ("metadata.csv", b"x" * 2_000_000, "line 1 of .* has more than 1,048,576 bytes"),
            ("metadata.jsonl", bytes(2_000_000), "line 1 of .* has more than 1,048,576 bytes"),
            ("metadata.jsonl", b'[{"file_name": "a.png"}]', "line 1 of .* is not a JSON object but a list"),
            ("metadata.jsonl", b'{"a": ' + b"[" * 5000, "line 1 of .*nested too deeply"),
            ("metadata.jsonl", b'\n{"a": ' + b"9" * 5000 + b"}", "line 2 of .*not valid JSON"),
        ],
        ids=lambda value: value[:20] if isinstance(value, str) else "",
    )
    def test_damaged_metadata_is_named(self, folder, name, content, message):
        (folder / name).write_bytes(content)
        with pytest.raises(ValueError, match=message) as caught:
            self.files(folder)
        assert name in str(caught.value) and len(str(caught.value)) < 400 + len(str(folder))

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"file_name": "/etc/passwd", "text": "x"}, "names '/etc/passwd', which is no path inside"),
            ({"file_name": "../a.png", "text": "x"}, "no path inside"),
            ({"file_name": "C:\\a.png", "text": "x"}, "no path inside"),
            ({"file_name": "a\0.png", "text": "x"}, "no path inside"),
            ({"file_name": ["a.png"], "text": "x"}, "'file_name' must be a string or null, and is a list"),
            ({"file_name": "a.png", "text": ["x"]}, "'text' must be a string or null, and is a list"),
            ({"file_name": "a.png", "text": 3}, "'text' must be a string or null, and is an integer"),
            ({"file_name": "a.png", "text": "\ud800"}, "half a character"),
            ({"file_name": "a.png"}, "needs one of"),
            ({"file_name": "absent.png", "text": "x"}, "absent.png does not exist"),
            ({"file_name": "x" * 300, "text": "x"}, "cannot be read"),
            ({"file_name": "x" * 100_000, "text": "x"}, "names a file by 100,000 characters"),
            ({"file_name": "folder", "text": "x"}, "is a folder, not a file"),
        ],
        ids=lambda value: str(value)[:40],
    )
    def test_an_entry_is_left_out(self, folder, row, message):
        (folder / "folder").mkdir()
        rows = [row, {"file_name": "b.png", "text": "b"}]
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        first, second = self.files(folder)
        assert second.problem is None and second.caption == "b"
        assert message in first.problem and "entry 1 of" in first.problem and len(first.problem) < 1000
        samples = captioned_images(folder, height=8, width=8)
        assert problem_of(samples, message) and samples[1].load().shape == (3, 8, 8)
        (folder / "metadata.jsonl").write_text(json.dumps(row) + "\n")
        with pytest.raises(ValueError, match="none of the 1 images of .* can be used: "):
            self.files(folder)

    def test_fields_that_the_header_lacks(self, folder):
        (folder / "metadata.csv").write_text("file_name,text\na.png,a wall, brown\nb.png\n")
        with pytest.raises(
            ValueError, match="entry 1 of .* has more fields than the header; put texts with commas in q"
        ):
            self.files(folder)

    @pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
    def test_metadata_that_is_no_file(self, folder, name):
        os.mkfifo(folder / name)
        with pytest.raises(ValueError, match=f"{name} is not a regular file"):
            self.files(folder)
        (folder / name).unlink()
        (folder / name).symlink_to("/etc/passwd")
        with pytest.raises(ValueError, match=f"{name} is a link out of"):
            self.files(folder)

    def test_text_files(self, folder):
        (folder / "a.txt").write_bytes("café".encode("latin-1"))
        (folder / "b.txt").write_bytes(bytes(2_000_000))
        with pytest.raises(ValueError, match=r"none of the 2 .*a\.txt is not UTF-8 text \(byte 3\); save it as UTF-8"):
            self.files(folder)
        (folder / "a.txt").write_text("good")
        assert "b.txt has 2,000,000 bytes; it may have 1,048,576" in self.files(folder)[1].problem


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    rows = np.random.default_rng(0).integers(0, 255, (24, 40, 3), np.uint8)
    frames = np.stack([np.roll(rows, shift, 1) for shift in range(17)])
    return write_video(tmp_path_factory.mktemp("video") / "a.mp4", frames)


class TestVideos:
    def test_extreme_sizes_are_refused(self, tmp_path):
        path = write_video(tmp_path / "wide.mp4", np.zeros((3, 2, 4096, 3), np.uint8))
        with pytest.raises(UnusableSampleError, match="has 4096 x 2 pixels; one side may be 20 times"):
            read_frames(path, 3)
        (tmp_path / "bomb.gif").write_bytes(gif_header(12_000, 12_000))
        with pytest.raises(UnusableSampleError, match="12000 x 12000 pixels; at most"):
            read_frames(tmp_path / "bomb.gif", 3)

    def test_frames_are_fitted_one_at_a_time(self, video):
        frames = read_frames(video, 100)
        assert frames.shape == (17, 24, 40, 3)
        fitted = read_frames(video, 5, None, (16, 16))
        expected = Image.fromarray(frames[3]).resize((16, 16), Image.Resampling.BICUBIC, box=(8, 0, 32, 24))
        assert fitted.shape == (5, 16, 16, 3) and np.array_equal(fitted[3], np.asarray(expected))

    def test_later_frames_are_not_decoded(self, tmp_path):
        """A GIF with more frames than wanted, damaged behind them."""
        images = [Image.fromarray(np.full((8, 8, 3), 10 * number, np.uint8)) for number in range(8)]
        path = tmp_path / "steps.gif"
        images[0].save(path, save_all=True, append_images=images[1:], duration=100)
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * 2 // 3])
        assert read_frames(path, 4)[:, 0, 0, 0].tolist() == [0, 10, 20, 30]
        assert read_frames(path, 4, fps=20)[:, 0, 0, 0].tolist() == [0, 0, 10, 20]
        with pytest.raises(UnusableSampleError, match="cannot be read as a video"):
            read_frames(path, 8)

    @pytest.mark.parametrize("kept", [0, 50, 0.5, 0.99])
    def test_truncated_videos_are_named(self, video, kept, tmp_path):
        content = video.read_bytes()
        path = tmp_path / "cut.mp4"
        path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
        with pytest.raises(UnusableSampleError, match=r"cut\.mp4 cannot be read as a video: .{5,200}$"):
            read_frames(path, 17)

    def test_damaged_frames_are_not_made_up(self, video, tmp_path):
        content = bytearray(video.read_bytes())
        places = np.random.default_rng(0).integers(content.index(b"mdat") + 1000, content.index(b"moov") - 4, 20)
        for place in places:
            content[place] ^= 0xFF
        (tmp_path / "a.mp4").write_bytes(content)
        (tmp_path / "a.txt").write_text("damaged")
        sample = captioned_videos(tmp_path, num_frames=17, height=16, width=16)[0]
        with pytest.raises(UnusableSampleError, match=r"a\.mp4 (has fewer than 17 frames that can|cannot) be read"):
            sample.load()

    def test_playlists_do_not_lead_elsewhere(self, video, tmp_path):
        (tmp_path / "private.mp4").write_bytes(video.read_bytes())
        (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile private.mp4\n")
        with pytest.raises(UnusableSampleError, match=r"list\.mp4 cannot be read as a video"):
            read_frames(tmp_path / "list.mp4", 3)

    def test_impossible_rates_are_refused(self, video, tmp_path):
        content = video.read_bytes()
        # The time scale and durations of the track: 8 frames per second become millions.
        place = content.index(b"mdhd") + 16
        changed = content[:place] + (2**31 - 1).to_bytes(4, "big") + content[place + 4 :]
        (tmp_path / "fast.mp4").write_bytes(changed)
        with pytest.raises(UnusableSampleError, match=r"fast\.mp4 (claims .* frames per second|has no frames|cannot)"):
            read_frames(tmp_path / "fast.mp4", 3, fps=8)

    def test_folders_named_like_videos(self, video, tmp_path):
        (tmp_path / "folder.mp4").mkdir()
        (tmp_path / "a.mp4").write_bytes(video.read_bytes())
        (tmp_path / "a.txt").write_text("x")
        samples = captioned_videos(tmp_path, num_frames=5, height=16, width=16)
        assert "folder.mp4 is a folder, not a file" in problem_of(samples, "folder.mp4")
        assert samples[0].load().shape == (3, 5, 16, 16)


@pytest.mark.usefixtures("fresh_accelerate_state")
class TestCache:
    def test_the_rest_of_the_cache_is_made(self, tmp_path, caplog):
        tiny_images.dit_pipeline().save_pretrained(tmp_path / "dit")
        data = tmp_path / "data"
        for name in ("cat/1.png", "cat/4.png", "dog/1.png"):
            image(data / name)
        image(data / "cat" / "2.png", (30_000, 1))
        (data / "cat" / "3.png").write_bytes(EPS)
        os.mkfifo(data / "dog" / "2.png")
        config = TrainingConfig(
            model=str(tmp_path / "dit"), output=str(tmp_path / "run"), device="cpu", max_steps=1, progress=False
        )
        cache_config = CacheConfig(data=str(data))

        def make():
            return LatentDataset(make_cache(config, cache_config, Accelerator(cpu=True)))

        dataset = make()
        assert len(dataset) == 3 and len(dataset.manifest["skipped"]) == 3
        assert [Path(key.split(":")[0].split(" is ")[0]).name for key in dataset.manifest["skipped"]] == [
            "2.png", "2.png", "3.png",
        ]  # fmt: skip
        for line in ("30000 x 1 pixels", "3.png cannot be read as an image", "is not a regular file"):
            assert line in caplog.text
        assert "3 of 6 samples were left out; 'skipped' in" in caplog.text
        # A run that goes on leaves out the same and keeps the numbers of the others.
        manifest = json.loads((dataset.directory / "cache.json").read_text())
        (dataset.directory / "cache.json").write_text(json.dumps({**manifest, "complete": False}))
        dataset.files[-1].unlink()
        times = {path.name: path.stat().st_mtime_ns for path in dataset.files[:-1]}
        again = make()
        assert again.manifest == dataset.manifest
        assert {path.name: path.stat().st_mtime_ns for path in again.files[:-1]} == times
        # A mended file is encoded, and the others stay.
        (data / "dog" / "2.png").unlink()
        image(data / "dog" / "2.png")
        mended = make()
        assert len(mended) == 4 and len(mended.manifest["skipped"]) == 2


def test_the_machines_errors_are_not_the_files(tmp_path):
    """With no file descriptors left, an image must not be left out of the cache."""
    path = image(tmp_path / "a.png")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            read_image(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
