# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.real_models` with a tiny model and texts where those of the packages would be made."""

from __future__ import annotations

import json

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import packaged_models, real_models

from ..recovery.sources import tokenizer


@pytest.fixture
def work(tmp_path):
    """A folder in which a language model of four layers and a book lie as made."""
    model, prose = (tmp_path / "work" / "made" / name for name in ("smollm2", "prose"))
    own = tokenizer(4096)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(own),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
        )
    ).save_pretrained(model)
    own.save_pretrained(model)
    prose.mkdir(parents=True)
    for chapter in range(4):
        (prose / f"chapter_{chapter}.txt").write_text("the ship sails on and on over the wide sea. " * 150)
    for directory in (model, prose):
        (directory / packaged_models.RECORD).write_text("{}")
    return tmp_path / "work"


@pytest.mark.slow
def test_variants_are_measured_once_and_shown(work, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(real_models, "CALIBRATION_ROWS", {"prose": 3, "code": 1})
    monkeypatch.setattr(real_models, "FIT_STEPS", 1)
    measured: list[str] = []
    options = (work, tmp_path / "report.json", ["smollm2"], ["softmax", "trivial", "quarter"], 1, False)
    report = real_models.measure_all(*options, measured.append)
    assert measured == ["smollm2/softmax/0", "smollm2/trivial/0", "smollm2/quarter/0"]
    assert real_models.measure_all(*options, measured.append) == json.loads((tmp_path / "report.json").read_text())
    assert len(measured) == 3
    original, trivial, quarter = (report["cases"][case] for case in measured)
    assert "layers" not in original and trivial["layers"] == [1, 2, 3]
    # Two of eight groups of heads stay softmax.
    assert sum(1 if isinstance(entry, str) else 2 for entry in quarter["layers"]) == 6
    assert quarter["calibration"]["error_after"] <= quarter["calibration"]["error_before"]
    for kind, value in original["bits_per_byte"].items():
        assert trivial["bits_per_byte"][kind] == pytest.approx(value, rel=0.1)
    real_models.show(report)
    table = capsys.readouterr().out
    assert "| trivial | " in table and table.count("\n|") == 5
