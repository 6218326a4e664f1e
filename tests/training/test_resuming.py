# SPDX-License-Identifier: Apache-2.0
"""Resuming with other inputs, from damaged, emptied and renamed checkpoints, and from the one before the newest."""

import copy
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mhla_hf.analysis import AttentionTracker
from mhla_hf.training import DiffusionTrainer, TrainingConfig
from mhla_hf.training.checkpoints import read_metrics, read_state

from .. import tiny
from .cases import CASES, write_cache


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")

CASE = CASES["dit"]
SETTINGS = {"max_sequence_length": 8, "sizes": "32,32,5"}


def options(output, **changes):
    base = {"batch_size": 2, "max_steps": 3, "checkpointing_steps": 1, "progress": False, "device": "cpu"}
    return TrainingConfig(**{**base, "output": str(output), "condition_dropout": 0.0, **changes})


@pytest.fixture(scope="module")
def student():
    return CASE.student(CASE.make_teacher())


@pytest.fixture(scope="module")
def finished(student, tmp_path_factory):
    """A run of three steps with three checkpoints, from models in memory."""
    output = tmp_path_factory.mktemp("finished")
    result = DiffusionTrainer(options(output), copy.deepcopy(student), CASE.dataset()).run()
    return output, {name: value.clone() for name, value in result.model.state_dict().items()}


@pytest.fixture
def output(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "run")


@pytest.fixture
def resume(student, output):
    def run(resume="latest", dataset=None, **changes):
        trainer = DiffusionTrainer(
            options(output, resume=resume, **changes), copy.deepcopy(student), dataset or CASE.dataset()
        )
        return trainer.run()

    return run


def checkpoint(output, step=3):
    return output / "checkpoints" / f"finetune-{step:08d}"


def one_line(error):
    text = str(error.value)
    assert "\n" not in text and len(text) < 600
    return text


class TestDamage:
    def of_another_step(self, path):
        shutil.copyfile(checkpoint(path.parents[1], 2) / "optimizer.safetensors", path / "optimizer.safetensors")

    def emptied(self, path):
        save_file({}, path / "optimizer.safetensors")

    def truncated(self, path):
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-10])

    def gone(self, path):
        (path / "model.safetensors").unlink()

    def no_state(self, path):
        (path / "state.json").write_bytes(b"")

    def renamed(self, path):
        shutil.rmtree(path)
        shutil.copytree(checkpoint(path.parents[1], 1), path)

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            ("of_another_step", "optimizer.safetensors is missing or not what was written"),
            ("emptied", "optimizer.safetensors is missing or not what was written"),
            ("truncated", "model.safetensors is missing or not what was written"),
            ("gone", "model.safetensors is missing or not what was written"),
            ("no_state", "state.json is not valid JSON"),
            ("renamed", "was renamed: its state.json says finetune-00000001"),
        ],
    )
    def test_the_newest_is_named_and_the_one_before_it_offered(self, damage, message, output, resume):
        getattr(self, damage)(checkpoint(output))
        with pytest.raises(ValueError, match=message) as error:
            resume()
        text = one_line(error)
        assert "finetune-00000003" in text and text.endswith("--resume previous continues from finetune-00000002")

    def test_the_one_before_goes_on_to_the_same_end(self, output, resume, finished):
        self.truncated(checkpoint(output))
        result = resume("previous")
        assert result.resumed_from == checkpoint(output, 2)
        assert all(torch.equal(value, finished[1][name]) for name, value in result.model.state_dict().items())
        # The damaged one was made again.
        assert read_state(checkpoint(output))["step"] == 3


def start_from_files(folder, resume):
    config = options(
        folder / "run",
        resume=resume,
        model=str(folder / "pipeline"),
        teacher=str(folder / "teacher"),
        cache=str(folder / "cache"),
        mhla={"blocks": (1, 2, 2)},
        train="mhla",
        distill_steps=1,
        max_steps=1,
    )
    return DiffusionTrainer(config).run()


@pytest.fixture(scope="module")
def run_from_files(tmp_path_factory):
    """A run from a pipeline, a cache and a teacher in files."""
    folder = tmp_path_factory.mktemp("files")
    tiny.wan_pipeline(num_layers=1).save_pretrained(folder / "pipeline")
    shutil.copytree(folder / "pipeline", folder / "teacher")
    write_cache(folder / "cache", SETTINGS, 2)
    start_from_files(folder, None)
    return folder


class TestOtherInputs:
    def test_other_data_of_the_same_size(self, resume):
        other = [{**sample, "latents": sample["latents"] + 1} for sample in CASE.dataset()]
        with pytest.raises(ValueError, match="was made with other data than this run has") as error:
            resume(dataset=other)
        one_line(error)

    @pytest.mark.parametrize(
        ("part", "name"),
        [
            ("pipeline/transformer", "base weights"),
            ("pipeline/vae", "vae"),
            ("pipeline/text_encoder", "text_encoder"),
            ("teacher/transformer", "teacher"),
            ("cache", "data"),
        ],
    )
    def test_a_difference_is_named(self, part, name, run_from_files, tmp_path):
        folder = shutil.copytree(run_from_files, tmp_path / "files")
        shutil.rmtree(folder / "run" / "pipeline")
        if part == "cache":
            shutil.rmtree(folder / "cache")
            write_cache(folder / "cache", SETTINGS, 2, seed=1)
        else:
            file = next((folder / part).glob("*.safetensors"))
            tensors = load_file(file)
            first = sorted(key for key, value in tensors.items() if value.is_floating_point())[0]
            save_file({**tensors, first: tensors[first] + 1}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"was made with other {name} than this run has"):
            start_from_files(folder, "latest")


class TestTracking:
    def run(self, student, output, **changes):
        trainer = DiffusionTrainer(options(output, **changes), copy.deepcopy(student), CASE.dataset())
        trainer.tracker = AttentionTracker(trainer.probe_batch(), every=1)
        return trainer.run(), trainer.tracker

    def test_it_changes_no_weight_and_goes_on_when_resumed(self, student, finished, tmp_path):
        result, whole = self.run(student, tmp_path / "run")
        expected = finished[1]
        assert all(torch.equal(value, expected[name]) for name, value in result.model.state_dict().items())
        assert [row["step"] for row in whole.history] == [0, 1, 2, 3]
        rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert [rows[0]["attention_at_start"], *(row["attention"] for row in rows)] == whole.history
        assert not any("attention_at_start" in row for row in rows[1:])
        kinds = [layer["kind"] for layer in whole.history[0]["layers"].values()]
        assert kinds == ["softmax", "mhla", "mhla"]
        _, resumed = self.run(student, tmp_path / "run", resume="finetune-00000001")
        assert [row["step"] for row in resumed.history] == [0, 1, 2, 3]
        assert [row["layers"] for row in resumed.history] == [row["layers"] for row in whole.history]
        rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
        assert [rows[0]["attention_at_start"], *(row["attention"] for row in rows)] == resumed.history
