# SPDX-License-Identifier: Apache-2.0
"""The modules that a kernel consists of: found by following imports, and rewritten to stand without the package.

Relative imports stay as they are, as the kernel's folder has the same tree as the package. What changes is the
namespace of custom operators, which has to be the build's own: several builds, and the package, may be loaded in one
process.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


PACKAGE = "mhla_hf"
# Nothing else may be imported by a kernel. torch brings Triton along where there is one.
LIBRARIES = {*sys.stdlib_module_names, "torch", "triton"}
# Written for each build, by kernel-builder or by `folder`.
OPERATORS_MODULE = "_ops"

_OPERATOR = re.compile(rf"{PACKAGE}::(\w+)")
_REFERENCE = re.compile(rf"(?<![\w.]){PACKAGE}\.(?:\w+\.)*(\w+)")
_EXAMPLE = re.compile(rf"(?<=>>> )from {PACKAGE} import (\w+(?:, \w+)*)")


def collect_sources(package: Path, template: Path, module_name: str) -> dict[str, str]:
    """Returns the text of every module of the kernel by its path.

    Starts at the modules of the template and follows their imports, those inside functions and for type checkers
    included. The package's own `__init__` is replaced by the template's.

    Args:
        package: Folder of the package.
        template: Folder with the kernel's `__init__.py`, and modules beside those of the package.
        module_name: Name for the loaded kernel in examples.

    Raises:
        ValueError: If a module needs what a kernel cannot have. The message names the file and the line.
    """
    roots = (template, package)
    pending = [path.relative_to(template).as_posix() for path in template.rglob("*.py")]
    sources: dict[str, str] = {}
    while pending:
        path = pending.pop()
        if path in sources:
            continue
        file = next(root / path for root in roots if (root / path).is_file())
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(file))
        pending.extend(_imported(tree, PurePosixPath(path), roots, file))
        sources[path] = _stand_alone(text, tree, PurePosixPath(path), module_name, file)
    return dict(sorted(sources.items()))


def _imported(tree: ast.Module, path: PurePosixPath, roots: tuple[Path, ...], file: Path) -> Iterator[str]:
    """Paths of the modules that a module imports from its own package, those of their packages included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            libraries = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            libraries = [node.module or ""]
        elif isinstance(node, ast.ImportFrom):
            libraries = []
            parts = (*_parent_package(path, node, file), *(node.module or "").split("."))
            yield from _modules_of(tuple(filter(None, parts)), node, roots, file)
        else:
            continue
        for library in libraries:
            if library.partition(".")[0] not in LIBRARIES:
                raise ValueError(
                    f"{file}:{node.lineno} imports {library}; a kernel may import the standard library, torch, triton "
                    "and its own modules (by relative imports)."
                )


def _parent_package(path: PurePosixPath, node: ast.ImportFrom, file: Path) -> tuple[str, ...]:
    package = path.parent.parts
    if node.level > len(package) + 1:
        raise ValueError(f"{file}:{node.lineno} imports from above the package.")
    return package[: len(package) + 1 - node.level]


def _modules_of(parts: tuple[str, ...], node: ast.ImportFrom, roots: tuple[Path, ...], file: Path) -> Iterator[str]:
    if parts == (OPERATORS_MODULE,):
        return
    found = _module_path(parts, roots)
    if found is None:
        raise ValueError(f"{file}:{node.lineno} imports {'.'.join(parts)}, which the package does not have.")
    yield found
    for end in range(1, len(parts)):
        if (parent := _module_path(parts[:end], roots)) is not None:
            yield parent
    for alias in node.names:
        submodule = _module_path((*parts, alias.name), roots)
        if submodule is not None:
            yield submodule
        elif not parts and alias.name != "__version__":
            raise ValueError(
                f"{file}:{node.lineno} imports {alias.name} from the package itself; import it from its module."
            )


def _module_path(parts: tuple[str, ...], roots: tuple[Path, ...]) -> str | None:
    """Path of a module or package, that of the template before that of the package."""
    base = "/".join(parts)
    for candidate in ("/".join(filter(None, (base, "__init__.py"))), f"{base}.py"):
        if any((root / candidate).is_file() for root in roots):
            return candidate
    return None


def _stand_alone(text: str, tree: ast.Module, path: PurePosixPath, module_name: str, file: Path) -> str:
    """A module's text with the operators in the build's namespace, and references within the kernel."""
    edits: list[tuple[tuple[int, int], tuple[int, int], str]] = []
    needed: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if match := _OPERATOR.fullmatch(node.value):
                edits.append((*_place(node), f'add_op_namespace_prefix("{match[1]}")'))
                needed.add("add_op_namespace_prefix")
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == f"torch.ops.{PACKAGE}":
            edits.append((*_place(node), "registered_operators"))
            needed.add("ops as registered_operators")
    if needed:
        dots = "." * (len(path.parent.parts) + 1)
        line = f"from {dots}{OPERATORS_MODULE} import {', '.join(sorted(needed))}\n"
        after = (_last_import(tree) + 1, 0)
        edits.append((after, after, line))
    text = _replace(text, edits)
    text = _REFERENCE.sub(r"\1", text)
    text = _EXAMPLE.sub(lambda match: _taken_from(module_name, match[1]), text)
    text = re.sub(rf"(?m)^( *>>> .*)\b{PACKAGE}\b", rf"\g<1>{module_name}", text)
    _check_rewritten(ast.parse(text), file)
    return text


def _check_rewritten(tree: ast.Module, file: Path) -> None:
    """Raises `ValueError` for what would lead back to the package or its operators. Other texts may name it."""
    docstrings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    for node in ast.walk(tree):
        named = getattr(node, "id", getattr(node, "attr", None)) == PACKAGE
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = f"{PACKAGE}::" in node.value and node not in docstrings
        elif isinstance(node, ast.Call):
            arguments = (*node.args, *(keyword.value for keyword in node.keywords))
            named = any(isinstance(value, ast.Constant) and value.value == PACKAGE for value in arguments)
        if named:
            raise ValueError(
                f"{file}: {ast.unparse(node)} names {PACKAGE}, which a kernel cannot have; write operators as "
                f'"{PACKAGE}::name", in one string, and torch.ops.{PACKAGE}.name.'
            )


def _taken_from(module_name: str, names: str) -> str:
    return f"{names} = {', '.join(f'{module_name}.{name}' for name in names.split(', '))}"


def _place(node: ast.expr) -> tuple[tuple[int, int], tuple[int, int]]:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _last_import(tree: ast.Module) -> int:
    """Last line of the imports at the top of a module."""
    last = 0
    for statement in tree.body:
        is_docstring = statement is tree.body[0] and isinstance(statement, ast.Expr)
        if not is_docstring and not isinstance(statement, (ast.Import, ast.ImportFrom)):
            break
        last = statement.end_lineno or last
    return last


def _replace(text: str, edits: list[tuple[tuple[int, int], tuple[int, int], str]]) -> str:
    """Replaces places of a text; columns count bytes, as those of `ast` do."""
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for (first_line, first), (last_line, last), new in sorted(edits, reverse=True):
        data = data[: starts[first_line - 1] + first] + new.encode() + data[starts[last_line - 1] + last :]
    return data.decode()
