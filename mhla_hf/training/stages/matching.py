# SPDX-License-Identifier: Apache-2.0
"""The layer-matching stage of a run: every MHLA layer is trained towards the output of the layer that it replaced.

Layers are matched as by `mhla_hf.recovery.match_layers`, all in one step and with the run's own optimizer, checkpoints
and metrics, on noised samples of the data set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from ...utils.files import write_json
from ...utils.json_files import read_json
from ..config import TrainingConfig
from ..data.batches import Batch, DataOrder
from ..data.fingerprints import model_fingerprint, samples_fingerprint
from ..families import Objective
from ..matching.activations import ActivationCache, DiskCache, MemoryCache, OnlineCache, choose_cache, pack
from ..matching.distributed import Processes
from ..matching.layers import LayerCall, evaluating, find_projections
from ..matching.layers import mhla_layers as attention_layers
from ..matching.stage import MatchingStage, RecordNumbers
from ..matching.teacher import SharedTeacher, shared_teacher
from ..parameters import mhla_layers, trainable_names


logger = logging.getLogger(__name__)

BatchMaker = Callable[[DataOrder, int, int], Batch]

# At least so many draws of noise, however few samples.
_LEAST_RECORDS = 128


class Transfer(MatchingStage):
    """Layer matching: each MHLA layer on the teacher's inputs, against the teacher's outputs.

    Unless `transfer_cache` is `none`, the teacher runs once on each of a set of samples with their noise, and steps go
    over the records of that: as many as the data set has samples, and at least 128, or as many as the steps take.

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
        super().__init__(model, [], [], None, config.transfer_steps)
        self.config, self.objective, self.gradient_checkpointing = config, objective, config.gradient_checkpointing
        self.make_one, self.get_teacher = make_batch, get_teacher
        self.accelerator, self.dataset, self.folder = accelerator, dataset, folder
        self.learning_rate = config.transfer_learning_rate or config.learning_rate
        # The more particular option wins: a rate for this stage over one for these parameters in every stage.
        self.mhla_learning_rate = config.transfer_learning_rate or config.mhla_learning_rate or config.learning_rate
        if not mhla_layers(model):
            raise ValueError("transfer_steps needs at least one MHLA layer, but the model has none")
        per_step = config.batch_size * config.gradient_accumulation_steps * accelerator.num_processes
        size = min(max(len(dataset), _LEAST_RECORDS), self.steps * per_step)
        self.pool = DataOrder(dataset_size=size, batch_size=1, seed=config.seed, stage="records")
        self.samples = DataOrder(dataset_size=len(dataset), batch_size=1, seed=config.seed, stage=self.name)
        self.teacher: SharedTeacher | None = None

    def make_batch(self, order: DataOrder, step: int, micro_step: int) -> RecordNumbers:
        """Numbers of records or, where none are kept, of samples with new noise."""
        numbers = order.sample_numbers(step, micro_step)
        if not isinstance(self.records, OnlineCache):
            numbers = [self.pool.dataset_index(number) for number in numbers]
        return RecordNumbers(tuple(numbers), tuple(self.samples.dataset_index(number) for number in numbers))

    def trainable_names(self) -> list[str]:
        """Those that `train` selects, within the self-attention of MHLA layers."""
        names = map(self.objective.attention_name, mhla_layers(self.model))
        return trainable_names(self.model, self.config.train, names)

    def module(self) -> nn.Module:
        """The MHLA layers side by side."""
        self.model.to(self.accelerator.device)
        self.teacher = shared_teacher(self.model, self.get_teacher())
        self.teacher.keep(self.trainable_names())
        first = self._inputs(0)
        with evaluating(self.model), self.accelerator.autocast():
            self.layers = find_projections(self.model, attention_layers(self.model), first)
        self.records = self._open_records(first)
        return super().module()

    def loss(self, module: nn.Module, batch: RecordNumbers, accelerator: Accelerator) -> torch.Tensor:
        """The matching loss, averaged over layers; missing records are made first."""
        assert self.records is not None
        for number in self.records.missing(batch.numbers):
            self.records.put(number, pack(self._record(self._inputs(number), _kept)))
        return super().loss(module, batch, accelerator)

    def close(self) -> None:
        """Releases the teacher, which may be as large as the model, and the records."""
        self.teacher = None
        if self.records is not None:
            self.accelerator.wait_for_everyone()
            if self.records.kind != "disk" or self.accelerator.is_main_process:
                self.records.close()
        self.records = None

    def _inputs(self, number: int) -> dict[str, Any]:
        """Keyword arguments of the model's forward for a sample."""
        return self.objective.inputs_of(self.model, self.make_one(self.samples, number, 0).to(self.accelerator.device))

    def _record(
        self, inputs: dict[str, Any], keep: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
    ) -> dict[str, LayerCall]:
        assert self.teacher is not None
        with self.accelerator.autocast():
            return self.teacher.record(self.layers, inputs, keep=keep)

    def _open_records(self, first: dict[str, Any]) -> ActivationCache:
        """The cache that was asked for, or that the records fit in; the main process decides for all."""
        kind, problem = self.config.transfer_cache, None
        if self.accelerator.is_main_process and kind != "none":
            try:
                kind = self._choose(kind, first)
            except (OSError, ValueError) as error:
                problem = str(error)
        kind, problem = Processes().all((kind, problem))[0]
        if problem is not None:
            raise ValueError(problem)
        if kind == "memory":
            return MemoryCache()
        if kind == "disk":
            assert self.folder is not None
            with self.accelerator.main_process_first():
                return DiskCache(self.folder / "activations", self._fingerprint())
        return OnlineCache(lambda number: self._record(self._inputs(number)), self.config.batch_size)

    def _choose(self, kind: str, first: dict[str, Any]) -> str:
        """The place of the records; a resumed run keeps the choice of its first start."""
        choice = None if self.folder is None else self.folder / "choice.json"
        if choice is not None and choice.is_file() and kind == "auto":
            return read_json(choice, "the choice of a run", required={"cache": str})["cache"]
        size = pack(self._record(first, _kept)).bytes * self.pool.dataset_size
        found, note = choose_cache(kind, size, None, None if self.folder is None else self.folder / "activations")
        logger.log(logging.WARNING if found == "none" else logging.INFO, "transfer: %s", note)
        if choice is not None:
            write_json(choice, {"cache": found})
        return found

    def _fingerprint(self) -> str:
        trained = set(self.trainable_names())
        options = f"{self.config.seed}-{self.config.condition_dropout}-{self.accelerator.mixed_precision}"
        return (
            f"{model_fingerprint(self.model, trained)}-{model_fingerprint(self.teacher)}-"
            f"{samples_fingerprint(self.dataset)}-{options}-{self.objective.to_dict()}"
        )


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.bfloat16, copy=True).contiguous()
