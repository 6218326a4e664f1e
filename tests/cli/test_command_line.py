# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: help of every command, shared options, exit codes, completion, JSON."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from mhla_hf.cli import help as panels
from mhla_hf.cli.main import app
from mhla_hf.cli.options import completion
from mhla_hf.cli.output import JsonFile, write_report
from mhla_hf.recovery.recipes import recipe_names
from tests import ROOT, tiny


def commands(group=None, words=()):
    """Every command and group by the words that call it."""
    command = get_command(app) if group is None else group
    found = {words: command}
    for name, inner in getattr(command, "commands", {}).items():
        found |= commands(inner, (*words, name))
    return found


COMMANDS = commands()
LEAVES = [words for words, command in COMMANDS.items() if not hasattr(command, "commands")]


def invoke(*words, columns=80, code=0):
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": str(columns)})
    assert result.exit_code == code, result.output
    return result


def run_process(*words, **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **variables}
    command = [sys.executable, "-m", "mhla_hf", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help(words, columns):
    text = invoke(*words, "--help", columns=columns).output
    assert max(map(len, text.splitlines())) <= columns
    for parameter in COMMANDS[words].params:
        if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False):
            # Names are never cut, even where the help is narrow.
            assert parameter.opts[0] in text
    # No names of the implementation, and no types of flags.
    assert not re.findall(r"\b(None|TODO|FIXME|kwargs|dataclass|Annotated|mhla_hf\.\w+)\b|<bool>|__\w", text)


@pytest.mark.parametrize("words", [(), ("train", "wan")], ids=" ".join)
def test_help_on_narrow_terminals(words):
    text = run_process(*words, "--help", COLUMNS="60").stdout
    assert max(map(len, text.splitlines())) <= 60 and "─" not in text
    assert all(parameter.opts[0] in text for parameter in COMMANDS[words].params if parameter.opts[0][0] == "-")


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_everything_is_explained(words):
    command = COMMANDS[words]
    assert command.help
    for parameter in command.params:
        assert parameter.help, f"{' '.join(words)} {parameter.name} has no help"
        # Or the first of the values.
        assert parameter.help[0].isupper() or re.match(r"'latest'|(auto|cpu|fast|float32|small|φ)\b", parameter.help)
        assert parameter.help.endswith((".", ")")), parameter.help
    summary = command.help.split("\n\n")[0]
    # One line of `mhla-hf --help` in 80 columns.
    assert len(summary) <= (66 if len(words) != 1 else 58) and summary.endswith("."), summary


def test_brackets_are_shown():
    assert "pip install -e '.[app]'" in invoke("app", "--help").output
    assert "softmax([Wx, -Wx])" in invoke("convert", "--help", columns=200).output


def test_commands_are_in_panels():
    order = [panels.CONVERT, panels.RECOVER, panels.LOOK, panels.SHARE, panels.CHECK]
    assert {command.rich_help_panel for command in COMMANDS[()].commands.values()} <= set(order)
    text = invoke("--help").output
    places = [text.index(f"─ {panel} ─") for panel in order]
    assert places == sorted(places)


# Options that mean the same everywhere; what a training calls them is in its config.
SHARED = (
    "--json", "--quiet", "--overwrite", "--seed", "--revision", "--token", "--cache-dir", "--component", "--grid",
    "--block-size", "--window-size", "--feature-map", "--normalizer", "--device",
)  # fmt: skip
DIFFERENT = {
    ("models", "--json"): "a flag since its first version",
    ("recover", "--device"): "auto or cpu",
    ("card", "--overwrite"): "a README.md that was edited",
    ("push", "--revision"): "a branch to write",
    ("convert", "--component"): "names a file's model too",
    ("import-official", "--normalizer"): "of the weights",
}


@pytest.mark.parametrize("option", SHARED)
def test_the_same_option_reads_the_same(option):
    forms = defaultdict(list)
    for words, command in COMMANDS.items():
        for parameter in command.params:
            name = " ".join(words)
            if option in parameter.opts and words[:1] != ("train",) and (name, option) not in DIFFERENT:
                forms[parameter.help, parameter.metavar, tuple(sorted(parameter.opts))].append(name)
    assert len(forms) == 1, dict(forms)


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_unknown_options_are_wrong_usage(words):
    result = invoke(*words, "--no-such-option", code=2)
    assert "--no-such-option" in result.stderr and "Traceback" not in result.stderr and result.stdout == ""


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("convert", "{missing}", "{out}"), "missing"),
        (("import-official", "{missing}", "{out}"), "missing"),
        (("recover", "{missing}", "{out}", "--data", "digits"), "missing"),
        (("calibrate", "{missing}"), "missing"),
        (("select-layers", "{missing}"), "missing"),
        (("train", "wan", "--model", "{missing}", "--output", "{out}"), "missing"),
        (("check-lora", "{missing}", "{missing}"), "missing"),
        (("demo", "{out}", "--base", "{missing}"), "missing"),
        (("doctor", "{missing}"), "missing"),
        (("inspect", "{missing}", "--quiet"), "missing"),
        (("card", "{missing}"), "missing"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_missing_model_is_one_line(words, named, tmp_path):
    places = {"missing": tmp_path / "missing", "out": tmp_path / "out"}
    result = invoke(*(word.format(**places) for word in words), code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert named in result.stderr and "unexpected" not in result.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mhla-hf con", ["convert"]),
        ("mhla-hf train ", ["wan", "sana", "dit", "cache"]),
        ("mhla-hf convert --feature-map ", ["relu", "elu", "exp", "hedgehog", "identity"]),
        ("mhla-hf convert --normalizer b", ["block_query"]),
        ("mhla-hf convert a b --dtype ", ["float32", "bfloat16", "float16"]),
        ("mhla-hf recover --recipe ", recipe_names()),
        ("mhla-hf recover --preset p", ["paper"]),
        ("mhla-hf recover --stages calibrate,m", ["calibrate,match"]),
        ("mhla-hf train wan --lr-schedule c", ["constant", "cosine"]),
        ("mhla-hf bench model --contestants mhla-t", ["mhla-torch", "mhla-triton"]),
        ("mhla-hf select-layers --device ", ["auto", "cpu", "cuda"]),
        # Empty: the shell completes names of files.
        ("mhla-hf convert ", []),
    ],
)
def test_completion(line, expected, monkeypatch):
    words = line.split()
    count = len(words) - (not line.endswith(" "))
    environment = {"_MHLA_HF_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(count)}
    result = CliRunner().invoke(app, [], env=environment, prog_name="mhla-hf")
    assert result.output.split() == expected


def test_completion_of_another_shell_imports_nothing_heavy():
    code = "import sys, runpy\nsys.argv = ['mhla-hf']\ntry: runpy.run_module('mhla_hf', run_name='__main__')\n"
    code += "finally: print({'torch', 'transformers', 'diffusers', 'gradio', 'matplotlib'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "_MHLA_HF_COMPLETE": "complete_zsh"}
    environment["_TYPER_COMPLETE_ARGS"] = "mhla-hf recover --recipe "
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert "wan-1.3b" in result.stdout and result.stdout.strip().endswith("set()"), result.stderr


def test_completion_scripts_are_for_the_shell_that_runs():
    # Not its last command, or bash would be replaced by it.
    shell = ["bash", "-c", '"$0" -m mhla_hf --show-completion; exit $?', sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(shell, capture_output=True, text=True, env=environment, timeout=120)
    assert "_mhla_hf_completion" in result.stdout and result.returncode == 0, result.stderr


def test_values_complete_behind_commas():
    complete = completion(("relu", "elu"))
    assert complete("") == ["relu", "elu"] and complete("r") == ["relu"] and complete("x") == []
    assert complete("relu,e") == ["relu,elu"]
    assert completion(lambda: ["late"])("l") == ["late"]


def reporting():
    application = typer.Typer()

    @application.command()
    def command(json_file: JsonFile = None) -> None:
        typer.echo("a table")
        write_report(json_file, {"loss": 0.5, "blocks": [3, 5, 10]})
        typer.echo("more")

    return application


def test_json_goes_to_standard_output_alone(tmp_path):
    outcome = CliRunner().invoke(reporting(), ["--json", "-"])
    assert json.loads(outcome.stdout) == {"loss": 0.5, "blocks": [3, 5, 10]}
    assert outcome.stderr == "a table\nmore\n"
    # Whatever one command redirected is as before for the next.
    outcome = CliRunner().invoke(reporting(), ["--json", str(tmp_path / "report.json")])
    assert outcome.stdout == "a table\nmore\n" and outcome.stderr == ""
    assert (
        tmp_path / "report.json"
    ).read_text() == '{\n  "blocks": [\n    3,\n    5,\n    10\n  ],\n  "loss": 0.5\n}\n'
    assert CliRunner().invoke(reporting(), []).stdout == "a table\nmore\n"


def test_json_of_a_conversion(tmp_path):
    tiny.wan_pipeline(num_layers=2).save_pretrained(tmp_path / "softmax")
    result = invoke("convert", tmp_path / "softmax", tmp_path / "mhla", "--blocks", "1,2,2", "--json", "-")
    assert json.loads(result.stdout) == json.loads((tmp_path / "mhla/conversion.json").read_text())
    assert "fine-tune" in result.stderr
    result = invoke("convert", tmp_path / "softmax", tmp_path / "other", "--json", tmp_path, code=1)
    assert "is a directory; give a file" in result.stderr and not (tmp_path / "other").exists()


def test_output_is_plain_without_a_terminal():
    for words in (("--help",), ("convert", "missing", "out")):
        result = run_process(*words)
        assert "\x1b" not in result.stdout + result.stderr
        assert not result.stdout or max(map(len, result.stdout.splitlines())) <= 80
    # As on a terminal.
    assert "\x1b[" in run_process("--help", FORCE_COLOR="1").stdout
    assert "\x1b[3" not in run_process("--help", FORCE_COLOR="1", NO_COLOR="1").stdout


def test_help_is_quick():
    code = "import time, sys\nfrom typer.testing import CliRunner\nfrom mhla_hf.cli.main import app\n"
    code += "assert CliRunner().invoke(app, ['--help']).exit_code == 0\nprint(time.process_time())"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert float(result.stdout) < 1.0, result.stderr
