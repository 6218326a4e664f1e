# SPDX-License-Identifier: Apache-2.0
"""Folders for Spaces: complete, and they run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from mhla_hf import __version__
from mhla_hf.app import Limits, export_space
from mhla_hf.cli.main import app
from tests import ROOT

from .conftest import VIDEO


gradio_client = pytest.importorskip("gradio_client", reason="gradio is not installed")
gradio = pytest.importorskip("gradio", reason="gradio is not installed")


def metadata(folder) -> dict:
    from huggingface_hub import SpaceCard

    return SpaceCard.load(folder / "README.md").data.to_dict()


def test_the_program_of_a_space_serves_the_model(saved_pipeline, tmp_path):
    folder = tmp_path / "space"
    arguments = ["app", str(saved_pipeline.model), "--export-space", str(folder), "--max-steps", "3"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "hf upload" in result.output
    assert (folder / "requirements.txt").read_text() == f"mhla-hf[app]=={__version__}\n"
    found = metadata(folder)
    assert {name: found[name] for name in ("sdk", "sdk_version", "app_file", "tags")} == {
        "sdk": "gradio",
        "sdk_version": gradio.__version__,
        "app_file": "app.py",
        "tags": ["mhla", "linear-attention"],
    }
    assert "limits=Limits(steps=3)" in (folder / "app.py").read_text()
    # Only what the comparison needs of the original.
    assert {path.name for path in (folder / "base").iterdir()} == {"model_index.json", "transformer"}

    # As on the Hub: another place, another working directory.
    shutil.move(folder, tmp_path / "elsewhere")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    environment["GRADIO_SERVER_NAME"] = "127.0.0.1"
    with (tmp_path / "log").open("w") as log:
        program = subprocess.Popen(
            [sys.executable, "elsewhere/app.py"], cwd=tmp_path, env=environment, stdout=log, stderr=log
        )
    try:
        url = None
        for _ in range(600):
            text = (tmp_path / "log").read_text()
            assert program.poll() is None, text
            url = re.search(r"http://127\.0\.0\.1:\d+", text)
            if url:
                break
            time.sleep(0.2)
        assert url, text
        client = gradio_client.Client(url[0], verbose=False, analytics_enabled=False)
        status, original, own, times = client.predict(**VIDEO, api_name="/generate")
        assert original.endswith(".mp4") and own.endswith(".mp4") and "MHLA" in times
        with pytest.raises(gradio_client.exceptions.AppError, match="Steps must be a whole number from 1 to 3"):
            client.predict(**{**VIDEO, "steps": 4}, api_name="/generate")
    finally:
        program.terminate()
        program.wait(30)


def test_models_on_the_hub_are_named(tmp_path):
    folder = export_space(tmp_path / "space", "someone/wan-mhla", "someone/wan", limits=Limits(seconds=60))
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "app.py", "requirements.txt"]
    program = (folder / "app.py").read_text()
    assert "create_app('someone/wan-mhla', 'someone/wan', limits=Limits(seconds=60))" in program
    compile(program, "app.py", "exec")
    found = metadata(folder)
    assert (found["models"], found["license"]) == (["someone/wan", "someone/wan-mhla"], "apache-2.0")


def test_without_a_model_the_space_is_the_demo(tmp_path):
    folder = export_space(tmp_path / "space")
    assert "create_app(None, None, limits=Limits())" in (folder / "app.py").read_text()
    assert "models" not in metadata(folder)


def test_what_stands_there_is_kept(saved_pipeline, tmp_path):
    (tmp_path / "space").mkdir()
    (tmp_path / "space" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="space"):
        export_space(tmp_path / "space")
    for model, base, message in [
        (saved_pipeline.base, None, "is no MHLA model"),
        (tmp_path / "missing", None, "neither a directory nor a Hub id"),
        ("someone/wan-mhla", saved_pipeline.base, "give the base's Hub id"),
    ]:
        with pytest.raises(ValueError, match=message):
            export_space(tmp_path / "space", model, base, overwrite=True)
    assert [path.name for path in (tmp_path / "space").iterdir()] == ["notes.txt"]
    assert (export_space(tmp_path / "space", overwrite=True) / "app.py").is_file()


def test_models_too_large_for_a_space_are_refused(saved_pipeline, tmp_path, monkeypatch):
    monkeypatch.setattr("mhla_hf.app.space._MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="more than a Space holds: publish it"):
        export_space(tmp_path / "space", saved_pipeline.model)
    assert not (tmp_path / "space").exists()


def test_a_port_that_is_taken_is_one_line(saved_pipeline):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = CliRunner().invoke(app, ["app", str(saved_pipeline.model), "--port", str(port), "--device", "cpu"])
    assert result.exit_code == 1
    assert f"port {port} cannot be used" in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
