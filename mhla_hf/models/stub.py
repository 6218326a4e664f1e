# SPDX-License-Identifier: Apache-2.0
"""The file in a repository by which `trust_remote_code=True` loads its MHLA model with the installed package.

Of models of transformers, `auto_map` in `config.json` names the file for the configuration, which is what each of the
automatic classes asks for first; the model is then of transformers' own class. Of a pipeline's model, diffusers looks
for a file in the model's folder that is named after the library in `model_index.json`; of a model by itself, for the
one that `auto_map` names, which is saved with every model of diffusers: without it, the error would not say that this
package is missing. With this package imported, transformers prefers its own classes to those of repositories, and
diffusers finds that library without the file (`mhla_hf.integrations.diffusers`): neither asks for trust then.

Without the package, transformers would load an MHLA model with softmax where another attention is asked for by name,
and report its MHLA parameters as unexpected. It refuses a configuration that names a file of weights of an unknown
format, and shows the name. Every `config.json` of an MHLA model is saved with such an entry, which configurations drop
when they are made with this package (`mhla_hf.integrations.transformers.patch`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..layers.weight_record import STATE_KEY
from ..utils.locations import PIPELINE_INDEX
from ..utils.messages import shorten_text
from ..utils.model_cards import CARD
from ..utils.tensor_files import count_values
from .directory import ModelDirectory
from .registry import LIBRARY
from .weight_files import STUB_MODULE, from_stored


TAGS = ("mhla", "linear-attention")

_CONFIGURATION = f"{STUB_MODULE}.Configuration"

# transformers never saves this entry with a model. Other versions of this package may word the advice otherwise.
_ENTRY = "transformers_weights"
_UNKNOWN_FORMAT = "MHLA weights: "
REFUSAL = (
    f"{_UNKNOWN_FORMAT}install mhla_hf from a clone, then import mhla_hf first (models from the Hub also load with "
    "trust_remote_code=True)"
)
"""The entry `transformers_weights` of `config.json` by which transformers alone refuses an MHLA model."""

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


def stub_files(directory: ModelDirectory) -> dict[str, str]:
    """Return the files that a directory lacks to be loaded by `trust_remote_code=True`.

    Returns:
        The contents by path relative to the directory: the stub, and the configuration that names it. Empty for a
        directory without MHLA.
    """
    models, index = directory.mhla_models, directory.index
    if index is not None and models:
        entries = {model.component: [LIBRARY, model.class_name] for model in models}
        stubs = {f"{model.component}/{LIBRARY}.py": STUB for model in models}
        return {PIPELINE_INDEX: _to_text({**index, **entries}), **stubs}
    if not models:
        return {}
    entry = {"AutoConfig": _CONFIGURATION}
    if not directory.is_transformers:
        entry = {"AutoModel": f"{STUB_MODULE}.{directory.class_name}"}
    others = directory.config.get("auto_map")
    named = {**(others if isinstance(others, dict) else {}), **entry}
    return {"config.json": _to_text({**directory.config, "auto_map": named}), f"{STUB_MODULE}.py": STUB}


def add_stub(folder: Path) -> None:
    """Add the stub to a directory that is about to be uploaded, and tags to its model card.

    Args:
        folder: A directory; others than those of MHLA models are left alone.

    Raises:
        ValueError: If weights have NaN values.
    """
    try:
        directory = ModelDirectory.read(folder)
    except (ValueError, OSError):
        return
    files = stub_files(directory)
    if not files:
        return
    for path in sorted(folder.glob("*.safetensors" if directory.index is None else "*/*.safetensors")):
        for entry, nans, _ in count_values(path):
            if nans:
                raise ValueError(f"{shorten_text(entry.name)} of {path.name} has NaN values; nothing is pushed.")
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if not (folder / CARD).is_file():
        return
    import yaml
    from huggingface_hub import ModelCard

    with suppress(ValueError, yaml.YAMLError):
        card = ModelCard.load(folder / CARD)
        if not set(TAGS) <= set(card.data.tags or ()):
            card.data.tags = list(dict.fromkeys([*(card.data.tags or ()), *TAGS]))
            card.save(folder / CARD)


def is_refusal(entry: Any) -> bool:
    """Return whether a value of `transformers_weights` is [`REFUSAL`], in any wording, and names no file."""
    return str(entry).startswith(_UNKNOWN_FORMAT)


def softmax_config(model: ModelDirectory) -> dict[str, Any]:
    """Return the configuration of a model without MHLA, for its softmax original."""
    if model.is_transformers:
        return _without_mhla(model.config)
    return {**_without_mhla(from_stored(model.config)), "_class_name": model.softmax_class_name}


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
    """Remove the entry for the stub from a configuration of transformers: what it is saved with has no such file."""
    named = getattr(config, "auto_map", None)
    if isinstance(named, dict) and str(named.get("AutoConfig", "")).endswith(_CONFIGURATION):
        config.auto_map = {name: entry for name, entry in named.items() if name != "AutoConfig"}
        if not config.auto_map:
            del config.auto_map


def _to_text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
