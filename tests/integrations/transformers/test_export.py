# SPDX-License-Identifier: Apache-2.0
"""torch.export and ONNX with sizes left open: the programs compute what the models do, at sizes not traced."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests import ROOT

from .mhla_models import mhla_model
from .tiny_models import FAMILIES, inputs


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "extended": {"mixing_tail": "decay", "mixing_constraint": "nonnegative", "normalizer": "none"},
    "window": {"window": "adjacent", "window_size": 3},
    "sinks": {"window": "block", "window_size": 5, "sink_tokens": 4},
    "hybrid": {"layers": [0, 2], "feature_map": "hedgehog", "output_norm": True, "output_gate": True},
}
# Batch and length; blocks have 4 tokens, and there are weights for 6 of them. 3 tokens are less than a block, 100 more
# blocks than are mixed by a matrix uncompiled.
SIZES = [(1, 3), (3, 8), (2, 13), (2, 37), (1, 100)]


def arguments(name: str, batch: int, length: int, padding: Any) -> dict[str, Any]:
    given = inputs(name, batch, length, padding, seed=length)
    return given if FAMILIES[name].kind != "causal" else {**given, "use_cache": False}


def exported(name: str, model: torch.nn.Module, padding: Any = None) -> torch.export.ExportedProgram:
    is_image = FAMILIES[name].kind == "vision"
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=2, max=128)
    example = arguments(name, 2, 18, padding)
    sizes = {0: batch} if is_image else {0: batch, 1: length}
    shapes = {key: sizes if isinstance(value, torch.Tensor) else None for key, value in example.items()}
    with torch.no_grad():
        return torch.export.export(model, (), kwargs=example, dynamic_shapes=shapes, strict=False)


def assert_same(name: str, model: torch.nn.Module, program: Any, padding: Any = None) -> None:
    for batch, length in SIZES:
        given = arguments(name, batch, length, padding)
        with torch.no_grad():
            expected, output = model(**given)[0], program(**given)[0]
        assert expected.abs().max() > 1
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bert", pytest.param("llama", marks=pytest.mark.slow)])
def test_length_of_texts(name):
    model = mhla_model(name)
    assert_same(name, model, exported(name, model).module())


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_length_of_padded_texts(name, padding, options):
    model = mhla_model(name, **OPTIONS[options])
    assert_same(name, model, exported(name, model, padding).module(), padding)


@pytest.mark.slow
def test_batch_of_images():
    model = mhla_model("vit")
    assert_same("vit", model, exported("vit", model).module())


@pytest.mark.slow
def test_length_of_one_block_is_no_special_case():
    # Traced where there is a single block, served where there are many.
    model = mhla_model("bert", block_size=32)
    assert_same("bert", model, exported("bert", model).module())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_onnx(name, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    padding = None if name == "vit" else "right"
    model = mhla_model(name)
    torch.onnx.export(exported(name, model, padding), f=tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    names = [entry.name for entry in session.get_inputs()]

    def program(**given):
        return [torch.from_numpy(session.run(None, {key: given[key].numpy() for key in names})[0])]

    assert_same(name, model, program, padding)


@pytest.mark.slow
def test_the_page_exports_to_onnx(tmp_path, monkeypatch):
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(# needs onnxscript.*?)```", page, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/export.md", "exec"), {})
    assert (tmp_path / "bert-mhla.onnx").is_file()
