# SPDX-License-Identifier: Apache-2.0
"""Models that train: loaded and written, their parameters, AdamW over them, their average (EMA), and LoRA."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models.directory import TRAINING_RECORD, ModelDirectory
from ..models.registry import LIBRARY
from ..models.weight_files import check_no_adapters
from ..utils.compat.transformers import check_peft_for_adapters
from ..utils.destinations import atomic_directory
from ..utils.files import list_files, write_json
from ..utils.locations import PIPELINE_INDEX
from ..utils.model_cards import CARD, is_own_card
from .config import TrainingConfig


LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
ADAPTER_NAME = "default"
_MHLA = re.compile(r"(^|\.)mhla\.")
_LORA = re.compile(r"\.lora_[AB]\.")
_TABLES = ("scale_shift_table", "embedding_table.weight")


def is_mhla_parameter(name: str) -> bool:
    """True for the name of a parameter of an MHLA module, as in `blocks.3.attn1.mhla.mixing`."""
    return _MHLA.search(name) is not None


def is_lora_parameter(name: str) -> bool:
    """True for the name of a LoRA matrix."""
    return _LORA.search(name) is not None


def trainable_names(model: nn.Module, mode: str) -> list[str]:
    """Names of the parameters that train, in the model's own order.

    Args:
        model: The transformer, with LoRA already added in mode `lora`.
        mode: `mhla`, `lora` or `full`.

    Raises:
        ValueError: If nothing is left to train.
    """
    names = [
        name
        for name, _ in model.named_parameters()
        if mode == "full" or is_mhla_parameter(name) or (mode == "lora" and is_lora_parameter(name))
    ]
    if not names:
        raise ValueError(f"train={mode!r} leaves nothing to train: the model has no MHLA layers")
    return names


def set_trainable(model: nn.Module, names: Iterable[str]) -> None:
    """Make exactly these parameters trainable."""
    names = set(names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


def learning_rate_factor(step: int, *, schedule: str, warmup_steps: int, total_steps: int) -> float:
    """The factor on the peak learning rate at a step, as in `diffusers.optimization` after the warm-up.

    Args:
        step: Optimizer step, from 0.
        schedule: `constant`, or `linear` or `cosine` decay to 0 over the steps after the warm-up.
        warmup_steps: Steps of linear warm-up; the first step has 1 / warmup_steps of the peak.
        total_steps: Steps of the stage, warm-up included.
    """
    if step < warmup_steps:
        # Diffusers begins at a rate of 0, with which the first step would learn nothing.
        return (step + 1) / warmup_steps
    progress = min(max(step - warmup_steps, 0) / max(total_steps - warmup_steps, 1), 1.0)
    return {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[schedule]


def make_optimizer(
    model: nn.Module, names: Sequence[str], config: TrainingConfig, learning_rate: float, mhla_learning_rate: float
) -> torch.optim.AdamW:
    """AdamW over some parameters of a model.

    Weight decay acts on weight matrices only: not on biases, norms, scale-and-shift tables or MHLA parameters, whose
    resting point is not zero, nor on tables of classes, where it would wear away those that the data lack. Each group
    keeps its peak learning rate under `peak_lr`.

    Args:
        model: The transformer.
        names: Parameters to train.
        config: The options.
        learning_rate: Peak learning rate of the stage.
        mhla_learning_rate: That of the MHLA parameters.
    """
    parameters = dict(model.named_parameters())
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name in names:
        parameter, ours = parameters[name], is_mhla_parameter(name)
        decayed = not ours and parameter.ndim >= 2 and not name.endswith(_TABLES)
        groups.setdefault((ours, decayed), []).append(parameter)
    options: list[dict[str, Any]] = []
    for (ours, decayed), members in groups.items():
        rate, decay = mhla_learning_rate if ours else learning_rate, config.weight_decay if decayed else 0.0
        options.append({"params": members, "lr": rate, "peak_lr": rate, "weight_decay": decay})
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(options, lr=learning_rate, betas=betas, eps=config.adam_epsilon)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Set every group to `factor` times its peak; return the learning rate of the first group."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    return float(optimizer.param_groups[0]["lr"])


class WeightAverage:
    """The average of some parameters over the steps of a stage, by `diffusers.training_utils.EMAModel`.

    It lies where the parameters lie, sharded as they are. The decay grows as (1 + step) / (10 + step) up to a limit.

    Args:
        model: The model, on its device and sharded already.
        names: Parameters that train.
        decay: The largest decay.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], decay: float) -> None:
        from diffusers.training_utils import EMAModel

        every = dict(model.named_parameters())
        self.names = list(names)
        self.parameters = [every[name] for name in self.names]
        self.ema = EMAModel(self.parameters, decay=decay)

    def step(self) -> None:
        """Update the average after an optimizer step."""
        self.ema.step(self.parameters)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The averages by parameter name."""
        return dict(zip(self.names, self.ema.shadow_params, strict=True))

    def copy_to_model(self) -> None:
        """Copy the average into the parameters."""
        with torch.no_grad():
            self.ema.copy_to(self.parameters)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the model has the average for its parameters."""
        self.ema.store(self.parameters)
        self.copy_to_model()
        try:
            yield
        finally:
            self.ema.restore(self.parameters)


def check_takes_adapters(model_class: type) -> None:
    """Check that models of a class of diffusers or transformers can have LoRA.

    Raises:
        ValueError: If diffusers gives them no `add_adapter`.
        UnsupportedVersionError: If transformers asks for another version of peft.
    """
    if hasattr(model_class, "config_class"):
        check_peft_for_adapters()
    elif not hasattr(model_class, "add_adapter"):
        raise ValueError(f"train='lora' is not possible: diffusers' {model_class.__name__} takes no adapters")


def add_lora(model: Any, rank: int, alpha: float | None, seed: int) -> None:
    """Add LoRA to the query, key, value and output projections through the model's own `add_adapter`.

    Args:
        model: The transformer.
        rank: Rank of the LoRA matrices.
        alpha: LoRA scale times rank; None takes the rank, a scale of 1.
        seed: Seed of the LoRA matrices; the global random state is left as it was.

    Raises:
        ValueError: If diffusers gives the model no `add_adapter`.
    """
    from peft import LoraConfig

    check_takes_adapters(type(model))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        options = {"r": rank, "lora_alpha": rank if alpha is None else alpha, "target_modules": lora_targets(model)}
        model.add_adapter(LoraConfig(**options), adapter_name=ADAPTER_NAME)


def lora_targets(model: nn.Module) -> list[str]:
    """Names of the projections that LoRA is added to: those of self-attention in every layer, MHLA or not."""
    from .layers import is_linear, mhla_layers

    if any(name.endswith(LORA_TARGETS) for name, _ in model.named_modules()):
        return list(LORA_TARGETS)
    names = (
        f"{layer.name.rpartition('.')[2]}.{name}"
        for layer in mhla_layers(model)
        for name, module in layer.attention.named_modules()
        if is_linear(module) and not name.startswith("mhla.")
    )
    return list(dict.fromkeys(names))


def adapter_of(model: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Returns the weights of an adapter and its configuration: of LoRA, and of MHLA where the model has it.

    Args:
        model: The model, before its LoRA is merged.

    Returns:
        Weights by peft's names, on the CPU, and a `LoraConfig` with MHLA among its `modules_to_save`.
    """
    from peft.utils import get_peft_model_state_dict

    config = copy.copy(model.peft_config[ADAPTER_NAME])
    ours = {name: tensor for name, tensor in model.state_dict().items() if is_mhla_parameter(name)}
    config.modules_to_save = ["mhla"] if ours else None
    tensors = {**get_peft_model_state_dict(model, adapter_name=ADAPTER_NAME), **ours}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, config


def merge_lora(model: nn.Module) -> None:
    """Merge the LoRA matrices into the weights, in place."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            model.set_submodule(name, layer.get_base_layer())
    if hasattr(model, "unload_lora"):
        model.unload_lora()  # type: ignore[operator]
    else:
        model.delete_adapter(ADAPTER_NAME)  # type: ignore[operator]


def save_adapter(destination: Path, model: nn.Module) -> None:
    """Save the LoRA matrices with their scale and the MHLA parameters as diffusers reads them.

    They load by `pipeline.load_lora_weights`, or where the pipeline has no such method, as DiT's, by the transformer's
    `load_lora_adapter(folder, prefix="transformer", use_safetensors=True)`. A pipeline's loader reads one prefix,
    whichever of its transformers it loads into.

    Args:
        destination: Directory to make.
        model: The transformer, before its LoRA is merged.
    """
    from diffusers import WanPipeline

    tensors, config = adapter_of(model)
    with atomic_directory(destination) as temporary:
        # Every pipeline with a transformer saves alike. Without the options, loaders take the rank for alpha.
        WanPipeline.save_lora_weights(
            temporary, transformer_lora_layers=tensors, transformer_lora_adapter_metadata=config.to_dict()
        )


def check_conversion(directory: ModelDirectory, mhla: dict | str | None) -> None:
    """Check that an ordinary model comes with MHLA options, or `none`, and an MHLA model without.

    Raises:
        ValueError: If it does not; the message says what to give.
    """
    if directory.is_mhla and mhla is not None:
        raise ValueError(f"mhla: {directory.location} is MHLA already; its options are fixed")
    if not directory.is_mhla and mhla is None:
        kind = "model" if directory.index is None else "pipeline"
        raise ValueError(
            f"model: {directory.location} is an ordinary {kind}; say how to convert it (mhla, blocks), convert it "
            "first with `mhla-hf convert`, or pass mhla='none' to train it as it is"
        )


def load_model(directory: ModelDirectory, mhla: dict | str | None = None) -> nn.Module:
    """Load the model to train, with fp32 weights.

    Args:
        directory: The model.
        mhla: MHLA options for an ordinary model, which is converted on load; `none` leaves it as it is.

    Raises:
        ValueError: If an ordinary model comes without options or an MHLA one with them, files are damaged, or adapters
            lie beside the model.
    """
    check_conversion(directory, mhla)
    model = directory.load(mhla if isinstance(mhla, dict) else None)
    # transformers also loads adapters from files beside the model, and would save them alone.
    check_no_adapters(dict(model.named_parameters()), directory.folder)
    return model


def export_model(directory: ModelDirectory, destination: Path, model: Any, record: dict[str, Any]) -> None:
    """Write a copy of a model's directory, or its pipeline's, with the trained model in it.

    The model card is not copied where it is about the original, or was generated for the model before training.

    Args:
        directory: The model before training.
        destination: Directory to make; written under a temporary name, then moved.
        model: The trained model, whole and without LoRA.
        record: Contents of `training.json`.

    Raises:
        ValueError: If links in the directory lead out of it, see `list_files`.
    """
    root, index, component = directory.root, directory.index, directory.component
    excluded = {TRAINING_RECORD, *({component, PIPELINE_INDEX} if index else {"config.json"})}
    excluded |= set() if directory.is_mhla and is_own_card(root) else {CARD}
    with atomic_directory(destination) as temporary:
        for path in list_files(root):
            is_weight = index is None and len(path.parts) == 1 and directory.names.match(path)
            # Version-control and download bookkeeping of the source does not belong to the copy.
            if not (is_weight or path.parts[0] in excluded or path.parts[0].startswith(".")):
                (temporary / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / path, temporary / path)
        model.save_pretrained(temporary if index is None else temporary / component)
        if index is not None:
            index = {**index, component: [LIBRARY, type(model).__name__]}
            (temporary / PIPELINE_INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        write_json(temporary / TRAINING_RECORD, record)
