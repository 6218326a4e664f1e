# SPDX-License-Identifier: Apache-2.0
"""README and documentation work as written: Python runs, commands, options and links exist, the API is complete."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import markdown
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from mhla_hf.cli.main import app
from mhla_hf.config import MHLAConfig
from mhla_hf.demo import base_pipeline_directory
from mhla_hf.models.registry import TRANSFORMERS_FAMILIES
from tests import ROOT


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
# "# needs a GPU and the Hub", "# needs a trained LoRA"
NEEDS = "# needs "
TAKES = "# takes "


def _blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXTS[page], flags=re.DOTALL)


def _python() -> dict[str, list[str]]:
    """The Python to run by page; what an earlier page has already is left out."""
    found: dict[str, list[str]] = {}
    for page in TEXTS:
        earlier = {block for blocks in found.values() for block in blocks}
        blocks = [block for block in _blocks(page, "python") if not block.startswith((NEEDS, TAKES))]
        found[page] = [block for block in blocks if block not in earlier]
    return {page: blocks for page, blocks in found.items() if blocks}


def _commands() -> list[list[str]]:
    """Every command line of the shell blocks, continuation lines joined and comments dropped."""
    blocks = [block for page in TEXTS for block in _blocks(page, "bash")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [words for line in dict.fromkeys(lines) if (words := shlex.split(line, comments=True))]
    assert len(found) >= 30
    return found


PYTHON, COMMANDS = _python(), _commands()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the Python runs: with the demo's output, unrecovered."""
    folder = tmp_path_factory.mktemp("readme")
    arguments = ["convert", str(base_pipeline_directory()), str(folder / "demo-output" / "mhla"), "--blocks", "5,4,4"]
    result = CliRunner().invoke(app, [*arguments, "--quiet"])
    assert result.exit_code == 0, result.output
    return folder


@pytest.mark.parametrize("page", PYTHON)
def test_python_blocks_run_in_order(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    for block in PYTHON[page]:
        names: dict[str, object] = {}
        exec(compile(block, page, "exec"), names)
        if "video" in names:
            assert names["video"].shape == (17, 64, 64, 3)
    if page == "README.md":
        assert len(PYTHON[page]) >= 2
        assert TEXTS[page].count("\n") <= 120
        assert (folder / "digits-mhla-in-place" / "model_index.json").is_file()


@pytest.mark.slow
def test_a_book_is_read_in_constant_memory():
    (block,) = [block for page in TEXTS for block in _blocks(page, "python") if block.startswith(TAKES)]
    assert len([line for line in block.splitlines() if line and not line.startswith("#")]) <= 20
    names: dict[str, Any] = {}
    exec(compile(block, "docs/use.md", "exec"), names)
    assert names["cache"].get_seq_length() == 2**20
    assert names["sizes"] == {722608}
    assert names["output"].logits.isfinite().all()


def _options_exist(arguments):
    command = get_command(app)
    while hasattr(command, "commands") and not arguments[0].startswith("-"):
        assert arguments[0] in command.commands, f"no command {arguments[0]}"
        command, arguments = command.commands[arguments[0]], arguments[1:]
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    assert {word for word in arguments if word.startswith("--")} <= known


@pytest.mark.parametrize("words", [words for words in COMMANDS if words[0] == "mhla-hf"], ids=" ".join)
def test_shell_commands_and_their_options_exist(words):
    _options_exist(words[1:])


@pytest.mark.parametrize(
    "words", [words for words in COMMANDS if words[0] in ("accelerate", "torchrun", "srun")], ids=" ".join
)
def test_launched_commands_take_the_options_shown(words):
    assert all((ROOT / word).is_file() for word in words if word.endswith(".yaml"))
    place = words.index("-m")
    assert words[place + 1] == "mhla_hf"
    _options_exist(words[place + 2 :])


@pytest.mark.parametrize("target", sorted({words[1] for words in COMMANDS if words[0] == "make"}))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)


def _anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_links_into_the_repository_lead_somewhere(page):
    for link in sorted(set(re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]))):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


@cache
def hooks():
    """Those of the site."""
    specification = spec_from_file_location("hooks", ROOT / "docs" / "scripts" / "hooks.py")
    module = module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", [page for page in TEXTS if page.startswith(("README", "docs/"))])
def test_numbers_stay_beside_their_units(page):
    """In the README as it is written, and in the pages of the site as the hook gives them."""
    html = markdown.markdown(TEXTS[page], extensions=["tables", "fenced_code"])
    if page.startswith("docs/"):
        html = hooks().on_page_content(html)
    text = re.sub(r"<pre.*?</pre>|<code.*?</code>|<[^>]*>", "", html, flags=re.DOTALL)
    assert re.findall(r"\d [×%]|× \d|\d (?:ms|s|[kMG]B)\b", text) == []


def test_every_public_name_is_in_the_api():
    pages = hooks().with_models("\n".join(text for page, text in TEXTS.items() if page.startswith("docs/api/")))
    described = set(re.findall(r"(?:^::: |`)(mhla_hf\.[\w.]+)", pages, flags=re.MULTILINE))
    names = json.loads((ROOT / "tests" / "public_names.json").read_text(encoding="utf-8"))["names"]
    aliases = set(names["mhla_hf"])
    for module, listed in names.items():
        wanted = {f"{'mhla_hf' if name in aliases else module}.{name}" for name in listed} - {"mhla_hf.__version__"}
        assert not wanted - described


@pytest.mark.parametrize("page", [page for page in TEXTS if page.startswith("docs/api/")])
def test_the_api_names_things_that_exist(page):
    for name in re.findall(r"^::: (\S+)$", hooks().with_models(TEXTS[page]), flags=re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name


def test_every_option_is_explained():
    explained = set(re.findall(r"^\| `(\w+)` \|", TEXTS["docs/options.md"], flags=re.MULTILINE))
    assert explained == set(MHLAConfig().to_dict())


def test_the_readme_counts_the_models_of_transformers():
    families = TRANSFORMERS_FAMILIES
    kinds = [family.kind for family in families.values()]
    counts = [kinds.count("language model") - 2, kinds.count("encoder") + kinds.count("vision") - 2]
    assert [int(number) for number in re.findall(r" and (\d+) more types", TEXTS["README.md"])] == counts
