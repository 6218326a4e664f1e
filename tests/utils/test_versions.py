# SPDX-License-Identifier: Apache-2.0
"""The version of transformers is checked when the package is imported, from its metadata alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mhla_hf.utils.versions import TRANSFORMERS
from tests import ROOT


PROGRAM = "import sys, mhla_hf; assert 'transformers' not in sys.modules; print(mhla_hf.__version__)"


def import_with(version: str, folder: Path) -> subprocess.CompletedProcess:
    """Imports the package in a process that finds this version of transformers installed first."""
    metadata = folder / f"transformers-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("version", ["4.57.3", "5.16.4", "5.17.0.dev0", "6.0.0", "6.0.0rc1"])
def test_other_versions_are_refused_in_one_line(version, tmp_path):
    result = import_with(version, tmp_path)
    assert result.returncode == 1
    *_, last = result.stderr.splitlines()
    assert last == (
        f"ImportError: mhla_hf needs transformers>=5.17,<6, but {version} is installed: "
        "pip install 'transformers>=5.17,<6'"
    )


@pytest.mark.parametrize("version", ["5.17.0", "5.23.0", "5.99.1", "5.24.0.dev0"])
def test_supported_versions_are_not(version, tmp_path):
    result = import_with(version, tmp_path)
    assert result.returncode == 0, result.stderr


def test_the_range_is_that_of_pyproject():
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    declared = [Requirement(line.strip().strip('",')) for line in lines if line.strip().startswith('"transformers>')]
    assert [requirement.specifier for requirement in declared] == [SpecifierSet(TRANSFORMERS)]
