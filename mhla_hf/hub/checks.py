# SPDX-License-Identifier: Apache-2.0
"""Checks of a pipeline's or model's directory: it loads, names and shapes match, values are finite."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
from tqdm.auto import tqdm

from ..conversion.transformers_planning import StoredNames
from ..integrations.transformers.limits import check_layers, check_sizes
from ..models.directory import ModelDirectory, parts_of, read_config
from ..models.limits import check_model_config
from ..models.registry import FAMILIES, LIBRARY, MHLA_CLASSES, current_class, mhla_class_for
from ..models.weight_files import ADAPTERS_OUT, PICKLES, check_layer_count
from ..utils.compat.diffusers import declared
from ..utils.files import list_files, path_inside, read_json, read_json_value
from ..utils.locations import PIPELINE_INDEX
from ..utils.messages import shorten_list, shorten_text
from ..utils.tensor_files import FLOATS, compare, count_values
from .card import describe_model


_LENGTH = 600


@dataclass(frozen=True)
class Problem:
    """Something wrong with a directory.

    Attributes:
        file: The file or folder, relative to the directory; `"."` for the directory itself.
        message: One line that says what is wrong and what to do.
        level: `"error"` for what cannot be loaded or used, `"warning"` for the rest.
    """

    file: str
    message: str
    level: str = "error"

    def __str__(self) -> str:
        return f"{'the directory' if self.file == '.' else self.file}: {self.message}"


def check_directory(path: str | Path, *, values: bool = True, progress: bool = False) -> list[Problem]:
    """Check a pipeline of diffusers, or a model of diffusers or transformers, MHLA or not.

    Headers and configurations are read, and models are built without memory for their weights; values are read a
    piece of one tensor at a time. Nothing is unpickled, no code of the directory is run, and nothing outside it is
    read.

    Args:
        path: The directory.
        values: Look for NaN and infinite values too, which reads every weight file once.
        progress: Show a progress bar on standard error while values are read.

    Returns:
        The problems, errors first; none for a directory that loads.
    """
    return DirectoryCheck(Path(path).expanduser(), values=values, progress=progress).problems


class DirectoryCheck:
    """The check of one directory; see [`check_directory`].

    Args:
        root: The directory.
        files: The files to check, relative to it; every file by default.
        values: See [`check_directory`].
        progress: See [`check_directory`].

    Attributes:
        problems: What is wrong, errors first.
        class_name: Class of the pipeline or model; empty if it cannot be read.
        models: Facts about the models whose files can be read, as of
            [`describe_model`][mhla_hf.hub.card.describe_model].
    """

    def __init__(
        self, root: Path, files: Sequence[Path] | None = None, *, values: bool = True, progress: bool = False
    ) -> None:
        self.root, self.class_name = root, ""
        self.problems: list[Problem] = []
        self.models: list[dict[str, Any]] = []
        self.files: set[Path] = set()
        if not root.is_dir():
            self._note(root, "is not a directory." if root.exists() else "does not exist.")
            return
        with self._noting(root):
            self.files = {root / file for file in (list_files(root) if files is None else files)}
            self._check_files()
            if values:
                self._check_values(progress)
        self.problems.sort(key=lambda problem: (problem.level, problem.file, problem.message))

    def _note(self, path: Path, message: str, level: str = "error") -> None:
        file = path.relative_to(self.root).as_posix()
        # Loaders name files by their full path, and begin most messages with it.
        text = shorten_text(message.replace(f"{self.root}/", "").replace(str(self.root), "the directory"), _LENGTH)
        called = "the directory" if path == self.root else re.escape(file)
        opening = re.match(rf"[\w' ]*{called}:? ", text)
        problem = Problem(file, text if opening is None else text[opening.end() :], level)
        if problem not in self.problems:
            self.problems.append(problem)

    @contextmanager
    def _noting(self, path: Path) -> Iterator[None]:
        """Note an exception as an error in a file, and continue."""
        try:
            yield
        except (ValueError, OSError) as error:
            self._note(path, str(error) or type(error).__name__)
        # Libraries meet unexpected contents with any exception.
        except Exception as error:
            self._note(path, f"does not describe a model ({type(error).__name__}: {shorten_text(str(error), 300)}).")

    def _check_files(self) -> None:
        for file in sorted(self.files):
            if file.suffix == ".json":
                with self._noting(file):
                    read_json_value(file, "the file")
        pickles = [file.relative_to(self.root).as_posix() for file in self.files if file.suffix in PICKLES]
        if pickles:
            advice = "which can run code when read; remove what is not needed, and keep tensors as safetensors."
            self._note(self.root, f"has pickles ({shorten_list(pickles)}), {advice}", "warning")
        index = self.root / PIPELINE_INDEX
        if index in self.files:
            with self._noting(index):
                self._check_pipeline(index)
        elif self.root / "config.json" in self.files:
            self._check_model(self.root)
        else:
            self._note(
                self.root, f"has neither {PIPELINE_INDEX} (a pipeline) nor config.json (a model); give its directory."
            )

    def _check_values(self, progress: bool) -> None:
        paths = sorted(file for file in self.files if file.suffix == ".safetensors")
        total = sum(path.stat().st_size for path in paths)
        disable = not progress or total == 0
        with tqdm(total=total, desc="checking weights", unit="B", unit_scale=True, disable=disable) as bar:
            for path in paths:
                broken = []
                with self._noting(path):
                    for entry, nans, infinities in count_values(path):
                        bar.update(entry.nbytes)
                        if nans or infinities:
                            what = f"{nans} NaN, {infinities} infinite of {math.prod(entry.shape)} values"
                            broken.append(f"{shorten_text(entry.name)} ({what})")
                if broken:
                    self._note(path, f"has NaN or infinite values: {shorten_list(broken)}; take earlier weights.")

    def _check_pipeline(self, path: Path) -> None:
        index = read_json(path, "the pipeline's index")
        self.class_name = str(index.get("_class_name"))
        if isinstance(index.get("_class_name"), list):
            self._note(path, "names a pipeline with its own code, which is not run here.", "warning")
        elif not hasattr(diffusers, self.class_name):
            version = diffusers.__version__
            self._note(path, f"is for {shorten_text(self.class_name)}, which diffusers {version} does not have.")
        for name, entry in index.items():
            # Other lists are settings of pipelines.
            if isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry):
                if not name.startswith("_"):
                    with self._noting(path):
                        self._check_component(path, name, *entry)

    def _check_component(self, index: Path, name: str, library: str, class_name: str) -> None:
        folder = path_inside(self.root, name, str(index))
        if not any(folder in file.parents for file in self.files):
            missing = f"the component {shorten_text(name)}, whose folder is missing or empty"
            self._note(index, f"names {missing}; download or save it again.")
            return
        found = _find_class(library, class_name)
        if found is None:
            what = f"{shorten_text(name)} a {shorten_text(class_name)} of {shorten_text(library)}"
            self._note(index, f"calls {what}, which is not installed here or unknown.")
            return
        # Not schedulers and tokenizers.
        if {"ModelMixin", "PreTrainedModel"} & {base.__name__ for base in found.__mro__}:
            self._check_model(folder, class_name)

    def _check_model(self, folder: Path, named: str | None = None) -> None:
        """Check a model; `named` is the class that the pipeline's index gives it."""
        path = folder / "config.json"
        if path not in self.files:
            adapters = folder / "adapter_config.json" in self.files
            advice = f" but adapters, {ADAPTERS_OUT}" if adapters else "; download or save it again."
            self._note(folder, f"has no config.json{advice}")
            return
        with self._noting(path):
            config = read_config(path)
            if not {"_class_name", "model_type"} & set(config):
                self._note(path, "does not say which model it is, by _class_name (diffusers) or model_type.")
                return
            if named is not None and "_class_name" not in config:
                # The class that the pipeline loads, which need not be the one that was saved.
                config["architectures"] = [named]
            name = "model" if named is None else folder.name
            model = ModelDirectory(str(folder), folder, None, {name: config}, name)
            sets = self._read_weights(model)
            self.class_name = self.class_name or model.class_name
            self.models.append(describe_model(model, next(iter(sets.values()), {})))
            problem = _class_problem(model, named, sets)
            if problem:
                self._note(path, problem)
                return
            if any(part.get("quantization_config") for part in parts_of(config)):
                self._note(path, "describes quantised weights, whose names and shapes are not checked.", "warning")
                return
            # A wrong size may ask for more memory than there is.
            check_sizes(config, str(path))
            if model.class_name in {**FAMILIES, **MHLA_CLASSES}:
                check_model_config(model.load_class(), config, str(path))
                count = mhla_class_for(model.class_name).layer_count(config)
                for tensors in sets.values():
                    check_layer_count(count, tensors, str(path))
            empty = model.build()
            for owner, tensors in sets.items():
                with self._noting(owner):
                    self._compare(owner, model, empty, tensors)

    def _read_weights(self, model: ModelDirectory) -> dict[Path, dict[str, Any]]:
        """Read the headers of each set of weights: its tensors, by the file that stands for it."""
        sets: dict[Path, dict[str, Any]] = {}
        with self._noting(model.folder):
            for weights in model.weight_sets():
                owner = weights.index or weights.files[0]
                with self._noting(owner):
                    sets[owner] = {entry.name: (entry.dtype, entry.shape) for entry in weights.entries()}
        return sets

    def _compare(self, owner: Path, directory: ModelDirectory, model: Any, tensors: Mapping[str, Any]) -> None:
        """Compare the tensors of the files with those of the model."""
        state = model.state_dict()
        optional: set[str] = set()
        if directory.is_transformers:
            names = StoredNames(model, list(tensors))
            check_layers(model, (), [names.renamed[name] for name in names.unknown], str(directory.folder))
            expected = names.expected
            missing, _, shapes = compare(expected, {key: tensors[name][1] for name, key in names.keys.items()})
            unknown = names.unknown
            optional = names.optional
            floats = {name for name in names.loaded if names.is_float(name)}
        else:
            expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
            ignored = declared(model, "_keys_to_ignore_on_load_unexpected")
            stored = {name: shape for name, (_, shape) in tensors.items()}
            missing, unknown, shapes = compare(expected, stored, ignored)
            floats = {name for name in tensors if name in state and state[name].is_floating_point()}
        wrong = [f"{name} ({tensors[name][0]})" for name in floats if tensors[name][0] not in FLOATS]
        found_problems = {
            "lacks {}; write or download the weights again.": set(missing) - optional,
            "has tensors of other shapes than config.json describes: {}; the two do not belong together.": [
                f"{shorten_text(name)} {shape}" for name, shape in shapes.items()
            ],
            "has trained MHLA tensors that 'mhla' in config.json leaves out: {}; take config.json from the directory "
            "that the weights were written to.": [name for name in unknown if ".mhla." in name],
            "holds other types in place of floating-point parameters: {}.": wrong,
        }
        for message, listed in found_problems.items():
            if listed:
                self._note(owner, message.format(shorten_list(listed)))
        if others := [name for name in unknown if ".mhla." not in name]:
            self._note(owner, f"has tensors that the model does not know: {shorten_list(others)}.", "warning")


def _class_problem(model: ModelDirectory, named: str | None, sets: Mapping[Path, Mapping[str, Any]]) -> str:
    """Return why a model would load as another class, without its MHLA weights, or without weights for MHLA."""
    class_name = shorten_text(model.class_name)
    if named is not None and "_class_name" in model.config and current_class(named, model.config) != model.class_name:
        return f"says {class_name}, but {PIPELINE_INDEX} calls {model.component} a {shorten_text(named)}."
    has_parameters = any(".mhla." in name for tensors in sets.values() for name in tensors)
    if has_parameters and not any(part.get("mhla") is not None for part in parts_of(model.config)):
        return (
            "has no entry 'mhla', although the weights hold MHLA parameters; take config.json from the directory that "
            "the weights were written to."
        )
    if has_parameters and not model.is_mhla:
        target = FAMILIES[model.class_name].mhla_class if model.class_name in FAMILIES else "an MHLA class"
        return f"says _class_name={class_name!r}, which would drop the MHLA weights; it should say {target}."
    if model.is_mhla and sets and not has_parameters:
        return "describes an MHLA model, but the weights hold no MHLA parameters; convert it again."
    return ""


def _find_class(library: str, class_name: str) -> Any:
    """Import a class that a pipeline's index names; `None` if it does not exist."""
    # Short names are modules of diffusers' pipelines.
    known = ("diffusers", "transformers", LIBRARY)
    if not library.isidentifier():
        return None
    try:
        module = importlib.import_module(library if library in known else f"diffusers.pipelines.{library}")
    except ImportError:
        return None
    found = getattr(module, class_name, None)
    return found if isinstance(found, type) else None
