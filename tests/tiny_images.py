# SPDX-License-Identifier: Apache-2.0
"""Tiny complete pipelines of image models and SANA-Video with random weights, as `tiny.py` makes them for Wan."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    DDIMScheduler,
    DiTPipeline,
    DiTTransformer2DModel,
    DPMSolverMultistepScheduler,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    SanaPipeline,
    SanaSprintPipeline,
    SanaTransformer2DModel,
    SanaVideoPipeline,
    SanaVideoTransformer3DModel,
    SCMScheduler,
)
from transformers import Gemma2Config, Gemma2Model, T5Config, T5EncoderModel

from tests.tiny import character_tokenizer, make, wan_vae


DIT: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
    # The pipeline's label for no class.
    "num_embeds_ada_norm": 1000,
}
"""Constructor arguments of the class-conditional transformer; half of its output is the learned variance."""


def image_vae() -> AutoencoderKL:
    """An autoencoder with four latent channels that halves height and width."""
    torch.manual_seed(0)
    stages = 2
    return AutoencoderKL(
        block_out_channels=(4,) * stages,
        down_block_types=("DownEncoderBlock2D",) * stages,
        up_block_types=("UpDecoderBlock2D",) * stages,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        sample_size=16,
    ).eval()


def dit_pipeline(transformer_cls: type | None = None, **transformer_overrides: Any) -> DiTPipeline:
    """A complete DiT pipeline of 16x16 images; arguments as for `tiny.wan_pipeline`."""
    transformer = make(transformer_cls or DiTTransformer2DModel, DIT, **transformer_overrides)
    pipeline = DiTPipeline(transformer=transformer, vae=image_vae(), scheduler=DDIMScheduler())
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


CAPTION_DIM = 16

SANA: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 12,
    "cross_attention_dim": 24,
    "caption_channels": CAPTION_DIM,
    # The pipeline's bins of aspect ratios are for 16, 32, 64 or 128: images of 512 pixels and more.
    "sample_size": 16,
}
"""Constructor arguments of the text-to-image transformer."""

SANA_SPRINT: dict[str, Any] = {
    **SANA,
    "guidance_embeds": True,
    "qk_norm": "rms_norm_across_heads",
    # Its bins are for images of 1024 pixels.
    "sample_size": 32,
}
"""The same for SANA-Sprint, which is told the guidance scale."""


def sana_vae() -> AutoencoderDC:
    """An autoencoder with four latent channels and images 32 times as wide."""
    torch.manual_seed(0)
    stages = 6
    return AutoencoderDC(
        latent_channels=4,
        encoder_block_out_channels=(4,) * stages,
        decoder_block_out_channels=(4,) * stages,
        encoder_layers_per_block=(1,) * stages,
        decoder_layers_per_block=(1,) * stages,
        encoder_qkv_multiscales=((),) * stages,
        decoder_qkv_multiscales=((),) * stages,
    ).eval()


def gemma(vocabulary_size: int) -> Gemma2Model:
    """A one-layer Gemma 2 of width `CAPTION_DIM`."""
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=vocabulary_size,
        hidden_size=CAPTION_DIM,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return Gemma2Model(config).eval()


def sana_pipeline(
    transformer_cls: type | None = None, *, sprint: bool = False, **transformer_overrides: Any
) -> SanaPipeline | SanaSprintPipeline:
    """A complete SANA or SANA-Sprint pipeline; arguments as for `tiny.wan_pipeline`."""
    tokenizer, sizes = character_tokenizer(), SANA_SPRINT if sprint else SANA
    parts = {
        "tokenizer": tokenizer,
        "text_encoder": gemma(len(tokenizer)),
        "vae": sana_vae(),
        "transformer": make(transformer_cls or SanaTransformer2DModel, sizes, **transformer_overrides),
    }
    if sprint:
        pipeline = SanaSprintPipeline(**parts, scheduler=SCMScheduler())
    else:
        options = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
        pipeline = SanaPipeline(**parts, scheduler=DPMSolverMultistepScheduler(**options))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


PIXART: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "cross_attention_dim": 24,
    "caption_channels": CAPTION_DIM,
    "sample_size": 8,
    "patch_size": 2,
}
"""Constructor arguments of the text-to-image transformer; half of its output is the learned variance."""


def t5_encoder(vocabulary_size: int) -> T5EncoderModel:
    """A one-layer T5 encoder of width `CAPTION_DIM`."""
    torch.manual_seed(0)
    sizes = {"d_model": CAPTION_DIM, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5EncoderModel(T5Config(vocab_size=vocabulary_size, **sizes)).eval()


def pixart_pipeline(
    transformer_cls: type | None = None, *, sigma: bool = False, **transformer_overrides: Any
) -> PixArtAlphaPipeline | PixArtSigmaPipeline:
    """A complete PixArt pipeline, alpha or sigma; arguments as for `tiny.wan_pipeline`."""
    tokenizer = character_tokenizer()
    pipeline = (PixArtSigmaPipeline if sigma else PixArtAlphaPipeline)(
        tokenizer=tokenizer,
        text_encoder=t5_encoder(len(tokenizer)),
        vae=image_vae(),
        transformer=make(transformer_cls or PixArtTransformer2DModel, PIXART, **transformer_overrides),
        scheduler=DPMSolverMultistepScheduler(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


SANA_VIDEO: dict[str, Any] = {
    **{name: value for name, value in SANA.items() if name != "sample_size"},
    "in_channels": 16,
    "out_channels": 16,
    "rope_max_seq_len": 64,
}
"""Constructor arguments of the text-to-video transformer."""


def sana_video_pipeline(transformer_cls: type | None = None, **transformer_overrides: Any) -> SanaVideoPipeline:
    """A complete SANA-Video pipeline with Wan's autoencoder; arguments as for `tiny.wan_pipeline`."""
    tokenizer = character_tokenizer()
    options = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    pipeline = SanaVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=gemma(len(tokenizer)),
        vae=wan_vae(),
        transformer=make(transformer_cls or SanaVideoTransformer3DModel, SANA_VIDEO, **transformer_overrides),
        scheduler=DPMSolverMultistepScheduler(**options),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
