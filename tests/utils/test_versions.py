# SPDX-License-Identifier: Apache-2.0
"""Unsupported or absent libraries leave the other half of the package usable; versions are read from metadata."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from mhla_hf.utils.compat import SUPPORTED, UnsupportedVersionError, check_version
from tests import ROOT


LLAMA = """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    config = LlamaConfig(**sizes)
    ids = torch.arange(12).reshape(2, 6)
"""
WAN = """
    import torch

    sizes = dict(num_attention_heads=2, attention_head_dim=12, text_dim=8, ffn_dim=8, num_layers=1)
    inputs = dict(
        hidden_states=torch.ones(1, 16, 2, 4, 4), timestep=torch.ones(1), encoder_hidden_states=torch.ones(1, 3, 8)
    )
"""


def run(program: str, *folders: Path, site: bool = True) -> tuple[dict, list[str]]:
    """Runs a program that finds packages in these folders first; returns its last line, and its warnings of ours."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(map(str, [*folders, ROOT]))}
    command = [
        sys.executable,
        *([] if site else ["-S"]),
        "-W",
        "always::RuntimeWarning",
        "-c",
        textwrap.dedent(program),
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    warnings = [line for line in result.stderr.splitlines() if "RuntimeWarning: MHLA models" in line]
    return json.loads(result.stdout.splitlines()[-1]), warnings


def metadata(library: str, version: str, folder: Path) -> Path:
    """A folder that says that another version of a library is installed."""
    info = folder / f"{library}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {library}\nVersion: {version}\n")
    return folder


def packages_without(libraries: tuple[str, ...], folder: Path) -> Path:
    """A folder with links to every installed package but these."""
    folder.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name.partition("-")[0] not in libraries:
            (folder / entry.name).symlink_to(entry)
    return folder


REFUSED = """
    def refused(function):
        try:
            function()
        except ImportError as error:
            return str(error)
        return "not refused"
"""


@pytest.mark.parametrize("version", ["4.57.3", "5.17.0.dev0", "6.0.0rc1"])
def test_other_versions_are_refused_in_one_line(version, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(metadata("transformers", version, tmp_path))
    with pytest.raises(UnsupportedVersionError) as caught:
        check_version("transformers")
    assert str(caught.value) == (
        f"mhla_hf needs transformers>=5.17,<6, but {version} is installed: pip install 'transformers>=5.17,<6'"
    )


@pytest.mark.parametrize("library", SUPPORTED)
def test_the_range_is_that_of_pyproject(library):
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    declared = [Requirement(line.strip().strip('",')) for line in lines if line.strip().startswith(f'"{library}>')]
    assert [requirement.specifier for requirement in declared] == [SpecifierSet(SUPPORTED[library])]


def test_the_lowest_versions_are_the_lower_bounds():
    core = re.search(r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    declared = [Requirement(text) for text in re.findall('"(.+)"', core[1])]
    bounds = {
        requirement.name: Version(bound.version)
        for requirement in declared
        for bound in requirement.specifier
        if bound.operator == ">="
    }
    pins = re.findall("^(\\w+)==(.+)$", (ROOT / "constraints-lowest.txt").read_text(), re.MULTILINE)
    assert len(bounds) == len(declared) and {name: Version(version) for name, version in pins} == bounds


@pytest.mark.slow
def test_unsupported_transformers_refuse_mhla_and_leave_diffusers(tmp_path):
    report, warnings = run(
        f"""
        import json, sys
        import mhla_hf
        assert "transformers" not in sys.modules
        {textwrap.indent(textwrap.dedent(LLAMA + REFUSED + WAN), "        ").strip()}

        LlamaForCausalLM(config).save_pretrained("{tmp_path}/softmax")
        refusals = [
            refused(lambda: LlamaForCausalLM.from_pretrained("{tmp_path}/softmax", attn_implementation="mhla")),
            refused(lambda: LlamaForCausalLM.from_pretrained("{tmp_path}/softmax", mhla={{}})),
            refused(lambda: AutoModelForCausalLM.from_pretrained("{tmp_path}/softmax", attn_implementation="mhla")),
            refused(lambda: LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="mhla"))),
            refused(lambda: mhla_hf.convert(LlamaForCausalLM(config))),
            refused(lambda: mhla_hf.MHLACache),
        ]
        softmax = LlamaForCausalLM.from_pretrained("{tmp_path}/softmax")(ids).logits.shape
        sizes = dict(num_attention_heads=2, attention_head_dim=12, text_dim=8, ffn_dim=8, num_layers=1)
        model = mhla_hf.MHLAWanTransformer3DModel(**sizes, mhla=dict(blocks=(1, 2, 2)))
        video = model(**inputs).sample.shape
        print(json.dumps(dict(refusals=refusals, softmax=softmax, video=video)))
        """,
        metadata("transformers", "4.57.3", tmp_path),
    )
    expected = "mhla_hf needs transformers>=5.17,<6, but 4.57.3 is installed: pip install 'transformers>=5.17,<6'"
    assert report == {"refusals": [expected] * 6, "softmax": [2, 6, 32], "video": [1, 16, 2, 4, 4]}
    assert len(warnings) == 1 and expected in warnings[0]


@pytest.mark.slow
def test_without_transformers_the_diffusers_half_works(tmp_path):
    report, warnings = run(
        f"""
        import importlib.util, json
        assert importlib.util.find_spec("transformers") is None
        import mhla_hf
        {textwrap.indent(textwrap.dedent(REFUSED + WAN), "        ").strip()}

        from diffusers import WanTransformer3DModel

        model = mhla_hf.MHLAWanTransformer3DModel(**sizes, mhla=dict(blocks=(1, 2, 2)))
        model.save_pretrained("{tmp_path}/model")
        loaded = WanTransformer3DModel.from_pretrained("{tmp_path}/model")
        converted = mhla_hf.convert(WanTransformer3DModel(**sizes), dict(blocks=(1, 2, 2)))
        classes = [type(loaded).__name__, type(converted).__name__]
        video = loaded(**inputs).sample.shape
        print(json.dumps(dict(refused=refused(lambda: mhla_hf.MHLACache), classes=classes, video=video)))
        """,
        # diffusers itself needs transformers where peft is installed.
        packages_without(("transformers", "peft"), tmp_path / "packages"),
        site=False,
    )
    assert report == {
        "refused": "mhla_hf needs transformers>=5.17,<6 for this, which is not installed: "
        "pip install 'transformers>=5.17,<6'",
        "classes": ["MHLAWanTransformer3DModel"] * 2,
        "video": [1, 16, 2, 4, 4],
    }
    assert warnings == []


TRANSFORMERS_HALF = """
        import mhla_hf
        {setup}

        options = dict(block_size=[4], feature_map="relu")
        LlamaForCausalLM(config).save_pretrained("{folder}/softmax")
        loaded = AutoModelForCausalLM.from_pretrained(
            "{folder}/softmax", attn_implementation="mhla", mhla=options, pad_token_id=0
        )
        converted = mhla_hf.convert(LlamaForCausalLM(config), options)
        generated = loaded.generate(ids, max_new_tokens=3, min_new_tokens=3, past_key_values=mhla_hf.MHLACache())
        refusals = [
            refused(lambda: mhla_hf.MHLAWanTransformer3DModel),
            refused(lambda: mhla_hf.load_pipeline("{folder}/softmax")),
        ]
        print(json.dumps(dict(
            refusals=refusals, shapes=[generated.shape, converted(ids).logits.shape], names=len(mhla_hf.supported_models()) > 99
        )))
"""  # noqa: E501


@pytest.mark.slow
def test_without_diffusers_the_transformers_half_works(tmp_path):
    setup = textwrap.indent(textwrap.dedent(REFUSED + LLAMA), "        ").strip()
    report, warnings = run(
        """
        import importlib.util, json
        assert importlib.util.find_spec("diffusers") is None
        """
        + TRANSFORMERS_HALF.format(setup=setup, folder=tmp_path),
        packages_without(("diffusers",), tmp_path / "packages"),
        site=False,
    )
    expected = "mhla_hf needs diffusers>=0.40 for this, which is not installed: pip install 'diffusers>=0.40'"
    assert report == {"refusals": [expected] * 2, "shapes": [[2, 9], [2, 6, 32]], "names": True}
    assert warnings == []
