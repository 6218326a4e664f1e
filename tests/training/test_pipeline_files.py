# SPDX-License-Identifier: Apache-2.0
"""Damaged JSON of pipelines and of records, as training, the demo and benchmarks read it."""

import json

import pytest

from mhla_hf.training import CacheConfig, TrainingConfig
from mhla_hf.training.checkpoints import MetricsFile, read_metrics
from mhla_hf.training.data.images import pipeline_labels
from mhla_hf.training.data.latent_cache import CachePlan, num_classes
from mhla_hf.training.libraries import check_run, open_pipeline

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
    source = open_pipeline(str(directory))
    check_run(source, TrainingConfig(model=str(directory), output="x", mhla="none"))
    if num_classes(source):
        pipeline_labels(source.index.get("id2label"))
    CachePlan(source, CacheConfig(data="digits"))


INDEX, SCHEDULER = "model_index.json", "scheduler/scheduler_config.json"
VAE, MODEL = "vae/config.json", "transformer/config.json"


@pytest.mark.parametrize(
    ("family", "name", "changes", "message"),
    [
        ("dit", INDEX, {"id2label": ["cat"]}, "'id2label' must map numbers of classes to their names"),
        ("dit", INDEX, {"id2label": {"x": "cat"}}, "'id2label' must map numbers of classes to their names"),
        ("dit", SCHEDULER, {"num_train_timesteps": 10**9}, "'num_train_timesteps' must be from 1 to 100,000"),
        ("dit", VAE, {"block_out_channels": [4] * 100_000}, "'block_out_channels' must be a list of 1 to 12 numbers"),
        ("wan", VAE, {"scale_factor_spatial": 0}, "'scale_factor_spatial' must be an integer from 1 to 4,096, got 0"),
        ("wan", MODEL, {"patch_size": [1, 0, 2]}, "'patch_size' must be an integer from 1"),
        ("dit", MODEL, {"patch_size": [2]}, "'patch_size' must be an integer from 1"),
        ("dit", MODEL, {"num_embeds_ada_norm": -1}, "'num_embeds_ada_norm' must be an integer from 1"),
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


class TestMetrics:
    ROW = '{"stage": "finetune", "step": 1, "loss": 1.0}\n'

    @pytest.mark.parametrize("end", ["", '{"stage": "fin', '{"stage": "finetune", "step": 2', "\0" * 100])
    def test_a_half_written_end_is_dropped(self, end, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text(self.ROW + end)
        assert [row["step"] for row in read_metrics(path)] == [1]
        MetricsFile(path, None)
        assert read_metrics(path) == []
