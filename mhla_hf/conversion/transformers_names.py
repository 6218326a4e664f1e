# SPDX-License-Identifier: Apache-2.0
"""Names of a transformers model's tensors in files and in memory; transformers renames those of some families."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from ..utils.compat.transformers import (
    ignored_names,
    keep_used_rules,
    loaded_name,
    renaming_rules,
    saved_tensors,
    without_tied,
)


class StoredNames:
    """Names of the tensors that a conversion reads and writes, with transformers' own rules.

    They are those that `save_pretrained` writes after `from_pretrained` has read the source: a checkpoint with names
    of an older kind keeps them, one without the prefix of its base model gets it.

    Args:
        model: The MHLA model on the meta device.
        stored: Names of the tensors in the source.

    Attributes:
        expected: Shapes of what a complete source has, by the name in the files written. Tied tensors occur once.
        loaded: Names of the source's tensors in the model; what the model does not know is left out.
        renamed: Name in the model for each tensor of the source, known to the model or not.
        written: Names of the same tensors in the files written.
        tied_copies: Tensors of the source that the model ties to another one of the source, with that one.
        fresh: Names of the MHLA parameters in the model, with those in the files written.
        may_be_missing: Names among `expected` that transformers does without.
    """

    def __init__(self, model: Any, stored: Sequence[str]) -> None:
        self._model = model
        self._state = model.state_dict()
        self._renaming = renaming_rules(model)
        self.loaded, merged = self._load_names(stored)
        # What `from_pretrained` does: rules that were not used on the way in are not used on the way out.
        keep_used_rules(model, self._renaming)
        state = {name: tensor for name, tensor in self._state.items() if ".mhla." not in name}
        unique = without_tied(model, state)
        ignored = set(ignored_names(model, "save"))
        unique = {name: tensor for name, tensor in unique.items() if name not in ignored}
        reverted = saved_tensors(model, dict(unique))
        self.expected = {name: tuple(tensor.shape) for name, tensor in reverted.items()}
        self.fresh = self._file_names([name for name in self._state if ".mhla." in name])
        self._main_name = self._tied_names(state, unique)
        self._plan(merged)
        patterns = ignored_names(model, "load_missing")
        self.may_be_missing = {name for name in self.expected if any(re.search(part, name) for part in patterns)}

    def is_float(self, name: str) -> bool:
        """True where the model has floating-point numbers in the place of a tensor of the source."""
        return self._state[self.loaded[name]].is_floating_point()

    def _load_names(self, stored: Sequence[str]) -> tuple[dict[str, str], set[str]]:
        """Names in the model by names in the source, and which of the latter are joined or split on the way."""
        prefix = self._model.base_model_prefix
        loaded, merged = {}, set()
        self.renamed: dict[str, str] = {}
        for name in stored:
            target, is_merged = loaded_name(name, self._renaming, prefix, self._state)
            if target not in self._state and name in self._state:
                target, is_merged = loaded_name(name, [], prefix, self._state)
            self.renamed[name] = target
            if target in self._state:
                loaded[name] = target
                if is_merged:
                    merged.add(name)
        return loaded, merged

    def _file_names(self, names: Sequence[str]) -> dict[str, str]:
        """Names in the files of tensors that are renamed only. Their shapes tell which became which."""
        with torch.device("meta"):
            numbered = {name: torch.empty(index) for index, name in enumerate(names)}
        renamed = saved_tensors(self._model, numbered) if numbered else {}
        found = {tensor.shape[0]: name for name, tensor in renamed.items()}
        return {name: found[index] for index, name in enumerate(names)}

    def _tied_names(self, state: dict[str, torch.Tensor], unique: dict[str, torch.Tensor]) -> dict[str, str]:
        """For each tensor of the model that is tied to one that is saved, that one."""
        owners = {id(self._model.get_parameter_or_buffer(name)): name for name in unique}
        others = {name: id(self._model.get_parameter_or_buffer(name)) for name in state if name not in unique}
        return {name: owners[tensor] for name, tensor in others.items() if tensor in owners}

    def _plan(self, merged: set[str]) -> None:
        by_loaded = {target: name for name, target in self.loaded.items() if name not in merged}
        self.tied_copies: dict[str, str] = {}
        targets = {}
        for name, target in self.loaded.items():
            if name in merged:
                continue
            main = self._main_name.get(target)
            if main is not None and main in by_loaded:
                self.tied_copies[name] = by_loaded[main]
            targets[name] = target if main is None or main in by_loaded else main
        file_names = self._file_names(sorted(set(targets.values())))
        # Tensors that are joined in the model only stay what they are in the files.
        self.written = {name: name if name in merged else file_names[targets[name]] for name in self.loaded}
