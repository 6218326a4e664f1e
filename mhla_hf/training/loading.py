# SPDX-License-Identifier: Apache-2.0
"""Finding and loading what a run trains: the student and its teacher, the model that it was converted from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights

from ..models.registry import current_class, is_mhla_class, mhla_class_for
from ..models.weight_files import check_weights, damage_named
from ..utils.files import path_inside
from ..utils.json_files import Types, read_json
from ..utils.locations import download_pipeline, find_pipeline, is_hub_id
from .config import UNCONVERTED, TrainingConfig
from .families import objective_class
from .parameters import check_takes_adapters


def component_config(directory: Path, component: str) -> dict[str, Any]:
    """Reads a component's `config.json`; `_class_name` is what diffusers calls the class today.

    Raises:
        ValueError: If the pipeline lacks the component, or it is a transformer that cannot be trained here, such as
            one for image-to-video or a distilled one.
    """
    path = directory / component / "config.json"
    if not path.exists():
        raise ValueError(f"component: {directory} has no {component}")
    channels: dict[str, Types] = {"in_channels": int, "out_channels": (int, type(None))}
    config = read_json(path, "the model's configuration", required={"_class_name": str}, optional=channels)
    name = current_class(config["_class_name"], config)
    objective_class(name, f"component: {component} of {directory}").check_config(config)
    return {**config, "_class_name": name}


def check_family(directory: Path, component: str, family: str) -> None:
    """Checks that a command for one family of models is given one of them.

    Raises:
        ValueError: If it is not; the message names the command to use instead.
    """
    name = component_config(directory, component)["_class_name"]
    found = objective_class(name).family().name
    if found != family:
        raise ValueError(f"model is a {name}: use `mhla-hf train {found}`")


def check_run(directory: Path, config: TrainingConfig) -> None:
    """Checks what the options of a run and the configurations of its pipeline tell, before data are encoded for it.

    Args:
        directory: The pipeline that training starts from.
        config: The options.

    Raises:
        ValueError: If options, pipeline and teacher do not fit together.
    """
    stored = component_config(directory, config.component)
    objective_class(stored["_class_name"]).from_run(config, directory)
    for name in (config.component, "vae", "text_encoder"):
        check_weights(directory / name)
    model_class = student_class(directory, config.component, config.mhla)
    if config.train == "lora":
        check_takes_adapters(model_class)
    if isinstance(config.mhla, dict):
        with init_empty_weights():
            model_class.from_config({**stored, "mhla": config.mhla})
    if config.transfer_steps or config.distill_steps:
        find_teacher(directory, config.component, config.teacher)


def student_class(directory: Path, component: str, mhla: dict | str | None) -> Any:
    """The class of the transformer to train; arguments and errors as in `load_student`."""
    name = component_config(directory, component)["_class_name"]
    if is_mhla_class(name):
        if mhla is not None:
            raise ValueError(f"mhla: {directory} is MHLA already; its options are fixed")
        return mhla_class_for(name)
    if mhla is None:
        raise ValueError(
            f"model: {directory} is an ordinary pipeline; say how to convert it (mhla, blocks, ...), "
            "convert it first with `mhla-hf convert`, or pass mhla='none' to train it as it is"
        )
    return _upstream_class(name) if mhla == UNCONVERTED else mhla_class_for(name)


def load_student(directory: Path, component: str = "transformer", mhla: dict | str | None = None) -> torch.nn.Module:
    """Loads the transformer to train, with fp32 weights.

    Args:
        directory: An MHLA pipeline, or an ordinary one that is converted on load.
        component: `transformer` or `transformer_2`.
        mhla: MHLA options for an ordinary pipeline; `none` leaves it as it is.

    Raises:
        ValueError: If an ordinary pipeline comes without options, an MHLA one with them, or the model is of a kind
            that cannot be trained here, such as image-to-video.
    """
    options: dict[str, Any] = {"subfolder": component, "torch_dtype": torch.float32}
    if isinstance(mhla, dict):
        options["mhla"] = mhla
    model_class = student_class(directory, component, mhla)
    check_weights(directory / component)
    with damage_named(directory / component):
        return model_class.from_pretrained(directory, **options)


def load_teacher(
    directory: Path, component: str, teacher: str | None, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    """Loads the ordinary model whose attention outputs the matching stage aims at.

    Args:
        directory: The pipeline that is trained.
        component: `transformer` or `transformer_2`.
        teacher: An ordinary pipeline; None takes `directory` itself if it is one, else what it was converted from.
        dtype: Type of the weights.

    Raises:
        ValueError: If no ordinary pipeline is to be found.
    """
    source, name = find_teacher(directory, component, teacher)
    check_weights(source / component)
    with damage_named(source / component):
        model = _upstream_class(name).from_pretrained(source, subfolder=component, torch_dtype=dtype)
    return model.requires_grad_(False).eval()


def find_teacher(directory: Path, component: str, teacher: str | None) -> tuple[Path, str]:
    """Directory and class of the teacher; arguments and errors as in `load_teacher`."""
    source = find_pipeline(teacher, "teacher") if teacher is not None else default_teacher(directory, component)
    name = component_config(source, component)["_class_name"]
    if is_mhla_class(name):
        raise ValueError(f"teacher: {source} is MHLA itself; it must be an ordinary pipeline")
    return source, name


def default_teacher(directory: Path, component: str) -> Path:
    """The ordinary pipeline behind a pipeline directory: itself, or what `conversion.json` or `training.json` names.

    A Hub repository is downloaded. A directory is looked for beside the one with the record, and nowhere else: what
    others recorded is no reason to read elsewhere.

    Raises:
        ValueError: If it is unknown, gone or elsewhere.
    """
    if not is_mhla_class(component_config(directory, component)["_class_name"]):
        return directory
    recorded = recorded_sources(directory)
    if not recorded:
        raise ValueError(f"teacher must be given: {directory} does not say which pipeline it was converted from")
    first, seen = recorded[0], {directory.resolve()}
    # The sources of a source follow it, those in a first record before those in a second.
    waiting = [(directory, source) for source in recorded]
    while waiting:
        owner, source = waiting.pop(0)
        try:
            found = _find_recorded(owner, source)
            is_ordinary = not is_mhla_class(component_config(found, component)["_class_name"])
        except (OSError, ValueError):
            continue
        if is_ordinary:
            return found
        if found.resolve() not in seen:
            seen.add(found.resolve())
            waiting = [(found, source) for source in recorded_sources(found)] + waiting
    raise ValueError(
        f"teacher must be given: {first}, which {directory} comes from, is not there (only Hub repositories and "
        "folders beside it are looked for)"
    )


def _find_recorded(owner: Path, source: str) -> Path:
    """The pipeline that the record of another one names."""
    if is_hub_id(source):
        return download_pipeline(source)
    folder = owner.resolve().parent
    name = str(Path(source).relative_to(folder)) if Path(source).is_absolute() else source
    return find_pipeline(path_inside(folder, name, f"the record of {owner}"), "teacher")


def recorded_sources(directory: Path) -> list[str]:
    """What the records of a pipeline directory say it was made from."""
    records = [directory / name for name in ("conversion.json", "training.json")]
    contents = [read_json(record, "the record", optional={"source": dict}) for record in records if record.exists()]
    locations = [content.get("source", {}).get("location") for content in contents]
    return [location for location in locations if location and isinstance(location, str)]


def _upstream_class(name: str) -> Any:
    import diffusers

    return getattr(diffusers, name)
