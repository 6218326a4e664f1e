# SPDX-License-Identifier: Apache-2.0
"""Every notebook runs from top to bottom and leaves nothing behind, and the committed copy shows its outputs."""

from __future__ import annotations

import ast
import json
import os
import re

import nbformat
import pytest

from notebooks.execute import NOTEBOOKS, execute, source_hash
from tests import ROOT


MAX_BYTES = 400_000
# Pictures of each, at least.
FIGURES = {
    "1_quick_start": 4,
    "2_convert_and_fine_tune_a_video_model": 2,
    "3_language_model": 3,
    "4_looking_inside": 6,
}
# What only one machine has, and progress bars.
_NOISE = re.compile(rf"{re.escape(str(ROOT))}|/(home|root|tmp|var|Users)/|[A-Z]:\\|site-packages|\dit/s|s/it|%\|")

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def _kinds(notebook: nbformat.NotebookNode) -> list[list[str]]:
    """What each code cell puts out: types of data, or the name of a stream."""
    return [
        [output.get("name") or ",".join(sorted(output.get("data", ["error"]))) for output in cell.outputs]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def _without_warnings(notebook: nbformat.NotebookNode) -> list[list[str]]:
    return [[kind for kind in kinds if kind != "stderr"] for kinds in _kinds(notebook)]


def _figures(notebook: nbformat.NotebookNode) -> int:
    return sum("image/png" in kind for kinds in _kinds(notebook) for kind in kinds)


def _texts(notebook: nbformat.NotebookNode) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [
        text
        for output in outputs
        for kind, text in {"text": output.get("text", ""), **output.get("data", {})}.items()
        if kind.startswith("text")
    ]


def test_there_are_notebooks():
    numbers = [path.name[0] for path in NOTEBOOKS]
    assert len(set(numbers)) == len(numbers)
    assert set(FIGURES) <= {path.stem for path in NOTEBOOKS}


@pytest.mark.slow
@every_notebook
def test_it_runs_and_leaves_nothing_behind(path, tmp_path):
    directory, temporary = tmp_path / "run", tmp_path / "temporary"
    directory.mkdir()
    temporary.mkdir()
    # The network is not needed: a notebook that tries fails. torch keeps what it compiles.
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"),
        "HF_HUB_OFFLINE": "1",
    }
    notebook = execute(path, directory, environment)
    assert _figures(notebook) >= FIGURES.get(path.stem, 1)
    # Other versions of libraries may warn.
    assert _without_warnings(notebook) == _kinds(nbformat.read(path, as_version=4))
    assert not list(directory.iterdir())
    assert not list(temporary.iterdir())
    if path.stem == "1_quick_start":
        assert any("WanPipeline with MHLAWanTransformer3DModel" in text for text in _texts(notebook))


@every_notebook
def test_the_committed_copy_shows_the_outputs_of_its_code(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.executed == source_hash(notebook), f"run it again: make notebooks NOTEBOOKS={path.name}"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert _figures(notebook) >= FIGURES.get(path.stem, 1)
    assert not {"stderr", "error"} & {kind for kinds in _kinds(notebook) for kind in kinds}
    assert path.stat().st_size < MAX_BYTES


@every_notebook
def test_the_committed_copy_is_free_of_what_only_one_machine_has(path):
    notebook = nbformat.read(path, as_version=4)
    assert set(notebook.metadata) == {"kernelspec", "language_info", "executed"}
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for text in _texts(notebook):
        assert not _NOISE.search(text), text


@every_notebook
def test_it_imports_public_names_alone(path):
    public = json.loads((ROOT / "tests" / "public_names.json").read_text(encoding="utf-8"))["names"]
    cells = nbformat.read(path, as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    imports = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in imports if node.module.partition(".")[0] == "mhla_hf"]
    for node in ours:
        packages = {name.removeprefix(f"{node.module}.") for name in public}
        assert {alias.name for alias in node.names} <= {*public.get(node.module, ()), *packages}, node.module


@every_notebook
def test_links_lead_somewhere(path):
    notebook = nbformat.read(path, as_version=4)
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    for link in sorted(set(re.findall(r"\]\(([^)\s#]+)[^)\s]*\)", "\n".join(texts)))):
        assert link.startswith("https://") or (ROOT / "notebooks" / link).exists(), link
