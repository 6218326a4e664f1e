# SPDX-License-Identifier: Apache-2.0
"""Flow-matching pretraining of the demo's text encoder and softmax transformer on a pool of latents."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.training_utils import EMAModel
from transformers import PreTrainedTokenizerFast
from transformers.hf_argparser import HfArg

from mhla_hf.demo.run import TEXT_LENGTH
from mhla_hf.training.optimizers import Muon
from mhla_hf.utils.machine import machine_facts

from .checkpoints import load_checkpoint, save_checkpoint
from .models import BaseModelConfig, assemble_pipeline, build_text_encoder, build_transformer, write_pipeline
from .text import (
    draw_padded_length,
    encode_text,
    install_padded_text,
    normal_quantiles,
    padding_bias,
    tokenize,
)


LatentPool = dict[str, torch.Tensor]
"""Encoded videos and captions: `latents` `[N, C, f, h, w]` fp32, `token_ids` `[N, L]` and `lengths` `[N]` int64."""


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig(BaseModelConfig):
    """Options of the pretraining, besides the sizes of the model. Each field's `help` describes it."""

    seed: int = HfArg(default=0, help="Seed of initial weights, videos and noise.")
    device: str = HfArg(default="cpu", help="cpu or cuda.")
    vae_crop_steps: int = HfArg(default=600, aliases=["--vae-steps"], help="VAE steps on crops.")
    vae_full_steps: int = HfArg(default=30, help="VAE steps on whole videos.")
    decoder_steps: int = HfArg(default=300, help="Further steps of the VAE's decoder alone, on whole videos.")
    pool_size: int = HfArg(default=3250, aliases=["--pool"], help="Training videos, encoded once and reused.")
    held_out_size: int = HfArg(default=64, help="Held-out videos of the loss that is logged.")
    steps: int = HfArg(default=3550, help="Steps of the transformer and text encoder.")
    minutes: float | None = HfArg(default=None, help="Time limit of the transformer's training, whatever `steps` is.")
    batch_size: int = HfArg(default=12, help="Videos per step.")
    matrix_learning_rate: float = HfArg(default=3e-3, help="Rate of Muon, for the matrices of transformer blocks.")
    learning_rate: float = HfArg(default=1.5e-3, help="Rate of AdamW, for everything else.")
    warmup_steps: int = HfArg(default=50, help="Linear warm-up.")
    decay_fraction: float = HfArg(default=0.35, help="Final part of the steps in which both rates fall to zero.")
    caption_dropout: float = HfArg(default=0.1, help="Share of captions replaced by the empty one, for guidance.")
    ema_decay: float = HfArg(default=0.998, help="Decay of the averaged weights that are saved.")
    compile: bool = HfArg(default=False, help="Compile the transformer; pays off in long runs.")
    snapshot_minutes: float = HfArg(
        default=10.0, help="Minutes between complete pipelines of the averaged weights in the work directory."
    )
    base: str | None = HfArg(default=None, help="Finished pipeline of the same sizes to start from; its VAE is kept.")


class BaseTrainer:
    """Flow-matching training of the text encoder and the transformer on a pool of latents.

    Args:
        config: Options.
        tokenizer: Tokenizer of the captions.
        vae: Trained VAE; only part of the pipelines that are written.
        pools: Latents of the splits `train` and `held_out`.
        work: Directory of checkpoints and snapshots; training resumes from the former.
        log: Receives progress lines.
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
        self.pools = {split: {name: x.to(config.device) for name, x in pool.items()} for split, pool in pools.items()}
        torch.manual_seed(config.seed)
        self.models = self._build_models().to(config.device)
        if config.base is not None:
            start = WanPipeline.from_pretrained(config.base, vae=None, torch_dtype=torch.float32)
            for name, model in self.models.items():
                model.load_state_dict(getattr(start, name).state_dict())
        self.processor = install_padded_text(self.models["transformer"])
        self.average = EMAModel(self.models.parameters(), decay=config.ema_decay)
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
        self.empty_ids, self.empty_length = (x.to(config.device) for x in tokenize(tokenizer, [""]))
        self.forward = self.models["transformer"]
        if config.compile:
            self.forward = torch.compile(self.models["transformer"])
        self._resume()

    def run(self) -> None:
        """Trains until `steps` or `minutes` are over, with checkpoints and snapshots on the way."""
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
        """Builds the pipeline of the averaged weights, on the CPU."""
        models = self._build_models()
        self.average.copy_to(models.parameters())
        return assemble_pipeline(self.config, self.tokenizer, models["text_encoder"], self.vae, models["transformer"])

    def facts(self) -> dict:
        """Record of the run: configuration, steps, seconds, held-out losses, machine and versions."""
        return {
            "config": asdict(self.config),
            "steps": self.step,
            "seconds": round(self.seconds, 1),
            "held_out_loss": [[step, round(loss, 5)] for step, loss in self.history],
            "parameters": sum(parameter.numel() for parameter in self.models["transformer"].parameters()),
            "machine": machine_facts(torch.device(self.config.device)),
        }

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Flow-matching loss of the averaged weights on held-out scans, with the same noise at every call."""
        self.average.store(self.models.parameters())
        self.average.copy_to(self.models.parameters())
        generator = torch.Generator().manual_seed(10_000 + self.config.seed)
        pool, losses = self.pools["held_out"], []
        for rows in torch.arange(len(pool["latents"])).split(16):
            losses.append(self._loss(pool, rows, generator, TEXT_LENGTH, 0.0, self.models["transformer"]))
        self.average.restore(self.models.parameters())
        return torch.stack(losses).mean().item()

    def _build_models(self) -> torch.nn.ModuleDict:
        transformer = build_transformer(self.config)
        text_encoder = build_text_encoder(self.config, len(self.tokenizer))
        return torch.nn.ModuleDict({"transformer": transformer, "text_encoder": text_encoder})

    def _train_step(self) -> float:
        config = self.config
        # One generator per step makes a resumed run the same as an uninterrupted one.
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
        pool = self.pools["train"]
        rows = torch.randint(len(pool["latents"]), (config.batch_size,), generator=generator)
        padded_length = draw_padded_length(generator)
        loss = self._loss(pool, rows, generator, padded_length, config.caption_dropout, self.forward)
        factor = min(1.0, (self.step + 1) / config.warmup_steps)
        factor *= min(1.0, (config.steps - self.step) / max(1.0, config.decay_fraction * config.steps))
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.zero_grad(set_to_none=True)
            optimizer.param_groups[0]["lr"] = rate * factor
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.models.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.average.step(self.models.parameters())
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
        device, shift = self.config.device, self.config.flow_shift
        clean, token_ids, lengths = (pool[name][rows.to(device)] for name in ("latents", "token_ids", "lengths"))
        noise = torch.randn(clean.shape, generator=generator).to(device)
        sigma = torch.sigmoid(normal_quantiles(len(rows), generator)).to(device)
        sigma = shift * sigma / (1.0 + (shift - 1.0) * sigma)
        dropped = (torch.rand(len(rows), generator=generator) < caption_dropout).to(device)
        token_ids = torch.where(dropped[:, None], self.empty_ids, token_ids)
        lengths = torch.where(dropped, self.empty_length, lengths)
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
        state = {
            "step": self.step,
            "models": self.models.state_dict(),
            "average": self.average.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "seconds": self.seconds,
            "history": self.history,
        }
        save_checkpoint(self.work / "transformer.pt", state)

    def _resume(self) -> None:
        state = load_checkpoint(self.work / "transformer.pt")
        if state is None:
            return
        self.models.load_state_dict(state["models"])
        self.average.load_state_dict(state["average"])
        self.average.to(self.config.device)
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
        self.log(f"resumed at step {self.step}")
