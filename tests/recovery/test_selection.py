# SPDX-License-Identifier: Apache-2.0
"""Which layers are kept softmax: scores against direct evaluation, budgets, and the commands."""

import copy
import json

import pytest
import torch
from typer.testing import CliRunner

import mhla_hf
from mhla_hf.cli.main import app
from mhla_hf.recovery.selection import select_layers
from mhla_hf.training.layers import run
from tests.integrations.transformers.tiny_models import softmax_model
from tests.recovery.sources import model_directory, text_folder
from tests.recovery.test_calibration import converted, probe


def test_scores_are_those_of_hybrids():
    """The figures equal those of the calibrated model with a layer's original attention and projection put back."""
    model, example = converted("bert")
    softmax, batches, seen = softmax_model("bert").eval(), probe(example), []
    report = select_layers(model, batches, keep=1, progress=lambda *count: seen.append(count))
    assert seen[-1][0] == seen[-1][1]

    def error(other):
        with torch.no_grad():
            pairs = [(run(other, batch)[0], run(softmax, batch)[0]) for batch in batches]
        own, reference = (torch.cat(part) for part in zip(*pairs))
        return float((own - reference).square().sum() / (reference - reference.mean()).square().sum())

    assert report.errors[0] == pytest.approx(error(model), rel=1e-3)
    for score in report.layers:
        hybrid = copy.deepcopy(softmax)
        state = dict(hybrid.state_dict())
        indices = [layer.index for layer in report.layers if layer.index != score.index]
        hybrid = mhla_hf.convert(hybrid, {**model.config.mhla, "layers": indices}).eval()
        kept = f"bert.encoder.layer.{score.index}."
        state = {
            name: state[name] if name.startswith(kept) else value
            for name, value in model.state_dict().items()
            if not (name.startswith(kept) and ".mhla." in name)
        }
        hybrid.load_state_dict(state)
        assert score.restored == pytest.approx(report.errors[0] - error(hybrid), rel=1e-2, abs=1e-5)
    best = max(report.layers, key=lambda layer: layer.restored)
    assert report.order == [best.index] and best.kept
    assert report.errors[1] == pytest.approx(report.errors[0] - best.restored)
    assert report.mhla_layers == [layer.index for layer in report.layers if layer is not best]
    json.dumps(report.to_dict())


def test_latency_budget(monkeypatch):
    model, example = converted("bert")

    def time(model, layers, batch, report):
        for score, softmax in zip(report.layers, (9.0, 2.0, 2.0)):
            score.softmax_ms, score.mhla_ms = softmax, 1.0
        report.softmax_ms, report.mhla_ms, report.chosen_ms = 20.0, 10.0, 10.0
        return report

    monkeypatch.setattr("mhla_hf.recovery.selection._time", time)
    report = select_layers(model, probe(example), latency="55%")
    assert len(report.order) == 1 and report.order[0] in (1, 2) and report.chosen_ms == 11.0
    with pytest.raises(ValueError, match="latency leaves every layer softmax"):
        select_layers(converted("bert")[0], probe(example), latency="100%")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": "much"}, "keep='much' must be a share such as 25%"),
        ({"keep": 3}, "keep=3 keeps 3 of 3 layers; at least one must become MHLA"),
        ({"keep": "0%"}, "keep='0%' must be a share"),
        ({"latency": "0%"}, "latency='0%' must be a share"),
        ({"keep": 1, "latency": 0.5}, "Give keep or latency, not both"),
    ],
)
def test_mistakes(options, message):
    model, example = converted("bert")
    with pytest.raises(ValueError, match=message):
        select_layers(model, probe(example), **options)


def test_a_share_is_checked_before_the_data(tmp_path):
    source = model_directory("bert", tmp_path / "bert")
    result = CliRunner().invoke(app, ["select-layers", str(source), "--keep", "200%"])
    assert result.exit_code == 2 and result.stderr.startswith("error: --keep '200%' must be a share")


@pytest.mark.slow
def test_commands(tmp_path):
    model_directory("llama", tmp_path / "softmax")
    texts = text_folder(tmp_path / "texts")
    plot, figures = tmp_path / "layers.png", tmp_path / "layers.json"
    common, source = ["--block-size", "4", "--data", str(texts)], str(tmp_path / "softmax")
    arguments = ["select-layers", source, *common, "--keep", "1", "--plot", str(plot), "--json", str(figures)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    record = json.loads(figures.read_text())
    option = ",".join(map(str, record["mhla_layers"]))
    assert len(record["mhla_layers"]) == 2 and f"--layers {option}" in result.output
    assert plot.read_bytes().startswith(b"\x89PNG")
    # The measured times of all layers, and of the models that they add up to.
    assert all(layer["softmax_ms"] > 0 and layer["mhla_ms"] > 0 for layer in record["layers"])
    extra = [layer["softmax_ms"] - layer["mhla_ms"] for layer in record["layers"]]
    assert record["softmax_ms"] == pytest.approx(record["mhla_ms"] + sum(extra))
    kept = [value for value, layer in zip(extra, record["layers"]) if layer["kept"]]
    assert record["chosen_ms"] == pytest.approx(record["mhla_ms"] + sum(kept))
    result = CliRunner().invoke(
        app, ["convert", source, str(tmp_path / "mhla"), *common, "--layers", "auto:2/3:error"]
    )
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "mhla" / "conversion.json").read_text())["components"]["model"]
    assert len(written["mhla_layers"]) == 2
    result = CliRunner().invoke(app, ["convert", source, str(tmp_path / "groups"), *common, "--layers", "auto:2/3"])
    assert result.exit_code == 0, result.output
    layers = json.loads((tmp_path / "groups" / "config.json").read_text())["mhla"]["layers"]
    # Four of the six groups of heads.
    assert sum(1 if isinstance(entry, str) else 2 for entry in layers) == 4
