# SPDX-License-Identifier: Apache-2.0
"""Size of the code by folder: code lines without docstrings, comments and blank lines, files, and `raise` statements.

python -m benchmarks.size            # this checkout
python -m benchmarks.size BEFORE     # beside another one
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
TEXTS = {"templates": (".html", ".jinja", ".md"), "json and yaml": (".json", ".yaml")}
"""Suffixes of other texts in the package, without those of the models in `assets`."""

OTHERS = ("benchmarks", "conversion", "tests")


def count_code(text: str) -> Counter[str]:
    """Count the code lines and `raise` statements of a Python file."""
    tree, lines = ast.parse(text), text.splitlines()
    skipped = {number for number, line in enumerate(lines, 1) if not line.strip() or line.lstrip().startswith("#")}
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node, clean=False) is not None:
            skipped |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    raises = sum(isinstance(node, ast.Raise) for node in ast.walk(tree))
    return Counter(lines=len(lines) - len(skipped), files=1, raises=raises)


def count_folders(root: Path) -> dict[str, Counter[str]]:
    """Count the folders of the package, its templates, and the other folders of a checkout."""
    package, rows = root / "mhla_hf", {"mhla_hf": Counter[str]()}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).parts[0] if path.parent != package else "(modules)"
        rows.setdefault(f"mhla_hf/{name}", Counter()).update(code := count_code(path.read_text(encoding="utf-8")))
        rows["mhla_hf"].update(code)
    rows = dict(sorted(rows.items(), key=lambda row: -row[1]["lines"]))
    for name, suffixes in TEXTS.items():
        texts = [path for path in package.rglob("*") if path.suffix in suffixes and "assets" not in path.parts]
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in texts)
        rows[name] = Counter(lines=lines, files=len(texts))
    for name in OTHERS:
        codes = (count_code(path.read_text(encoding="utf-8")) for path in (root / name).rglob("*.py"))
        rows[name] = sum(codes, Counter())
    return rows


def main() -> None:
    """Print the table."""
    now = count_folders(ROOT)
    before = count_folders(Path(sys.argv[1])) if len(sys.argv) > 1 else {}
    print(f"{'':24}{'lines':>8}{'files':>7}{'raises/1000':>13}" + (f"{'before':>10}{'files':>7}" if before else ""))
    for name in {**now, **before}:
        code, old = now.get(name, Counter()), before.get(name, Counter())
        row = f"{name:24}{code['lines']:8,}{code['files']:7}{1000 * code['raises'] / max(code['lines'], 1):13.1f}"
        print(row + (f"{old['lines']:10,}{old['files']:7}" if before else ""))


if __name__ == "__main__":
    main()
