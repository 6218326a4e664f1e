# SPDX-License-Identifier: Apache-2.0
"""Components of the demo's base model: a complete, small Wan text-to-video pipeline with softmax attention."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel
from transformers.hf_argparser import HfArg

from mhla_hf.training.data.digits import DIGIT_WORDS, DIRECTIONS
from mhla_hf.utils.destinations import atomic_directory
from mhla_hf.utils.files import atomic_file


@dataclass(frozen=True, kw_only=True)
class BaseModelConfig:
    """Sizes of the pipeline. The defaults give 5x8x8 tokens for 17 frames of 64x64 pixels."""

    latent_channels: int = HfArg(default=8, help="Channels of the VAE's latents.")
    vae_dim: int = HfArg(default=8, help="Width of the VAE at full resolution.")
    num_heads: int = HfArg(default=4, help="Attention heads of the transformer.")
    head_dim: int = HfArg(default=32, help="Width of one head; must be even.")
    num_layers: int = HfArg(default=5, help="Transformer blocks.")
    ffn_dim: int = HfArg(default=384, help="Width of their feed-forward layers.")
    frequency_dim: int = HfArg(default=128, help="Sinusoidal features of the timestep.")
    text_dim: int = HfArg(default=64, help="Width of the text encoder.")
    text_layers: int = HfArg(default=2, help="Layers of the text encoder.")
    flow_shift: float = HfArg(default=3.0, help="Timestep shift of the flow, the same in training and sampling.")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Makes the word-level tokenizer of the captions; all other words become `<unk>`."""
    words = ["<pad>", "</s>", "<unk>", "a", "and", "moves", *DIGIT_WORDS, *DIRECTIONS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def build_vae(config: BaseModelConfig) -> AutoencoderKLWan:
    """Makes an untrained VAE that compresses time and both sides four times each."""
    channels = config.latent_channels
    vae = AutoencoderKLWan(
        base_dim=config.vae_dim,
        z_dim=channels,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        # Placeholders until `measure_latents` has seen the data.
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
        scale_factor_spatial=4,
        scale_factor_temporal=4,
    )
    # Nearly noiseless latents at first: with unit noise the decoder learns to ignore them (posterior collapse).
    torch.nn.init.constant_(vae.quant_conv.bias[channels:], -6.0)
    return vae


def build_text_encoder(config: BaseModelConfig, vocabulary_size: int) -> UMT5EncoderModel:
    """Makes an untrained text encoder for `vocabulary_size` words."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=vocabulary_size,
            d_model=config.text_dim,
            d_kv=config.text_dim // 4,
            d_ff=2 * config.text_dim,
            num_layers=config.text_layers,
            num_heads=4,
            dropout_rate=0.0,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=32,
            is_encoder_decoder=False,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def build_transformer(config: BaseModelConfig) -> WanTransformer3DModel:
    """Makes an untrained softmax transformer whose first prediction is zero."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=config.num_heads,
        attention_head_dim=config.head_dim,
        in_channels=config.latent_channels,
        out_channels=config.latent_channels,
        text_dim=config.text_dim,
        freq_dim=config.frequency_dim,
        ffn_dim=config.ffn_dim,
        num_layers=config.num_layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=256,
    )
    # The latents of 17 frames of 64x64 pixels. diffusers keeps such entries, and does not warn of them.
    transformer.register_to_config(_sample_frames=5, _sample_height=16, _sample_width=16)
    torch.nn.init.zeros_(transformer.proj_out.weight)
    torch.nn.init.zeros_(transformer.proj_out.bias)
    return transformer


def build_scheduler(config: BaseModelConfig) -> UniPCMultistepScheduler:
    """Makes the scheduler that Wan pipelines ship with, at the training's flow shift."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=1000,
        flow_shift=config.flow_shift,
    )


def assemble_pipeline(
    config: BaseModelConfig,
    tokenizer: PreTrainedTokenizerFast,
    text_encoder: UMT5EncoderModel,
    vae: AutoencoderKLWan,
    transformer: WanTransformer3DModel,
) -> WanPipeline:
    """Puts the components together."""
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder.eval(),
        vae=vae.eval(),
        scheduler=build_scheduler(config),
        transformer=transformer.eval(),
    )


def write_pipeline(pipeline: WanPipeline, destination: Path, facts: dict) -> None:
    """Saves a pipeline with half-precision weights and a `pretraining.json`, under a temporary name until complete."""
    with atomic_directory(destination) as fresh:
        pipeline.save_pretrained(fresh)
        # Half precision is enough on disk. Only the transformer: diffusers loads it as fp32 unless told otherwise,
        # while transformers would keep a text encoder in the dtype that it finds.
        weights = fresh / "transformer" / "diffusion_pytorch_model.safetensors"
        half = {name: value.half() for name, value in load_file(weights).items()}
        with atomic_file(weights) as temporary:
            save_file(half, temporary, {"format": "pt"})
        (fresh / "pretraining.json").write_text(json.dumps(facts, indent=2) + "\n")
