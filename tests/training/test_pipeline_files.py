# SPDX-License-Identifier: Apache-2.0
"""Damaged JSON of pipelines and of records, as training, the demo and benchmarks read it."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from benchmarks.quality_dit import SETTINGS
from benchmarks.quality_dit.runner import measure_quality
from conversion.digits.checkpoints import load_checkpoint, save_checkpoint
from mhla_hf.cli.main import app
from mhla_hf.demo import DemoConfig, run_demo
from mhla_hf.training import TrainingConfig
from mhla_hf.training.data.images import pipeline_labels
from mhla_hf.training.loading import PipelineSource
from mhla_hf.training.run import MetricsFile, read_metrics

from .. import tiny, tiny_images


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """Files of tiny pipelines, by family: names with their texts."""
    found = {}
    for family, pipeline in (("wan", tiny.wan_pipeline()), ("dit", tiny_images.dit_pipeline())):
        directory = tmp_path_factory.mktemp(family)
        pipeline.save_pretrained(directory)
        found[family] = {
            path.relative_to(directory): path.read_text()
            for path in directory.rglob("*.json")
            if not path.name.endswith(".index.json")
        }
    return found


@pytest.fixture
def directory(pipelines, tmp_path):
    """Makes a pipeline directory without weights, with one field changed."""

    def make(family, name, changes):
        for path, text in pipelines[family].items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        stored = tmp_path / name
        content = changes if isinstance(changes, str) else json.dumps({**json.loads(stored.read_text()), **changes})
        stored.write_text(content)
        return tmp_path

    return make


def check(directory):
    """What the command checks before it loads anything."""
    source = PipelineSource(directory)
    source.check_run(TrainingConfig(model=str(directory), output="x", mhla="none"))
    if source.sizes.num_classes:
        pipeline_labels(source)


INDEX, SCHEDULER = "model_index.json", "scheduler/scheduler_config.json"
VAE, MODEL = "vae/config.json", "transformer/config.json"


@pytest.mark.parametrize(
    ("family", "name", "changes", "message"),
    [
        ("dit", INDEX, {"id2label": ["cat"]}, "'id2label' must be an object or null, and is a list"),
        ("dit", INDEX, {"id2label": {"x": "cat"}}, "'id2label' must map numbers of classes to their names"),
        ("dit", INDEX, "[]", "is not a JSON object but a list"),
        ("dit", INDEX, {"x": [[]], "_class_name": 3}, "'_class_name' must be a string, and is an integer"),
        ("wan", INDEX, {"boundary_ratio": "half"}, "'boundary_ratio' must be a number or null, and is a string"),
        ("wan", SCHEDULER, {"flow_shift": "3"}, "'flow_shift' must be a number or null, and is a string"),
        ("wan", SCHEDULER, {"prediction_type": None}, "'prediction_type' must be a string, and is null"),
        ("dit", SCHEDULER, {"num_train_timesteps": 10**9}, "'num_train_timesteps' must be from 1 to 100,000"),
        ("dit", SCHEDULER, {"beta_schedule": "x" * 5000}, "of the scheduler is not known"),
        ("dit", SCHEDULER, "{" * 5000, "is not valid JSON"),
        ("dit", VAE, {"block_out_channels": 4}, "'block_out_channels' must be a list of 1 to 12 numbers"),
        ("dit", VAE, {"block_out_channels": [4] * 100_000}, "'block_out_channels' must be a list of 1 to 12 numbers"),
        ("dit", VAE, "null", "is not a JSON object but null"),
        ("wan", VAE, {"scale_factor_spatial": 0}, "'scale_factor_spatial' must be an integer from 1 to 4,096, got 0"),
        ("wan", VAE, {"scale_factor_temporal": "4"}, "'scale_factor_temporal' must be an integer from 1 to 4,096"),
        ("wan", MODEL, {"patch_size": 2}, "'patch_size' must be three integers"),
        ("wan", MODEL, {"patch_size": [1, 0, 2]}, "'patch_size' must be an integer from 1"),
        ("wan", MODEL, {"in_channels": "16"}, "'in_channels' must be an integer, and is a string"),
        ("dit", MODEL, {"patch_size": [2]}, "'patch_size' must be an integer from 1"),
        ("dit", MODEL, {"sample_size": None}, "'sample_size' must be an integer from 1"),
        ("dit", MODEL, {"num_embeds_ada_norm": -1}, "'num_embeds_ada_norm' must be an integer from 1"),
        ("dit", MODEL, {"in_channels": {}}, "'in_channels' must be an integer, and is an object"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_pipelines(directory, family, name, changes, message):
    path = directory(family, name, changes)
    with pytest.raises(ValueError, match=message) as caught:
        check(path)
    assert len(str(caught.value)) < 400 + len(str(path))
    if "of the scheduler" not in message:
        assert name in str(caught.value)


@pytest.mark.parametrize("family", ["wan", "dit"])
def test_good_pipelines_pass(directory, family):
    check(directory(family, INDEX, {}))


@pytest.mark.parametrize("name", [INDEX, SCHEDULER, VAE])
def test_what_is_no_file_is_not_waited_for(directory, name):
    path = directory("dit", INDEX, {})
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(ValueError, match="is not a regular file"):
        check(path)


def test_a_command_says_it_in_one_line(directory, tmp_path):
    path = directory("dit", SCHEDULER, {"prediction_type": "\x1b[31m" + "x" * 100_000})
    arguments = ["train", "dit", path, tmp_path / "run", "--data", "digits", "--mhla", "none"]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 1 and len(result.output) < 1000
    assert "\x1b" not in result.output and "must be 'epsilon'" in result.output


class TestMetrics:
    ROW = '{"stage": "finetune", "step": 1, "loss": 1.0}\n'

    @pytest.mark.parametrize("end", ["", '{"stage": "fin', '{"stage": "finetune", "step": 2', "\0" * 100])
    def test_a_half_written_end_is_dropped(self, end, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text(self.ROW + end)
        assert [row["step"] for row in read_metrics(path)] == [1]
        metrics = MetricsFile(path, None)
        metrics.close()
        assert read_metrics(path) == []

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("[1]", "is not a JSON object but a list"),
            ('{"stage": "finetune", "step": "1", "loss": 1.0}', "'step' must be an integer"),
            ('{"stage": "fine', "is not valid JSON"),
        ],
    )
    def test_other_damage_is_named(self, line, message, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text(self.ROW + line + "\n" + self.ROW)
        with pytest.raises(ValueError, match=rf"line 2 of .*metrics\.jsonl.*{message}"):
            read_metrics(path)


class TestRecords:
    @pytest.mark.parametrize("content", ["", "[]", "{", '{"a": ' * 500])
    def test_options_of_the_demo(self, content, tmp_path):
        (tmp_path / "options.json").write_text(content)
        with pytest.raises(ValueError, match=r"the demo's options \(--no-resume starts again\): .*options\.json"):
            run_demo(DemoConfig(output=str(tmp_path)))

    def test_tensors_of_the_benchmark(self, tmp_path):
        save_checkpoint(tmp_path / "checkpoint.pt", {"step": 3, "weights": {"weight": torch.zeros(2)}})
        whole = (tmp_path / "checkpoint.pt").read_bytes()
        for content in (b"damaged", whole[: len(whole) // 2]):
            (tmp_path / "checkpoint.pt").write_bytes(content)
            with pytest.raises(
                ValueError, match=r"checkpoint\.pt cannot be read .*remove .* to start this stage again"
            ):
                load_checkpoint(tmp_path / "checkpoint.pt")
        (tmp_path / "work").mkdir()
        save_file({"weight": torch.zeros(1)}, tmp_path / "work" / "classifier.safetensors")
        with pytest.raises(ValueError, match=r"classifier\.safetensors holds another classifier; remove it to train"):
            measure_quality(SETTINGS["smoke"], tmp_path / "work", device="cpu")

    def test_options_of_the_benchmark(self, tmp_path):
        (tmp_path / "options.json").write_text("[]")
        with pytest.raises(ValueError, match=r"options\.json is not a JSON object"):
            measure_quality(SETTINGS["smoke"], tmp_path, device="cpu")
