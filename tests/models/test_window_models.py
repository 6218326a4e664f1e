# SPDX-License-Identifier: Apache-2.0
"""Whole models with a softmax window beside MHLA: against their softmax originals, and on disk."""

from __future__ import annotations

import copy
import json
import logging
import shutil

import pytest
import torch
import torch.nn as nn
from typer.testing import CliRunner

import mhla_hf
from mhla_hf import MHLAWanTransformer3DModel
from mhla_hf.cli.main import app
from mhla_hf.layers import MHLA
from tests.families.cases import DiTCase, PixArtCase, WanCase
from tests.integrations.transformers.mhla_models import served_names
from tests.integrations.transformers.tiny_models import FAMILIES, inputs, softmax_model


CASES = {"wan": WanCase(), "dit": DiTCase(), "pixart": PixArtCase()}
CAUSAL = ("qwen3", "llama_yarn", "phi", "smollm3", "granite", "gpt2", "opt", "clip_text")


@torch.no_grad()
def with_window_alone(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, MHLA):
            module.window_bias.fill_(float("-inf"))
    return model


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize(
    ("case", "window"),
    [*((case, window) for case in CASES for window in ("block", "adjacent")), ("wan", "cross")],
)
def test_a_window_over_everything_is_softmax_attention(case, window, size):
    case = CASES[case]
    size = size if case.upstream_size == 0 else case.upstream_size
    softmax = case.make()
    # Neighbours of one place, or all frames there, are the whole grid; no block is full.
    window_size = [20] * len(case.options["blocks"])
    model = mhla_hf.convert(copy.deepcopy(softmax), {"window": window, "window_size": window_size})
    given = case.inputs(size)
    with torch.no_grad():
        expected = softmax(**given).sample
        torch.testing.assert_close(with_window_alone(model)(**given).sample, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", ["block", "adjacent"])
@pytest.mark.parametrize("name", [*served_names("encoder", "vision"), *CAUSAL])
@torch.no_grad()
def test_transformers_models_with_a_window_over_everything(name, window):
    softmax = softmax_model(name)
    texts = FAMILIES[name].kind != "vision"
    model = mhla_hf.convert(copy.deepcopy(softmax), {"window": window, "window_size": 40 if texts else [7, 7]})
    padding = "right" if texts else None
    given = inputs(name, padding=padding)
    seen = given.get("attention_mask", torch.ones(1)).bool() if padding else ...
    expected = softmax(**given)[0][seen]
    torch.testing.assert_close(with_window_alone(model)(**given)[0][seen], expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A softmax Wan transformer on disk, and what the command makes of it with a window."""
    folder = tmp_path_factory.mktemp("window")
    CASES["wan"].make().save_pretrained(folder / "softmax")
    options = ["--blocks", "1,2,2", "--window", "cross", "--window-size", "1,2,2"]
    result = CliRunner().invoke(app, ["convert", str(folder / "softmax"), str(folder / "mhla"), *options])
    assert result.exit_code == 0, result.output
    return folder


def test_the_command_converts_with_a_window(converted):
    stored = json.loads((converted / "mhla/config.json").read_text())["mhla"]
    assert (stored["window"], stored["window_size"]) == ("cross", [1, 2, 2])
    noted = json.loads((converted / "mhla/conversion.json").read_text())
    initialised = next(iter(noted["components"].values()))["initialised"]
    assert initialised["blocks.0.attn1.mhla.window_bias"] == [2]
    loaded = MHLAWanTransformer3DModel.from_pretrained(converted / "mhla")
    assert not loaded.blocks[0].attn1.mhla.window_bias.any()


def test_gains_of_earlier_versions_are_refused(converted, tmp_path):
    shutil.copytree(converted / "mhla", tmp_path / "old")
    stored = json.loads((tmp_path / "old/config.json").read_text())
    stored["mhla"]["window_gains"] = "per_head"
    (tmp_path / "old/config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="Unknown mhla option window_gains"):
        MHLAWanTransformer3DModel.from_pretrained(tmp_path / "old")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "near"], "'near' is not one of 'block', 'adjacent', 'cross'"),
        (["--window-size", "1,2,2"], r"--window-size \(1, 2, 2\) needs window"),
        (["--window", "cross", "--window-size", "2,2"], r"--window-size \(2, 2\) must have one entry for each axis"),
    ],
)
def test_the_command_refuses_wrong_windows_in_one_line(converted, tmp_path, options, message):
    result = CliRunner().invoke(
        app, ["convert", str(converted / "softmax"), str(tmp_path / "out"), "--blocks", "1,2,2", *options],
        env={"COLUMNS": "300"},
    )  # fmt: skip
    assert result.exit_code == 2 and not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match=message):
        raise ValueError(result.output)


def test_half_precision_keeps_the_bias_in_fp32(converted):
    model = MHLAWanTransformer3DModel.from_pretrained(converted / "mhla", torch_dtype=torch.bfloat16)
    assert model.blocks[0].attn1.mhla.window_bias.dtype == torch.float32
    assert model.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16


def test_checkpoints_of_earlier_versions_load_and_take_a_window(tmp_path, caplog):
    case = CASES["wan"]
    model = case.make_mhla()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    for name in ("window", "window_size"):
        del stored["mhla"][name]
    path.write_text(json.dumps(stored))
    expected = case.run(model)
    torch.testing.assert_close(case.run(MHLAWanTransformer3DModel.from_pretrained(tmp_path)), expected)
    logging.getLogger("mhla_hf").propagate = True
    caplog.clear()
    with_window = MHLAWanTransformer3DModel.from_pretrained(tmp_path, mhla={"window": "cross"})
    assert with_window.config.mhla["window_size"] == [1, 3, 3]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "newly initialised. Recover the model before you use it:" in message
    with_window.save_pretrained(tmp_path / "window")
    with pytest.raises(ValueError, match="The mhla options leave out 2 trained MHLA weight.*window_bias"):
        MHLAWanTransformer3DModel.from_pretrained(tmp_path / "window", mhla={"window": None})
    caplog.clear()
    MHLAWanTransformer3DModel.from_pretrained(tmp_path / "window", mhla={"window": "block"})
    assert "made with window='cross'; the mhla options change that" in caplog.text
