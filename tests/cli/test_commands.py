# SPDX-License-Identifier: Apache-2.0
"""The console script: help without heavy imports, the conversion commands, errors as one line."""

import json
import os
import subprocess
import sys

import pytest
import torch
import typer
from safetensors import SafetensorError
from typer.main import get_command
from typer.testing import CliRunner

import mhla_hf
from mhla_hf import MHLAWanTransformer3DModel
from mhla_hf.cli import errors
from mhla_hf.cli.main import app
from mhla_hf.models.registry import TransformersFamily
from mhla_hf.presets import PRESETS
from tests import GOLDEN, ROOT, tiny


@pytest.fixture(scope="module")
def pipeline_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("softmax") / "pipeline"
    tiny.wan_pipeline(num_layers=3).save_pretrained(folder)
    return folder


def run(*arguments, code=0):
    """Runs a command in this process and returns what it wrote to standard output."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def run_process(*arguments, code=0, **variables):
    """Runs Python in a process of its own, without the terminal's colours."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "NO_COLOR": "1", **variables}
    result = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert result.returncode == code, result.stderr
    return result


def mhla_of(folder):
    return json.loads((folder / "config.json").read_text())["mhla"]


def test_help_lists_the_commands():
    output = run("--help").output
    for command in ("convert", "import-official", "models", "train", "demo"):
        assert command in output


def test_help_is_light():
    code = (
        "import sys, mhla_hf.cli.main as m; print(sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    assert run_process("-c", code).stdout.strip() == "[]"


def test_module_and_version():
    assert run("--version").output.strip() == f"mhla-hf {mhla_hf.__version__}"
    assert run_process("-m", "mhla_hf", "--version").stdout.strip() == f"mhla-hf {mhla_hf.__version__}"


@pytest.mark.parametrize(
    ("script", "option"),
    [
        ("convert_wan", "--block-size"),
        ("convert_dit", "--blocks"),
        ("convert_sana", "--mixing-init"),
        ("convert_lm", "--layers"),
        ("import_official", "--base"),
    ],
)
def test_scripts_take_the_same_options(script, option):
    assert option in run_process(ROOT / f"conversion/{script}.py", "--help").stdout


def test_models_keep_names_whole_in_narrow_windows():
    output = run_process("-m", "mhla_hf", "models", COLUMNS="80").stdout
    assert max(map(len, output.splitlines())) <= 80
    for name, family in mhla_hf.supported_models().items():
        words = [name] if isinstance(family, TransformersFamily) else [name, family.mhla_class, *family.pipelines]
        assert not [word for word in words if word not in output]


def test_supported_models_print_as_a_list():
    models = mhla_hf.supported_models()
    lines = str(models).splitlines()
    assert repr(models) == str(models) and len(lines) == len(models) + 2
    assert lines[:2] == [
        "diffusers",
        "  WanTransformer3DModel        video  as MHLAWanTransformer3DModel in WanPipeline, WanImageToVideoPipeline",
    ]
    assert ["modernbert", "encoder", "sliding-window layers stay softmax"] in [
        line.split(maxsplit=2) for line in lines
    ]


def test_models():
    assert "WanTransformer3DModel" in run("models").output
    listed = json.loads(run("models", "--json").output)
    assert {"upstream": "WanTransformer3DModel", "mhla_class": "MHLAWanTransformer3DModel"}.items() <= listed[
        0
    ].items()


def test_models_lists_presets():
    output = run("models", "--presets").output
    listed = json.loads(run("models", "--presets", "--json").output)
    assert [entry["name"] for entry in listed] == list(PRESETS)
    assert all(name in output for name in PRESETS)
    assert listed[0]["mhla"]["blocks"] == [4, 4]


def test_convert_with_every_option(pipeline_dir, tmp_path):
    output = run(
        "convert", pipeline_dir, tmp_path / "mhla", "--blocks", "1,2,2", "--layers", "2/3", "--grid", "3,2,4",
        "--feature-map", "hedgehog", "--normalizer", "none", "--rope", "before_feature_map", "--output-norm", "--gate",
        "--lepe", "3", "--mixing-init", "gaussian", "--mixing-heads", "per_head", "--mixing-constraint", "nonnegative",
        "--mixing-range", "2", "--window", "cross", "--window-size", "1,2,2", "--window-gains", "per_channel",
        "--dtype", "bf16", "--max-shard-size", "1MB",
    ).output  # fmt: skip
    assert "2 of 3" in output
    assert "1×2×2" in output
    assert "fine-tune" in output
    mhla = mhla_of(tmp_path / "mhla/transformer")
    expected = {
        "blocks": [1, 2, 2],
        "layers": [1, 2],
        "grid": [3, 2, 4],
        "feature_map": "hedgehog",
        "normalizer": "none",
        "rope": "before_feature_map",
        "output_norm": True,
        "output_gate": True,
        "lepe_kernel": 3,
        "mixing_init": "gaussian",
        "mixing_heads": "per_head",
        "mixing_constraint": "nonnegative",
        "mixing_range": 2.0,
        "window": "cross",
        "window_size": [1, 2, 2],
        "window_gains": "per_channel",
    }
    assert {name: mhla[name] for name in expected} == expected
    MHLAWanTransformer3DModel.from_pretrained(tmp_path / "mhla", subfolder="transformer")


def test_convert_with_block_size(pipeline_dir, tmp_path):
    output = run("convert", pipeline_dir / "transformer", tmp_path / "mhla", "--block-size", "7,6,13").output
    assert "of 7×6×13 tokens" in output
    assert mhla_of(tmp_path / "mhla")["block_size"] == [7, 6, 13]
    assert mhla_of(tmp_path / "mhla")["grid"] == list(MHLAWanTransformer3DModel.default_grid)


def test_convert_uses_the_defaults_and_can_be_quiet(pipeline_dir, tmp_path):
    result = run("convert", pipeline_dir / "transformer", tmp_path / "mhla", "--quiet")
    assert result.output == ""
    default = MHLAWanTransformer3DModel(**tiny.WAN).config.mhla
    assert mhla_of(tmp_path / "mhla") == dict(default)


def test_import_official(tmp_path):
    checkpoint = GOLDEN / "wan_hybrid_gated/model.safetensors"
    output = run("import-official", checkpoint, tmp_path / "out").output
    assert "2 of 3" in output
    assert "fine-tune" not in output
    assert mhla_of(tmp_path / "out")["normalizer"] == "none"
    run(
        "import-official",
        checkpoint,
        tmp_path / "out",
        "--overwrite",
        "-q",
        "--normalizer",
        "query",
        "--blocks",
        "5,5,6",
    )
    assert mhla_of(tmp_path / "out")["normalizer"] == "query"
    assert mhla_of(tmp_path / "out")["blocks"] == [5, 5, 6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--blocks", "1,2"], "for 2 axes, but this model's token grid has 3"),
        (["--blocks", "1,2,2", "--block-size", "1,1,1"], "Give blocks or block_size, not both"),
        (["--layers", "0,3"], "layers names 3, but the model has layers 0 to 2"),
        (["--feature-map", "softmax"], "feature_map='softmax' is not one of"),
        (["--lepe", "2"], "lepe_kernel=2 must be an odd integer"),
        (["--dtype", "int8"], "dtype='int8' must be one of"),
    ],
)
def test_mistakes_are_one_line(arguments, message, pipeline_dir, tmp_path):
    result = run("convert", pipeline_dir, tmp_path / "mhla", *arguments, code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not (tmp_path / "mhla").exists()


def test_mistakes_in_a_process_of_its_own():
    code = "def fail():\n    raise ValueError('no such model')\nfrom mhla_hf.cli.errors import run_script\nrun_script(fail)"  # noqa: E501
    assert run_process("-c", code, code=1).stderr == "error: no such model\n"
    assert "Traceback" in run_process("-c", code, code=1, MHLA_HF_DEBUG="1").stderr
    assert "Traceback" not in run_process("-m", "mhla_hf", "convert", code=2).stderr


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("two\nlines of [markup]"), "error: two lines of [markup]\n"),
        (FileNotFoundError(2, "No such file", "weights"), "error: [Errno 2] No such file: 'weights'\n"),
        (ModuleNotFoundError("install imageio"), "error: install imageio\n"),
        (ValueError(), "error: ValueError\n"),
    ],
)
def test_friendly_errors(error, shown, capsys):
    with pytest.raises(typer.Exit) as caught, errors.friendly_errors():
        raise error
    assert caught.value.exit_code == 1
    assert capsys.readouterr().err == shown


def test_debugging_shows_the_traceback(monkeypatch):
    monkeypatch.setenv(errors.DEBUG_VARIABLE, "1")
    with pytest.raises(ValueError, match="wrong"), errors.friendly_errors():
        raise ValueError("wrong")


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (KeyError("blocks"), "error: unexpected KeyError: 'blocks' (run again with --debug"),
        (RuntimeError("mat1 and mat2\ncannot be multiplied"), "error: unexpected RuntimeError: mat1 and mat2 cannot"),
        (AssertionError(), "error: unexpected AssertionError (run again with --debug"),
        (RuntimeError("x" * 10_000), "error: unexpected RuntimeError: xxx"),
        (SafetensorError("header too large"), "error: header too large\n"),
        (ImportError("install peft"), "error: install peft\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unexpected_errors_are_one_line(error, shown, capsys):
    with pytest.raises(typer.Exit) as caught, errors.friendly_errors():
        raise error
    assert caught.value.exit_code == 1
    line = capsys.readouterr().err
    assert line.startswith(shown) and line.count("\n") == 1 and len(line) < 900
    assert ("mhla-hf env" in line) == ("unexpected" in line)


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
def test_full_memory_names_the_options_that_lower_it(error, capsys):
    group = get_command(app)
    for words, expected in (
        (("calibrate",), "; lower --batch-size, --memory-limit, --num-frames, --height ("),
        (("train", "wan"), "; lower --batch-size, --transfer-cache, --num-frames, --height ("),
        (("import-official",), "; a smaller model or input takes less ("),
    ):
        command = group
        for word in words:
            command = command.commands[word]
        with pytest.raises(typer.Exit), errors.friendly_errors(command):
            raise error
        assert capsys.readouterr().err.startswith(f"error: out of memory{expected}")


def test_debug_may_stand_anywhere(tmp_path):
    missing = tmp_path / "missing"
    for words in (
        ("--debug", "convert", missing, tmp_path / "out"),
        ("convert", "--debug", missing, tmp_path / "out"),
        ("convert", missing, tmp_path / "out", "--debug"),
    ):
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert isinstance(result.exception, (ValueError, OSError)), result.output
    # After two dashes nothing is an option.
    assert "error: " in run("convert", missing, "--", "--debug", code=1).stderr


def test_scripts_take_debug_too():
    code = "def fail():\n    raise KeyError('x')\nfrom mhla_hf.cli.errors import run_script\nrun_script(fail)"
    assert run_process("-c", code, code=1).stderr.startswith("error: unexpected KeyError: 'x'")
    assert "Traceback" in run_process("-c", code, "--debug", code=1).stderr


def test_a_closed_pipe_is_quiet():
    code = "import typer\ndef talk():\n    for _ in range(10**5): typer.echo('many words')\n"
    code += "from mhla_hf.cli.errors import run_script\nrun_script(talk)"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_scripts_show_mistakes_too(monkeypatch, capsys):
    def command(number: int = typer.Argument()) -> None:
        raise ValueError(f"number={number} is wrong")

    monkeypatch.setattr(sys, "argv", ["script", "3"])
    with pytest.raises(SystemExit) as caught:
        errors.run_script(command)
    assert caught.value.code == 1
    assert capsys.readouterr().err == "error: number=3 is wrong\n"
