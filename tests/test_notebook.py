# SPDX-License-Identifier: Apache-2.0
"""The quick-start notebook runs from top to bottom, and the committed copy shows its outputs."""

from __future__ import annotations

import nbformat
from nbclient import NotebookClient

from tests import ROOT


NOTEBOOK = ROOT / "notebooks" / "quick_start.ipynb"


def _images(notebook: nbformat.NotebookNode) -> int:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_it_runs_and_draws_its_four_figures(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert _images(notebook) == 4
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = [output.text for output in outputs if output.get("name") == "stdout"]
    assert any("WanPipeline with MHLAWanTransformer3DModel" in text for text in printed)


def test_the_committed_copy_has_its_outputs():
    assert _images(nbformat.read(NOTEBOOK, as_version=4)) == 4
