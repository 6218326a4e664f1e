# SPDX-License-Identifier: Apache-2.0
"""Caches of latents: what is in them, resuming, locks, hostile `cache.json`, damaged samples and encoders."""

import dataclasses
import json
import os

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mhla_hf.models.directory import ModelDirectory
from mhla_hf.training import DiffusionTrainer, LatentDataset, TrainingConfig
from mhla_hf.training.config import CacheConfig
from mhla_hf.training.data import cache as caching
from mhla_hf.training.data.cache import CachePlan, build_cache, finish_cache, make_cache, start_cache
from mhla_hf.training.data.folders import DataSample, UnusableSampleError
from mhla_hf.training.data.images import fit, to_tensor
from mhla_hf.training.families import encode_videos
from mhla_hf.utils.destinations import take_lock
from mhla_hf.utils.files import write_json

from ... import tiny
from ..cases import write_cache
from ..test_resuming import SETTINGS


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


@pytest.fixture(scope="module")
def pipeline():
    return tiny.wan_pipeline(num_layers=1)


@pytest.fixture(scope="module")
def source(pipeline, tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    pipeline.save_pretrained(directory)
    return directory


@pytest.fixture
def videos(tmp_path):
    """A folder with one short GIF."""
    folder = tmp_path / "videos"
    folder.mkdir()
    frames = [Image.new("RGB", (16, 16), (40 * number, 0, 0)) for number in range(5)]
    frames[0].save(folder / "red.gif", save_all=True, append_images=frames[1:], duration=100)
    (folder / "red.txt").write_text("it turns red")
    return folder


def make(source, videos, cache):
    config = TrainingConfig(model=str(source), cache=str(cache), device="cpu", progress=False)
    options = CacheConfig(data=str(videos), sizes="16,16,5", max_sequence_length=8)
    return make_cache(config, options, Accelerator(cpu=True), ModelDirectory.open(source))


def metadata(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


class TestContent:
    def plan(self, source):
        config = CacheConfig(data="digits", sizes="16,16,5", max_sequence_length=48)
        return CachePlan.make(ModelDirectory.open(source), config)

    def samples(self, count=3):
        def load(number):
            if number == 1:
                raise UnusableSampleError("square 1 has fewer than 5 frames")
            frame = np.zeros((16, 16, 3), np.uint8)
            frame[4:12, number : number + 8] = 255
            return to_tensor(np.stack([fit(Image.fromarray(frame), 16, 16)] * 5))

        return [
            DataSample(f"square {number}", f"a square {number}", lambda number=number: load(number))
            for number in range(count)
        ]

    def build(self, directory, pipeline, source, samples, **options):
        plan = dataclasses.replace(self.plan(source), samples=samples)
        work = start_cache(directory, plan.settings(), samples, write=True)
        if work:
            build_cache(directory, plan, pipeline, progress=False, **options)
        return work

    def test_samples_come_back_as_the_pipeline_makes_them(self, pipeline, source, tmp_path):
        samples = self.samples()
        assert self.build(tmp_path, pipeline, source, samples)
        with pytest.raises(ValueError, match="unfinished"):
            LatentDataset(tmp_path)
        finish_cache(tmp_path, samples)
        dataset = LatentDataset(tmp_path)
        # The second video cannot be used: it is left out and named.
        assert len(dataset) == 2 and dataset.manifest["skipped"] == ["square 1"]
        assert dataset[0]["latents"].shape == (16, 2, 2, 2)
        assert torch.equal(dataset[0]["latents"], encode_videos(pipeline.vae, samples[0].load()[None])[0])
        expected, empty = pipeline.encode_prompt("a square 2", negative_prompt="", max_sequence_length=48)
        assert torch.allclose(dataset[1]["prompt_embeds"], expected[0], atol=1e-6)
        assert torch.allclose(dataset.null_condition["prompt_embeds"], empty[0], atol=1e-6)
        assert not self.build(tmp_path, pipeline, source, samples)

    def test_an_interrupted_cache_goes_on(self, pipeline, source, tmp_path):
        samples, loads = self.samples(), []
        counted = [
            DataSample(
                sample.key, sample.condition, lambda sample=sample: (loads.append(sample.key), sample.load())[1]
            )
            for sample in samples
        ]
        self.build(tmp_path, pipeline, source, counted, rank=0, world_size=2)
        assert loads == ["square 0", "square 2"]
        # A truncated file, as a full disk may leave, is made again.
        broken = tmp_path / "samples" / "000002.safetensors"
        broken.write_bytes(broken.read_bytes()[:20])
        (tmp_path / "samples" / "000009.safetensors").write_bytes(b"left from a larger run")
        self.build(tmp_path, pipeline, source, counted)
        assert loads[2:] == ["square 1", "square 2"]
        finish_cache(tmp_path, counted)
        assert len(LatentDataset(tmp_path)) == 2
        assert sorted(os.listdir(tmp_path / "samples")) == ["000000.safetensors", "000002.safetensors"]

    def test_a_cache_of_other_settings_is_refused(self, source, tmp_path):
        settings = self.plan(source).settings()
        start_cache(tmp_path, settings, [], write=True)
        with pytest.raises(ValueError, match="sizes '16,16,5' not '64,64,5'"):
            start_cache(tmp_path, {**settings, "sizes": "64,64,5"}, [], write=True)
        with pytest.raises(ValueError, match="none of the 3 samples"):
            finish_cache(tmp_path, self.samples())
        with pytest.raises(ValueError, match="does not exist"):
            LatentDataset(tmp_path / "none")
        (tmp_path / "cache.json").write_text('{"format_version": 99}')
        with pytest.raises(ValueError, match="format 99"):
            LatentDataset(tmp_path)


class TestLock:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch):
        monkeypatch.setattr(caching, "PATIENCE_SECONDS", 0.3)

    def test_a_cache_in_the_making_is_refused(self, source, videos, tmp_path):
        (tmp_path / "cache").mkdir()
        held = take_lock(tmp_path / "cache" / ".lock", "")
        with pytest.raises(ValueError, match="cache .* is in use by another run; wait for it or choose another cache"):
            make(source, videos, tmp_path / "cache")
        assert os.listdir(tmp_path / "cache") == [".lock"]
        held.close()
        make(source, videos, tmp_path / "cache")

    def test_training_keeps_its_cache_from_changing(self, source, videos, tmp_path):
        cache = make(source, videos, tmp_path / "cache")
        opened = LatentDataset(cache)
        config = TrainingConfig(
            model=str(source), cache=str(cache), output=str(tmp_path / "run"), mhla="none", max_steps=1,
            progress=False, device="cpu", checkpointing_steps=0,
        )  # fmt: skip
        seen = []

        def callback(*step):
            # Another run may read along, but none may change it.
            opened.lock().close()
            assert make(source, videos, cache) == cache
            (videos / "red.txt").write_text("changed while it is trained on")
            with pytest.raises(ValueError, match="in use by another run"):
                make(source, videos, cache)
            seen.append(step)

        run = DiffusionTrainer(config)
        run.callback = callback
        run.run()
        assert len(seen) == 1
        make(source, videos, cache)
        assert "changed while" in metadata(cache / "samples" / "000000.safetensors")["condition"]
        with pytest.raises(ValueError, match="has changed since it was opened; start again"):
            opened.lock()


class TestHostileFiles:
    @pytest.fixture
    def cache(self, tmp_path):
        write_cache(tmp_path / "cache", SETTINGS, 2)
        return tmp_path / "cache"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"settings": {"max_sequence_length": 10**400}}, "'max_sequence_length' must be from 1 to"),
            ({"settings": {"max_sequence_length": 3}}, "does not fit max_sequence_length 3"),
            ({"settings": {"sizes": "x"}}, "'sizes' must be like"),
            ({"settings": []}, "'settings' must be an object"),
            ({"samples": ["../../secret.safetensors"]}, "which is no path inside"),
            ({"samples": ["absent.safetensors"], "buckets": [0]}, "absent.safetensors cannot be read"),
            ({"latent_shapes": [[16, -2, "x"]]}, r"has latents of shape \[16, 2, 4, 4\], cache.json says"),
            ({"buckets": [0, [1]]}, "'buckets' must give each sample an entry"),
        ],
    )
    def test_a_manifest_is_checked(self, changes, message, cache):
        manifest = json.loads((cache / "cache.json").read_text())
        if isinstance(changes.get("settings"), dict):
            changes = {"settings": {**manifest["settings"], **changes["settings"]}}
        write_json(cache / "cache.json", {**manifest, **changes})
        with pytest.raises(ValueError, match=message) as error:
            LatentDataset(cache)[0]
        text = str(error.value)
        assert str(cache) in text and "\n" not in text and len(text) < 700

    def test_damaged_samples_are_named(self, cache):
        path = cache / "samples" / "000001.safetensors"
        tensors, content = load_file(path), path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(ValueError, match=r"000001\.safetensors cannot be read .*; remove it"):
            LatentDataset(cache)[1]
        for damaged, message in (
            ({"prompt_embeds": torch.zeros(2, 3)}, "has latents of shape None"),
            ({**tensors, "prompt_embeds": torch.tensor(1.0)}, r"has prompt_embeds of shape \(\)"),
            # Their noise levels would be rounded to whole numbers.
            ({**tensors, "latents": tensors["latents"].int()}, "has latents of type int32, not floating-point"),
        ):
            save_file(damaged, path)
            with pytest.raises(ValueError, match=message):
                LatentDataset(cache)[1]
