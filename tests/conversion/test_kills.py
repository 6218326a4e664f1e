# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf convert` killed at random moments, and two at once: the destination is absent or complete."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT, tiny


def content(folder):
    """Every file with its bytes; of the record, what does not depend on the time."""
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    record = json.loads(files.pop(Path("conversion.json")))
    return files, record["source"]["location"], record["copied_files"]


@pytest.mark.slow
def test_the_installed_command(tmp_path):
    tiny.wan_pipeline(num_layers=1).save_pretrained(tmp_path / "source")
    output = tmp_path / "output"
    output.mkdir()
    command = [sys.executable, "-m", "mhla_hf", "convert", str(tmp_path / "source"), str(output / "mhla")]
    command += ["--blocks", "1,2,2", "--quiet"]
    options = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    started = time.monotonic()
    both = [subprocess.Popen(command, **options) for _ in range(2)]
    errors = [process.communicate()[1] for process in both]
    seconds = time.monotonic() - started
    assert sorted(process.returncode for process in both) == [0, 1], errors
    assert "is being written by another run" in "".join(errors) or "is not empty" in "".join(errors)
    complete = content(output / "mhla")
    for share in (0.5, 0.8, 0.9, 0.95):
        shutil.rmtree(output / "mhla", ignore_errors=True)
        process = subprocess.Popen(command, **options)
        time.sleep(share * seconds)
        process.kill()
        process.communicate()
        assert not (output / "mhla").exists() or content(output / "mhla") == complete
    shutil.rmtree(output / "mhla", ignore_errors=True)
    assert subprocess.run(command, **options).returncode == 0
    assert os.listdir(output) == ["mhla"] and content(output / "mhla") == complete
