# SPDX-License-Identifier: Apache-2.0
"""The comparison of test suites (`tests/upstream/run.py`) on a small checkout, written here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mhla_hf.families.flux import grid_of
from tests.upstream import run, substitution


RUNNER = Path(run.__file__)

SUITE = """
import unittest

import torch
from diffusers import WanTransformer3DModel

OPTIONS = dict(
    patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
    freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
)


class TestWan(unittest.TestCase):
    @property
    def model_class(self):
        return WanTransformer3DModel

    def test_is_deterministic(self):
        model = self.model_class(**OPTIONS).eval()
        inputs = torch.randn(1, 4, 2, 8, 8), torch.tensor([3]), torch.randn(1, 5, 16)
        with torch.no_grad():
            first, second = (model(*inputs, return_dict=False)[0] for _ in range(2))
        self.assertTrue(torch.equal(first, second))

    def test_has_no_other_parameters(self):
        names = [name for name, _ in self.model_class(**OPTIONS).named_parameters()]
        self.assertFalse([name for name in names if "mixing" in name])

    def test_fails_for_stock(self):
        self.assertIn("MHLA", self.model_class.__name__)

    @unittest.skip("needs a GPU")
    def test_is_skipped(self):
        pass
"""


@pytest.fixture
def checkout(tmp_path):
    for name in run.SUITES["diffusers"]:
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SUITE if name.endswith("_wan.py") else "def test_nothing():\n    pass\n")
    for folder in ("", "models", "models/transformers"):
        (tmp_path / "tests" / folder / "__init__.py").touch()
    return tmp_path


def _compare(checkout, *options):
    environment = {**os.environ, "PYTHONPATH": str(run.REPOSITORY), "COLUMNS": "200"}
    command = [sys.executable, str(RUNNER), "diffusers", "--checkout", str(checkout), "--workers", "0", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=checkout)


@pytest.mark.slow
def test_prints_what_fails_with_mhla_alone(checkout):
    finished = _compare(checkout, "-k", "Wan", "--output", str(checkout / "results"))
    assert finished.returncode == 1, finished.stderr
    assert "stock: 2 passed, 1 failed, 1 skipped; MHLA: 2 passed, 1 failed, 1 skipped" in finished.stdout
    assert "TestWan::test_has_no_other_parameters" in finished.stdout
    assert "test_is_deterministic" not in finished.stdout and "test_fails_for_stock" not in finished.stdout
    assert (checkout / "results" / "diffusers-mhla.xml").is_file()


def test_reviewed_differences_have_their_reasons():
    reviewed = json.loads((RUNNER.parent / "reviewed.json").read_text())
    assert set(reviewed) == set(run.SUITES)
    for entries in reviewed.values():
        assert all("::" in pattern and len(reason) > 20 for pattern, reason in entries.items())


def test_differences_are_explained_new_or_gone(monkeypatch, tmp_path, capsys):
    (tmp_path / "reviewed.json").write_text(json.dumps({"diffusers": {"*::test_a": "known", "*::test_gone": "old"}}))
    monkeypatch.setattr(run, "HERE", tmp_path)
    passed, failed = run.Outcome("passed"), run.Outcome("failed", "no")
    stock = {"T::test_a": passed, "T::test_b": passed, "T::test_c": failed, "T::test_d": run.Outcome("skipped")}
    mhla = {**dict.fromkeys(stock, failed), "T::test_d": passed}
    assert run._report("diffusers", stock, mhla, is_whole=True) == 1
    printed = capsys.readouterr().out
    assert "T::test_b" in printed and "T::test_a" not in printed and "T::test_d" not in printed
    assert "*::test_gone, which does not differ" in printed


@pytest.mark.parametrize(("count", "grid"), [(16, (4, 4)), (32, (4, 8)), (7, (1, 7))])
def test_image_tokens_are_placed_on_a_grid(count, grid):
    drawn = {"img_ids": torch.randn(1, count, 3, dtype=torch.bfloat16), "timestep": torch.ones(1)}
    draw = substitution._changed(lambda: drawn, substitution.CHANGES["get_dummy_inputs"])
    assert substitution._changed(draw, substitution.CHANGES["get_dummy_inputs"]) is draw
    inputs = draw()
    assert grid_of(inputs["img_ids"]) == grid
    assert inputs["img_ids"].dtype == torch.bfloat16 and inputs["timestep"] is drawn["timestep"]


def test_testers_of_language_models_ask_for_mhla():
    module = ModuleType("tests.models.made_up")
    for name in ("ModelTester", "Other"):
        setattr(module, name, type(name, (), {"get_config": lambda self: SimpleNamespace()}))
    substitution._substitute_methods(module)
    options = {"_attn_implementation": "mhla", "mhla": substitution.LANGUAGE_OPTIONS}
    assert vars(module.ModelTester().get_config()) == options
    assert not vars(module.Other().get_config())
