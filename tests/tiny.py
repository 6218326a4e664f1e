# SPDX-License-Identifier: Apache-2.0
"""Tiny complete Wan pipelines with random weights: real classes, seconds on a CPU, no network and no files.

Sizes are the smallest at which nothing degenerates: two heads of width 12 (the narrowest that rotary embeddings over
three axes can split), two layers, 16 latent channels as in Wan 2.1, and a character tokenizer built in memory.
`wan_transformer` makes the model alone, `wan_inputs` what its `forward` takes, `wan_pipeline` everything, and
`DIGITS_MODEL` holds the sizes of the demo's own model. The image models have the same in `tiny_images.py`.
"""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    SkyReelsV2Pipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)


TEXT_DIM = 32
IMAGE_DIM = 16

WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": TEXT_DIM,
    "freq_dim": 256,
    "ffn_dim": 32,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 64,
}
"""Constructor arguments of the text-to-video transformer."""

DIGITS_MODEL: dict[str, Any] = {
    "latent_channels": 4,
    "vae_dim": 2,
    "num_heads": 2,
    "head_dim": 12,
    "num_layers": 2,
    "ffn_dim": 32,
    "frequency_dim": 32,
    "text_dim": 16,
    "text_layers": 1,
}
"""Sizes of the demo's base model at their smallest."""

WAN_IMAGE_TO_VIDEO: dict[str, Any] = {
    **WAN,
    "in_channels": 36,
    "image_dim": IMAGE_DIM,
    "added_kv_proj_dim": WAN["num_attention_heads"] * WAN["attention_head_dim"],
}
"""The same for image-to-video: latents, 4 mask channels and the image's latents; image cross-attention."""


def make(cls: type, sizes: dict[str, Any], *, seed: int = 0, **overrides: Any) -> Any:
    """A tiny transformer in evaluation mode, fp32; `overrides` replace entries of its sizes."""
    torch.manual_seed(seed)
    return cls(**{**sizes, **overrides}).eval()


def wan_transformer(cls: type | None = None, *, image_to_video: bool = False, seed: int = 0, **overrides: Any):
    """A tiny Wan transformer in evaluation mode, fp32.

    Args:
        cls: `WanTransformer3DModel` (default) or a subclass; `overrides` may then hold its own arguments (`mhla=…`).
        image_to_video: with image cross-attention and 36 input channels.
        seed: of the weights. Two classes with the same seed share weights only if they draw in the same order;
            use a state dict for that.
        **overrides: replace entries of `WAN`.
    """
    sizes = WAN_IMAGE_TO_VIDEO if image_to_video else WAN
    return make(cls or WanTransformer3DModel, sizes, seed=seed, **overrides)


def wan_inputs(
    batch: int = 1,
    frames: int = 3,
    height: int = 4,
    width: int = 8,
    *,
    image_to_video: bool = False,
    text_tokens: int = 16,
    text_dim: int = TEXT_DIM,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> dict[str, torch.Tensor]:
    """Keyword arguments for the transformer's `forward`.

    `frames`, `height` and `width` are of the latents: the token grid is `(frames, height / 2, width / 2)`.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    channels = (WAN_IMAGE_TO_VIDEO if image_to_video else WAN)["in_channels"]
    inputs = {
        "hidden_states": random(batch, channels, frames, height, width),
        "timestep": torch.full((batch,), 500.0),
        "encoder_hidden_states": random(batch, text_tokens, text_dim),
    }
    if image_to_video:
        # The model itself assumes 257 image tokens only when it has text of 512; here: one class token, four patches.
        inputs["encoder_hidden_states_image"] = random(batch, 5, IMAGE_DIM)
    return inputs


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single characters with the special tokens of UMT5, made in memory."""
    vocabulary = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    vocabulary += [(character, -5.0) for character in ["\u2581", *string.printable.strip()]]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=2))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


def text_encoder(vocabulary_size: int) -> UMT5EncoderModel:
    """A two-layer UMT5 encoder of width `TEXT_DIM`."""
    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=vocabulary_size,
        d_model=TEXT_DIM,
        d_kv=8,
        d_ff=37,
        num_layers=2,
        num_heads=4,
        is_encoder_decoder=False,
    )
    return UMT5EncoderModel(config).eval()


def wan_vae() -> AutoencoderKLWan:
    """Wan's causal video autoencoder with three channels: 4 times fewer frames, 8 times smaller images."""
    torch.manual_seed(0)
    return AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()


def wan_scheduler() -> UniPCMultistepScheduler:
    """The scheduler that Wan's repositories ship."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )


def image_encoder() -> CLIPVisionModel:
    """A one-layer CLIP vision tower whose hidden width is `IMAGE_DIM`: images of 8x8 make four patches."""
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=IMAGE_DIM,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    return CLIPVisionModel(config).eval()


def wan_pipeline(
    transformer_cls: type | None = None,
    image_to_video: bool = False,
    *,
    second_transformer: bool = False,
    **transformer_overrides: Any,
) -> WanPipeline | WanImageToVideoPipeline:
    """A complete Wan pipeline.

    Args:
        transformer_cls: class of the transformer; the diffusers one by default.
        image_to_video: a `WanImageToVideoPipeline` with its image encoder instead of a `WanPipeline`.
        second_transformer: also `transformer_2`, as in Wan 2.2 (other weights, boundary at 0.9).
        **transformer_overrides: see `wan_transformer`.
    """
    tokenizer = character_tokenizer()
    parts: dict[str, Any] = {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder(len(tokenizer)),
        "vae": wan_vae(),
        "scheduler": wan_scheduler(),
        "transformer": wan_transformer(transformer_cls, image_to_video=image_to_video, **transformer_overrides),
    }
    if second_transformer:
        parts["boundary_ratio"] = 0.9
        parts["transformer_2"] = wan_transformer(
            transformer_cls, image_to_video=image_to_video, seed=1, **transformer_overrides
        )
    if image_to_video:
        size = {"height": 8, "width": 8}
        processor = CLIPImageProcessor(size=size, crop_size=size)
        pipeline = WanImageToVideoPipeline(**parts, image_encoder=image_encoder(), image_processor=processor)
    else:
        pipeline = WanPipeline(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def vace_pipeline(**overrides: Any) -> WanVACEPipeline:
    """A complete Wan-VACE pipeline with a control block; `overrides` are of the transformer."""
    return _family_pipeline(WanVACEPipeline, WanVACETransformer3DModel, vace_layers=[0], **overrides)


def skyreels_pipeline(**overrides: Any) -> SkyReelsV2Pipeline:
    """A complete SkyReels-V2 pipeline from text; `overrides` are of the transformer."""
    return _family_pipeline(SkyReelsV2Pipeline, SkyReelsV2Transformer3DModel, **overrides)


def _family_pipeline(pipeline_cls: type, transformer_cls: type, **overrides: Any) -> Any:
    tokenizer = character_tokenizer()
    pipeline = pipeline_cls(
        tokenizer=tokenizer,
        text_encoder=text_encoder(len(tokenizer)),
        vae=wan_vae(),
        scheduler=wan_scheduler(),
        transformer=wan_transformer(transformer_cls, **overrides),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


LTX: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "cross_attention_dim": 32,
    "caption_channels": TEXT_DIM,
    "num_layers": 2,
}
"""Two layers of LTX-Video. Two channels of the 32 are not rotated, as in the published models."""


LTX2: dict[str, Any] = {
    **LTX,
    "audio_in_channels": 4,
    "audio_out_channels": 4,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
}
"""Two layers of LTX-2."""

LTX23: dict[str, Any] = {
    **LTX2,
    "rope_type": "split",
    "gated_attn": True,
    "cross_attn_mod": True,
    "audio_gated_attn": True,
    "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False,
    "perturbed_attn": True,
}
"""Two layers of LTX-2.3: rotary halves, gates of heads, and spatio-temporal guidance."""


def ltx_pipeline(**overrides: Any) -> LTXPipeline:
    """A complete LTX-Video pipeline; its autoencoder makes a latent of 2 frames of 8 × 8 pixels."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    vae = AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(4, 4),
        decoder_block_out_channels=(4, 4),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, False),
        decoder_spatio_temporal_scaling=(True, False),
        decoder_inject_noise=(False, False, False),
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
    ).eval()
    pipeline = LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=text_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        transformer=make(LTXVideoTransformer3DModel, LTX, **overrides),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def ltx2_pipeline(**overrides: Any) -> LTX2Pipeline:
    """A complete LTX-2 pipeline with the same compression, and perturbed attention in the transformer."""
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    text = {"vocab_size": len(tokenizer) + 4, "hidden_size": TEXT_DIM, "intermediate_size": 16}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision |= {"image_size": 8, "patch_size": 4}
    gemma = Gemma3Config(text_config={**text, **heads}, vision_config=vision, mm_tokens_per_image=4)
    vae = AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        down_block_types=("LTX2VideoDownBlock3D",),
        layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatiotemporal",),
        upsample_type=("spatiotemporal",),
        upsample_residual=(False,),
        upsample_factor=(1,),
    )
    connector = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1, "num_learnable_registers": None}
    sides = {f"{side}_connector_{name}": value for side in ("video", "audio") for name, value in connector.items()}
    parts = {
        "vae": vae,
        "audio_vae": AutoencoderKLLTX2Audio(
            base_channels=4, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, mel_bins=8, resolution=16
        ),
        "text_encoder": Gemma3ForConditionalGeneration(gemma),
        "connectors": LTX2TextConnectors(caption_channels=TEXT_DIM, text_proj_in_factor=2, **sides),
        "vocoder": LTX2Vocoder(
            in_channels=16,
            hidden_channels=8,
            upsample_kernel_sizes=[4, 4],
            upsample_factors=[2, 2],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1]],
        ),
    }
    pipeline = LTX2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        tokenizer=tokenizer,
        transformer=make(LTX2VideoTransformer3DModel, {**LTX2, "perturbed_attn": True}, **overrides),
        **{name: part.eval() for name, part in parts.items()},
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.no_grad()
def wan_output(model: torch.nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    """Output of a transformer in evaluation mode, for `wan_inputs()` unless others are given."""
    return model.eval()(**(inputs or wan_inputs()), return_dict=False)[0]


def wan_video(pipeline: WanPipeline | WanImageToVideoPipeline, **options: Any) -> np.ndarray:
    """A seeded video of two steps as an array `[frames, height, width, 3]`."""
    pipeline.set_progress_bar_config(disable=True)
    sizes: dict[str, Any] = {"height": 16, "width": 32, "num_frames": 5, "num_inference_steps": 2, "output_type": "np"}
    sizes["max_sequence_length"] = 512 if "image" in options else 16
    generator = torch.Generator().manual_seed(0)
    video = pipeline(prompt="a three moves left", generator=generator, **{**sizes, **options}).frames[0]
    assert np.isfinite(video).all()
    return video
