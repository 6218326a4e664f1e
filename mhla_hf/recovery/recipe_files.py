# SPDX-License-Identifier: Apache-2.0
"""Finding and reading recipe files: plain YAML without the parts that are easily misread."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from ..utils.messages import shorten_text


_FOLDER = Path(__file__).parents[1] / "recipes"
_SUFFIXES = (".yaml", ".yml")
_LARGEST = 1 << 16


def recipe_names() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def find_recipe(location: str | Path) -> Path:
    """The file of a recipe.

    Args:
        location: A file, or a name from [`recipe_names`].

    Raises:
        ValueError: If there is none.
    """
    path = Path(location).expanduser()
    if path.suffix in _SUFFIXES and path.is_file():
        return path
    # Only a name is looked up, never a path that leads out of the folder.
    if str(location) in recipe_names():
        return _FOLDER / f"{location}.yaml"
    raise ValueError(
        f"recipe {shorten_text(str(location))} is neither a .yaml file nor one of {', '.join(recipe_names())}"
    )


def read_yaml(path: Path) -> Any:
    """Reads a small YAML file.

    Raises:
        ValueError: If it is no YAML, too large, has a key twice or an alias (`*name`).
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"recipe {path} has {path.stat().st_size:,} bytes; recipes may have {_LARGEST:,}")
        return yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader)
    except UnicodeDecodeError as error:
        raise ValueError(f"recipe {path} is not UTF-8 text (byte {error.start})") from None
    except RecursionError:
        raise ValueError(f"recipe {path} is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {path} is not valid YAML: {shorten_text(str(error), 200)}") from None
    except OSError as error:
        raise ValueError(f"recipe {path} cannot be read ({error.strerror})") from None


class _Loader(yaml.SafeLoader):
    """Plain values only. Numbers may be `3e-3`, which YAML 1.1 takes for a text."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        # Keys of values, by the identities of their nodes.
        self.paths: dict[int, str] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            # A few of them, one in another, stand for more than fits into memory.
            raise yaml.YAMLError(f"aliases are not allowed (line {self.peek_event().start_mark.line + 1})")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [getattr(key, "value", None) for key, _ in getattr(node, "value", [])]
        twice = next((key for position, key in enumerate(keys) if key in keys[:position]), None)
        if twice is not None:
            raise yaml.YAMLError(f"{str(twice)[:100]} is there twice (line {node.start_mark.line + 1})")
        for key, value in getattr(node, "value", []):
            path = f"{self.paths.get(id(node), '')}.{key.value}".lstrip(".")
            for part in (value, *(value.value if isinstance(value, yaml.SequenceNode) else ())):
                self.paths[id(part)] = path
        return super().construct_mapping(node, deep=True)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (yaml.YAMLError, RecursionError):
            raise
        # Of a text that does not have the form of its tag (`!!int 2e3`, a 13th month) anything is raised.
        except Exception as error:
            kind, line = node.tag.rpartition(":")[2], node.start_mark.line + 1
            path = self.paths.get(id(node), "the value")
            raise yaml.YAMLError(f"{path} is no {kind}: {shorten_text(str(node.value))} (line {line})") from error


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)
