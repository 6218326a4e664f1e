# SPDX-License-Identifier: Apache-2.0
"""Numbers that commands refuse: not finite, negative, or far out of range."""

import dataclasses
import json
import math
import re

import pytest
from typer.testing import CliRunner

from benchmarks.quality_dit.options import QualityOptions
from mhla_hf.cli.main import app
from mhla_hf.config import parse_layers
from mhla_hf.conversion.options import parse_axes, parse_size
from mhla_hf.demo.config import DemoConfig
from mhla_hf.training.config import CacheConfig, TrainingConfig


CONFIGS = (TrainingConfig, CacheConfig)


def numeric_fields(kind):
    return [
        pytest.param(config, item.name, id=f"{config.__name__}-{item.name}")
        for config in CONFIGS
        for item in dataclasses.fields(config)
        if item.type.startswith(kind)
    ]


@pytest.mark.parametrize(("config", "name"), numeric_fields("float"))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, "1", True, [1.0]])
def test_options_are_finite_numbers(config, name, value):
    with pytest.raises(ValueError, match=f"{name} must be a finite number") as caught:
        config(**{name: value})
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(("config", "name"), numeric_fields("int"))
@pytest.mark.parametrize("value", [math.nan, 1.5, "1", True, -1])
def test_options_are_whole_numbers(config, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be (a whole number \(at least \d|at least \d)"):
        config(**{name: value})


def test_the_allowed_range_is_named():
    with pytest.raises(ValueError, match=r"condition_dropout must be a finite number \(at least 0 and at most 1\)"):
        TrainingConfig(condition_dropout=math.nan)
    for options, message in (
        ({"height": 10**9}, "height must be at most 16384"),
        ({"num_frames": 10**30}, "num_frames must be at most 16384"),
        ({"max_sequence_length": 10**9}, "max_sequence_length must be at most 65536"),
        ({"fps": 1e9}, "fps must be at most 1000"),
    ):
        with pytest.raises(ValueError, match=message):
            CacheConfig(**options)
    with pytest.raises(ValueError, match="seed must be at most 4294967295"):
        TrainingConfig(seed=2**32)


@pytest.mark.parametrize("name", ["model", "output", "cache", "teacher", "resume", "validation_negative_prompt"])
def test_options_are_texts(name):
    with pytest.raises(ValueError, match=f"{name} must be a text, got 5"):
        TrainingConfig(**{name: 5})


@pytest.mark.parametrize("value", [5, {"a": 1}, [["a"]]])
def test_prompts_are_texts(value):
    with pytest.raises(ValueError, match="validation_prompts must be texts"):
        TrainingConfig(validation_prompts=value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance": math.nan}, "guidance must be a finite number of at least 0, got nan"),
        ({"guidance": math.inf}, "guidance must be a finite number"),
        ({"guidance": -1.0}, "guidance must be a finite number of at least 0"),
        ({"match_steps": 0}, "match_steps must be at least 1"),
        ({"seed": 2**40}, "seed must be from 0 to 2147483647"),
    ],
)
def test_demo_options(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        DemoConfig(output=tmp_path, **options)


@pytest.mark.parametrize(
    "name", ["guidance_scale", "learning_rate", "matrix_learning_rate", "class_dropout", "flow_shift"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_quality_options(name, value):
    with pytest.raises(ValueError, match=f"{name}={value} must be"):
        QualityOptions(**{name: value})


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "{folder}/x", "--guidance", "nan"],
        ["demo", "{folder}/x", "--seed", "-1"],
        ["bench", "op", "--quick", "--seconds", "nan"],
        ["bench", "model", "--quick", "--seconds", "inf"],
        ["train", "cache", "--cache", "{folder}/x", "--data", "digits", "--fps", "nan"],
        ["train", "wan", "--output", "{folder}/x", "--validation-guidance", "nan"],
        ["train", "wan", "--output", "{folder}/x", "--logit-mean=-inf"],
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)
def test_commands_refuse_them_in_one_line(arguments, tmp_path):
    result = CliRunner().invoke(app, [argument.replace("{folder}", str(tmp_path)) for argument in arguments])
    assert result.exit_code == 1
    line = " ".join(result.output.split())
    assert re.match(r"error: .* must be", line) and len(line) < 300
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (lambda text: parse_axes(text, "blocks"), "9" * 5000),
        (lambda text: parse_layers(text, 4), "9" * 5000),
        (lambda text: parse_layers(text, 4), "1/" + "9" * 5000),
        (parse_size, "9" * 5000 + "GB"),
        (parse_size, "nanGB"),
        (parse_size, "-5GB"),
        (parse_size, "0.5B"),
    ],
    ids=["blocks", "layers", "fraction", "long size", "nan", "negative", "no byte"],
)
def test_conversion_options(parse, text):
    with pytest.raises(ValueError, match="must be") as caught:
        parse(text)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "is not a JSON object but a list"),
        ("{", "is not valid JSON"),
        ('{"mhla": ' + "[" * 500 + "]" * 500 + "}", "nested too deeply"),
        ('{"learning_rate": NaN}', "learning_rate must be a finite number (greater than 0), got nan"),
        ('{"max_steps": "5"}', "max_steps must be a whole number (at least 0), got '5'"),
        ('{"model": ["a"]}', "model must be a text"),
        (json.dumps({f"x{number}": 1 for number in range(1000)}), "has unknown options: x0"),
        ('{"mhla": [1]}', "mhla must be JSON"),
        ('{"validation_prompts": 5}', "validation_prompts must be texts"),
    ],
    ids=lambda value: value[:20],
)
def test_config_files(content, message, tmp_path):
    (tmp_path / "config.json").write_text(content)
    output = tmp_path / "run"
    result = CliRunner().invoke(
        app, ["train", "wan", "--output", str(output), "--config", str(output.parent / "config.json")]
    )
    line = " ".join(result.output.split())
    assert result.exit_code == 1 and message in line and len(line) < 500
    assert not output.exists()


@pytest.mark.parametrize("value", ["{", "[1]", "x" * 5000, "a\0b", '{"a":' * 500 + "1" + "}" * 500])
def test_mhla_texts(value):
    with pytest.raises(ValueError, match="^mhla") as caught:
        TrainingConfig(mhla=value)
    assert len(str(caught.value)) < 300
