# SPDX-License-Identifier: Apache-2.0
"""`check_directory`: whether the directory of a pipeline or model is complete, undamaged and safe to load."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..conversion.writing import byte_progress
from ..models.registry import current_class
from ..models.source import Component
from ..models.stub import LIBRARY as STUB_LIBRARY
from ..utils.files import list_files, named_file
from ..utils.json_files import Types, read_json, read_json_value
from ..utils.locations import PIPELINE_INDEX
from ..utils.messages import shorten_text
from .model_checks import check_model
from .problems import Findings, Problem
from .weight_checks import Header, check_dtypes, check_pickles, check_values, check_weight_sets, read_headers


__all__ = ["Problem", "check_directory"]

_PREPROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def check_directory(
    path: str | Path,
    *,
    values: bool = True,
    skip: Callable[[str], bool] | None = None,
    progress: bool = False,
) -> list[Problem]:
    """Checks a pipeline of diffusers, or a model of diffusers or transformers, MHLA or not.

    Headers and configurations are read, and models are built without memory for their weights; values, if asked for,
    are read a piece of one tensor at a time. Nothing is unpickled, no code of the directory is run, and nothing
    outside it is read.

    Args:
        path: The directory.
        values: Look for NaN and infinite values too, which reads every weight file once.
        skip: Returns whether to leave out a file, given by its path relative to the directory, with `/`.
        progress: Show a progress bar on standard error while values are read.

    Returns:
        The problems, errors first; none for a directory that loads.
    """
    root = Path(path).expanduser()
    findings = Findings(root)
    if not root.is_dir():
        findings.error(root, "is not a directory.")
        return findings.sorted()
    with findings.noting(root):
        files = [root / file for file in list_files(root) if skip is None or not skip(file.as_posix())]
        checker = _Checker(root, files, findings)
        checker.run()
        if values:
            total = sum(file.stat().st_size for file in checker.headers)
            with byte_progress(total, progress and total > 0) as (describe, advance):
                describe("checking weights")
                check_values(checker.headers, findings, advance)
    return findings.sorted()


class _Checker:
    """The checks of one directory.

    Args:
        root: The directory.
        files: The files below it, after links were checked.
        findings: Where problems are noted.
    """

    def __init__(self, root: Path, files: list[Path], findings: Findings) -> None:
        self.root, self.findings = root, findings
        self.files = set(files)
        weights = [file for file in files if file.suffix == ".safetensors"]
        self.headers: dict[Path, Header] = read_headers(weights, findings)

    def run(self) -> None:
        index = self.root / PIPELINE_INDEX
        for file in sorted(self.files):
            if file.suffix == ".json":
                with self.findings.noting(file):
                    # Vocabularies may be lists; configurations are read again where they are used.
                    read_json_value(file, "the file")
        check_pickles(sorted(self.files), self.findings)
        if index in self.files:
            with self.findings.noting(index):
                self._check_pipeline(index)
        elif self.root / "config.json" in self.files:
            self._check_model_folder(self.root, None)
        else:
            self.findings.error(
                self.root, f"has neither {PIPELINE_INDEX} (a pipeline) nor config.json (a model); give its directory."
            )

    def _check_pipeline(self, index: Path) -> None:
        content = read_json(index, "the pipeline's index")
        entries = {name: entry for name, entry in content.items() if isinstance(entry, list) and name[:1] != "_"}
        self._check_pipeline_class(index, content.get("_class_name"), content)
        for name, entry in entries.items():
            with self.findings.noting(index):
                if entry == [None, None] or len(entry) != 2 or not all(isinstance(part, str) for part in entry):
                    # Tuples of numbers are settings of some pipelines.
                    continue
                self._check_component(index, name, entry[0], entry[1])

    def _check_pipeline_class(self, index: Path, class_name: Any, content: dict[str, Any]) -> None:
        import diffusers

        if isinstance(class_name, list):
            self.findings.warning(index, "names a pipeline with code of its own, which is not run here.")
            return
        if not isinstance(class_name, str):
            self.findings.error(index, "does not say which pipeline it is for (_class_name).")
            return
        pipeline_class: Any = getattr(diffusers, class_name, None)
        if not hasattr(pipeline_class, "_optional_components"):
            self.findings.error(
                index, f"is for {shorten_text(class_name)}, which diffusers {diffusers.__version__} does not have."
            )
            return
        optional = set(pipeline_class._optional_components)
        needed = {
            name
            for name, parameter in inspect.signature(pipeline_class.__init__).parameters.items()
            if name != "self" and parameter.default is inspect.Parameter.empty
        }
        absent = sorted(name for name in needed - optional if content.get(name) in (None, [None, None]))
        if absent:
            self.findings.error(
                index, f"has no {', '.join(absent)}, which {class_name} needs; save the pipeline again."
            )

    def _check_component(self, index: Path, name: str, library: str, class_name: str) -> None:
        folder = named_file(self.root, name, str(index))
        if not folder.is_dir():
            self.findings.error(
                index, f"names the component {shorten_text(name)}, whose folder is missing; download or save it again."
            )
            return
        found = _find_class(library, class_name)
        if found is None:
            self.findings.error(
                index,
                f"calls {shorten_text(name)} a {shorten_text(class_name)} of {shorten_text(library)}, which is not "
                "installed here or unknown.",
            )
        elif _is_subclass(found, "diffusers", "ModelMixin") or _is_subclass(found, "transformers", "PreTrainedModel"):
            self._check_model_folder(folder, class_name)
        elif _is_subclass(found, "diffusers", "SchedulerMixin"):
            self._need(folder, "scheduler_config.json")
        elif _is_subclass(found, "transformers", "PreTrainedTokenizerBase"):
            self._need(folder, "tokenizer_config.json")
            self._need(folder, *dict.fromkeys(["tokenizer.json", *found.vocab_files_names.values()]))
        elif _is_subclass(found, "transformers", "ProcessorMixin", "ImageProcessingMixin", "FeatureExtractionMixin"):
            self._need(folder, *_PREPROCESSORS)

    def _need(self, folder: Path, *names: str) -> None:
        """Notes it if a folder has none of these files."""
        if names and not any(folder / name in self.files for name in names):
            self.findings.error(folder, f"has no {' or '.join(names)}; download or save it again.")

    def _check_model_folder(self, folder: Path, named: str | None) -> None:
        """Checks a model.

        Args:
            folder: Its folder.
            named: The class that the pipeline's index names.
        """
        path = folder / "config.json"
        if path not in self.files:
            self.findings.error(folder, "has no config.json; download or save it again.")
            return
        with self.findings.noting(path):
            types: dict[str, Types] = {"_class_name": str, "model_type": str, "architectures": (list, type(None))}
            config = read_json(path, "the configuration", optional=types)
            if not all(isinstance(entry, str) for entry in config.get("architectures") or []):
                raise ValueError("'architectures' must be a list of class names.")
            component = Component(folder.name, folder, config)
            if component.is_transformers and "model_type" not in config:
                raise ValueError(
                    "does not say which diffusers class (_class_name) or which kind of transformers model "
                    "(model_type) it is for."
                )
            weights = check_weight_sets(folder, component.names, self.files, self.headers, self.findings)
            for owner, tensors in weights:
                check_dtypes(owner, tensors, self.findings)
            model_class = self._model_class(component, named)
            if model_class is not None:
                check_model(component, model_class, weights, self.findings)
            if named is None and component.is_transformers:
                self._check_preprocessing(folder, config)

    def _model_class(self, component: Component, named: str | None) -> Any:
        """The class that loads a model; None, with a problem noted, where there is none."""
        path = component.folder / "config.json"
        class_name = component.class_name if named is None or not component.is_transformers else named
        if (
            named is not None
            and not component.is_transformers
            and current_class(named, component.config) != class_name
        ):
            self.findings.error(
                self.root / PIPELINE_INDEX,
                f"calls {component.name} a {shorten_text(named)}, but {component.name}/config.json says "
                f"{shorten_text(class_name)}.",
            )
            return None
        if component.is_transformers and named is None:
            return component.load_class()
        library = "transformers" if component.is_transformers else "diffusers"
        found = _find_class(library, class_name)
        if found is None:
            self.findings.error(path, f"is for {shorten_text(class_name)}, which {library} does not have.")
        return found

    def _check_preprocessing(self, folder: Path, config: dict[str, Any]) -> None:
        if isinstance(config.get("vocab_size"), int):
            if not any(file.parent == folder and file.name.startswith(("tokenizer", "vocab")) for file in self.files):
                self.findings.warning(folder, "has no tokenizer; save it there too (tokenizer.save_pretrained).")
        elif isinstance(config.get("image_size"), (int, list)):
            if not any(folder / name in self.files for name in _PREPROCESSORS):
                self.findings.warning(
                    folder, "has no preprocessor_config.json; save the image processor there too (save_pretrained)."
                )


def _find_class(library: str, class_name: str) -> Any:
    """Imports a class that a pipeline's index names; None if it does not exist."""
    # Short names are modules of diffusers' pipelines.
    known = ("diffusers", "transformers", STUB_LIBRARY)
    module = library if library in known else f"diffusers.pipelines.{library}"
    if not library.isidentifier():
        return None
    try:
        found = getattr(importlib.import_module(module), class_name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) else None


def _is_subclass(found: type, library: str, *names: str) -> bool:
    return any(base.__name__ in names and base.__module__.startswith(library) for base in found.__mro__)
