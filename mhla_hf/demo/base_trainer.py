# SPDX-License-Identifier: Apache-2.0
"""Flow-matching pretraining of the demo's text encoder and softmax transformer on a pool of latents."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from transformers import PreTrainedTokenizerFast

from .base_model import BaseModelConfig, assemble_pipeline, build_text_encoder, build_transformer, write_pipeline
from .checkpoints import load_checkpoint, save_checkpoint
from .latents import LatentPool
from .muon import Muon
from .text import (
    PRETRAINING_TEXT_LENGTH,
    draw_padded_length,
    encode_text,
    install_padded_text,
    normal_quantiles,
    padding_bias,
    tokenize,
)


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig:
    """How the base model is made.

    Args:
        model: Sizes.
        seed: Chooses initial weights, videos, noise.
        device: `"cpu"` or `"cuda"`.
        vae_crop_steps: VAE steps on crops.
        vae_full_steps: VAE steps on whole videos.
        decoder_steps: Further steps of the decoder alone, on whole videos.
        pool_size: Training videos that are encoded once and used over and over.
        held_out_size: Held-out videos for the loss that is logged.
        workers: Processes that encode.
        steps: Steps of the transformer and text encoder.
        minutes: Stop the transformer's training after this long, whatever `steps` says; None for no limit.
        batch_size: Videos per step.
        matrix_learning_rate: Of Muon, for the matrices of the transformer blocks.
        learning_rate: Of AdamW, for everything else.
        warmup_steps: Linear warm-up.
        decay_fraction: Final part of the steps in which both rates fall to zero.
        caption_dropout: Share of captions replaced by the empty one, for guidance.
        ema_decay: Decay of the averaged weights that are saved.
        compile: Compile the transformer; a few minutes that pay off in long runs.
        snapshot_minutes: How often a complete pipeline of the averaged weights is written to the work directory.
        base: Directory of a finished pipeline of the same sizes to start from; its VAE is kept.
    """

    model: BaseModelConfig = field(default_factory=BaseModelConfig)
    seed: int = 0
    device: str = "cpu"
    vae_crop_steps: int = 600
    vae_full_steps: int = 30
    decoder_steps: int = 300
    pool_size: int = 3250
    held_out_size: int = 64
    workers: int = 2
    steps: int = 3550
    minutes: float | None = None
    batch_size: int = 12
    matrix_learning_rate: float = 3e-3
    learning_rate: float = 1.5e-3
    warmup_steps: int = 50
    decay_fraction: float = 0.35
    caption_dropout: float = 0.1
    ema_decay: float = 0.998
    compile: bool = False
    snapshot_minutes: float = 10.0
    base: str | None = None


class BaseTrainer:
    """Flow-matching training of the text encoder and the transformer on a pool of latents.

    Args:
        config: How.
        tokenizer: Of the captions.
        vae: Trained; only goes into the pipelines that are written.
        pools: Latents of the splits `train` and `held_out`.
        work: Directory for checkpoints and snapshots.
        log: Gets lines of progress.
    """

    def __init__(
        self,
        config: PretrainingConfig,
        tokenizer: PreTrainedTokenizerFast,
        vae: AutoencoderKLWan,
        pools: dict[str, LatentPool],
        work: Path,
        log: Callable[[str], None] = print,
    ) -> None:
        self.config, self.tokenizer, self.vae, self.work, self.log = config, tokenizer, vae, work, log
        self.pools = {name: pool.to(config.device) for name, pool in pools.items()}
        torch.manual_seed(config.seed)
        self.models = torch.nn.ModuleDict(
            {
                "transformer": build_transformer(config.model),
                "text_encoder": build_text_encoder(config.model, len(tokenizer)),
            }
        ).to(config.device)
        if config.base is not None:
            start = WanPipeline.from_pretrained(config.base, vae=None, torch_dtype=torch.float32)
            for name, model in self.models.items():
                model.load_state_dict(getattr(start, name).state_dict())
        self.processor = install_padded_text(self.models["transformer"])
        self.average = {name: value.detach().clone() for name, value in self.models.state_dict().items()}
        blocks = [p for p in self.models["transformer"].blocks.parameters() if p.ndim == 2]
        chosen = {id(parameter) for parameter in blocks}
        others = [parameter for parameter in self.models.parameters() if id(parameter) not in chosen]
        self.optimizers = [
            Muon(blocks, lr=config.matrix_learning_rate),
            torch.optim.AdamW(others, lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.rates = (config.matrix_learning_rate, config.learning_rate)
        self.step, self.seconds = 0, 0.0
        self.history: list[list[float]] = []
        empty_ids, empty_length = tokenize(tokenizer, [""])
        self.empty_ids, self.empty_length = empty_ids.to(config.device), empty_length.to(config.device)
        self.forward = self.models["transformer"]
        if config.compile:
            self.forward = torch.compile(self.models["transformer"])
        self._resume()

    def run(self) -> None:
        """Train until `steps` or `minutes` are over; checkpoints and snapshots on the way."""
        config = self.config
        started = last_snapshot = time.monotonic()
        before = self.seconds
        recent = []
        while self.step < config.steps:
            recent.append(self._train_step())
            self.step += 1
            now = time.monotonic()
            self.seconds = before + now - started
            if self.step % 50 == 0:
                mean = sum(recent) / len(recent)
                self.log(f"step {self.step}/{config.steps} loss {mean:.4f} {self.seconds:.0f} s")
                recent = []
            if self.step % 250 == 0:
                self.history.append([self.step, self.held_out_loss()])
                self.log(f"step {self.step} held-out loss {self.history[-1][1]:.4f}")
                self._save()
            if now - last_snapshot > 60 * config.snapshot_minutes:
                last_snapshot = now
                self._save()
                write_pipeline(self.pipeline(), self.work / "snapshot", self.facts())
            if config.minutes is not None and self.seconds > 60 * config.minutes:
                break
        self.history.append([self.step, self.held_out_loss()])
        self._save()

    def pipeline(self) -> WanPipeline:
        """Build the pipeline of the averaged weights, on the CPU."""
        parts = {
            "transformer": build_transformer(self.config.model),
            "text_encoder": build_text_encoder(self.config.model, len(self.tokenizer)),
        }
        torch.nn.ModuleDict(parts).load_state_dict({name: value.cpu() for name, value in self.average.items()})
        return assemble_pipeline(
            self.config.model, self.tokenizer, parts["text_encoder"], self.vae, parts["transformer"]
        )

    def facts(self) -> dict:
        """Describe the run: configuration, steps, seconds, held-out losses, versions."""
        import diffusers
        import transformers

        return {
            "config": asdict(self.config),
            "steps": self.step,
            "seconds": round(self.seconds, 1),
            "held_out_loss": [[step, round(loss, 5)] for step, loss in self.history],
            "parameters": sum(parameter.numel() for parameter in self.models["transformer"].parameters()),
            "versions": {
                "torch": torch.__version__,
                "diffusers": diffusers.__version__,
                "transformers": transformers.__version__,
            },
        }

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Flow-matching loss of the averaged weights on held-out scans, with noise that is the same at every call."""
        current = {name: value.clone() for name, value in self.models.state_dict().items()}
        self.models.load_state_dict(self.average)
        generator = torch.Generator().manual_seed(10_000 + self.config.seed)
        pool, losses = self.pools["held_out"], []
        for start in range(0, len(pool), 16):
            rows = torch.arange(start, min(start + 16, len(pool)))
            losses.append(self._loss(pool, rows, generator, PRETRAINING_TEXT_LENGTH, 0.0, self.models["transformer"]))
        self.models.load_state_dict(current)
        return torch.stack(losses).mean().item()

    def _train_step(self) -> float:
        config = self.config
        # One generator per step makes a resumed run the same as an uninterrupted one.
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
        rows = torch.randint(len(self.pools["train"]), (config.batch_size,), generator=generator)
        padded_length = draw_padded_length(generator)
        loss = self._loss(self.pools["train"], rows, generator, padded_length, config.caption_dropout, self.forward)
        factor = min(1.0, (self.step + 1) / config.warmup_steps)
        factor *= min(1.0, (config.steps - self.step) / max(1.0, config.decay_fraction * config.steps))
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.zero_grad(set_to_none=True)
            optimizer.param_groups[0]["lr"] = rate * factor
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.models.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        decay = min(config.ema_decay, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            for name, value in self.models.state_dict().items():
                self.average[name].lerp_(value, 1.0 - decay)
        value = loss.item()
        if not math.isfinite(value):
            raise ValueError(f"The loss is {value} at step {self.step}; use a smaller learning_rate.")
        return value

    def _loss(
        self,
        pool: LatentPool,
        rows: torch.Tensor,
        generator: torch.Generator,
        padded_length: int,
        caption_dropout: float,
        transformer: torch.nn.Module,
    ) -> torch.Tensor:
        device, shift = self.config.device, self.config.model.flow_shift
        clean = pool.latents[rows.to(device)]
        noise = torch.randn(clean.shape, generator=generator).to(device)
        sigma = torch.sigmoid(normal_quantiles(len(rows), generator)).to(device)
        sigma = shift * sigma / (1.0 + (shift - 1.0) * sigma)
        dropped = (torch.rand(len(rows), generator=generator) < caption_dropout).to(device)
        token_ids = torch.where(dropped[:, None], self.empty_ids, pool.token_ids[rows.to(device)])
        lengths = torch.where(dropped, self.empty_length, pool.lengths[rows.to(device)])
        text = encode_text(self.models["text_encoder"], token_ids, lengths)
        self.processor.bias = padding_bias(lengths, token_ids.shape[1], padded_length)
        weight = sigma.view(-1, 1, 1, 1, 1)
        predicted = transformer(
            hidden_states=(1.0 - weight) * clean + weight * noise,
            timestep=1000.0 * sigma,
            encoder_hidden_states=text,
            return_dict=False,
        )[0]
        return (predicted - (noise - clean)).square().mean()

    def _save(self) -> None:
        tensors = {f"model.{name}": value for name, value in self.models.state_dict().items()}
        tensors |= {f"average.{name}": value for name, value in self.average.items()}
        # T5 encoders share their embedding under two names, and safetensors wants separate memory.
        tensors = {name: value.clone() for name, value in tensors.items()}
        state = {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "seconds": self.seconds,
            "history": self.history,
        }
        save_checkpoint(self.work / "transformer_checkpoint", self.step, tensors, state)

    def _resume(self) -> None:
        checkpoint = load_checkpoint(self.work / "transformer_checkpoint")
        if checkpoint is None:
            return
        tensors, state = checkpoint
        self.models.load_state_dict({k.removeprefix("model."): v for k, v in tensors.items() if k[0] == "m"})
        self.average = {k.removeprefix("average."): v for k, v in tensors.items() if k[0] == "a"}
        self.average = {name: value.to(self.config.device) for name, value in self.average.items()}
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
        self.log(f"resumed at step {self.step}")
