# SPDX-License-Identifier: Apache-2.0
"""Caches: locked while they change, hostile `cache.json`, damaged samples, truncated encoders."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from mhla_hf.training import DiffusionTrainer, LatentDataset, TrainingConfig
from mhla_hf.training.config import CacheConfig
from mhla_hf.training.data import cache_building
from mhla_hf.training.data.cache_building import make_cache
from mhla_hf.training.loading import PipelineSource
from mhla_hf.utils.destinations import take_lock
from mhla_hf.utils.files import write_json
from tests import ROOT

from ... import tiny
from ..test_resuming import write_cache


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    directory = tmp_path_factory.mktemp("source")
    tiny.wan_pipeline(num_layers=1).save_pretrained(directory)
    return directory


@pytest.fixture
def pipeline(source, tmp_path):
    return shutil.copytree(source, tmp_path / "pipeline")


@pytest.fixture
def videos(tmp_path):
    """A folder with one short GIF."""
    from PIL import Image

    folder = tmp_path / "videos"
    folder.mkdir()
    frames = [Image.new("RGB", (16, 16), (40 * number, 0, 0)) for number in range(5)]
    frames[0].save(folder / "red.gif", save_all=True, append_images=frames[1:], duration=100)
    (folder / "red.txt").write_text("it turns red")
    return folder


def cache_options(videos):
    return CacheConfig(data=str(videos), height=16, width=16, num_frames=5, max_sequence_length=8)


def make(pipeline, videos, cache):
    config = TrainingConfig(model=str(pipeline), cache=str(cache), device="cpu", progress=False)
    return make_cache(config, cache_options(videos), Accelerator(cpu=True))


def trainer(pipeline, cache, output):
    return DiffusionTrainer(
        TrainingConfig(
            model=str(pipeline),
            cache=str(cache),
            output=str(output),
            mhla="none",
            max_steps=1,
            progress=False,
            device="cpu",
            checkpointing_steps=0,
        )  # fmt: skip
    )


class TestLock:
    @pytest.fixture(autouse=True)
    def impatient(self, monkeypatch):
        monkeypatch.setattr(cache_building, "PATIENCE_SECONDS", 0.3)

    def test_a_cache_in_the_making_is_refused(self, pipeline, videos, tmp_path):
        (tmp_path / "cache").mkdir()
        held = take_lock(tmp_path / "cache" / ".lock", "")
        with pytest.raises(ValueError, match="cache .* is in use by another run; wait for it or choose another cache"):
            make(pipeline, videos, tmp_path / "cache")
        assert os.listdir(tmp_path / "cache") == [".lock"]
        held.close()
        make(pipeline, videos, tmp_path / "cache")

    def test_a_cache_that_is_read_does_not_change(self, pipeline, videos, tmp_path):
        cache = make(pipeline, videos, tmp_path / "cache")
        before = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
        readers = [LatentDataset(cache).lock() for _ in range(2)]
        # Another one that finds everything as it is may read along.
        assert make(pipeline, videos, cache) == cache
        (videos / "red.txt").write_text("something else")
        with pytest.raises(ValueError, match="in use by another run"):
            make(pipeline, videos, cache)
        assert {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()} == before
        for reader in readers:
            reader.close()
        make(pipeline, videos, cache)
        assert "something else" in str(load_metadata(cache / "samples" / "000000.safetensors"))

    def test_training_locks_its_cache(self, pipeline, videos, tmp_path):
        cache = make(pipeline, videos, tmp_path / "cache")
        run = trainer(pipeline, cache, tmp_path / "run")
        seen = []

        def callback(*step):
            (videos / "red.txt").write_text("changed while it is trained on")
            with pytest.raises(ValueError, match="in use by another run"):
                make(pipeline, videos, cache)
            seen.append(step)

        run.callback = callback
        run.run()
        assert len(seen) == 1
        make(pipeline, videos, cache)

    def test_a_cache_that_changed_before_the_run_began(self, pipeline, videos, tmp_path):
        cache = make(pipeline, videos, tmp_path / "cache")
        run = trainer(pipeline, cache, tmp_path / "run")
        (videos / "red.txt").write_text("something else")
        make(pipeline, videos, cache)
        with pytest.raises(ValueError, match="has changed since it was opened; start again"):
            run.run()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_cache_without_the_right_to_write_can_be_read(self, pipeline, videos, tmp_path):
        cache = make(pipeline, videos, tmp_path / "cache")
        (cache / ".lock").unlink()
        cache.chmod(0o555)
        assert LatentDataset(cache).lock() is None

    def test_two_processes_with_different_data_do_not_mix(self, pipeline, videos, tmp_path, monkeypatch):
        """Both find no cache; one makes its own, the other one is refused."""
        other = shutil.copytree(videos, tmp_path / "others")
        (other / "red.txt").write_text("another caption")
        begin = cache_building.start_cache

        def begin_late(directory, *arguments, main_process=True):
            found = begin(directory, *arguments, main_process=main_process)
            if not main_process:
                # Meanwhile the first one makes it.
                monkeypatch.setattr(cache_building, "start_cache", begin)
                make(pipeline, videos, directory)
            return found

        monkeypatch.setattr(cache_building, "start_cache", begin_late)
        with pytest.raises(ValueError, match="was made with data .*videos' not .*others'"):
            make(pipeline, other, tmp_path / "cache")
        assert "it turns red" in str(load_metadata(tmp_path / "cache" / "samples" / "000000.safetensors"))


def load_metadata(path):
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata()


class TestManifest:
    @pytest.fixture
    def cache(self, tmp_path):
        write_cache(tmp_path / "cache")
        return tmp_path / "cache"

    def change(self, cache, **changes):
        manifest = json.loads((cache / "cache.json").read_text())
        settings = changes.pop("settings", None)
        if isinstance(settings, dict):
            settings = {**manifest["settings"], **settings}
        changes |= {} if settings is None else {"settings": settings}
        write_json(cache / "cache.json", {**manifest, **changes})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"settings": {"max_sequence_length": 10**9}}, "'max_sequence_length' must be from 1 to"),
            ({"settings": {"max_sequence_length": 10**400}}, "'max_sequence_length' must be from 1 to"),
            ({"settings": {"max_sequence_length": -1}}, "'max_sequence_length' must be from 1 to"),
            ({"settings": {"max_sequence_length": "8"}}, "'max_sequence_length' must be an integer or null"),
            ({"settings": {"max_sequence_length": 3}}, "does not fit max_sequence_length 3"),
            ({"settings": {"max_sequence_length": None}}, "does not fit max_sequence_length None"),
            ({"settings": []}, "'settings' must be an object"),
            ({"samples": "000000.safetensors"}, "'samples' must be a list"),
            ({"samples": ["../../secret.safetensors"]}, "which is no path inside"),
            ({"samples": ["/etc/passwd"]}, "which is no path inside"),
            ({"samples": [{"a": 1}]}, "which is no path inside"),
            ({"samples": []}, "has no samples"),
            ({"samples": ["x" * 100_000]}, "lacks 1 samples"),
            ({"latent_shape": [16, -2, 4, 4]}, "'latent_shape' must be a list of positive integers"),
            ({"latent_shape": [16, 2, 4, 5]}, r"has latents of shape \(16, 2, 4, 4\), cache.json says"),
            ({"complete": "yes"}, "'complete' must be true or false"),
            ({"samples_digest": 7}, "'samples_digest' must be a string"),
            ({"format_version": None}, "'format_version' must be an integer"),
        ],
    )
    def test_hostile_values_are_one_line(self, changes, message, cache):
        self.change(cache, **changes)
        with pytest.raises(ValueError, match=message) as error:
            LatentDataset(cache)[0]
        text = str(error.value)
        assert str(cache) in text and "\n" not in text and len(text) < 700

    @pytest.mark.slow
    def test_nothing_is_allocated_for_them(self, cache):
        """A billion tokens of text would take 128 GB."""
        self.change(cache, settings={"max_sequence_length": 10**9})
        script = (
            "import resource, sys\n"
            "import torch\n"
            "from mhla_hf.training import LatentDataset\n"
            "resource.setrlimit(resource.RLIMIT_AS, (12 * 2**30,) * 2)\n"
            "try:\n    LatentDataset(sys.argv[1])\nexcept ValueError as error:\n    print(error)\n"
        )
        command = [sys.executable, "-c", script, str(cache)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert "'max_sequence_length' must be from 1 to" in done.stdout

    @pytest.mark.parametrize("content", ["", "[]", '{"format_version": 3', "[" * 100_000, "\0"])
    def test_no_json_object(self, content, cache):
        (cache / "cache.json").write_text(content)
        with pytest.raises(ValueError, match=r"cache\.json is not (valid JSON|a JSON object)"):
            LatentDataset(cache)

    @pytest.mark.parametrize("file", ["samples/000000", "samples/000001", "null_condition"])
    def test_integers_in_place_of_latents_and_text_are_refused(self, file, cache):
        """Their noise levels would be rounded to whole numbers."""
        path = cache / f"{file}.safetensors"
        name = "prompt_embeds" if file == "null_condition" else "latents"
        tensors = load_file(path)
        save_file({**tensors, name: (8 * tensors[name]).to(torch.int32)}, path)
        with pytest.raises(ValueError, match=f"{path.name} has {name} of type int32, which must be floating-point"):
            dataset = LatentDataset(cache)
            assert file == "samples/000001", "only the first sample is read when a cache is opened"
            dataset[1]

    def test_damaged_samples_are_named(self, cache):
        path = cache / "samples" / "000001.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1])
        with pytest.raises(ValueError, match=r"000001\.safetensors cannot be read: .*; remove it"):
            LatentDataset(cache)[1]
        save_file({"prompt_embeds": torch.zeros(2, 3)}, path)
        with pytest.raises(ValueError, match="has latents of shape None"):
            LatentDataset(cache)[1]
        save_file({"latents": torch.zeros(16, 2, 4, 4), "prompt_embeds": torch.tensor(1.0)}, path)
        with pytest.raises(ValueError, match=r"has prompt_embeds of shape \(\)"):
            LatentDataset(cache)[1]


class TestTruncatedWeights:
    def truncate(self, folder, keep=0.5):
        path = next(folder.glob("*.safetensors"))
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
        return path

    @pytest.mark.parametrize("keep", [0.5, 0], ids=["half", "nothing"])
    @pytest.mark.parametrize("component", ["vae", "text_encoder"])
    def test_encoders_are_named_when_caching(self, component, keep, pipeline, videos, tmp_path):
        path = self.truncate(pipeline / component, keep)
        with pytest.raises(ValueError, match=r"weights .* are damaged \(.*\): copy or download them again") as error:
            make(pipeline, videos, tmp_path / "cache")
        assert str(path) in str(error.value) and "\n" not in str(error.value)
        # Before a run has begun, too.
        with pytest.raises(ValueError, match="are damaged"):
            PipelineSource(pipeline).check_run(TrainingConfig(mhla="none"))

    def test_the_model_and_its_teacher_are_named(self, pipeline):
        path = self.truncate(pipeline / "transformer")
        for load in (
            lambda: PipelineSource(pipeline).load_model("none"),
            lambda: PipelineSource(pipeline).teacher.load(),
        ):
            with pytest.raises(ValueError, match="are damaged") as error:
                load()
            assert str(path) in str(error.value)

    def test_pickled_weights_too(self, pipeline, videos, tmp_path):
        """Those that are not safetensors can only be tried."""
        path = next((pipeline / "vae").glob("*.safetensors"))
        torch.save(load_file(path), path.with_suffix(".bin"))
        path.unlink()
        content = path.with_suffix(".bin").read_bytes()
        path.with_suffix(".bin").write_bytes(content[: len(content) // 2])
        with pytest.raises((ValueError, OSError)) as error:
            make(pipeline, videos, tmp_path / "cache")
        assert str(pipeline) in str(error.value)


class TestDamagedConfigurations:
    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("text_encoder/config.json", "[]", "is not a JSON object but a list"),
            ("tokenizer/tokenizer.json", '{"a": [', "is not valid JSON"),
            ("tokenizer/tokenizer_config.json", "[1, 2]", "is not a JSON object but a list"),
            ("scheduler/scheduler_config.json", "[" * 100_000, "nested too deeply"),
        ],
    )
    def test_files_are_named(self, name, content, message, pipeline, videos, tmp_path):
        (pipeline / name).write_text(content)
        with pytest.raises(ValueError, match=message) as error:
            make(pipeline, videos, tmp_path / "cache")
        assert str(pipeline / name) in str(error.value) and "\n" not in str(error.value)

    def test_layers_without_weights_are_refused(self, pipeline, videos, tmp_path):
        path = pipeline / "text_encoder" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "num_layers": 10**7}))
        with pytest.raises(
            ValueError, match=r"text_encoder/config\.json: 'num_layers' is above the \d+ tensors beside"
        ):
            make(pipeline, videos, tmp_path / "cache")

    def test_fields_of_other_types_name_the_pipeline(self, pipeline, videos, tmp_path):
        path = pipeline / "text_encoder" / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "num_layers": "many"}))
        with pytest.raises(ValueError) as error:
            make(pipeline, videos, tmp_path / "cache")
        assert str(pipeline) in str(error.value) and len(str(error.value)) < 600
