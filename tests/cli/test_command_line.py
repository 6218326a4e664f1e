# SPDX-License-Identifier: Apache-2.0
"""The frame of every command: help, shared options, errors and exit codes, JSON, light imports."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
import typer
from safetensors import SafetensorError
from typer.main import get_command

import mhla_hf
from mhla_hf.cli.main import COMMANDS as PANELS
from mhla_hf.cli.main import app, friendly_errors
from tests import ROOT
from tests.command_line import run_command
from tests.processes import run_program


def commands(group=None, words=()):
    """Every command and group by the words that call it."""
    command = get_command(app) if group is None else group
    found = {words: command}
    for name, inner in getattr(command, "commands", {}).items():
        found |= commands(inner, (*words, name))
    return found


COMMANDS = commands()
LEAVES = [words for words, command in COMMANDS.items() if not hasattr(command, "commands")]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help(words):
    text = run_command(*words, "--help", columns=80).output
    assert max(map(len, text.splitlines())) <= 80
    for parameter in COMMANDS[words].params:
        assert parameter.help, f"{' '.join(words)} {parameter.name} has no help"
        # Or the first of the values.
        assert parameter.help[0].isupper() or re.match(r"'latest'|(auto|cpu|float32|small|φ)\b", parameter.help)
        assert parameter.help.endswith((".", ")")), parameter.help
        if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False):
            # Names are never cut, even where the help is narrow.
            assert parameter.opts[0] in text
    # No names of the implementation.
    assert not re.findall(r"\b(None|TODO|FIXME|kwargs|dataclass|Annotated|mhla_hf\.\w+)\b|__\w", text)
    summary = COMMANDS[words].help.split("\n\n")[0]
    # One line of `mhla-hf --help` in 80 columns.
    assert len(summary) <= (66 if len(words) != 1 else 58) and summary.endswith("."), summary


def test_help_of_the_program():
    text = run_command("--help", columns=80).output
    places = [text.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places) and "Start here: demo → recover → inspect → push" in text
    assert run_command("--version").output.strip() == f"mhla-hf {mhla_hf.__version__}"


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_unknown_options_are_wrong_usage(words):
    result = run_command(*words, "--no-such-option", code=2)
    assert "--no-such-option" in result.stderr and "Traceback" not in result.stderr and result.stdout == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("conver",), "Did you mean 'convert'"),
        (("convert", "a/b", "c", "--feature-map", "hedghog"), "Did you mean 'hedgehog'?"),
        (("convert", "a/b", "c", "--lepe-kernel", "2"), "error: --lepe-kernel 2 must be"),
        (("convert", "a/b", "c", "--blocks", "0,2"), "error: --blocks must be at least 1, got (0, 2)"),
        (("convert", "a/b", "c", "--data", "x/y"), "error: --data has no effect without --calibrate"),
        (("convert", "a/b", "c", "--dtype", "int8"), "'int8' is not one of"),
        (("convert", "a/b", "c", "--json", "{folder}"), "is a directory"),
        (("recover", "a/b", "c", "--match-steps", "one"), "Invalid value for '--match-steps'"),
        (("calibrate", "a", "--samples", "many"), "Invalid value for '--samples'"),
        (("train", "wan", "a/b", "c", "--learning-rate", "-1"), "error: --learning-rate must be greater than 0"),
        (("train", "wan", "a/b", "c", "--match-steps", "5"), "--match-steps is no option of training any more"),
        (("train", "wan"), "error: MODEL must be given"),
        (("models", "--presets", "--refused"), "give --presets or --refused, not both"),
        (("doctor", "a/b", "--gpu"), "--gpu checks this machine"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_names_the_option_before_anything_heavy_is_imported(words, message, tmp_path):
    result = run_command(*(word.format(folder=tmp_path) for word in words), code=2)
    assert message in result.stderr and result.stdout == ""


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("two\nlines of [markup]"), "error: two lines of [markup]\n"),
        (FileNotFoundError(2, "No such file", "weights"), "error: [Errno 2] No such file: 'weights'\n"),
        (ImportError("install peft"), "error: install peft\n"),
        (SafetensorError("header too large"), "error: header too large\n"),
        (ValueError(), "error: ValueError\n"),
        (KeyError("blocks"), "error: unexpected KeyError: 'blocks' (mhla-hf --debug COMMAND"),
        (RuntimeError("mat1 and mat2\ncannot be multiplied"), "error: unexpected RuntimeError: mat1 and mat2 cannot"),
        (AssertionError(), "error: unexpected AssertionError (mhla-hf --debug COMMAND"),
        (RuntimeError("x" * 10_000), "error: unexpected RuntimeError: xxx"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_one_line(error, shown, capsys):
    with pytest.raises(typer.Exit) as caught, friendly_errors():
        raise error
    assert caught.value.exit_code == 1
    line = capsys.readouterr().err
    assert line.startswith(shown) and line.count("\n") == 1 and len(line) < 900
    assert ("mhla-hf env" in line) == ("unexpected" in line)
    with pytest.raises(type(error)), friendly_errors(debug=True):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        OSError(12, "Cannot allocate memory"),
        MemoryError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_full_memory_says_what_helps(error, capsys):
    with pytest.raises(typer.Exit), friendly_errors():
        raise error
    assert capsys.readouterr().err.startswith("error: out of memory; a smaller batch, input or model takes less (")


@pytest.mark.parametrize("arguments", [("--debug", "convert", "a/b", "c", "--lepe-kernel", "2")])
def test_debug_raises_the_error(arguments):
    result = run_command(*arguments, code=None)
    assert isinstance(result.exception, ValueError) and "lepe_kernel=2 must be" in str(result.exception)


def test_a_closed_pipe_is_quiet():
    pipe, environment = subprocess.PIPE, {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mhla_hf", "models", "--refused", "--json"]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, env=environment) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_help_imports_nothing_heavy():
    code = "import sys\nfrom typer.testing import CliRunner\nfrom mhla_hf.cli.main import app\n"
    code += "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
    code += "print({'torch', 'diffusers', 'transformers', 'matplotlib', 'gradio'} & set(sys.modules))"
    assert run_program(code, COLUMNS="80").stdout == "set()\n"


LIGHT = [
    ("convert nosuch out", "source nosuch is neither a directory nor a Hub id"),
    ("convert nosuch.safetensors out", "nosuch.safetensors is neither a file nor the address of one on the Hub"),
    ("convert a/b out --layers 5/3", "--layers '5/3' must be all"),
    ("convert a/b out --calibrate --data nosuch", "nosuch is neither a file or folder nor a data set"),
    ("recover a/b out --recipe fsat", "Did you mean 'fast'?"),
    ("recover a/b out --keep 25", "--keep '25' must be a share such as 25%"),
    ("recover a/b out --stages match,blockw", "Did you mean 'blockwise'?"),
    ("recover a/b out --budget 0", "--budget must be a number above 0"),
    ("recover a/b out --match-steps 0", "match.steps must be at least 1, got 0"),
    ("recover a/b out --blocks-steps 0", "blockwise.steps must be at least 1, got 0"),
    ("recover a/b out --data digit", "Did you mean 'digits'?"),
    ("recover a/b out --data .", "the folder . is empty"),
    ("calibrate nosuch", "model nosuch does not exist"),
    ("recover nosuch out --data digits", "source nosuch is neither a directory nor a Hub id"),
    ("select-layers nosuch", "source nosuch is neither a directory nor a Hub id"),
    ("select-layers a/b --keep 200%", "--keep '200%' must be a share"),
    ("train wan nosuch out", "model nosuch is neither a directory nor a Hub id"),
    ("train wan a/b out --data nosuch", "nosuch is neither a file or folder"),
    ("estimate nosuch", "nosuch"),
    ("estimate lama-3-8b", "Did you mean 'llama-3-8b'?"),
    ("inspect nosuch", "model nosuch is neither a directory nor a Hub id"),
    ("doctor nosuch", "model nosuch is neither a directory nor a Hub id"),
    ("app nosuch", "model nosuch is neither a directory nor a Hub id"),
    ("serve nosuch", "model nosuch is neither a directory nor a Hub id"),
    ("card nosuch", "model nosuch does not exist"),
    ("push nosuch you/x", "model nosuch does not exist"),
    ("push nosuch you/x --dry-run", "model nosuch does not exist"),
    ("check-lora a/b nosuch", "lora nosuch does not exist"),
    ("unconvert nosuch out", "model nosuch is neither a directory nor a Hub id"),
    ("import-official nosuch out", "source nosuch does not exist"),
]


def test_wrong_names_are_told_before_anything_heavy_is_imported(tmp_path, monkeypatch):
    """In a process of their own, one after the other: none of them may import what the next would miss."""
    code = "import json, sys\nfrom typer.testing import CliRunner\nfrom mhla_hf.cli.main import app\n"
    code += "for line in json.loads(sys.argv[1]):\n    result = CliRunner().invoke(app, line.split())\n"
    code += "    heavy = {'torch', 'diffusers', 'transformers', 'datasets'} & set(sys.modules)\n"
    code += "    print(json.dumps([line, result.exit_code, result.stdout + result.stderr, sorted(heavy)]))"
    monkeypatch.chdir(tmp_path)
    result = run_program(code, json.dumps([line for line, _ in LIGHT]), COLUMNS="200")
    for (line, message), found in zip(LIGHT, map(json.loads, result.stdout.splitlines()), strict=True):
        assert found[0] == line and found[1] in (1, 2) and message in found[2] and found[3] == [], found
        *notes, error = found[2].splitlines()
        assert error.startswith("error: ") and "unexpected" not in error, found
        assert not notes or "deprecated" in notes[0], found
