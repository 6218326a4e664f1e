# SPDX-License-Identifier: Apache-2.0
"""Imports inside the package go one way: from the packages that users call down to the utilities, without circles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests import ROOT


# A package imports those of lower levels alone; packages of one level do not import each other.
LEVELS = (
    ("utils",),
    ("layouts",),
    ("ops",),
    ("config",),
    ("layers",),
    ("models",),
    ("families",),
    ("presets",),
    ("integrations",),
    ("pipelines",),
    ("conversion",),
    ("training",),
    ("matching",),
    ("recovery", "analysis", "lora_check"),
    ("hub",),
    ("bench", "demo"),
    ("gpu", "estimate"),
    ("app",),
    ("cli",),
    ("__init__", "__main__"),
)
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}


def modules() -> dict[str, Path]:
    """The package's modules by their names without `mhla_hf`."""
    found = {}
    for path in (ROOT / "mhla_hf").rglob("*.py"):
        parts = path.relative_to(ROOT / "mhla_hf").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = modules()


def statements(tree: ast.AST, types: bool) -> Iterator[ast.stmt]:
    """Yield the imports of a file, those inside functions included, and with `types` those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not types:
            for other in node.orelse:
                yield from statements(other, types)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        else:
            yield from statements(node, types)


def imports(name: str) -> set[str]:
    """Return the package's modules that one of them imports.

    Its version is in `__init__`, and free to all. What `__init__` lists for type checkers is loaded when it is used.
    """
    path = MODULES[name]
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found = set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8")), types=name != "__init__"):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            assert isinstance(node, ast.ImportFrom)
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        for target in targets:
            if target == "mhla_hf.__version__" or target.partition(".")[0] != "mhla_hf":
                continue
            short = target.removeprefix("mhla_hf").removeprefix(".")
            while short and short not in MODULES:
                short = short.rpartition(".")[0]
            found.add(short or "__init__")
    return found - {name}


IMPORTS = {name: imports(name) for name in MODULES}


def test_the_architecture_page_lists_the_levels():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \|", page, flags=re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed, key=lambda name: -LEVEL[name]) == listed
    assert {*listed, "__init__", "__main__"} == {name.partition(".")[0] for name in MODULES}


def test_packages_import_those_below_them_alone():
    wrong = {
        (name.partition(".")[0], target.partition(".")[0]): f"{name} imports {target}"
        for name, targets in IMPORTS.items()
        for target in targets
        if name.partition(".")[0] != target.partition(".")[0]
        and LEVEL[name.partition(".")[0]] <= LEVEL[target.partition(".")[0]]
    }
    assert list(wrong.values()) == []


def test_no_module_imports_itself_through_others():
    circular = set()
    for start in MODULES:
        reached, waiting = set(), list(IMPORTS[start])
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                waiting.extend(IMPORTS[name])
        if start in reached:
            circular.add(start)
    assert circular == set()
