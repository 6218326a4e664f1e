# SPDX-License-Identifier: Apache-2.0
"""`import_official`: the authors' Wan-MHLA checkpoints become diffusers directories."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ..config import MHLAConfig
from ..models.options import to_stored
from ..models.registry import mhla_class_for
from ..models.source import Source
from ..models.wan_keys import authors_name, diffusers_names, mhla_options, strip_prefixes, wan_config
from ..utils.destinations import claim_destination
from ..utils.messages import shorten_text, shorten_value
from ..utils.tensor_files import TensorEntry
from .options import MAX_SHARD_BYTES, parse_dtype, parse_size
from .original_weights import UPSTREAM, open_checkpoint, read_base
from .planning import (
    ComponentPlan,
    cast_entry,
    compare_tensors,
    component_report,
    empty_model,
    kept_in_fp32,
    plan_files,
)
from .report import ConversionReport
from .writing import check_apart, write_result


# Sizes in which a transformer must agree with the pipeline it is put into.
_SHARED_SIZES = ("patch_size", "in_channels", "out_channels", "text_dim", "image_dim")


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
    started = time.monotonic()
    checkpoint, destination = Path(checkpoint).expanduser(), Path(destination).expanduser()
    dtype, max_bytes = parse_dtype(dtype), parse_size(max_shard_size) or MAX_SHARD_BYTES
    base_path = None if base is None or not Path(base).expanduser().exists() else Path(base).expanduser()
    with claim_destination(destination, overwrite=overwrite) as claimed:
        check_apart(claimed, checkpoint if checkpoint.exists() else None, base_path)
        found, files = open_checkpoint(checkpoint)
        plan = _plan_import(found, files, checkpoint, blocks, normalizer, grid, num_heads, dtype, max_bytes)
        source = None
        origin: dict[str, Any] = {"location": checkpoint.resolve().name}
        if base is not None:
            hub = {"revision": revision, "token": token, "cache_dir": cache_dir}
            source = read_base(base, "transformer", hub)
            _check_sizes(source, plan.config)
            origin["base"] = source.origin
            check_apart(claimed, source.root)
        report = ConversionReport("import-official", destination, origin)
        write_result(source, [plan], report, claimed, progress=progress, started=started, finish=finish)
        return report


def _plan_import(
    found: list[TensorEntry],
    files: tuple[Path, ...],
    checkpoint: Path,
    blocks: Sequence[int] | None,
    normalizer: str,
    grid: Sequence[int] | None,
    num_heads: int | None,
    dtype: torch.dtype | None,
    max_bytes: int,
) -> ComponentPlan:
    entries: dict[str, TensorEntry] = {}
    for entry in found:
        if entry.name in entries or 0 in entry.shape:
            problem = "twice" if entry.name in entries else f"of shape {shorten_value(entry.shape)}, which is empty"
            raise ValueError(f"{checkpoint} holds {shorten_text(entry.name)} {problem}.")
        entries[entry.name] = entry
    stripped = strip_prefixes(entries)
    shapes = {name: entries[original].shape for name, original in stripped.items()}
    options = mhla_options(shapes, None if blocks is None else tuple(blocks))
    mhla = MHLAConfig(
        feature_map="relu",
        feature_map_eps=1e-6,
        rope="after_feature_map",
        normalizer=normalizer,
        grid=None if grid is None else tuple(grid),
        **options,
    )
    model_class = mhla_class_for(UPSTREAM)
    model = empty_model(model_class, {**wan_config(shapes, num_heads), "mhla": mhla.to_dict()})
    renamed = diffusers_names(shapes)
    target = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    written = {
        stripped[original]: _imported_entry(name, entries[stripped[original]], target.get(name, ()))
        for name, original in renamed.items()
    }
    compare_tensors(
        {entry.name: entry.shape for entry in written.values()},
        target,
        where=f"checkpoint {checkpoint}",
        called=lambda name: renamed.get(name) or authors_name(name),
    )
    kept = kept_in_fp32(model)
    copied = [cast_entry(entry, dtype, kept(entry.name)) for entry in written.values()]
    report = component_report("WanModel", model)
    # What save_pretrained would write: the constructor's arguments, without notes on which of them were given.
    config = to_stored(
        {
            "_class_name": model_class.__name__,
            "_diffusers_version": version("diffusers"),
            **{key: value for key, value in sorted(model.config.items()) if not key.startswith("_")},
        }
    )
    return ComponentPlan("transformer", config, [plan_files(None, files, copied, [], max_bytes)], report)


def _imported_entry(name: str, entry: TensorEntry, shape: tuple[int, ...]) -> TensorEntry:
    """Return a tensor under its diffusers name, in the module's shape where the authors store it in another."""
    if name.endswith(".mhla.mixing") and entry.shape[2:] == (1, 1):
        return TensorEntry(name, entry.shape[:2], entry.dtype, lambda: entry.load().flatten(1))
    if name.endswith(".mhla.lepe.weight") and entry.shape != shape:
        sizes = (1,) * (5 - len(entry.shape)) + entry.shape[2:]
        if entry.shape[:2] == shape[:2] and len(sizes) == 3 and all(size % 2 for size in sizes):
            return TensorEntry(name, shape, entry.dtype, lambda: widen_kernel(entry.load(), shape))
    return replace(entry, name=name)


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


def _check_sizes(base: Source, config: Mapping[str, Any]) -> None:
    component = base.component("transformer")
    for name in _SHARED_SIZES:
        theirs = component.config.get(name)
        if theirs is not None and config.get(name) is not None and theirs != config[name]:
            raise ValueError(
                f"{base.location} has a transformer with {name}={theirs}, the checkpoint has {config[name]}."
            )
