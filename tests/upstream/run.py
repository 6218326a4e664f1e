# SPDX-License-Identifier: Apache-2.0
"""Runs the test suites of diffusers and transformers on MHLA models beside the stock ones, and prints what differs.

    python tests/upstream/run.py transformers
    python tests/upstream/run.py diffusers --checkout ~/src/diffusers

Without `--checkout` the suite of the installed version is fetched: the source distribution from PyPI, which for
transformers has the common tests of all models, or by `--clone` the tagged repository. Differences that
`reviewed.json` explains are only counted; any other one ends with exit code 1.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
CASES = "transformers_cases.py"

# In a checkout; folders and files below `tests`.
SUITES = {
    "diffusers": [
        f"models/transformers/test_models_{name}.py"
        for name in (
            "transformer_wan",
            "transformer_wan_vace",
            "transformer_wan_animate",
            "transformer_skyreels_v2",
            "transformer_ltx",
            "transformer_ltx2",
            "transformer_hunyuan_video",
            "transformer_hunyuan_1_5",
            "transformer_qwenimage",
            "transformer_flux",
            "dit_transformer2d",
            "pixart_transformer2d",
            "transformer_sana",
            "transformer_sana_video",
        )
    ],
    "transformers": [f"models/{name}/test_modeling_{name}.py" for name in ("llama", "qwen3", "bert", "vit")],
}

# What the common tests of transformers import and its source distribution leaves out.
PLACEHOLDERS = {
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "distributed_testing_utils.py": (HERE / "distributed_placeholder.py").read_text(encoding="utf-8"),
}


@dataclass(frozen=True)
class Outcome:
    """Result of one test: `passed`, `failed` or `skipped`, and the first line of its message."""

    result: str
    message: str = ""


def run(
    library: Annotated[str, typer.Argument(help=f"Whose suite: {' or '.join(SUITES)}.")],
    checkout: Annotated[Path | None, typer.Option(help="A checkout of the library at the installed version.")] = None,
    clone: Annotated[bool, typer.Option(help="Fetch the tagged repository with git.")] = False,
    keyword: Annotated[str | None, typer.Option("-k", help="Only tests whose names match, as pytest -k.")] = None,
    workers: Annotated[int, typer.Option(help="Test processes.")] = 2,
    output: Annotated[Path | None, typer.Option(help="Keep both result files (JUnit XML) in this folder.")] = None,
) -> None:
    """Compares the outcomes of a suite for the stock and the MHLA classes."""
    if library not in SUITES:
        raise typer.BadParameter(f"{library!r} is not one of {', '.join(SUITES)}")
    with tempfile.TemporaryDirectory() as scratch:
        root = checkout.resolve() if checkout is not None else _fetch(library, Path(scratch), clone)
        folder = Path(scratch) if output is None else output.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        root, files = _suite(library, root, Path(scratch))
        results = {}
        for name in ("stock", "mhla"):
            typer.echo(f"{library} {version(library)}: {name} classes, {len(files)} files ...", err=True)
            results[name] = _run_suite(root, files, folder / f"{library}-{name}.xml", name == "mhla", keyword, workers)
    unexplained = _report(library, results["stock"], results["mhla"], is_whole=keyword is None)
    raise typer.Exit(1 if unexplained else 0)


def _fetch(library: str, folder: Path, clone: bool) -> Path:
    """Fetches the suite of the installed version."""
    if clone:
        url = f"https://github.com/huggingface/{library}"
        subprocess.run(
            ["git", "clone", "-q", "--depth=1", f"--branch=v{version(library)}", url, folder / library], check=True
        )
        return folder / library
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary=:all:", "-d"]
    subprocess.run([*command, os.fspath(folder), f"{library}=={version(library)}"], check=True)
    archive = next(folder.glob(f"{library}-*.tar.gz"))
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def _suite(library: str, root: Path, scratch: Path) -> tuple[Path, list[Path]]:
    """The folder to run in and the test files; what a source distribution lacks is filled in, in a copy."""
    files = [root / "tests" / name for name in SUITES[library]]
    missing = [path for path in files if not path.is_file()]
    if not missing:
        return root, files
    has_common = (root / "tests/test_modeling_common.py").is_file()
    if library != "transformers" or len(missing) < len(files) or not has_common:
        raise typer.BadParameter(
            f"{missing[0]} is not there; give a whole checkout (--checkout) or fetch it (--clone)"
        )
    root = Path(shutil.copytree(root / "tests", scratch / "suite" / "tests")).parent
    shutil.copy(HERE / CASES, root / "tests" / CASES)
    for name, content in PLACEHOLDERS.items():
        (root / "tests" / name).parent.mkdir(exist_ok=True)
        (root / "tests" / name).write_text(content, encoding="utf-8")
    for package in {"tests", *(f"tests/{Path(name).parent}" for name in PLACEHOLDERS)}:
        (root / package / "__init__.py").touch()
    return root, [root / "tests" / CASES]


def _run_suite(
    root: Path, files: list[Path], results: Path, with_mhla: bool, keyword: str | None, workers: int
) -> dict[str, Outcome]:
    # The suite's own package `tests` has to come before the one of this repository.
    folders = [root, HERE, REPOSITORY]
    if with_mhla:
        # Tests start processes of their own, which must know MHLA too.
        folders.insert(0, results.parent / "startup")
        folders[0].mkdir(exist_ok=True)
        (folders[0] / "sitecustomize.py").write_text("import mhla_hf\n", encoding="utf-8")
    path = os.pathsep.join(map(os.fspath, folders))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--rootdir={root}"]
    command += ["--import-mode=importlib", "-n", str(workers), f"--junitxml={results}", *map(os.fspath, files)]
    command += ["-p", "substitution"] if with_mhla else []
    command += ["-k", keyword] if keyword else []
    finished = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    # 1: some tests failed, which is what this is about.
    if finished.returncode not in (0, 1) or not results.is_file():
        raise typer.BadParameter(f"pytest did not run the suite:\n{finished.stdout[-2000:]}{finished.stderr[-2000:]}")
    outcomes = _read_results(results)
    if not outcomes or "::" in outcomes:
        raise typer.BadParameter(f"pytest could not collect the suite:\n{finished.stdout[-2000:]}")
    return outcomes


def _read_results(path: Path) -> dict[str, Outcome]:
    outcomes = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        problem = next(
            (case.find(kind) for kind in ("failure", "error", "skipped") if case.find(kind) is not None), None
        )
        if problem is None:
            outcomes[name] = Outcome("passed")
        else:
            result = "skipped" if problem.tag == "skipped" else "failed"
            lines = (problem.get("message") or "").strip().splitlines()
            outcomes[name] = Outcome(result, re.sub(r"\s+", " ", lines[0]) if lines else "")
    return outcomes


def _report(library: str, stock: dict[str, Outcome], mhla: dict[str, Outcome], is_whole: bool) -> int:
    """Prints the differences; returns how many have no explanation."""
    reviewed = json.loads((HERE / "reviewed.json").read_text(encoding="utf-8"))[library]
    explained: list[str] = []
    table = Table("test", "stock", "MHLA", "message", title=f"{library}: differences without an explanation")
    for name in sorted(stock.keys() | mhla.keys()):
        before, after = stock.get(name, Outcome("not run")), mhla.get(name, Outcome("not run"))
        # A test that stock fails says nothing about MHLA.
        if after.result in (before.result, "passed") or before.result == "failed":
            continue
        pattern = next((entry for entry in reviewed if fnmatch.fnmatch(name, entry)), None)
        if pattern is None:
            table.add_row(name, before.result, after.result, after.message or before.message)
        else:
            explained.append(pattern)
    counts = {
        label: ", ".join(
            f"{sum(outcome.result == result for outcome in outcomes.values())} {result}"
            for result in ("passed", "failed", "skipped")
        )
        for label, outcomes in (("stock", stock), ("MHLA", mhla))
    }
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(f"stock: {counts['stock']}; MHLA: {counts['MHLA']}; {len(explained)} explained differences")
    if table.row_count:
        console.print(table)
    for pattern in sorted(set(reviewed) - set(explained)) if is_whole else []:
        console.print(f"reviewed.json explains {pattern}, which does not differ here", markup=False)
    return table.row_count


if __name__ == "__main__":
    typer.run(run)
