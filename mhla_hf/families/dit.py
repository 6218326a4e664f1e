# SPDX-License-Identifier: Apache-2.0
"""MHLA for DiT and PixArt: the token grid travels in `cross_attention_kwargs`, which blocks give their attention."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from diffusers.loaders import PeftAdapterMixin
from diffusers.models.attention_processor import Attention, AttnProcessor
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from diffusers.models.transformers.pixart_transformer_2d import PixArtTransformer2DModel

from ..models.attention import (
    KeepsMHLAProcessors,
    MHLAAttnProcessor,
    MHLAImageAttention,
    MHLAImageModelMixin,
    RefusesFusedProjections,
)
from ..models.directory import ModelDirectory
from ..models.ordering import order_of
from ..utils.compat.diffusers import checkpointed
from . import noise_prediction
from .noise_prediction import NoiseSchedule
from .objectives import Inputs, LatentBatch, Objective, Tensors, read_scheduler


# Entries of a scheduler's configuration that the noise of DiT depends on.
_NOISE_ENTRIES = (
    "beta_start", "beta_end", "beta_schedule", "num_train_timesteps", "prediction_type", "trained_betas",
    "rescale_betas_zero_snr", "use_flow_sigmas", "_class_name",
)  # fmt: skip
# Scheduler of DiT's pipeline, for models that come without one.
_DIT_SCHEDULER = {
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
}


class MHLADiTTransformer2DModel(MHLAImageModelMixin, DiTTransformer2DModel, PeftAdapterMixin):
    """`DiTTransformer2DModel` whose self-attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary DiT ones with fresh MHLA parameters. Besides
    it takes images that are not square, and LoRA adapters, which upstream's class does not.
    """

    _no_split_modules = ["BasicTransformerBlock"]
    _repeated_blocks = ["BasicTransformerBlock"]

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.LongTensor | None = None,
        class_labels: torch.LongTensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """Like upstream, but unpatchifies to the input's aspect ratio; upstream always returns a square.

        Args:
            hidden_states: Latents `[B, C, height, width]`.
            timestep: `[B]`.
            class_labels: `[B]`.
            cross_attention_kwargs: More arguments for the attention processors.
            return_dict: Return an output object, or a tuple.

        Returns:
            The prediction `[B, C_out, height, width]`; sizes that the patches do not divide are rounded down.
        """
        patch = self.patch_size
        height, width = hidden_states.shape[-2] // patch, hidden_states.shape[-1] // patch
        layout = None if cross_attention_kwargs else order_of(self, (height, width))
        attention_kwargs = {"grid": (height, width), "block_order": layout is not None}
        attention_kwargs = {**(cross_attention_kwargs or {}), **attention_kwargs}
        hidden_states = self.pos_embed(hidden_states)
        if layout is not None:
            hidden_states = layout.to_block_order(hidden_states)
        for block in self.transformer_blocks:
            arguments = (hidden_states, None, None, None, timestep, attention_kwargs, class_labels)
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states = checkpointed(self, block, *arguments)
            else:
                hidden_states = block(*arguments)
        conditioning = self.transformer_blocks[0].norm1.emb(timestep, class_labels, hidden_dtype=hidden_states.dtype)
        shift, scale = self.proj_out_1(F.silu(conditioning)).chunk(2, dim=1)
        hidden_states = self.norm_out(hidden_states) * (1 + scale[:, None]) + shift[:, None]
        hidden_states = self.proj_out_2(hidden_states)
        if layout is not None:
            hidden_states = layout.from_block_order(hidden_states)
        patches = hidden_states.unflatten(2, (patch, patch, -1)).unflatten(1, (height, width))
        output = patches.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)


class MHLAPixArtTransformer2DModel(
    RefusesFusedProjections, KeepsMHLAProcessors, MHLAImageModelMixin, PixArtTransformer2DModel, PeftAdapterMixin
):
    """`PixArtTransformer2DModel` (alpha and sigma) whose self-attention is MHLA in the chosen layers.

    Takes upstream's arguments plus `mhla`, an `MHLAConfig` or a dict of its options, kept under the key `mhla` of
    `config.json`. `from_pretrained` loads MHLA checkpoints, and ordinary PixArt ones with fresh MHLA parameters.
    Besides it takes LoRA adapters, which upstream's class does not.
    """

    _repeated_blocks = ["BasicTransformerBlock"]

    def _use_mhla(self, attentions: list[nn.Module], mhla_layers: list[int]) -> None:
        super()._use_mhla(attentions, mhla_layers)
        for block in self.transformer_blocks:
            # It is handed the grid as well, and has no use for it.
            block.attn2.__class__ = MHLAImageAttention

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        timestep: torch.LongTensor | None = None,
        added_cond_kwargs: dict[str, torch.Tensor] | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        attention_mask: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        return_dict: bool = True,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """As upstream. MHLA layers take no `attention_mask` (`ValueError`)."""
        grid = tuple(size // self.config.patch_size for size in hidden_states.shape[-2:])
        return super().forward(
            hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            timestep=timestep,
            added_cond_kwargs=added_cond_kwargs,
            cross_attention_kwargs={**(cross_attention_kwargs or {}), "grid": grid},
            attention_mask=attention_mask,
            encoder_attention_mask=encoder_attention_mask,
            return_dict=return_dict,
        )

    @classmethod
    def own_inputs(cls, model: Any, grid: tuple[int, ...], text: int, random: Any) -> dict[str, Any]:
        """Return the size of the image, for models that are told it."""
        return (
            {"added_cond_kwargs": {"resolution": random(2), "aspect_ratio": random(1)}}
            if model.use_additional_conditions
            else {}
        )

    def set_default_attn_processor(self) -> None:
        """As upstream for the layers that are not MHLA; those get the MHLA processor."""
        for attention in self.modules():
            if isinstance(attention, Attention):
                attention.set_processor(MHLAAttnProcessor() if hasattr(attention, "mhla") else AttnProcessor())


@dataclass(frozen=True, kw_only=True)
class DiTObjective(Objective):
    """Noise prediction on uniform timesteps; where the model predicts variances, with their variational bound.

    Samples have `latents` `[C, H, W]` and `class_label` `[]`, int64. The label of a sample without class is the
    number of classes.

    Attributes:
        scheduler: Configuration of the pipeline's scheduler, whose steps are trained.

    Raises:
        ValueError: If the scheduler is for another objective; see `noise_prediction.NoiseSchedule`.
    """

    name = "dit"
    condition_names = ("class_label",)
    encoders = ("vae",)
    # The last layer of the model reuses the first block's embeddings, after that block was resharded.
    sharded_classes = ("BasicTransformerBlock", "CombinedTimestepLabelEmbeddings")

    scheduler: Mapping[str, Any] = field(default_factory=lambda: dict(_DIT_SCHEDULER))

    def __post_init__(self) -> None:
        # Fail before the first batch.
        _ = self.schedule

    @cached_property
    def schedule(self) -> NoiseSchedule:
        """The scheduler's betas and all that follows from them, on the CPU."""
        return NoiseSchedule.from_config(self.scheduler)

    def check_data(self, model: nn.Module, sample: Tensors, null_condition: Tensors | None = None) -> None:
        """Check that labels are those of the model; a wrong null label would train a class."""
        super().check_data(model, sample, null_condition)
        config: Any = model.config
        label, classes = int(sample["class_label"]), config["num_embeds_ada_norm"]
        null_label = classes if null_condition is None else int(null_condition["class_label"])
        if not 0 <= label <= classes or null_label != classes:
            raise ValueError(
                f"class_label must be from 0 to {classes} for this model, and {classes} in null_condition; got "
                f"{label} and {null_label}"
            )

    def noise_levels(self, uniform: torch.Tensor) -> torch.Tensor:
        """Return timesteps, int64."""
        return noise_prediction.timesteps_from_uniform(uniform, self.schedule)

    def add_noise(self, latents: torch.Tensor, noise: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """Return x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps."""
        return noise_prediction.add_noise(latents, noise, levels, self.schedule)

    def model_inputs(self, config: Any, noisy: torch.Tensor, levels: torch.Tensor, condition: Tensors) -> Inputs:
        """Return the arguments of `forward`, which predicts noise `[B, C, H, W]`, and variances in some models."""
        labels = condition["class_label"]
        return {"hidden_states": noisy, "timestep": levels, "class_labels": labels, "return_dict": False}

    def losses_of(self, prediction: torch.Tensor, noisy: torch.Tensor, batch: LatentBatch) -> torch.Tensor:
        """Return the mean squared error of the noise, plus the weighted variational bound of predicted variances."""
        return noise_prediction.noise_prediction_losses(
            prediction, batch.noise, noisy, batch.latents, batch.levels, self.schedule
        )

    def distillation_losses(
        self, prediction: torch.Tensor, target: torch.Tensor, noisy: torch.Tensor, batch: LatentBatch
    ) -> torch.Tensor:
        """Return the mean squared error to the teacher's noise, plus the divergence from its learned variances."""
        return noise_prediction.noise_distillation_losses(prediction, target, noisy, batch.levels, self.schedule)

    def check_model(self, config: Any) -> None:
        """Take all: variances that a model predicts are further channels."""

    @classmethod
    def for_run(cls, config: Any, directory: ModelDirectory | None) -> Any:
        """Take the noise of the pipeline's scheduler."""
        stored = {} if directory is None else read_scheduler(directory)
        noise = {name: stored[name] for name in _NOISE_ENTRIES if stored.get(name) is not None}
        return cls(scheduler=noise) if noise else cls()

    def encode_condition(self, pipeline: Any, condition: str | int, length: int | None) -> dict[str, torch.Tensor]:
        return {"class_label": torch.tensor(int(condition))}

    def encode_null_condition(self, pipeline: Any, length: int | None, num_classes: int) -> dict[str, torch.Tensor]:
        """Return the label after the last class."""
        return {"class_label": torch.tensor(num_classes)}

    def training_context(self, model: nn.Module) -> AbstractContextManager[None]:
        """Drop classes by the seed of the sample alone, not also in every block."""
        return noise_prediction.no_label_dropout(model)
