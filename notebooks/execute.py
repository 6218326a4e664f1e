# SPDX-License-Identifier: Apache-2.0
"""Runs notebooks from top to bottom and saves them with their outputs (`make notebooks`).

    python notebooks/execute.py [NOTEBOOK ...]

Each runs in a temporary directory and a kernel of its own. A notebook that fails stays as it is.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import tempfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

from mhla_hf.utils.files import atomic_file


FOLDER = Path(__file__).resolve().parent
NOTEBOOKS = sorted(FOLDER.glob("[0-9]_*.ipynb"))
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def execute(path: Path, directory: Path, environment: Mapping[str, str] | None = None) -> nbformat.NotebookNode:
    """Runs a notebook, and returns it with its outputs and nothing else that changes from run to run.

    Args:
        path: The notebook.
        directory: Where it runs.
        environment: Environment variables of its kernel; by default those of this process.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    notebook.metadata = {"kernelspec": _KERNEL}
    client = NotebookClient(
        notebook,
        timeout=600,
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(directory)}},
    )
    variables = dict(os.environ if environment is None else environment)
    # Figures go into the notebook. tqdm warns where there are no widgets.
    variables |= {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "PYTHONWARNINGS": "ignore:IProgress"}
    client.execute(env=variables)
    shrink_pictures(notebook)
    # The kernel's version says nothing about the notebook.
    notebook.metadata = {"kernelspec": _KERNEL, "language_info": {"name": "python"}, "executed": source_hash(notebook)}
    return notebook


def shrink_pictures(notebook: nbformat.NotebookNode) -> None:
    """Gives pictures a palette of 256 colours, which takes half the bytes or less."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                picture = Image.open(BytesIO(base64.b64decode(output.data["image/png"]))).convert("RGB")
                with BytesIO() as file:
                    # Rare colours keep their places in it.
                    picture = picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
                    picture.save(file, format="png", optimize=True)
                    output.data["image/png"] = base64.b64encode(file.getvalue()).decode()


def source_hash(notebook: nbformat.NotebookNode) -> str:
    """Hash of the code cells, by which a notebook knows that its outputs are theirs."""
    cells = "\0".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(cells.encode()).hexdigest()


def main() -> None:
    """Executes the notebooks that the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=NOTEBOOKS, help="Default: all.")
    for path in parser.parse_args().notebooks:
        print(path.name, flush=True)
        with tempfile.TemporaryDirectory() as directory:
            notebook = execute(path, Path(directory))
        with atomic_file(path) as temporary:
            nbformat.write(notebook, temporary)


if __name__ == "__main__":
    main()
