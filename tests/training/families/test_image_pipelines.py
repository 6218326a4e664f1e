# SPDX-License-Identifier: Apache-2.0
"""SANA and DiT from a command to a pipeline: complete tiny pipelines, trained on digits."""

import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file
from typer.testing import CliRunner

from mhla_hf import convert
from mhla_hf.cli.main import app
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.training import LatentDataset, evaluate, objective_for
from mhla_hf.training.checkpoints import read_metrics
from mhla_hf.training.parameters import load_model
from tests.families.cases import SanaCase

from ... import tiny_images


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


runner = CliRunner()

PIPELINES = {"sana": tiny_images.sana_pipeline, "dit": tiny_images.dit_pipeline}
SIZES = {"sana": 128, "dit": 16}
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A complete ordinary pipeline of each family, with a cache of digits."""
    directories = {}
    for family, make in PIPELINES.items():
        directories[family] = tmp_path_factory.mktemp(family)
        make(num_layers=3).save_pretrained(directories[family] / "source")
        size = SIZES[family]
        cached = invoke(
            "cache", directories[family] / "source", directories[family] / "cache", "--data", "digits", "--samples",
            24, "--sizes", f"{size},{size}", "--quiet", "--device", "cpu",
        )  # fmt: skip
        assert cached.exit_code == 0, cached.output
    return directories


def invoke(*arguments):
    return runner.invoke(app, ["train", *map(str, arguments)], env={"COLUMNS": "200"})


def train(family, sources, output, *arguments):
    """Runs the family's command on its digits; returns what it printed."""
    directory = sources[family]
    result = invoke(
        family, directory / "source", output, "--cache", directory / "cache", "--batch-size", 4, "--quiet",
        "--device", "cpu", *arguments,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return result.output


def generate(directory, family, **options):
    """Two images from a pipeline directory, float `[2, H, W, 3]`."""
    pipeline = DiffusionPipeline.from_pretrained(directory)
    pipeline.set_progress_bar_config(disable=True)
    what = {"class_labels": [3, 7]} if family == "dit" else {"prompt": ["the digit three", "the digit seven"]}
    if family == "sana":
        size = {"height": SIZES[family], "width": SIZES[family]}
        what |= {**size, "use_resolution_binning": False, "complex_human_instruction": None}
    generator = torch.Generator().manual_seed(0)
    images = pipeline(**what, num_inference_steps=2, generator=generator, output_type="np", **options).images
    return pipeline, np.asarray(images)


@pytest.mark.parametrize("family", ["dit", pytest.param("sana", marks=pytest.mark.slow)])
def test_a_trained_pipeline_is_whole_and_better(family, sources, tmp_path):
    # An output norm takes SANA away from its own attention, so that there is something to learn.
    printed = train(
        family, sources, tmp_path, "--mhla", '{"blocks": [2, 2], "layers": "2/3", "output_norm": true}',
        "--distill-steps", 30, "--max-steps", 60, "--learning-rate", 3e-3, "--warmup-steps", 5, "--lr-schedule",
        "cosine",
    )  # fmt: skip
    assert "distill: loss" in printed and "finetune: loss" in printed

    pipeline, images = generate(tmp_path / "pipeline", family)
    assert type(pipeline.transformer).__name__.startswith("MHLA") and pipeline.transformer.mhla_layers == [1, 2]
    assert images.shape == (2, SIZES[family], SIZES[family], 3) and np.isfinite(images).all()
    record = json.loads((tmp_path / "pipeline" / "training.json").read_text())
    assert record["objective"].keys() >= ({"scheduler"} if family == "dit" else {"flow_shift", "logit_mean"})
    assert record["source"]["location"] == str((sources[family] / "source").resolve())

    digits = LatentDataset(sources[family] / "cache")
    start = load_model(ModelDirectory.open(sources[family] / "source"), "none")
    objective = objective_for(start, sources[family] / "source")
    before, after = (
        evaluate(model, digits, draws_per_sample=4, objective=objective) for model in (start, pipeline.transformer)
    )
    difference, error = after.difference(before)
    assert difference < -5 * error


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dit"])
def test_a_resumed_command_ends_where_an_uninterrupted_one_does(family, sources, tmp_path):
    train(
        family, sources, tmp_path / "whole", "--mhla", '{"blocks": [2, 2], "output_gate": true}', "--distill-steps", 2,
        "--max-steps", 4, "--checkpointing-steps", 1, "--gradient-checkpointing", "--condition-dropout", 0.5,
    )  # fmt: skip
    whole = load_file(tmp_path / "whole" / "pipeline" / WEIGHTS)
    for stage, step in (("distill", 1), ("finetune", 2)):
        # What a crash right after this step leaves behind.
        cut = tmp_path / f"cut-{stage}"
        shutil.copytree(tmp_path / "whole", cut)
        shutil.rmtree(cut / "pipeline")
        last = f"{stage}-{step:08d}"
        for checkpoint in (cut / "checkpoints").iterdir():
            if (checkpoint.name.startswith("finetune"), checkpoint.name) > (stage == "finetune", last):
                shutil.rmtree(checkpoint)
        resumed = invoke(
            family, sources[family] / "source", cut, "--config", cut / "training_config.json", "--resume", "latest"
        )
        assert resumed.exit_code == 0, resumed.output
        ends = load_file(cut / "pipeline" / WEIGHTS)
        assert ends.keys() == whole.keys() and all(torch.equal(ends[name], whole[name]) for name in whole)
        losses = [
            [row["loss"] for row in read_metrics(folder / "metrics.jsonl")] for folder in (tmp_path / "whole", cut)
        ]
        assert losses[0] == losses[1] and len(losses[0]) == 6


@pytest.mark.parametrize("family", ["sana"])
def test_lora_loads_into_a_converted_pipeline(family, sources, tmp_path):
    """With the scale that it was trained with, which is not the default one."""
    train(
        family, sources, tmp_path, "--mhla", '{"blocks": [2, 2]}', "--train", "lora", "--lora-rank", 2,
        "--lora-alpha", 8, "--max-steps", 3, "--learning-rate", 1e-2,
    )  # fmt: skip
    trained = DiffusionPipeline.from_pretrained(tmp_path / "pipeline").transformer
    fresh = convert(DiffusionPipeline.from_pretrained(sources[family] / "source"), {"blocks": (2, 2)})
    fresh.load_lora_weights(tmp_path / "lora")
    inputs = SanaCase().inputs()
    with torch.no_grad():
        expected = trained(**inputs).sample
        assert torch.allclose(fresh.transformer(**inputs).sample, expected, atol=1e-4)
        fresh.transformer.unload_lora()
        assert not torch.allclose(fresh.transformer(**inputs).sample, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "arguments", "scheduler", "message"),
    [
        ("dit", ["--mhla", '{"blocks": [9, 9]}'], {}, "more blocks than grid"),
        ("dit", ["--mhla", "none", "--train", "lora"], {}, "takes no adapters"),
        ("dit", ["--mhla", '{"blocks": [2, 2]}'], {"prediction_type": "v_prediction"}, "must be 'epsilon'"),
        ("sana", ["--mhla", '{"blocks": [2, 2]}'], {"prediction_type": "epsilon"}, "must be 'flow_prediction'"),
        (
            "sana",
            ["--mhla", '{"blocks": [2, 2]}', "--distill-steps", "1", "--original", "nowhere"],
            {},
            "nowhere is neither",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_data_are_encoded(
    family, arguments, scheduler, message, sources, tmp_path
):
    directory = tmp_path / "source"
    shutil.copytree(sources[family] / "source", directory)
    config = directory / "scheduler" / "scheduler_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **scheduler}))
    output = tmp_path / "run"
    result = invoke(family, directory, output, "--data", "digits", "--device", "cpu", *arguments)
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.split())
    assert not output.exists()
