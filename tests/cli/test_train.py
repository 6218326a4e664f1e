# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf train`, its script, and processes: killed and resumed."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import pytest
from safetensors.torch import load_file
from typer.main import get_command

from mhla_hf.cli.main import app
from mhla_hf.training.checkpoints import read_metrics
from mhla_hf.training.config import CacheConfig, TrainingConfig, option_families
from tests import ROOT
from tests.command_line import run_command

from .. import tiny


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wan")
    tiny.wan_pipeline(num_layers=3).save_pretrained(directory)
    return directory


DIGITS = ["--data", "digits", "--samples", "3", "--sizes", "16,16,5"]
QUIET = ["--max-sequence-length", "32", "--quiet", "--device", "cpu"]


invoke = partial(run_command, "train")


def test_cache_train_and_resume(wan, tmp_path):
    invoke("cache", wan, tmp_path / "cache", *DIGITS, *QUIET)
    arguments = [
        "wan", wan, tmp_path / "run", "--cache", tmp_path / "cache", *DIGITS, *QUIET, "--mhla",
        '{"blocks": [1, 1, 1], "layers": "2/3", "output_gate": true}', "--distill-steps", 1,
        "--checkpointing-steps", 1,
    ]  # fmt: skip
    first = invoke(*arguments, "--max-steps", 1, "--track-attention", 1)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["attention"]["step"] for row in rows] == [1, 2] and rows[0]["attention"]["layers"]
    assert "distill: loss" in first.output and str(tmp_path / "run" / "pipeline") in first.output.replace("\n", "")
    config = json.loads((tmp_path / "run" / "pipeline" / "transformer" / "config.json").read_text())
    assert config["mhla"]["layers"] == [1, 2] and config["mhla"]["output_gate"] is True
    assert "already holds the run" in invoke(*arguments, "--max-steps", 2, code=2).output
    # The options of the first run come from its file, except for those on the command line.
    stored = tmp_path / "run" / "training_config.json"
    resumed = invoke("wan", "--config", stored, "--max-steps", 2, "--resume", "latest", "--json", tmp_path / "f.json")
    figures = json.loads((tmp_path / "f.json").read_text())
    assert figures["pipeline"] == str(tmp_path / "run" / "pipeline") and "finetune: loss" in resumed.output
    assert [len(figures["losses"][stage]) for stage in ("distill", "finetune")] == [1, 2]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(row["stage"], row["step"]) for row in rows] == [("distill", 1), ("finetune", 1), ("finetune", 2)]


def test_a_folder_of_videos(wan, tmp_path):
    import numpy as np

    from mhla_hf.training.data.videos import write_video

    videos = tmp_path / "videos"
    videos.mkdir()
    write_video(videos / "grey.mp4", np.full((5, 16, 16, 3), 90, np.uint8))
    (videos / "grey.txt").write_text("nothing happens")
    invoke("cache", wan, tmp_path / "cache", "--data", videos, "--sizes", "16,16,5", *QUIET)
    manifest = json.loads((tmp_path / "cache" / "cache.json").read_text())
    assert manifest["complete"] and manifest["samples"] == ["000000.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["wan", "a/x"], "OUTPUT must be given"),
        (["wan", "a/x", "y", "--mhla", "{"], "--mhla is not valid JSON"),
        (["cache", "a/x", "--data", "digits"], "OUTPUT must be given"),
        (["cache", "a/x", "y"], "--data must be given"),
        (
            ["cache", "a/x", "y", "--data", "digits", "--sizes", "32,64"],
            "--sizes must have the same height and width for data='digits'",
        ),
        (
            ["dit", "--config", "{folder}/flow.json"],
            "flow_shift is not an option of dit models, only of wan, wan-vace, ltx, hunyuan-video",
        ),
        (["wan", "--config", "{folder}/list.json"], "is not a JSON object but list"),
        (["wan", "--config", "{folder}/bad.json"], "is not valid JSON"),
        (["wan", "--config", "{folder}/unknown.json"], "stepz"),
        (["wan", "--config", "{folder}/matching.json"], "match layers with `mhla-hf recover SOURCE OUTPUT --stages"),
        (["wan", "--config", "{folder}/no_matching.json"], "MODEL must be given"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path):
    texts = {"list": "[]", "bad": "{", "unknown": '{"stepz": 1}', "flow": '{"flow_shift": 3.0}'}
    texts |= {"matching": '{"transfer_steps": 5}', "no_matching": '{"transfer_steps": 0, "transfer_cache": "auto"}'}
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text)
    result = invoke(*(argument.replace("{folder}", str(tmp_path)) for argument in arguments), code=None)
    assert result.exit_code in (1, 2)
    assert message in " ".join(result.output.split()) and "Traceback" not in result.output


@pytest.mark.parametrize("family", ["wan", "sana", "dit"])
def test_a_command_has_the_options_of_its_family(family):
    command = get_command(app).commands["train"].commands[family]
    names = {parameter.name for parameter in command.params}
    fields = {field.name for cls in (TrainingConfig, CacheConfig) for field in dataclasses.fields(cls)} - {"progress"}
    assert fields & names == {name for name in fields if family in option_families(name)}
    assert ("flow_shift" in names) == (family != "dit") and ("component" in names) == (family == "wan")


PROBE = """
import os, sys
from mhla_hf.training import TrainingConfig
from mhla_hf.training.processes import make_accelerator

accelerator = make_accelerator(TrainingConfig(device="cpu"))
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
line = " ".join([accelerator.distributed_type.value, *(os.environ[name] for name in names)])
open(f"{sys.argv[1]}/rank{accelerator.process_index}", "w").write(line)
accelerator.end_training()
"""


def launch_probe(tmp_path, *arguments):
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE)
    command = [sys.executable, "-m", "accelerate.commands.launch", *arguments, str(probe), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_accelerate_starts_processes_on_cpus(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    done = launch_probe(tmp_path, "--multi_gpu", "--num_processes", "2", "--main_process_port", port)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "rank0").read_text() == f"MULTI_CPU 0 0 2 {port}"
    assert (tmp_path / "rank1").read_text() == f"MULTI_CPU 1 1 2 {port}"


@pytest.mark.slow
def test_two_processes_killed_and_resumed_end_at_the_same_loss(wan, tmp_path):
    invoke("cache", wan, tmp_path / "cache", *DIGITS, *QUIET)
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "-m", "mhla_hf", "train", "wan", str(wan), "{output}", "--cache", str(tmp_path / "cache"),
        "--mhla", '{"blocks": [1, 1, 1]}', "--distill-steps", "10", "--max-steps", "30", "--batch-size", "2",
        "--learning-rate", "1e-3", "--checkpointing-steps", "5", "--resume", "latest", "--quiet",
        "--device", "cpu",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(output):
        return subprocess.Popen(
            [str(tmp_path / output) if word == "{output}" else word for word in command], env=environment
        )

    assert start("whole").wait(timeout=600) == 0
    for checkpoint in ("distill-00000010", "finetune-00000010"):
        process = start("cut")
        deadline = time.monotonic() + 600
        while not (tmp_path / "cut" / "checkpoints" / checkpoint).is_dir():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert len(read_metrics(tmp_path / "cut" / "metrics.jsonl")) < 40
    assert start("cut").wait(timeout=600) == 0

    whole, cut = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut"))
    assert [(row["stage"], row["step"]) for row in cut] == [(row["stage"], row["step"]) for row in whole]
    for mine, theirs in zip(cut, whole, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
    state = json.loads((tmp_path / "cut" / "checkpoints" / "finetune-00000030" / "state.json").read_text())
    assert state["world_size"] == 2
    weights = [
        load_file(tmp_path / name / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors")
        for name in ("whole", "cut")
    ]
    assert all((weights[0][name] - weights[1][name]).abs().max() < 1e-6 for name in weights[0])
