# SPDX-License-Identifier: Apache-2.0
"""Files of models: names and complete sets of weights, limits of configurations, and loading into MHLA models."""

from __future__ import annotations

import inspect
import logging
import math
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from ..layers.mixing import reference_blocks
from ..layers.original import STATE_KEY, record_weights
from ..utils.compat.diffusers import load_weights, without_quantized
from ..utils.compat.transformers import saves_adapters_aside
from ..utils.files import read_weight_map
from ..utils.locations import EXPORT_FILES, EXPORT_FOLDERS
from ..utils.messages import shorten_list, shorten_text, shorten_value
from ..utils.tensor_files import TensorEntry, check_safetensors, read_entries
from .registry import recovery_advice


logger = logging.getLogger(__name__)

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Suffixes of files that may hold pickles."""

STUB_MODULE = "modeling_mhla"
"""Name of the file beside a model's `config.json` that loads it by `trust_remote_code=True` (`mhla_hf.models.stub`).

Not that of the package: Python would find it first where the repository is the working directory.
"""

UNREADABLE_FOR_SOFTMAX = {"dtype": "MHLA weights: import mhla_hf before you load them"}
"""The entry of `config.json` by which softmax classes fail.

diffusers ignores entries and weights that a class does not know, with a warning. But it passes an unknown `dtype` on
to the class's constructor, which refuses it. So one is written, for programs that never import this package; the
warning before the error shows its text. MHLA classes drop it when they read the file. With this package imported, the
softmax classes hand MHLA checkpoints over (`mhla_hf.integrations.diffusers`).
"""

MAX_LAYERS = 1000
"""Published models have up to about two hundred."""

MAX_SIZE = 2**24
"""The largest width or count."""

MAX_POSITIONS = 2**16
"""Positions of a table that is computed when a model is built: the longest axis of a video, or an image's patches."""

ADAPTERS_OUT = (
    "which a saved model cannot hold. Take them out and save it again: by unload_lora_weights() of the pipeline, "
    "after fuse_lora() to keep their effect, or by merge_and_unload() of peft."
)
"""End of the errors for weights with adapters."""

LITTLE = 2**26
"""Parameters that any model may get: 256 MB of them."""

TRAINED_WITH = ("feature_map", "feature_map_eps", "normalizer", "rope")
"""Options that leave the shapes of the weights alone and change the output."""

_LAYER_COUNTS = ("num_layers", "num_single_layers")
_POSITIONS = ("rope_max_seq_len", "sample_size")
_SAMPLE = ("sample_frames", "sample_height", "sample_width")
# Lists of layers by the names of diffusers and of authors. HunyuanVideo's refiner of the text has blocks of its own.
_LAYER = re.compile(r"(?:^|(?<!refiner)\.)((?:(?:single_)?transformer_|single_|double_|vace_)?blocks)\.([0-9]{1,9})\.")
# Modules that adapters put around those that they change.
_IN_ADAPTERS = re.compile(r"\.(base_layer|original_module)\.")
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
_STARTS_AS_IDENTITY = ("gate", "lepe")


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
        check_no_adapters(found, self.index or self.files[0])
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


def check_no_adapters(names: Iterable[str], where: Any) -> None:
    """Refuse weights of a model that has adapters in it: their names are not those of the model.

    Args:
        names: Names of the weights.
        where: The model or its files, for the error.

    Raises:
        ValueError: If there are such names.
    """
    if found := [name for name in names if _IN_ADAPTERS.search(name)]:
        raise ValueError(f"{where} has adapters in its weights ({shorten_list(found)}), {ADAPTERS_OUT}")


def check_saved(model: Any, names: Iterable[str] | None = None) -> None:
    """Check that a model of diffusers or transformers is saved without adapters among its weights.

    Args:
        model: The model, or another component of a pipeline.
        names: Names of the weights that are saved; by default those of the model.

    Raises:
        ValueError: See [`check_no_adapters`].
    """
    if isinstance(model, torch.nn.Module) and not saves_adapters_aside(model):
        names = dict(model.named_parameters()) if names is None else names
        check_no_adapters(names, f"This {type(model).__name__}")


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


# Configurations: what is stored, and limits before a model is built.


def to_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's configuration as it is written: `AutoModel` of diffusers finds the stub by it."""
    return {**config, **UNREADABLE_FOR_SOFTMAX, "auto_map": {"AutoModel": f"{STUB_MODULE}.{config['_class_name']}"}}


def from_stored(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the entries of [`to_stored`], which files of earlier versions may lack."""
    return {
        name: value
        for name, value in config.items()
        if (name, value) not in UNREADABLE_FOR_SOFTMAX.items() and name != "auto_map"
    }


def check_model_config(model_class: Any, config: Mapping[str, Any], where: str) -> None:
    """Check the arguments that a model's configuration holds for its constructor, and the sizes of its samples.

    Args:
        model_class: A class of diffusers. Its constructor's defaults and annotations tell the types.
        config: Contents of `config.json`; entries that the constructor does not know are left alone.
        where: Name of the file, for errors.

    Raises:
        ValueError: If an entry has a wrong type, is no positive number where one is needed, or is a size that no
            model has.
    """
    parameters = inspect.signature(model_class.__init__).parameters
    for name, value in config.items():
        largest = MAX_LAYERS if name in _LAYER_COUNTS else MAX_POSITIONS if name in _POSITIONS else MAX_SIZE
        if name.lstrip("_") in _SAMPLE:
            wanted, largest = "int | None", MAX_POSITIONS
            fits = value is None or _is_size(value, largest)
        elif name in parameters and parameters[name].default is not inspect.Parameter.empty:
            wanted = str(parameters[name].annotation)
            fits = _fits(value, parameters[name].default, wanted, largest)
        else:
            continue
        if not fits:
            raise ValueError(f"{where}: {name}={shorten_value(value)} must be {wanted}, of at most {largest:,}.")
    image, patch = config.get("sample_size"), config.get("patch_size")
    if isinstance(image, int) and isinstance(patch, int) and (image // patch) ** 2 > MAX_POSITIONS:
        raise ValueError(
            f"{where}: sample_size={image} in patches of {patch} gives more than {MAX_POSITIONS} positions."
        )


def sample_size(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return frames, height and width of the latents that a video model was made for.

    Args:
        config: Contents of `config.json`.

    Returns:
        `sample_frames`, `sample_height` and `sample_width`, with or without an underscore before them; `None` unless
        the configuration has all three.
    """
    found = [config.get(name, config.get(f"_{name}")) for name in _SAMPLE]
    return None if None in found else tuple(found)


def check_layer_count(num_layers: int, names: Iterable[str], where: str) -> None:
    """Check the number of layers against the names of the weights.

    Args:
        num_layers: Number of layers that the configuration describes, in all lists of blocks together.
        names: Names of the tensors.
        where: Name of the configuration, for errors.

    Raises:
        ValueError: If the weights have more layers, or fewer.
    """
    found: dict[str, int] = {}
    for match in filter(None, map(_LAYER.search, names)):
        found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    if found and sum(found.values()) != num_layers:
        raise ValueError(
            f"{where} describes {num_layers} layers, but the weights have {sum(found.values())}: the two do not "
            "belong together."
        )


def check_new_size(old: Mapping[str, tuple[int, ...]], new: Mapping[str, tuple[int, ...]]) -> None:
    """Check that options do not add more to a model than it has already.

    Args:
        old: Shapes of the source's tensors by name.
        new: Shapes of those to be written.

    Raises:
        ValueError: If they do, unless it is little in any case.
    """
    added = sum(math.prod(shape) for name, shape in new.items() if name not in old)
    had = sum(map(math.prod, old.values()))
    if added > max(had, LITTLE):
        raise ValueError(
            f"The mhla options add {added:,} parameters to a model of {had:,}: choose fewer blocks (blocks), "
            "larger ones (block_size) or a smaller convolution (lepe_kernel)."
        )


def _fits(value: Any, default: Any, annotation: str, largest: int) -> bool:
    """Return whether a value is of the type of an argument, and a number that models have."""
    if value is None:
        return default is None or "None" in annotation or "Optional" in annotation
    if isinstance(default, bool) or annotation.startswith("bool"):
        return isinstance(value, bool)
    if isinstance(default, str):
        return isinstance(value, str)
    if isinstance(default, list):
        # Numbers of layers.
        return isinstance(value, list) and all(type(each) is int and 0 <= each < MAX_LAYERS for each in value)
    if isinstance(default, tuple):
        sizes = value if isinstance(value, (list, tuple)) else ()
        return len(sizes) == len(default) and all(_is_size(size, largest) for size in sizes)
    if isinstance(default, int):
        return _is_size(value, largest)
    is_count = annotation.startswith("int")
    if not is_count and not isinstance(default, float):
        return True
    # Some published configurations have counts with a decimal point.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and (0 if is_count else -math.inf) < value <= largest


def _is_size(value: Any, largest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= largest


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


def load_mhla_weights(load: Callable[..., Any], call: inspect.BoundArguments) -> tuple[Any, ...]:
    """Load a checkpoint into an MHLA model, with initial values of the MHLA parameters that it lacks.

    Raises:
        ValueError: If the checkpoint lacks other weights, has other layers than the model, or its MHLA weights were
            made for other options.
    """
    given = call.arguments
    model, name, loaded = given["model"], given["pretrained_model_name_or_path"], set(given["loaded_keys"])
    files = given.get("resolved_model_file") or []
    check_loaded_files(files, name, pickles=True)
    check_no_adapters(loaded, f"The checkpoint {name}")
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    # diffusers only warns of layers that the configuration leaves out.
    check_layer_count(len(model._self_attentions()), loaded, f"the configuration of {name}")
    quantizer = given.get("hf_quantizer")
    fresh = sorted(without_quantized(quantizer, model, shapes.keys() - loaded))
    if others := [key for key in fresh if ".mhla." not in key]:
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
    if fresh and getattr(quantizer, "pre_quantized", False):
        advice = "Convert the original weights, and quantise the MHLA directory when it is loaded."
        raise ValueError(f"{name} is quantised, and lacks MHLA weights such as {fresh[0]}. {advice}")
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
    _, missing_names, *others = load_weights(load, call)
    if fresh:
        warn_of_fresh(model, fresh, name)
    was_mhla = any(".mhla." in key for key in loaded)
    record_weights(model, model.config.get(STATE_KEY, "trained") if was_mhla else "converted")
    return model, sorted({*missing_names, *fresh}), *others


def is_identity(fresh: Iterable[str]) -> bool:
    """Return whether new MHLA parameters of these names leave the output of a model as it was."""
    return all(key.partition(".mhla.")[2].partition(".")[0] in _STARTS_AS_IDENTITY for key in fresh)


def warn_of_fresh(model: Any, fresh: list[str], source: Any) -> None:
    """Warn of newly initialised parameters, and say whether the model needs fine-tuning.

    Args:
        model: A model of an MHLA class.
        fresh: Names of the parameters.
        source: Name of the checkpoint that lacks them.
    """
    # It starts as 1, which is what weights without it have been trained with.
    if all(key.endswith(".normalizer_scale") for key in fresh):
        return
    is_same = is_identity(fresh) or model.starts_as_upstream(model.mhla_config)
    advice = recovery_advice(type(model).__name__, is_same=is_same)
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
    kept += ["text"] * any(module.streams for module in model.mhla_modules().values())
    kept += ["lepe_kernel"] * (stored.lepe_kernel is not None)
    for field in kept:
        if getattr(stored, field) != getattr(wanted, field):
            raise ValueError(
                f"The MHLA weights of {name} are stored under {field}={getattr(stored, field)!r}, but the mhla "
                f"options ask for {getattr(wanted, field)!r}."
            )
    # A window that was not there has a warning of its own, about its fresh bias.
    fields = TRAINED_WITH if stored.window is None else (*TRAINED_WITH, "window", "window_size")
    changed = [field for field in fields if getattr(stored, field) != getattr(wanted, field)]
    if changed:
        changes = ", ".join(f"{field}={getattr(stored, field)!r}" for field in changed)
        logger.warning("The MHLA weights of %s were made with %s; the mhla options change that.", name, changes)
