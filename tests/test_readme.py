# SPDX-License-Identifier: Apache-2.0
"""What the README shows works as written: its Python runs, and its commands and options exist."""

from __future__ import annotations

import re
import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from mhla_hf.cli.main import app
from mhla_hf.demo import base_pipeline_directory
from tests import ROOT


README = (ROOT / "README.md").read_text(encoding="utf-8")
NEEDS_A_GPU = "# needs a GPU and the Hub"


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def _commands() -> list[list[str]]:
    """Every command line of the shell blocks, continuation lines joined and comments dropped."""
    lines = [line for block in _blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def test_python_blocks_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(
        app, ["convert", str(base_pipeline_directory()), "demo-output/mhla", "--blocks", "5,4,4", "--quiet"]
    )
    assert result.exit_code == 0, result.output
    blocks = [block for block in _blocks("python") if not block.startswith(NEEDS_A_GPU)]
    assert len(blocks) >= 4
    for block in blocks:
        names: dict[str, object] = {}
        exec(compile(block, "README.md", "exec"), names)
        if "video" in names:
            assert names["video"].shape == (17, 64, 64, 3)
    assert (tmp_path / "digits-mhla-in-place" / "model_index.json").is_file()


@pytest.mark.parametrize("words", [words for words in _commands() if words[0] == "mhla-hf"], ids=" ".join)
def test_shell_commands_and_their_options_exist(words):
    command = get_command(app)
    arguments = words[1:]
    while hasattr(command, "commands"):
        assert arguments[0] in command.commands, f"no command {arguments[0]}"
        command = command.commands[arguments.pop(0)]
    known = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in arguments if word.startswith("--")} <= known


@pytest.mark.parametrize("words", [words for words in _commands() if words[0] == "accelerate"], ids=" ".join)
def test_the_training_scripts_take_the_options_shown(words):
    script = ROOT / words[2]
    assert script.is_file()
    train = get_command(app).commands["train"].commands[script.stem.removeprefix("train_")]
    known = {name for parameter in train.params for name in parameter.opts}
    assert {word for word in words[3:] if word.startswith("--")} <= known


@pytest.mark.parametrize("target", [words[1] for words in _commands() if words[0] == "make"])
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_into_the_repository_lead_somewhere(path):
    assert path.startswith("https://") or (ROOT / path).exists()
