# SPDX-License-Identifier: Apache-2.0
"""The layer-matching stage of a run: every MHLA layer learns to put out what the layer it replaced puts out.

Matching is that of `mhla_hf.training.matching.matching`, with the run's own optimizer, checkpoints and metrics: layers
depend on nothing but their records, so they may step together as well as one after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint

from ...utils.files import write_json
from ...utils.json_files import read_json
from ..config import TrainingConfig
from ..data.batches import Batch
from ..data.data_order import DataOrder
from ..data.fingerprints import model_fingerprint, samples_fingerprint
from ..families import Objective
from ..matching.activations import ActivationCache, DiskCache, MemoryCache, moved, pack
from ..matching.cache_choice import choose_cache
from ..matching.layer_training import layer_loss
from ..matching.layers import AttentionLayer, LayerCall, evaluating, find_projections
from ..matching.layers import mhla_layers as attention_layers
from ..matching.recording import Recorder, original_values
from ..parameters import mhla_layers, trainable_names


logger = logging.getLogger(__name__)

BatchMaker = Callable[[DataOrder, int, int], Batch]

# So many draws of noise there are at least, however few samples.
_LEAST_RECORDS = 128


class LayerMatching(nn.Module):
    """MHLA layers side by side, called on recorded hidden states instead of on one another's outputs.

    Only these layers run, and under gradient checkpointing only one of them keeps activations at a time. It shares
    its parameters with the model.

    Args:
        layers: The layers.
        gradient_checkpointing: Recompute each layer in the backward pass.
    """

    def __init__(self, layers: Sequence[AttentionLayer], gradient_checkpointing: bool = False) -> None:
        super().__init__()
        self.layers = list(layers)
        self.attentions = nn.ModuleList(layer.attention for layer in self.layers)
        self.gradient_checkpointing = gradient_checkpointing

    def forward(self, records: Sequence[Mapping[str, LayerCall]]) -> torch.Tensor:
        """The matching loss of each layer, the mean over some records.

        Args:
            records: What the original layers were called with and gave, by layer.

        Returns:
            Losses `[number of layers]`, fp32.
        """
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        losses = []
        for layer in self.layers:
            dtype = next(layer.attention.parameters()).dtype
            total: Any = 0.0
            for record in records:
                call = moved(record[layer.name], next(layer.attention.parameters()).device, dtype)
                total = total + (
                    checkpoint(layer_loss, layer, call, use_reentrant=False) if recompute else layer_loss(layer, call)
                )
            losses.append(total / len(records))
        return torch.stack(losses)


@dataclass(frozen=True)
class RecordedBatch:
    """A micro-batch of records.

    Attributes:
        records: Of each sample, by layer.
        indices: See `TrainingBatch`.
    """

    records: list[dict[str, LayerCall]]
    indices: tuple[int, ...]

    def to(self, device: torch.device | str) -> RecordedBatch:
        """The batch on another device."""
        there = torch.device(device)
        return RecordedBatch(
            [{name: moved(call, there) for name, call in record.items()} for record in self.records], self.indices
        )


class Transfer:
    """Layer matching: each MHLA layer on the teacher's inputs, against the teacher's outputs.

    Unless `transfer_cache` is `none`, the teacher runs once on a set of samples with their noise, and steps go over
    the records of that: as many as the data set has samples, and at least 128, or as many as the steps take.

    Args:
        config: The options.
        model: The model that trains.
        objective: Makes the model's inputs of a batch.
        make_batch: Makes batches.
        get_teacher: Gives the model before its conversion.
        accelerator: The processes.
        dataset: The samples.
        folder: Where records may be kept; None for memory alone.
    """

    name = "transfer"
    validates = False

    def __init__(
        self,
        config: TrainingConfig,
        model: nn.Module,
        objective: Objective,
        make_batch: BatchMaker,
        get_teacher: Callable[[], nn.Module],
        accelerator: Accelerator,
        dataset: Any,
        folder: Path | None,
    ) -> None:
        self.config, self.model, self.objective = config, model, objective
        self.make_one, self.get_teacher = make_batch, get_teacher
        self.accelerator, self.dataset, self.folder = accelerator, dataset, folder
        self.steps = config.transfer_steps
        self.learning_rate = config.transfer_learning_rate or config.learning_rate
        # The more particular option wins: a rate for this stage over one for these parameters in every stage.
        self.mhla_learning_rate = config.transfer_learning_rate or config.mhla_learning_rate or config.learning_rate
        if not mhla_layers(model):
            raise ValueError("transfer_steps needs at least one MHLA layer, but the model has none")
        per_step = config.batch_size * config.gradient_accumulation_steps * accelerator.num_processes
        size = min(max(len(dataset), _LEAST_RECORDS), self.steps * per_step)
        self.pool = DataOrder(dataset_size=size, batch_size=1, seed=config.seed, stage="records")
        self.samples = DataOrder(dataset_size=len(dataset), batch_size=1, seed=config.seed, stage=self.name)
        self.layers: list[AttentionLayer] = []
        self.recorder: Recorder | None = None
        self.records: ActivationCache | None = None

    def make_batch(self, order: DataOrder, step: int, micro_step: int) -> Batch | RecordedBatch:
        """A micro-batch of records or, where none are kept, of samples to record."""
        if self.records is None:
            return self.make_one(order, step, micro_step)
        numbers = [self.pool.dataset_index(number) for number in order.sample_numbers(step, micro_step)]
        return RecordedBatch(
            [{layer.name: self.records.call(number, layer.name) for layer in self.layers} for number in numbers],
            tuple(self.samples.dataset_index(number) for number in numbers),
        )

    def trainable_names(self) -> list[str]:
        """What `train` says, within the self-attention of MHLA layers."""
        names = map(self.objective.attention_name, mhla_layers(self.model))
        return trainable_names(self.model, self.config.train, names)

    def module(self) -> nn.Module:
        """The MHLA layers side by side; the teacher's records are made before, if they are kept."""
        self.model.to(self.accelerator.device)
        self.recorder = Recorder(
            self.model, [], original_values(self.model, self.get_teacher()), autocast=self.accelerator.autocast
        )
        first = self._inputs(self.make_one(self.samples, 0, 0))
        with evaluating(self.model), self.accelerator.autocast():
            self.layers = find_projections(self.model, attention_layers(self.model), first)
        self.recorder.layers = self.layers
        self.records = self._fill(first)
        return LayerMatching(self.layers, self.config.gradient_checkpointing)

    def loss(self, module: nn.Module, batch: Batch | RecordedBatch, accelerator: Accelerator) -> torch.Tensor:
        """The matching loss, averaged over layers."""
        if isinstance(batch, Batch):
            assert self.recorder is not None
            return module([self.recorder(self._inputs(batch))]).mean()
        return module(batch.records).mean()

    def context(self) -> AbstractContextManager[None]:
        """Without dropout."""
        return evaluating(self.model)

    def close(self) -> None:
        """Lets go of the teacher, which may be as large as the model, and of the records."""
        self.recorder = None
        if self.records is not None:
            self.accelerator.wait_for_everyone()
            if isinstance(self.records, MemoryCache) or self.accelerator.is_main_process:
                self.records.close()
        self.records = None

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        """Keyword arguments of the model's forward, in the type of the teacher's weights."""
        assert self.recorder is not None
        dtypes = {value.dtype for name, value in self.recorder.originals.items() if name.endswith("to_q.weight")}
        dtype = next(iter(dtypes), None)
        return self.objective.inputs_of(self.model, batch.to(self.accelerator.device), dtype)

    def _fill(self, first: dict[str, Any]) -> ActivationCache | None:
        """Makes the records; None where they do not fit, or are not wanted."""
        from accelerate.utils import broadcast_object_list

        assert self.recorder is not None
        kind: list[Any] = [self.config.transfer_cache, None]
        if kind[0] == "none":
            return None
        if self.accelerator.is_main_process:
            try:
                kind[0] = self._choose(kind[0], first)
            except (OSError, ValueError) as error:
                kind[1] = str(error)
        broadcast_object_list(kind)
        if kind[1] is not None:
            raise ValueError(kind[1])
        if kind[0] == "none":
            return None
        if kind[0] == "memory":
            cache: ActivationCache = MemoryCache()
            rank, world = self.accelerator.process_index, self.accelerator.num_processes
            order = self._order(world, rank)
            micro_steps = [(step, micro) for step in range(self.steps) for micro in range(order.accumulation_steps)]
            numbers = (number for step, micro in micro_steps for number in order.sample_numbers(step, micro))
            needed = sorted({self.pool.dataset_index(number) for number in numbers})
        else:
            assert self.folder is not None
            with self.accelerator.main_process_first():
                cache = DiskCache(self.folder / "activations", self._fingerprint())
            needed = list(range(self.pool.dataset_size))
            needed = needed[self.accelerator.process_index :: self.accelerator.num_processes]
        for number in cache.missing(needed):
            cache.put(number, self._record(number))
        self.accelerator.wait_for_everyone()
        return cache

    def _choose(self, kind: str, first: dict[str, Any]) -> str:
        """Where records go; a resumed run keeps to what it chose when it began."""
        assert self.recorder is not None
        choice = None if self.folder is None else self.folder / "choice.json"
        if choice is not None and choice.is_file() and kind == "auto":
            return read_json(choice, "the choice of a run", required={"cache": str})["cache"]
        size = pack(self.recorder(first, _kept)).bytes * self.pool.dataset_size
        found, note = choose_cache(kind, size, None, None if self.folder is None else self.folder / "activations")
        logger.log(logging.WARNING if found == "none" else logging.INFO, "transfer: %s", note)
        if choice is not None:
            write_json(choice, {"cache": found})
        return found

    def _record(self, number: int) -> Any:
        assert self.recorder is not None
        return pack(self.recorder(self._inputs(self.make_one(self.samples, number, 0)), _kept))

    def _order(self, world: int, rank: int) -> DataOrder:
        return DataOrder(
            dataset_size=len(self.dataset),
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            stage=self.name,
            accumulation_steps=self.config.gradient_accumulation_steps,
            world_size=world,
            rank=rank,
        )

    def _fingerprint(self) -> str:
        assert self.recorder is not None
        teacher = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(value, False) for name, value in self.recorder.originals.items()}
        )
        trained = set(self.trainable_names())
        options = f"{self.config.seed}-{self.config.condition_dropout}-{self.accelerator.mixed_precision}"
        return (
            f"{model_fingerprint(self.model, trained)}-{model_fingerprint(teacher)}-"
            f"{samples_fingerprint(self.dataset)}-{options}-{self.objective.to_dict()}"
        )


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.bfloat16, copy=True).contiguous()
