# SPDX-License-Identifier: Apache-2.0
"""Loading checkpoints into MHLA models of diffusers, with initial values of the parameters that they lack."""

from __future__ import annotations

import inspect
import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..config import WINDOW_OPTIONS
from ..layers.mixing import reference_blocks
from ..layers.weight_record import STATE_KEY, record_weights
from ..utils.compat.diffusers import load_weights, without_quantized
from ..utils.tensor_files import check_safetensors
from .limits import check_new_size
from .registry import recovery_advice
from .weight_files import PICKLES, check_layer_count, check_loaded_files, check_no_adapters, pickles_refused


logger = logging.getLogger(__name__)

TRAINED_WITH = ("feature_map", "feature_map_eps", "normalizer", "rope")
"""Options that leave the shapes of the weights alone and change the output."""

# diffusers names the file, and does not say what is wrong with it.
_SAFETENSORS_NAMED = re.compile(r"'([^']+\.safetensors)'")
# Parts of an MHLA layer that leave its output unchanged when they are fresh.
_STARTS_AS_IDENTITY = ("gate", "lepe")


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
    fields = TRAINED_WITH if stored.window is None else (*TRAINED_WITH, *WINDOW_OPTIONS)
    changed = [field for field in fields if getattr(stored, field) != getattr(wanted, field)]
    if changed:
        changes = ", ".join(f"{field}={getattr(stored, field)!r}" for field in changed)
        logger.warning("The MHLA weights of %s were made with %s; the mhla options change that.", name, changes)
