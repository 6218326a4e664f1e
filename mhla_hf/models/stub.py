# SPDX-License-Identifier: Apache-2.0
"""The file in a repository by which `trust_remote_code=True` loads its MHLA model with the installed package.

Of models of transformers, `auto_map` in `config.json` names the file for the configuration, which is what each of the
automatic classes asks for first; the model is then of transformers' own class. Of a pipeline's model, diffusers looks
for a file in the model's folder that is named after the library in `model_index.json`. With this package imported,
transformers prefers its own classes to those of repositories, and diffusers finds that library without the file
(`mhla_hf.integrations.diffusers`): neither asks for trust then.

Without the package, transformers would load an MHLA model with softmax where another attention is asked for by name,
and report its MHLA parameters as unexpected. It refuses a configuration that names a file of weights of an unknown
format, and shows the name. Every `config.json` of an MHLA model is saved with such an entry, which configurations drop
when they are made with this package (`mhla_hf.integrations.transformers.patch`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..layers.original import STATE_KEY
from ..utils.locations import PIPELINE_INDEX
from ..utils.messages import shorten_text
from ..utils.model_cards import CARD
from ..utils.tensor_files import count_values
from .options import from_stored
from .source import Component, Source, read_source


LIBRARY = "mhla_hf"
"""Library of MHLA models in the index of a pipeline on the Hub, and the name of the file in their folders."""

MODULE = "modeling_mhla"
"""Name of the file beside a model's `config.json` at the top of a repository.

Not that of the package: Python would find it first where the repository is the working directory.
"""

TAGS = ("mhla", "linear-attention")

_CONFIGURATION = f"{MODULE}.Configuration"

# transformers never saves this entry with a model. Other versions of this package may word the advice otherwise.
_ENTRY = "transformers_weights"
_UNKNOWN_FORMAT = "MHLA weights: "
REFUSAL = f"{_UNKNOWN_FORMAT}install mhla_hf from a clone, then import mhla_hf first"
_PUSHED_REFUSAL = f"{REFUSAL} or pass trust_remote_code=True"

STUB = '''\
"""Lets `trust_remote_code=True` load this model with the installed package mhla-hf. Written by mhla-hf."""

try:
    import mhla_hf as package
except ModuleNotFoundError as error:
    if error.name != "mhla_hf":
        raise
    message = "This model needs mhla_hf (Multi-Head Linear Attention): pip install . in a clone of its repository"
    raise ImportError(message) from None


def __getattr__(name):
    """Model classes, for diffusers."""
    return getattr(package, name)


class Configuration:
    """Configuration of transformers' own class, loaded with MHLA registered."""

    @classmethod
    def from_pretrained(cls, location, **options):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(location, **options, trust_remote_code=False)

    @classmethod
    def register_for_auto_class(cls, auto_class="AutoConfig"):
        """Nothing of this file is saved with a model."""
'''


def stub_files(source: Source) -> dict[str, str]:
    """Returns the files that a directory lacks to be loaded by `trust_remote_code=True`.

    Args:
        source: The directory of a pipeline or model.

    Returns:
        The contents by path relative to the directory: the stub, and the configuration that names it. Empty for a
        directory without MHLA.
    """
    parts = source.mhla_components
    if not parts:
        return {}
    if source.pipeline is not None:
        entries = {part.name: [LIBRARY, part.class_name] for part in parts}
        stubs = {f"{part.folder.relative_to(source.root).as_posix()}/{LIBRARY}.py": STUB for part in parts}
        return {PIPELINE_INDEX: _to_text({**source.pipeline, **entries}), **stubs}
    part = parts[0]
    entry, config = {"AutoModel": f"{MODULE}.{part.class_name}"}, part.config
    if part.is_transformers:
        entry, config = {"AutoConfig": _CONFIGURATION}, with_refusal(part.config, _PUSHED_REFUSAL)
    others = part.config.get("auto_map")
    named = {**(others if isinstance(others, dict) else {}), **entry}
    return {"config.json": _to_text({**config, "auto_map": named}), f"{MODULE}.py": STUB}


def add_stub(directory: Path) -> None:
    """Adds the stub to a directory that is about to be uploaded, and tags to its model card.

    Args:
        directory: A directory; others than those of MHLA models are left alone.

    Raises:
        ValueError: If weights have NaN values.
    """
    if not (directory / PIPELINE_INDEX).is_file() and not (directory / "config.json").is_file():
        return
    try:
        source = read_source(directory)
    except (ValueError, OSError):
        return
    files = stub_files(source)
    pattern = "*.safetensors" if source.pipeline is None else "*/*.safetensors"
    for path in sorted(directory.glob(pattern)) if files else ():
        for entry, nans, _ in count_values(path):
            if nans:
                raise ValueError(f"{shorten_text(entry.name)} of {path.name} has NaN values; nothing is pushed.")
    for name, text in files.items():
        (directory / name).write_text(text, encoding="utf-8")
    if files and (directory / CARD).is_file():
        _tag(directory / CARD)


def _tag(path: Path) -> None:
    import yaml
    from huggingface_hub import ModelCard

    try:
        card = ModelCard.load(path)
    except (ValueError, yaml.YAMLError):
        return
    tags = card.data.tags or []
    if not set(TAGS) <= set(tags):
        card.data.tags = list(dict.fromkeys([*tags, *TAGS]))
        card.save(path)


def with_refusal(config: Mapping[str, Any], refusal: str = REFUSAL) -> dict[str, Any]:
    """Returns the contents of a `config.json` of transformers with the entry by which transformers alone refuses it.

    A composite model has it, and each of its towers that is MHLA, which may be loaded alone. What is softmax has none.

    Args:
        config: The contents, or those of a tower.
        refusal: The entry.
    """
    towers = {
        name: with_refusal(entry, refusal)
        for name, entry in config.items()
        if isinstance(entry, Mapping) and "model_type" in entry
    }
    written = {name: towers.get(name, entry) for name, entry in config.items()}
    if config.get("mhla") is not None or any(is_refusal(tower.get(_ENTRY)) for tower in towers.values()):
        written[_ENTRY] = refusal
    return written


def is_refusal(entry: Any) -> bool:
    """Returns whether a value of `transformers_weights` is the entry of [`with_refusal`], and names no file."""
    return str(entry).startswith(_UNKNOWN_FORMAT)


def softmax_config(part: Component) -> dict[str, Any]:
    """Returns the configuration of a model without MHLA, for its softmax original."""
    if part.is_transformers:
        return _without_mhla(part.config)
    return {**_without_mhla(from_stored(part.config)), "_class_name": part.softmax_class_name}


def _without_mhla(config: Mapping[str, Any]) -> dict[str, Any]:
    removed = ["mhla", "attn_implementation", STATE_KEY]
    if is_refusal(config.get(_ENTRY)):
        removed.append(_ENTRY)
    if isinstance(config.get("auto_map"), dict) and config["auto_map"].get("AutoConfig") == _CONFIGURATION:
        removed.append("auto_map")
    # Towers are configurations as well.
    return {
        name: _without_mhla(entry) if isinstance(entry, dict) else entry
        for name, entry in config.items()
        if name not in removed
    }


def forget_stub(config: Any) -> None:
    """Removes the entry for the stub from a configuration of transformers: what it is saved with has no such file."""
    named = getattr(config, "auto_map", None)
    if isinstance(named, dict) and str(named.get("AutoConfig", "")).endswith(_CONFIGURATION):
        config.auto_map = {name: entry for name, entry in named.items() if name != "AutoConfig"}
        if not config.auto_map:
            del config.auto_map


def _to_text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
