# SPDX-License-Identifier: Apache-2.0
"""Folders for Spaces: complete, and they run."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mhla_hf import __version__
from mhla_hf.cli.main import app


gradio = pytest.importorskip("gradio", reason="gradio is not installed")
export_space = pytest.importorskip("mhla_hf.app").export_space


def metadata(folder) -> dict:
    from huggingface_hub import SpaceCard

    return SpaceCard.load(folder / "README.md").data.to_dict()


@pytest.mark.slow
def test_the_program_of_a_space_builds_its_page(tmp_path, monkeypatch):
    folder = tmp_path / "space"
    result = CliRunner().invoke(app, ["app", "--export-space", str(folder)])
    assert result.exit_code == 0, result.output
    assert "hf upload" in result.output
    assert (folder / "requirements.txt").read_text() == f"mhla-hf[app]=={__version__}\n"
    found = metadata(folder)
    assert (found["sdk"], found["sdk_version"], found["app_file"]) == ("gradio", gradio.__version__, "app.py")
    assert (found["license"], found["tags"]) == ("apache-2.0", ["mhla", "linear-attention"])
    assert "models" not in found
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "space", "__file__": str(folder / "app.py")}
    exec(compile((folder / "app.py").read_text(), "app.py", "exec"), names)
    assert isinstance(names["page"], gradio.Blocks)
    names["page"].close()


def test_models_on_the_hub_are_named(tmp_path):
    folder = export_space(tmp_path / "space", "someone/wan-mhla", "someone/wan")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "app.py", "requirements.txt"]
    assert "create_app('someone/wan-mhla', 'someone/wan')" in (folder / "app.py").read_text()
    assert metadata(folder)["models"] == ["someone/wan", "someone/wan-mhla"]


def test_what_stands_there_is_kept(saved_pipeline, tmp_path):
    (tmp_path / "space").mkdir()
    (tmp_path / "space" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="space"):
        export_space(tmp_path / "space")
    with pytest.raises(ValueError, match="is a directory; push it to the Hub first"):
        export_space(tmp_path / "space", str(saved_pipeline.model), overwrite=True)
    assert [path.name for path in (tmp_path / "space").iterdir()] == ["notes.txt"]
