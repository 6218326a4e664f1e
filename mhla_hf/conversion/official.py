# SPDX-License-Identifier: Apache-2.0
"""Weights of training code: original Wan models to convert, and the authors' Wan-MHLA checkpoints to import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..config import MHLAConfig
from ..models.directory import ModelDirectory
from ..models.registry import family_for, mhla_class_for
from ..models.single_file import mhla_options, official_names, softmax_names, wan_config
from ..models.weight_files import WeightSet, from_stored, to_stored
from ..pipelines import options_by_component
from ..utils.compat.diffusers import kept_in_fp32
from ..utils.destinations import claim_destination
from ..utils.files import check_entry, read_json, read_weight_map
from ..utils.locations import PIPELINE_INDEX
from ..utils.machine import parse_dtype
from ..utils.messages import shorten_list
from ..utils.options import parse_size
from ..utils.tensor_files import FLOATS, TensorEntry
from . import planning
from .writing import ConversionReport, check_apart, write_result


UPSTREAM = "WanTransformer3DModel"
"""The diffusers class that checkpoints become."""

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# Where training code keeps the weights inside a saved dict, outermost first.
_NESTED = ("state_dict", "model_state_dict", "model", "module")


def import_official(
    checkpoint: str | Path,
    destination: str | Path,
    *,
    blocks: Sequence[int] | None = None,
    normalizer: str = "none",
    base: str | Path | None = None,
    grid: Sequence[int] | None = None,
    num_heads: int | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
    finish: Callable[[Path], None] | None = None,
) -> ConversionReport:
    """Convert a Wan-MHLA checkpoint of the authors' code to a diffusers transformer or pipeline directory.

    Sizes, the output norm, the gate, LePE, and which layers are MHLA come from the keys and shapes. The feature map is
    ReLU with 1e-6 added, rotary embeddings come after it, as in the authors' code.

    Args:
        checkpoint: A safetensors file, a directory of safetensors shards, or a file of `torch.save`, which is read
            with `weights_only=True` and may hold the weights under `state_dict` or `model`. Prefixes that training
            frameworks put before every key are taken off.
        destination: The directory to write.
        blocks: Number of blocks along frames, height and width. Needed unless there are 150, which are 3 × 5 × 10.
        normalizer: The normaliser the weights were trained with: `"none"` (the authors' Wan), `"block_query"` or
            `"query"`.
        base: A Wan pipeline, directory or Hub id, whose other components are taken; then `destination` is a
            pipeline. Its transformer's weights are not used.
        grid: Token grid the weights were trained for; lets other sizes be resampled, see `MHLAConfig.resize`.
        num_heads: Number of heads. By default from the output norm's width, or heads 128 wide without one.
        dtype: Cast the weights: float32, bfloat16 or float16; what diffusers keeps in fp32 keeps its type.
        max_shard_size: Largest weight file, in bytes or as `"5GB"`, the default. The import needs as much memory.
        revision: Branch, tag or commit of `base` on the Hub.
        token: Access token for the Hub.
        cache_dir: Where downloads of `base` go.
        overwrite: Replace an existing destination.
        progress: Show a progress bar on standard error.
        finish: Called with the complete directory before it moves to `destination`, to add files such as a model card.

    Returns:
        What was done; the same is written as `conversion.json`.

    Raises:
        ValueError: If the checkpoint cannot be read, is not of this kind, lacks tensors or has others (each named), if
            an option does not fit it, or the destination is taken or too small.
    """
    checkpoint, destination = Path(checkpoint).expanduser(), Path(destination).expanduser()
    cast, max_bytes = parse_dtype(dtype), parse_size(max_shard_size) or planning.MAX_SHARD_BYTES
    with claim_destination(destination, overwrite=overwrite) as claimed:
        check_apart(claimed, checkpoint)
        stored = read_checkpoint(checkpoint, official_names)
        shapes = {entry.name: entry.shape for entry in stored.entries}
        mhla = MHLAConfig(
            feature_map="relu",
            feature_map_eps=1e-6,
            rope="after_feature_map",
            normalizer=normalizer,
            grid=None if grid is None else tuple(grid),
            **mhla_options(shapes, None if blocks is None else tuple(blocks)),
        )
        plan = _plan_import(stored, {**wan_config(shapes, num_heads), "mhla": mhla.to_dict()}, cast, max_bytes)
        source: ModelDirectory | None = None
        origin: dict[str, Any] = {"location": checkpoint.resolve().name}
        if base is not None:
            source = read_base(base, "transformer", {"revision": revision, "token": token, "cache_dir": cache_dir})
            origin["base"] = source.origin
            check_apart(claimed, source.root)
        report = ConversionReport("import-official", destination, origin)
        return write_result(source, [plan], report, claimed, progress=progress, finish=finish)


def _plan_import(
    stored: planning.StoredWeights, config: Mapping[str, Any], dtype: torch.dtype | None, max_bytes: int
) -> planning.ComponentPlan:
    model = planning.empty_model(mhla_class_for(UPSTREAM), config)
    target = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    entries = [_imported_entry(entry, target.get(entry.name, ())) for entry in stored.entries]
    planning.compare_tensors(replace(stored, entries=entries), target)
    kept = kept_in_fp32(model)
    copied = [planning.cast_entry(entry, dtype, kept(entry.name)) for entry in entries]
    report = planning.component_report("WanModel", model)
    # What save_pretrained would write: the constructor's arguments, without notes on which of them were given.
    written = to_stored(
        {
            "_class_name": type(model).__name__,
            "_diffusers_version": version("diffusers"),
            **{key: value for key, value in sorted(model.config.items()) if not key.startswith("_")},
        }
    )
    return planning.ComponentPlan("transformer", written, [planning.plan_files(None, copied, max_bytes)], report)


def _imported_entry(entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """Return a tensor in the module's shape where the authors store it in another."""
    if entry.name.endswith(".mhla.mixing") and entry.shape[2:] == (1, 1):
        return replace(entry, shape=entry.shape[:2], load=lambda: entry.load().flatten(1))
    if entry.name.endswith(".mhla.lepe.weight") and entry.shape != shape:
        sizes = (1,) * (5 - len(entry.shape)) + entry.shape[2:]
        if entry.shape[:2] == shape[:2] and len(sizes) == 3 and all(size % 2 for size in sizes):
            return replace(entry, shape=shape, load=lambda: widen_kernel(entry.load(), shape))
    return entry


def widen_kernel(weight: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Pad a depthwise kernel with zeros to a larger one, which convolves to the same.

    Args:
        weight: `[C, 1, h, w]`, which acts within frames, or `[C, 1, f, h, w]`, odd sizes.
        shape: `[C, 1, k, k, k]`, k at least those sizes.
    """
    if weight.ndim == 4:
        weight = weight.unsqueeze(2)
    margins = [(wanted - size) // 2 for wanted, size in zip(shape[2:], weight.shape[2:])]
    return F.pad(weight, [margin for size in reversed(margins) for margin in (size, size)])


def plan_original(
    path: Path,
    location: str,
    mhla: MHLAConfig | Mapping[str, Any] | None,
    options: planning.PlanOptions,
    *,
    component: str | None,
    base: str | Path | None,
    config: str | Path | None,
    hub: Mapping[str, Any],
) -> tuple[planning.ComponentPlan, ModelDirectory | None, dict[str, int]]:
    """Plan the conversion of original weights.

    Args:
        path: The file, or the directory of shards.
        location: Location as the user gave it.
        mhla: This and the other arguments, and errors, as for `convert_pretrained`.

    Returns:
        The plan, the pipeline that the model is put into (`None` for a model alone), and the number of tensors by
        type in a GGUF file.
    """
    name = component or "transformer"
    chosen = options_by_component(mhla, [name])[name]
    source = None if base is None else read_base(base, name, hub)
    try:
        stored = read_checkpoint(path, softmax_names)
        if config is not None:
            file = Path(config).expanduser()
            if file.is_dir():
                file = (file / name if (file / PIPELINE_INDEX).is_file() else file) / "config.json"
            found, folder = read_json(file, "the model's configuration"), file.parent
        elif source is not None:
            found, folder = source.config, source.folder
        else:
            found, folder = wan_config({entry.name: entry.shape for entry in stored.entries}), path
    except ValueError as error:
        raise ValueError(f"{location}: {error}" if location not in str(error) else str(error)) from error
    class_name = found.get("_class_name", UPSTREAM)
    if class_name not in (UPSTREAM, family_for(UPSTREAM).mhla_class):
        raise ValueError(f"{folder} is of a {class_name}: of that class only diffusers directories are converted.")
    # Ignore MHLA options stored for the expert being replaced.
    kept = {key: value for key, value in from_stored(found).items() if key != "mhla"}
    content = {"_diffusers_version": version("diffusers"), **kept, "_class_name": UPSTREAM}
    model = ModelDirectory(location, folder, None, {name: content}, name)
    compression = None if source is None else source.vae_compression
    plan = planning.plan_component(model, chosen, options, [stored], compression)
    return plan, source, dict(Counter(entry.stored_as for entry in stored.entries if entry.stored_as))


def read_base(base: str | Path, name: str, hub: Mapping[str, Any]) -> ModelDirectory:
    """Open the pipeline, a directory or Hub id, that a component is put into.

    Raises:
        ValueError: If it is not a pipeline with such a component.
    """
    source = ModelDirectory.open(base, **hub)
    if source.index is None or name not in source.configs:
        raise ValueError(f"base {base} is not a pipeline directory with a {name}.")
    return source.select(name)


def read_checkpoint(path: Path, rename: Callable[[Iterable[str]], dict[str, str]]) -> planning.StoredWeights:
    """Find the tensors of a checkpoint of training code.

    Args:
        path: A safetensors or GGUF file, a file of `torch.save`, or a directory of safetensors shards.
        rename: Returns the names in the file by those of diffusers, for the former.

    Raises:
        ValueError: If there is no checkpoint, a shard is missing or damaged, or a torch file holds anything that
            could run code.
    """
    if path.suffix in _TORCH_SUFFIXES:
        entries = _torch_entries(path)
    else:
        entries = WeightSet(None, tuple(_shards_in(path) if path.is_dir() else [path])).entries()
    by_name = {entry.name: entry for entry in entries}
    names = rename(by_name)
    renamed = [replace(by_name[original], name=name) for name, original in names.items()]
    return planning.StoredWeights(None, renamed, str(path), names)


def _shards_in(folder: Path) -> list[Path]:
    """Return the weight files of a folder, which must be regular files in it."""
    indices = sorted(folder.glob("*.safetensors.index.json"))
    for path in indices:
        check_entry(path, folder)
    files = read_weight_map(indices[0]) if indices else sorted(folder.glob("*.safetensors"))
    if len(indices) > 1 or not files:
        raise ValueError(f"checkpoint {folder} must have safetensors files, with one index at most.")
    for file in files:
        check_entry(file, folder)
    return files


def _torch_entries(path: Path) -> list[TensorEntry]:
    """Read the tensors of a file of `torch.save`, alone or under the usual keys."""
    try:
        content = torch.load(path, mmap=True, map_location="cpu", weights_only=True)
    # A damaged archive may end in any kind of error.
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}): it is missing, damaged, or holds more than tensors and "
            "could run code when read; save its state dict only."
        ) from error
    for name in _NESTED:
        if isinstance(content, Mapping) and isinstance(content.get(name), Mapping):
            content = content[name]
    content = content if isinstance(content, Mapping) else {}
    plain = {
        str(name): tensor
        for name, tensor in content.items()
        if isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
        and tensor.dtype in FLOATS
    }
    # Views may share a storage, but not hold more than there is: a small file would fill the memory.
    others = shorten_list(name for name in content if str(name) not in plain)
    if others or not plain or sum(tensor.nbytes for tensor in plain.values()) > path.stat().st_size:
        found = others or "no tensors, or views that repeat stored numbers"
        raise ValueError(f"{path} holds {found}; only plain tensors of floats can be imported.")
    return [
        TensorEntry(name, tuple(tensor.shape), tensor.dtype, partial(torch.Tensor.detach, tensor))
        for name, tensor in plain.items()
    ]
