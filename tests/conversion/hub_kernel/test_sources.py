# SPDX-License-Identifier: Apache-2.0
"""Following imports, and rewriting modules so that they stand without the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from conversion.hub_kernel.sources import collect_sources


def write(folder: Path, **modules: str) -> Path:
    """Writes modules by their names, with `__` between folders."""
    for name, text in modules.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path = path.with_name("__init__.py") if path.stem == "init" else path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def collect(tmp_path):
    """Collects the sources of a template with the given root, and a package with the given modules."""

    def run(root: str, **modules: str) -> dict[str, str]:
        template = write(tmp_path / "template", init=root)
        package = write(tmp_path / "package", init="raise AssertionError", **modules)
        return collect_sources(package, template, "mhla")

    return run


def test_follows_every_kind_of_import(collect):
    sources = collect(
        "from .ops import attend\nfrom . import layers",
        layers="import torch.nn as nn",
        ops__init="from .a import attend\nfrom .. import __version__",
        ops__a="def attend():\n    from .b import c\n    from ..utils.deep import d",
        ops__b="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .typed import T",
        ops__typed="import math, triton.language as tl",
        ops__unused="",
        utils__init="",
        utils__deep__init="",
        utils__unused="import transformers",
    )
    expected = ["__init__", "layers", "ops/__init__", "ops/a", "ops/b", "ops/typed", "utils/__init__"]
    assert list(sources) == [f"{name}.py" for name in (*expected, "utils/deep/__init__")]
    assert sources["__init__.py"].startswith("from .ops import attend")


def test_operators_move_to_the_namespace_of_the_build(collect):
    text = (
        '"""Märchen."""\n\nimport torch\nfrom .b import (\n    one,\n)\n\n\n'
        '@torch.library.custom_op("mhla_hf::attend", mutates_args=())\ndef attend(): ...\n\n\n'
        'ü = "ö", "mhla_hf::attend", torch.ops.mhla_hf.attend, torch.ops.aten.add\n'
    )
    sources = collect("from .ops import a", ops__init="", ops__a=text, ops__b="one = 1")
    assert sources["ops/a.py"] == (
        '"""Märchen."""\n\nimport torch\nfrom .b import (\n    one,\n)\n'
        "from .._ops import add_op_namespace_prefix, ops as registered_operators\n\n\n"
        '@torch.library.custom_op(add_op_namespace_prefix("attend"), mutates_args=())\ndef attend(): ...\n\n\n'
        'ü = "ö", add_op_namespace_prefix("attend"), registered_operators.attend, torch.ops.aten.add\n'
    )
    assert sources["ops/b.py"] == "one = 1"


@pytest.mark.parametrize(
    "text, message",
    [
        ("import os\nimport numpy as np", r"a\.py:2 imports numpy; a kernel may import"),
        ("from diffusers.models import x", r"a\.py:1 imports diffusers\.models; "),
        ("import mhla_hf.ops", r"imports mhla_hf\.ops; "),
        ("def f():\n    from .missing import x", r"a\.py:2 imports missing, which the package does not have"),
        ("from . import MHLAConfig", r"a\.py:1 imports MHLAConfig from the package itself"),
        ("from ..above import x", r"a\.py:1 imports from above the package"),
        ('NAME = "mhla_hf::" + name', r"'mhla_hf::' names mhla_hf, .* as \"mhla_hf::name\", in one string"),
        ('define(f"mhla_hf::{name}")', "names mhla_hf, which a kernel cannot have"),
        ('torch.library.Library("mhla_hf", "DEF")', r"Library\('mhla_hf', 'DEF'\) names mhla_hf"),
        ("from torch import ops\nops.mhla_hf.attend", r"a\.py: ops\.mhla_hf names mhla_hf"),
    ],
)
def test_what_a_kernel_cannot_have(collect, text, message):
    with pytest.raises(ValueError, match=message):
        collect("from . import a", a=text)
