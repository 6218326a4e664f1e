# SPDX-License-Identifier: Apache-2.0
"""Weight files of models: their names in each library, complete sets, checks, and loading them into MHLA models."""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from ..layers.mixing import reference_blocks
from ..layers.original import STATE_KEY, record_weights
from ..utils.compat.diffusers import LoadedWeights, load_weights
from ..utils.files import read_weight_map
from ..utils.locations import EXPORT_FILES, EXPORT_FOLDERS
from ..utils.messages import shorten_list, shorten_text
from ..utils.tensor_files import TensorEntry, check_safetensors, read_entries
from .options import check_layer_count, check_new_size


logger = logging.getLogger(__name__)

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files that may hold pickles."""

TRAINED_WITH = ("feature_map", "feature_map_eps", "normalizer", "rope")
"""Options that leave the shapes of the weights alone and change the output."""

_OTHER_FORMATS = (*PICKLES, ".msgpack", ".h5", ".onnx")
# Exceptions of libraries for damaged weights, and for configurations whose fields have other types.
_DAMAGE = (AttributeError, EOFError, KeyError, RuntimeError, SafetensorError, StrictDataclassError, TypeError)
# What follows the stem of a list of shards, of a file that holds all weights, and of one of several files.
_INDEX = r"\.safetensors\.index(?:\.(?P<variant>[^.]+))?\.json"
_SINGLE = r"(?:\.(?P<variant>[^.]+))?\.safetensors"
_SHARD = r".*-\d{5}-of-\d{5}.*\.safetensors"
# diffusers names the file, and does not say what is wrong with it.
_SAFETENSORS_NAMED = re.compile(r"'([^']+\.safetensors)'")
# Parts of an MHLA layer that leave its output unchanged when they are fresh.
_STARTS_AS_IDENTITY = ("gate", "lepe", "window_gain")


@dataclass(frozen=True)
class WeightSet:
    """The files that hold one complete set of a model's weights.

    Attributes:
        variant: Part of the file names such as `fp16`; `None` for the main set.
        files: The safetensors files.
        index: The file that lists them; `None` for a single file.
    """

    variant: str | None
    files: tuple[Path, ...]
    index: Path | None = None

    def entries(self) -> list[TensorEntry]:
        """Read the headers of every file; `ValueError` for damaged files, and for a tensor in two of them."""
        found: dict[str, TensorEntry] = {}
        for path in self.files:
            for entry in read_entries(path):
                if entry.name in found:
                    raise ValueError(f"{path} holds {shorten_text(entry.name)}, which another file holds, too.")
                found[entry.name] = entry
        return list(found.values())


@dataclass(frozen=True)
class FileNames:
    """Names of a library for the weight files of a model.

    Attributes:
        stem: Beginning of the names.
        exports: Whether repositories hold the same weights for other programs, too.
    """

    stem: str
    exports: bool = False

    def find(self, folder: Path, variant: str | None = None) -> list[WeightSet]:
        """Find the sets of weights in a folder.

        Args:
            folder: The model's folder.
            variant: Only this variant; `None` for every set.

        Raises:
            ValueError: If there are none, only pickles, shards without an index, or not the variant asked for.
        """
        sets = []
        names = {path.name: path for path in sorted(folder.iterdir())}
        for name, path in names.items():
            if match := re.fullmatch(f"{self.stem}{_INDEX}", name):
                sets.append(WeightSet(match["variant"], tuple(read_weight_map(path)), path))
        listed = {path for weights in sets for path in weights.files}
        for name, path in names.items():
            if path in listed:
                continue
            if re.fullmatch(f"{self.stem}{_SHARD}", name):
                raise ValueError(f"{path} is one of several shards, but no index in {folder} lists it.")
            if match := re.fullmatch(f"{self.stem}{_SINGLE}", name):
                sets.append(WeightSet(match["variant"], (path,)))
        if not sets:
            pickles = [name for name, path in names.items() if path.suffix in _OTHER_FORMATS]
            problem = f"no {self.stem}*.safetensors; weights in other formats are not read"
            if pickles:
                problem = f"its weights only as {shorten_list(pickles)}; those can run code when read"
            raise ValueError(
                f"{folder} has {problem}. Load the model with from_pretrained and write it with save_pretrained first."
            )
        if variant is not None:
            found = [weights.variant or "(none)" for weights in sets]
            sets = [weights for weights in sets if weights.variant == variant]
            if not sets:
                raise ValueError(f"variant={variant!r} is not in {folder}, which has {shorten_list(found)}.")
        return sets

    def match(self, path: Path) -> bool:
        """Return whether a file belongs to the model's weights, in any format."""
        return bool(
            any(re.fullmatch(f"{self.stem}{pattern}", path.name) for pattern in (_INDEX, _SINGLE, _SHARD))
            or path.suffix in _OTHER_FORMATS
            or ".bin.index" in path.name
            or (self.exports and any(path.match(pattern) for pattern in EXPORT_FILES))
        )

    def is_export(self, path: Path) -> bool:
        """Return whether a file, relative to the model's folder, holds the same weights for other programs."""
        return self.exports and path.parts[0] in EXPORT_FOLDERS


DIFFUSERS_FILES, TRANSFORMERS_FILES = FileNames("diffusion_pytorch_model"), FileNames("model", exports=True)


def check_weights(folder: Path) -> int:
    """Check that the safetensors files of a folder are whole, and that indices of shards name files in it.

    Returns:
        The number of tensors in them.

    Raises:
        ValueError: If one of them is truncated or damaged; the message names it.
    """
    for pattern in ("*.safetensors.index*.json", "*.bin.index*.json"):
        for index in sorted(folder.glob(pattern)):
            read_weight_map(index)
    return sum(len(check_safetensors(path)[0]) for path in sorted(folder.glob("*.safetensors")))


def check_loaded_files(files: Iterable[str | os.PathLike[str]], location: Any, *, pickles: bool) -> None:
    """Check the files that a library is about to load weights from.

    Args:
        files: Their paths, as the library put them together.
        location: The directory or Hub id that is loaded.
        pickles: Whether files that are no safetensors are allowed.

    Raises:
        ValueError: If one of them is no path inside the directory, damaged, or a pickle where none is allowed.
    """
    root = os.path.abspath(location) if os.path.isdir(location) else None
    for path in map(Path, files):
        # Links are followed: the Hub's cache consists of them.
        inside = root is None or Path(os.path.normpath(path.absolute())).is_relative_to(root)
        if ".." in path.parts or not inside:
            raise ValueError(
                f"{location} says that its weights are in {shorten_text(str(path), 200)}, which is no path inside it; "
                "correct the index, or download the model again."
            )
        if path.suffix == ".safetensors":
            check_safetensors(path)
        elif path.suffix in PICKLES and not pickles:
            raise ValueError(pickles_refused(path.parent, [path.name]))


def pickles_refused(folder: Path, names: Iterable[str]) -> str:
    """The message for an MHLA checkpoint without safetensors."""
    return (
        f"{folder} has its weights only as {shorten_list(names)}; those can run code when read. If you trust them, "
        "load this model alone with use_safetensors=False, and save_pretrained writes safetensors."
    )


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Name the folder that is loaded from when a library meets damaged files there.

    Raises:
        ValueError: In place of exceptions that only describe the bytes.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (*_DAMAGE, pickle.UnpicklingError) as error:
        reason = shorten_text(str(error), 200) or type(error).__name__
        raise ValueError(f"{folder} cannot be loaded: files are damaged or of another model ({reason})") from error


# Loading into MHLA models of diffusers.


def check_missing_weights(folder: Path, error: OSError, *, pickles_allowed: bool) -> None:
    """Find out why diffusers finds no weights in a model's folder.

    Raises:
        ValueError: If the file that it names is damaged.
        OSError: If there are pickles alone, where these are not allowed.
    """
    for name in _SAFETENSORS_NAMED.findall(str(error)):
        if os.path.isfile(name):
            check_safetensors(Path(name))
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not pickles_allowed and not any(name.endswith(".safetensors") for name in names):
        raise OSError(pickles_refused(folder, pickles)) from error


def load_mhla_weights(load: Callable[..., Any], call: inspect.BoundArguments) -> LoadedWeights:
    """Load a checkpoint into an MHLA model, with initial values of the MHLA parameters that it lacks.

    Raises:
        ValueError: If the checkpoint lacks other weights, has other layers than the model, or its MHLA weights were
            made for other options.
    """
    given = call.arguments
    model, name, loaded = given["model"], given["pretrained_model_name_or_path"], set(given["loaded_keys"])
    files = given.get("resolved_model_file") or []
    check_loaded_files(files, name, pickles=True)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    # diffusers only warns of layers that the configuration leaves out.
    check_layer_count(len(model._self_attentions()), loaded, f"the configuration of {name}")
    missing = sorted(shapes.keys() - loaded)
    fresh = [key for key in missing if ".mhla." in key]
    if len(fresh) < len(missing):
        others = [key for key in missing if ".mhla." not in key]
        raise ValueError(
            f"The checkpoint {name} lacks {len(others)} weight(s) of {type(model).__name__}, for example "
            f"{', '.join(others[:3])}. It is damaged or belongs to another architecture."
        )
    dropped = sorted(key for key in loaded.difference(shapes) if ".mhla." in key)
    if dropped:
        raise ValueError(
            f"The mhla options leave out {len(dropped)} trained MHLA weight(s) of {name}, for example "
            f"{', '.join(dropped[:3])}. Keep the checkpoint's own layers and options, or convert its softmax "
            "original anew."
        )
    _check_overrides(name, model)
    check_new_size({key: shape for key, shape in shapes.items() if key in loaded}, shapes)
    if fresh:
        # Loaded like weights of the checkpoint: cast, placed or offloaded as these are.
        values = {}
        for key in fresh:
            prefix, _, own = key.partition(".mhla.")
            values[key] = model.get_submodule(f"{prefix}.mhla").initial_tensor(own)
        given["loaded_keys"] = [*given["loaded_keys"], *fresh]
        if given.get("state_dict") is not None:
            given["state_dict"] = {**given["state_dict"], **values}
        else:
            given["resolved_model_file"] = [*files, values]
    result = load_weights(load, call)
    if fresh:
        warn_of_fresh(model, fresh, name)
    was_mhla = any(".mhla." in key for key in loaded)
    record_weights(model, model.config.get(STATE_KEY, "trained") if was_mhla else "converted")
    return result._replace(missing_keys=sorted({*result.missing_keys, *fresh}))


def warn_of_fresh(model: Any, fresh: list[str], source: Any) -> None:
    """Warn of newly initialised parameters, and say whether the model needs fine-tuning.

    Args:
        model: A model of an MHLA class.
        fresh: Names of the parameters.
        source: Name of the checkpoint that lacks them.
    """
    identity = all(key.partition(".mhla.")[2].partition(".")[0] in _STARTS_AS_IDENTITY for key in fresh)
    advice = "Fine-tune the model before you use it."
    if identity or model.starts_as_upstream(model.mhla_config):
        advice = "They leave its output as it was until they are fine-tuned."
    layers = len({key.split(".mhla.")[0] for key in fresh})
    found = f"{len(fresh)} MHLA parameter(s) in {layers} layer(s) are not in {source} and were newly initialised."
    logger.warning("%s: %s %s", type(model).__name__, found, advice)
    warning = model.single_block_warning()
    if warning is not None:
        logger.warning("%s", warning)


def _check_overrides(name: Any, model: Any) -> None:
    """Refuse options under which stored weights of a fitting shape would mean something else."""
    if model._mhla_options_of_checkpoint is None:
        return
    stored, wanted = model.coerce_options(model._mhla_options_of_checkpoint), model.mhla_config
    before, now = (reference_blocks(config, model.reference_grid(model.config)) for config in (stored, wanted))
    if before != now:
        raise ValueError(f"The MHLA weights of {name} are for blocks={before}, but the mhla options ask for {now}.")
    # diffusers would advise to overwrite those of other shapes.
    kept = ["mixing_constraint", "mixing_heads"]
    kept += ["lepe_kernel"] * (stored.lepe_kernel is not None) + ["window_gains"] * (stored.window is not None)
    for field in kept:
        if getattr(stored, field) != getattr(wanted, field):
            raise ValueError(
                f"The MHLA weights of {name} are stored under {field}={getattr(stored, field)!r}, but the mhla "
                f"options ask for {getattr(wanted, field)!r}."
            )
    # Gains of a window that was not there are fresh, and leave the output as it was.
    fields = TRAINED_WITH if stored.window is None else (*TRAINED_WITH, "window", "window_size")
    changed = [field for field in fields if getattr(stored, field) != getattr(wanted, field)]
    if changed:
        changes = ", ".join(f"{field}={getattr(stored, field)!r}" for field in changed)
        logger.warning("The MHLA weights of %s were made with %s; the mhla options change that.", name, changes)
