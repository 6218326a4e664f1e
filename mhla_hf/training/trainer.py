# SPDX-License-Identifier: Apache-2.0
"""The training loop: two stages, any number of processes, resumed exactly."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from torch import nn

from ..files import remove_leftovers, write_json
from ..sources import find_pipeline
from . import checkpoints, loading, parameters
from .batches import DataOrder, FlowBatch, LatentSamples, NoiseOptions, make_batch, stable_seed
from .cache import LatentDataset
from .checkpoints import Position
from .config import TrainingConfig
from .export import export_pipeline, save_adapter, unsharded
from .metrics import MetricsFile
from .optimization import learning_rate_factor, make_optimizer, set_learning_rate
from .prefetch import Prefetcher
from .resuming import find_start, run_state
from .runtime import make_accelerator, open_trackers
from .stages import FineTuning, Stage, Transfer
from .validation import Validator, frame_strip


logger = logging.getLogger(__name__)

Callback = Callable[[str, int, float], None]


@dataclass
class TrainingResult:
    """What a run returns.

    Attributes:
        model: The trained transformer; LoRA is merged.
        losses: Loss of every step of this run, by stage. A resumed run has those of the earlier one too.
        seconds_per_step: Mean duration of the steps run here, by stage.
        resumed_from: The checkpoint it went on from.
        pipeline: The pipeline directory written.
    """

    model: nn.Module
    losses: dict[str, list[float]] = field(default_factory=dict)
    seconds_per_step: dict[str, float] = field(default_factory=dict)
    resumed_from: Path | None = None
    pipeline: Path | None = None


class WanTrainer:
    """Matches a Wan transformer's MHLA layers to a softmax teacher, then fine-tunes it by flow matching.

    With files, everything comes from `config.model` and `config.cache`. In a program, models and data can be passed
    in; without `config.output` nothing is written.

    Args:
        config: The options.
        model: The transformer to train, in place; None loads it from `config.model`.
        dataset: Samples `{"latents": [C, F, H, W], "prompt_embeds": [L, D]}`; None opens the cache.
        teacher: The softmax teacher, for `transfer_steps`; None loads it.
        null_prompt_embeds: Embeddings of the empty prompt `[L, D]`, for `text_dropout`; None takes the data set's
            attribute of this name, if it has one.
        callback: Called with (stage, step, loss) after every step, in every process; steps count from 1.
        accelerator: An `Accelerator` to use; None makes one.

    Raises:
        ValueError: If options, model and data do not fit together.
    """

    def __init__(
        self,
        config: TrainingConfig,
        model: nn.Module | None = None,
        dataset: LatentSamples | None = None,
        *,
        teacher: nn.Module | None = None,
        null_prompt_embeds: torch.Tensor | None = None,
        callback: Callback | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        if model is None and config.model is None:
            raise ValueError("model must be given: a pipeline directory or a Hub id")
        if dataset is None and config.cache is None and config.output is None:
            raise ValueError("cache must be given: the directory made by the cache step")
        self.config = config
        self.output = Path(config.output) if config.output is not None else None
        self.owns_accelerator = accelerator is None
        self.accelerator = accelerator or make_accelerator(config)
        check_distribution(self.accelerator, config)
        self.metrics: MetricsFile | None = None
        self.callback = callback
        self.source: Path | None = None
        if config.model is not None:
            with self.accelerator.main_process_first():
                self.source = find_pipeline(config.model, "model")
        if dataset is None:
            dataset = LatentDataset(config.cache or Path(str(config.output)) / "cache")
        self.dataset = dataset
        if len(dataset) < 1:
            raise ValueError("the data set is empty")
        self.null_prompt_embeds = (
            null_prompt_embeds if null_prompt_embeds is not None else getattr(dataset, "null_prompt_embeds", None)
        )
        if config.text_dropout > 0 and self.null_prompt_embeds is None:
            raise ValueError(
                "text_dropout needs null_prompt_embeds, the embeddings of the empty prompt; or set it to 0"
            )
        self.model = model if model is not None else self._load_student()
        if isinstance(dataset, LatentDataset):
            dataset.check_model(self.model)
        self.teacher = teacher
        self.noise_options = self._noise_options()
        if config.train == "lora" and not hasattr(self.model, "peft_config"):
            parameters.add_lora(self.model, config.lora_rank, config.lora_alpha, stable_seed(config.seed, "lora"))

    def run(self) -> TrainingResult:
        """Trains, and returns what came of it.

        Raises:
            ValueError: If a checkpoint does not fit, or the output already holds a run that is not resumed.
            FloatingPointError: If the loss is no longer finite.
        """
        result = TrainingResult(self.model)
        stages = self._stages()
        position, lock = None, None
        if self.output is not None:
            result.resumed_from, position, lock = find_start(self.config, self.accelerator, self._state())
        try:
            self._prepare_output(position)
            for stage in stages:
                self._run_stage(stage, position, result)
            self._finish(result)
        finally:
            if self.metrics is not None:
                self.metrics.close()
            if lock is not None:
                lock.close()
        return result

    def _load_student(self) -> nn.Module:
        assert self.source is not None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stable_seed(self.config.seed, "parameters"))
            return loading.load_student(self.source, self.config.component, self.config.mhla)

    def _noise_options(self) -> NoiseOptions:
        config, shift, levels = self.config, self.config.flow_shift, (0.0, 1.0)
        if self.source is not None:
            shift = shift if shift is not None else loading.default_flow_shift(self.source)
            levels = loading.sigma_range(self.source, config.component)
        return NoiseOptions(
            logit_mean=config.logit_mean,
            logit_std=config.logit_std,
            flow_shift=3.0 if shift is None else shift,
            sigma_range=levels,
            text_dropout=config.text_dropout,
        )

    def _state(self) -> dict[str, Any]:
        return run_state(self.config, self.model, self.accelerator, len(self.dataset), self.noise_options.flow_shift)

    def _stages(self) -> list[Stage]:
        config = self.config
        stages: list[Stage] = []
        if config.transfer_steps:
            stages.append(Transfer(config, self.model, self._get_teacher))
        if config.max_steps:
            stages.append(FineTuning(config, self.model))
        return stages

    def _get_teacher(self) -> nn.Module:
        if self.teacher is None:
            if self.source is None:
                raise ValueError("transfer_steps needs a teacher: the softmax model")
            low = {"bf16": torch.bfloat16, "fp16": torch.float16}
            dtype = low.get(self.accelerator.mixed_precision, torch.float32)
            self.teacher = loading.load_teacher(self.source, self.config.component, self.config.teacher, dtype)
        return self.teacher.to(self.accelerator.device).requires_grad_(False).eval()

    def _prepare_output(self, position: Position | None) -> None:
        if self.output is not None and self.accelerator.is_main_process:
            self.output.mkdir(parents=True, exist_ok=True)
            for folder in (self.output, self.output / "checkpoints"):
                remove_leftovers(folder)
            write_json(self.output / "training_config.json", self.config.to_dict())
            self.metrics = MetricsFile(self.output / "metrics.jsonl", position)
        open_trackers(self.accelerator, self.config)
        self.validator = self._make_validator()
        self.accelerator.wait_for_everyone()

    def _make_validator(self) -> Validator | None:
        config = self.config
        if not config.validation_prompts or not self.accelerator.is_main_process or not config.max_steps:
            return None
        if self.source is None or self.output is None or not isinstance(self.dataset, LatentDataset):
            raise ValueError(
                "validation_prompts need model, output and cache: a pipeline, its data and where to write"
            )
        if loading.read_index(self.source).get("boundary_ratio") is not None:
            raise ValueError("validation_prompts cannot be used for one transformer of a pipeline with two")
        settings = self.dataset.manifest["settings"]
        size = (settings["num_frames"], settings["height"], settings["width"])
        return Validator(self.source, config, size, self.dataset.max_sequence_length, self.accelerator.device)

    def _run_stage(self, stage: Stage, position: Position | None, result: TrainingResult) -> None:
        """Runs what is left of a stage after `position`."""
        losses = [row["loss"] for row in (self.metrics.rows if self.metrics else []) if row["stage"] == stage.name]
        result.losses[stage.name] = losses
        result.seconds_per_step[stage.name] = 0.0
        if position is not None and position >= Position.of(stage.name, stage.steps):
            if position.stage == stage.name:
                self._load_last(stage, result.resumed_from)
            return
        reached = position is not None and position.stage == stage.name
        start = position.step if reached and position is not None else 0
        checkpoint = result.resumed_from if reached else None
        config, accelerator = self.config, self.accelerator
        names = stage.trainable_names()
        parameters.set_trainable(self.model, names)
        self.model.train()
        if config.gradient_checkpointing:
            self.model.enable_gradient_checkpointing()
        if checkpoint is not None:
            checkpoints.load_weights(checkpoint, self.model, names)
        optimizer = make_optimizer(self.model, names, config, stage.learning_rate, stage.mhla_learning_rate)
        module, optimizer = accelerator.prepare(stage.module(), optimizer)
        if checkpoint is not None:
            checkpoints.load_optimizer(checkpoint, self.model, optimizer.optimizer, names)
            self._load_scaler(checkpoints.read_state(checkpoint))
        durations = []
        with self._progress(stage, start) as bar, self._batches(stage, start) as batches:
            for step in range(start, stage.steps):
                began = time.perf_counter()
                loss, logs = self._step(stage, module, optimizer, step, batches)
                durations.append(time.perf_counter() - began)
                losses.append(loss)
                self._report(stage, step + 1, loss, logs, durations[-1], bar)
                self._save_if_due(stage, step + 1, optimizer.optimizer, names)
                self._validate_if_due(stage, step + 1, module)
        result.seconds_per_step[stage.name] = math.fsum(durations) / len(durations)
        if isinstance(stage, Transfer):
            # Fine-tuning does not need it, and it is as large as the model.
            self.teacher = stage.teacher = None
        del module, optimizer
        accelerator.free_memory()

    def _load_last(self, stage: Stage, checkpoint: Path | None) -> None:
        """Loads the weights at the end of a stage, from where the next one, or the export, goes on."""
        if checkpoint is not None:
            checkpoints.load_weights(checkpoint, self.model, stage.trainable_names())

    def _step(
        self,
        stage: Stage,
        module: nn.Module,
        optimizer: Any,
        step: int,
        batches: Callable[[int, int], FlowBatch],
    ) -> tuple[float, dict[str, float]]:
        """One optimizer step; returns the loss averaged over micro-steps and processes, and further figures."""
        config, accelerator = self.config, self.accelerator
        factor = learning_rate_factor(
            step, schedule=config.lr_schedule, warmup_steps=config.warmup_steps, total_steps=stage.steps
        )
        rate = set_learning_rate(optimizer.optimizer, factor)
        total = torch.zeros((), device=accelerator.device)
        for micro_step in range(config.gradient_accumulation_steps):
            batch = batches(step, micro_step).to(accelerator.device)
            last = micro_step + 1 == config.gradient_accumulation_steps
            with nullcontext() if last else accelerator.no_sync(module):
                loss = stage.loss(module, batch, accelerator) / config.gradient_accumulation_steps
                accelerator.backward(loss)
            total += loss.detach()
        logs = {"lr": rate}
        if config.max_grad_norm:
            norm = accelerator.clip_grad_norm_(module.parameters(), config.max_grad_norm)
            logs["grad_norm"] = float(checkpoints.full_tensor(norm))
        optimizer.step()
        optimizer.zero_grad()
        loss_value = float(accelerator.reduce(total, reduction="mean"))
        if not math.isfinite(loss_value):
            raise FloatingPointError(
                f"the loss of {stage.name} step {step + 1} is {loss_value}; lower the learning rate"
            )
        return loss_value, logs

    def _batches(self, stage: Stage, start: int) -> Prefetcher:
        config = self.config
        order = DataOrder(
            dataset_size=len(self.dataset),
            batch_size=config.batch_size,
            seed=config.seed,
            stage=stage.name,
            accumulation_steps=config.gradient_accumulation_steps,
            world_size=self.accelerator.num_processes,
            rank=self.accelerator.process_index,
        )

        def make(step: int, micro_step: int) -> FlowBatch:
            return make_batch(self.dataset, order, step, micro_step, self.noise_options, self.null_prompt_embeds)

        # On a CPU there is nothing to overlap with: the cores are busy training.
        ahead = self.accelerator.device.type != "cpu"
        return Prefetcher(make, micro_steps=config.gradient_accumulation_steps, steps=stage.steps, ahead=ahead)

    def _progress(self, stage: Stage, start: int):
        from tqdm.auto import tqdm

        hidden = not (self.config.progress and self.accelerator.is_local_main_process)
        return tqdm(total=stage.steps, initial=start, desc=stage.name, unit="step", disable=hidden)

    def _report(self, stage: Stage, step: int, loss: float, logs: dict[str, float], seconds: float, bar: Any) -> None:
        bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        bar.update()
        if self.metrics is not None:
            row = {"stage": stage.name, "step": step, "loss": loss, **logs, "seconds": round(seconds, 6)}
            self.metrics.append(row)
        if self.accelerator.trackers:
            offset = self.config.transfer_steps if stage.name == "finetune" else 0
            values = {f"{stage.name}/{name}": value for name, value in {"loss": loss, **logs}.items()}
            self.accelerator.log(values, step=offset + step)
        if self.callback is not None:
            self.callback(stage.name, step, loss)

    def _save_if_due(self, stage: Stage, step: int, optimizer: torch.optim.Optimizer, names: list[str]) -> None:
        every = self.config.checkpointing_steps
        if self.output is None or not every or (step % every and step != stage.steps):
            return
        weights, moments = checkpoints.collect_state(self.model, optimizer, names)
        if self.accelerator.is_main_process:
            state = self._state()
            state["learning_rates"] = [group["lr"] for group in optimizer.param_groups]
            scaler = self.accelerator.scaler
            state["scaler"] = scaler.state_dict() if scaler is not None else None
            checkpoints.save_checkpoint(
                self.output / "checkpoints",
                Position.of(stage.name, step),
                weights,
                moments,
                state,
                self.config.checkpoints_total_limit,
            )
        self.accelerator.wait_for_everyone()

    def _load_scaler(self, state: dict[str, Any]) -> None:
        if self.accelerator.scaler is not None and state.get("scaler"):
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def _validate_if_due(self, stage: Stage, step: int, module: nn.Module) -> None:
        config = self.config
        if stage.name != "finetune" or not config.validation_prompts:
            return
        if step % config.validation_steps and step != stage.steps:
            return
        if self.validator is not None and self.output is not None:
            with self.accelerator.autocast():
                _, videos = self.validator.write(self.model, self.output / "validation", step)
            for tracker in self.accelerator.trackers:
                images = {f"validation/{number}": frame_strip(video)[None] for number, video in enumerate(videos)}
                tracker.log_images(images, step=config.transfer_steps + step, **_image_options(tracker))
        self.accelerator.wait_for_everyone()

    def _finish(self, result: TrainingResult) -> None:
        config, main = self.config, self.accelerator.is_main_process
        model = unsharded(self.model)
        if main and config.train == "lora" and self.output is not None:
            save_adapter(self.output / "lora", model, config.component)
        if config.train == "lora":
            parameters.merge_lora(model)
        if model is self.model:
            model.to(self.accelerator.device)
        model.requires_grad_(True).eval()
        result.model = model
        if self.output is not None and self.source is not None:
            result.pipeline = self.output / "pipeline"
            if main:
                record = self._state()
                is_directory = Path(str(config.model)).is_dir()
                record["source"] = {"location": str(self.source.resolve()) if is_directory else str(config.model)}
                record["final_losses"] = {name: values[-1] for name, values in result.losses.items() if values}
                record["versions"] = _versions()
                export_pipeline(self.source, result.pipeline, config.component, model, record)
        self.accelerator.wait_for_everyone()
        if self.owns_accelerator:
            self.accelerator.end_training()


def check_distribution(accelerator: Accelerator, config: TrainingConfig) -> None:
    """Refuses ways of running that would fail hours later.

    Raises:
        ValueError: For DeepSpeed and others, FSDP 1, and what FSDP cannot do here; the message names the option.
    """
    kind = accelerator.distributed_type
    if kind in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        return
    if kind != DistributedType.FSDP:
        raise ValueError(f"training under {kind.value} is not supported; use one process, DDP or FSDP 2")
    if not getattr(accelerator, "is_fsdp2", False):
        raise ValueError("training under FSDP 1 is not supported; set fsdp_version: 2 in accelerate's configuration")
    if config.transfer_steps:
        raise ValueError("transfer_steps must be 0 under FSDP: match the layers first in a run without sharding")
    if config.train == "lora":
        raise ValueError("train='lora' does not run under FSDP; use DDP, or train full")
    if config.validation_prompts:
        raise ValueError("validation_prompts do not run under FSDP: generate from a checkpoint's pipeline instead")


def _image_options(tracker: Any) -> dict[str, Any]:
    return {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "diffusers", "accelerate", "safetensors")}
