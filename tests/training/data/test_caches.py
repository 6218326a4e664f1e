# SPDX-License-Identifier: Apache-2.0
"""Caches of latents: what is in them, resuming, locks, hostile `cache.json`, damaged samples and encoders."""

import json
import os
from functools import partial

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from PIL import Image
from safetensors import safe_open

from mhla_hf.families.objectives import encode_media
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.training import LatentDataset, TrainingConfig
from mhla_hf.training.config import CacheConfig
from mhla_hf.training.data import latent_cache as caching
from mhla_hf.training.data.folders import DataSample, UnusableSampleError
from mhla_hf.training.data.images import fit, to_tensor
from mhla_hf.training.data.latent_cache import CachePlan, build_cache, finish_cache, is_finished, make_cache
from mhla_hf.utils.destinations import lock_output
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


class TestContent:
    def plan(self, source):
        config = CacheConfig(data="digits", sizes="16,16,5", max_sequence_length=48)
        return CachePlan(ModelDirectory.open(source), config)

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
        plan = self.plan(source)
        plan.samples = samples
        work = not is_finished(directory, plan.settings(), samples)
        if work:
            write_json(directory / "cache.json", {"settings": plan.settings(), "complete": False})
            build_cache(directory, plan, pipeline, progress=False, **options)
        return work

    def test_samples_come_back_as_the_pipeline_makes_them(self, pipeline, source, tmp_path):
        samples = self.samples()
        assert self.build(tmp_path, pipeline, source, samples)
        with pytest.raises(ValueError, match="unfinished"):
            LatentDataset(tmp_path)
        finish_cache(tmp_path, self.plan(source).settings(), samples)
        dataset = LatentDataset(tmp_path)
        # The second video cannot be used: it is left out and named.
        assert len(dataset) == 2 and dataset.manifest["skipped"] == ["square 1"]
        assert dataset[0]["latents"].shape == (16, 2, 2, 2)
        assert torch.equal(dataset[0]["latents"], encode_media(pipeline.vae, samples[0].load()[None])[0])
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
        finish_cache(tmp_path, self.plan(source).settings(), counted)
        assert len(LatentDataset(tmp_path)) == 2
        assert sorted(os.listdir(tmp_path / "samples")) == ["000000.safetensors", "000002.safetensors"]

    def test_a_cache_of_other_settings_is_refused(self, source, tmp_path):
        settings = self.plan(source).settings()
        write_json(tmp_path / "cache.json", {"settings": settings, "complete": False})
        with pytest.raises(ValueError, match=r"sizes '16,16,5' \(now '64,64,5'\)"):
            is_finished(tmp_path, {**settings, "sizes": "64,64,5"}, [])
        with pytest.raises(ValueError, match="none of the 3 samples"):
            finish_cache(tmp_path, settings, self.samples())
        with pytest.raises(ValueError, match="does not exist"):
            LatentDataset(tmp_path / "none")


class TestMaking:
    def test_a_cache_in_the_making_is_refused(self, source, videos, tmp_path, monkeypatch):
        monkeypatch.setattr(caching, "lock_output", partial(lock_output, patience=0.3))
        with (
            lock_output(tmp_path / "cache"),
            pytest.raises(ValueError, match="cache is in use by another run; wait for it or choose another"),
        ):
            make(source, videos, tmp_path / "cache")
        assert os.listdir(tmp_path / "cache") == [".lock"]
        make(source, videos, tmp_path / "cache")

    def test_a_caption_that_changed_is_encoded_again(self, source, videos, tmp_path):
        cache = make(source, videos, tmp_path / "cache")
        before = LatentDataset(cache).fingerprint()
        assert make(source, videos, cache) == cache and LatentDataset(cache).fingerprint() == before
        (videos / "red.txt").write_text("changed")
        make(source, videos, cache)
        assert LatentDataset(cache).fingerprint() != before
        with safe_open(cache / "samples" / "000000.safetensors", framework="pt") as file:
            assert file.metadata()["condition"] == "changed"


class TestHostileFiles:
    @pytest.fixture
    def cache(self, tmp_path):
        write_cache(tmp_path / "cache", SETTINGS, 2)
        return tmp_path / "cache"

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"settings": {"max_sequence_length": 10**400}},
                "max_sequence_length=1.* must be a whole number of at",
            ),
            ({"settings": {"sizes": "x"}}, "'sizes' must be like"),
            ({"settings": []}, "'settings' must be dict"),
            ({"samples": ["../../secret.safetensors"]}, "which is no path inside"),
            ({"samples": ["absent.safetensors"], "buckets": [0]}, "absent.safetensors cannot be read"),
            ({"buckets": [0, [1]]}, "'buckets' must give each sample a number"),
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
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ValueError, match=r"000001\.safetensors cannot be read .*; remove it"):
            LatentDataset(cache)[1]
