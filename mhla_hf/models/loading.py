# SPDX-License-Identifier: Apache-2.0
"""Weights of MHLA models: checks of those in a checkpoint, and initial values of those that it lacks."""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from accelerate.utils import offload_weight, save_offload_index

from ..layers.blocks import reference_blocks
from ..layers.original import STATE_KEY, record_weights
from ..utils.compat.diffusers import LoadedWeights, load_weights
from ..utils.locations import LOCATION_OPTIONS
from ..utils.tensor_files import check_safetensors
from .bounds import check_layer_count, check_new_size
from .options import from_stored
from .weight_files import PICKLES, check_loaded_files, pickles_refused


logger = logging.getLogger(__name__)

TRAINED_WITH = ("feature_map", "feature_map_eps", "normalizer", "rope")
"""Options that leave the shapes of the weights alone and change the output."""

# diffusers names the file, and does not say what is wrong with it.
_SAFETENSORS_NAMED = re.compile(r"'([^']+\.safetensors)'")
# Parts of an MHLA layer that leave its output unchanged when they are fresh.
_STARTS_AS_IDENTITY = ("gate", "lepe", "window_gain")


@contextmanager
def checked_checkpoint(model_class: Any, location: Any, options: dict[str, Any]) -> Iterator[None]:
    """Checks the options that a checkpoint of an MHLA class holds, and names files in errors while it is loaded.

    Checkpoints that are MHLA already are loaded from safetensors alone, unless `use_safetensors=False` is given.

    Args:
        model_class: The MHLA class.
        location: The directory or Hub id.
        options: Arguments of `from_pretrained`; `use_safetensors` is set here.

    Raises:
        ValueError: If stored options are unknown or have values that are not allowed, or a file is damaged.
        OSError: If an MHLA checkpoint has no safetensors.
    """
    where = {name: options[name] for name in LOCATION_OPTIONS if name in options}
    stored = from_stored(model_class.load_config(location, **where)).get("mhla")
    if stored is not None:
        try:
            model_class.coerce_options(stored)
        except ValueError as error:
            raise ValueError(f"config.json of {location}: {error}") from error
        if options.get("use_safetensors") is None:
            options["use_safetensors"] = True
    try:
        yield
    except OSError as error:
        for name in _SAFETENSORS_NAMED.findall(str(error)):
            if os.path.isfile(name):
                check_safetensors(Path(name))
        folder = Path(location, options.get("subfolder") or "")
        if stored is not None and options["use_safetensors"] and folder.is_dir():
            names = sorted(path.name for path in folder.iterdir())
            pickles = [name for name in names if name.endswith(PICKLES)]
            if pickles and not any(name.endswith(".safetensors") for name in names):
                raise OSError(pickles_refused(folder, pickles)) from error
        raise


def load_mhla_weights(load: Callable[..., Any], call: inspect.BoundArguments) -> LoadedWeights:
    """Loads a checkpoint into an MHLA model, and initialises the MHLA parameters that it lacks, with one warning.

    Raises:
        ValueError: If the checkpoint lacks other weights, has other layers than the model, or its MHLA weights were
            made for other options.
    """
    model, name, loaded_keys = (
        call.arguments[argument] for argument in ("model", "pretrained_model_name_or_path", "loaded_keys")
    )
    check_loaded_files(call.arguments.get("resolved_model_file") or (), name, pickles=True)
    class_name, loaded = type(model).__name__, set(loaded_keys)
    shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    # diffusers only warns of layers that the configuration leaves out.
    check_layer_count(len(model._self_attentions()), loaded_keys, f"the configuration of {name}")
    missing = sorted(set(shapes) - loaded)
    fresh = [key for key in missing if ".mhla." in key]
    others = [key for key in missing if ".mhla." not in key]
    if others:
        raise ValueError(
            f"The checkpoint {name} lacks {len(others)} weight(s) of {class_name}, for example "
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
    check_new_size({key: shape for key, shape in shapes.items() if key not in fresh}, shapes)
    # Told that the fresh keys are there, upstream neither warns about them nor touches them.
    call.arguments["loaded_keys"] = [*loaded_keys, *fresh]
    try:
        result = load_weights(load, call)
    except ValueError as error:
        if ".mhla." not in str(error):
            raise
        # The rest of diffusers' message advises to overwrite weights that do not fit.
        reason = str(error).partition(". ")[0]
        raise ValueError(f"The mhla options do not fit the MHLA weights of {name}: {reason}.") from error
    if fresh:
        if initialize_fresh(model, fresh, call.arguments):
            # The index is in the offload folder, as upstream leaves it.
            result = result._replace(offload_index=None)
        warn_of_fresh(model, fresh, name)
    was_mhla = any(".mhla." in key for key in shapes if key not in fresh)
    record_weights(model, model.config.get(STATE_KEY, "trained") if was_mhla else "converted")
    return result._replace(missing_keys=sorted({*result.missing_keys, *fresh}))


def warn_of_fresh(model: Any, fresh: list[str], source: Any) -> None:
    """Warns of newly initialised parameters, and says whether the model needs fine-tuning.

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
    logger.warning(
        "%s: %d MHLA parameter(s) in %d layer(s) are not in %s and were newly initialised. %s",
        type(model).__name__, len(fresh), layers, source, advice,
    )  # fmt: skip
    warn_of_single_block(model)


def warn_of_single_block(model: Any) -> None:
    """Warns if samples of the size that a newly converted model was made for are a single block."""
    warning = model.single_block_warning()
    if warning is not None:
        logger.warning("%s", warning)


def initialize_fresh(model: nn.Module, keys: list[str], load_options: Mapping[str, Any]) -> bool:
    """Gives parameters that the checkpoint lacks their initial values; returns whether some went to the disk.

    Args:
        model: The model, whose weights are loaded.
        keys: Names of the parameters.
        load_options: Arguments of the loader: `dtype`, `keep_in_fp32_modules`, `device_map`, `offload_folder`.
    """
    dtype = load_options.get("dtype") or torch.get_default_dtype()
    kept = set(load_options.get("keep_in_fp32_modules") or [])
    device_map = load_options.get("device_map") or {}
    offload_index: dict[str, Any] = {}
    for key in keys:
        prefix, _, name = key.partition(".mhla.")
        owner = model.get_submodule(key.rpartition(".")[0])
        target = torch.float32 if kept & set(key.split(".")) else dtype
        mhla: Any = model.get_submodule(f"{prefix}.mhla")
        value = mhla.initial_tensor(name).to(target)
        places = [place for place in device_map if place == "" or key == place or key.startswith(f"{place}.")]
        device = device_map[max(places, key=len)] if places else "cpu"
        if device == "disk":
            # Hooks read it from there; the parameter itself stays on the meta device like all offloaded ones.
            offload_weight(value, key, load_options["offload_folder"], offload_index)
        else:
            setattr(owner, key.rpartition(".")[2], nn.Parameter(value.to(device)))
    if offload_index:
        save_offload_index(offload_index, load_options["offload_folder"])
    return bool(offload_index)


def _check_overrides(name: Any, model: Any) -> None:
    """Refuses options under which stored weights of a fitting shape would mean something else."""
    if model._mhla_options_of_checkpoint is None:
        return
    stored, wanted = model.coerce_options(model._mhla_options_of_checkpoint), model.mhla_config
    before, now = (reference_blocks(config, model.reference_grid(model.config)) for config in (stored, wanted))
    if before != now:
        raise ValueError(f"The MHLA weights of {name} are for blocks={before}, but the mhla options ask for {now}.")
    if stored.mixing_constraint != wanted.mixing_constraint:
        raise ValueError(
            f"The MHLA weights of {name} are stored under mixing_constraint={stored.mixing_constraint!r}, but the "
            f"mhla options ask for {wanted.mixing_constraint!r}."
        )
    # Gains of a window that was not there are fresh, and leave the output as it was.
    fields = TRAINED_WITH if stored.window is None else (*TRAINED_WITH, "window", "window_size")
    changed = [field for field in fields if getattr(stored, field) != getattr(wanted, field)]
    if changed:
        changes = ", ".join(f"{field}={getattr(stored, field)!r}" for field in changed)
        logger.warning("The MHLA weights of %s were made with %s; the mhla options change that.", name, changes)
