# SPDX-License-Identifier: Apache-2.0
"""Tiny models with joint attention, random weights: real classes, no network and no files.

Two heads, and two layers of each kind; the text of the second sample is padded.
"""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLQwenImage,
    ChromaPipeline,
    ChromaTransformer2DModel,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    T5Config,
    T5EncoderModel,
)

from tests.tiny import character_tokenizer, make


TEXT_DIM, HEAD_DIM = 16, 12

_HUNYUAN: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": HEAD_DIM,
    "num_refiner_layers": 1,
    "mlp_ratio": 1.0,
    "text_embed_dim": TEXT_DIM,
    "rope_axes_dim": (4, 4, 4),
}
HUNYUAN_VIDEO: dict[str, Any] = {
    **_HUNYUAN,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_single_layers": 2,
    "pooled_projection_dim": 8,
    "guidance_embeds": False,
}
HUNYUAN_VIDEO_15: dict[str, Any] = {
    **_HUNYUAN,
    "in_channels": 6,
    "out_channels": 4,
    "num_layers": 2,
    "text_embed_2_dim": 8,
    "image_embed_dim": 8,
}
_IMAGES: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": HEAD_DIM,
    "joint_attention_dim": TEXT_DIM,
    "axes_dims_rope": (4, 4, 4),
    "num_layers": 2,
    "in_channels": 16,
}
QWEN_IMAGE: dict[str, Any] = {**_IMAGES, "out_channels": 4}
FLUX: dict[str, Any] = {**_IMAGES, "num_single_layers": 2, "pooled_projection_dim": 8}
CHROMA: dict[str, Any] = {
    **_IMAGES,
    "num_single_layers": 2,
    "approximator_num_channels": 16,
    "approximator_hidden_dim": 16,
    "approximator_layers": 1,
}


def hunyuan_video_pipeline() -> HunyuanVideoPipeline:
    """A pipeline from text without its encoders; four frames and 8×8 pixels are a latent."""
    torch.manual_seed(0)
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(4, 4, 4, 4),
        layers_per_block=1,
        norm_num_groups=2,
        mid_block_add_attention=False,
    )
    return _pipeline(
        HunyuanVideoPipeline,
        vae=vae,
        transformer=make(HunyuanVideoTransformer3DModel, HUNYUAN_VIDEO, guidance_embeds=True),
    )


def hunyuan_video_15_pipeline() -> HunyuanVideo15Pipeline:
    """A pipeline from text without its encoders; four frames and 4×4 pixels are a latent."""
    torch.manual_seed(0)
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(4, 4, 4),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )
    # Latents, those of the first frame, and a mask.
    transformer = make(HunyuanVideo15Transformer3DModel, HUNYUAN_VIDEO_15, in_channels=9)
    return _pipeline(HunyuanVideo15Pipeline, vae=vae, transformer=transformer, guider=ClassifierFreeGuidance())


def qwen_image_pipeline() -> QwenImagePipeline:
    """A pipeline without its encoder; 8×8 pixels are a latent, and 2×2 of those a token."""
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    return _pipeline(QwenImagePipeline, vae=vae, transformer=make(QwenImageTransformer2DModel, QWEN_IMAGE))


def flux_pipeline(cls: type = FluxPipeline) -> Any:
    """A pipeline without its encoders; 8×8 pixels are a latent, and 2×2 of those a token."""
    return _pipeline(cls, vae=_image_vae(), transformer=make(FluxTransformer2DModel, FLUX))


def chroma_pipeline(cls: type = ChromaPipeline) -> Any:
    """As `flux_pipeline`."""
    return _pipeline(cls, vae=_image_vae(), transformer=make(ChromaTransformer2DModel, CHROMA))


def _image_vae() -> AutoencoderKL:
    torch.manual_seed(0)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        norm_num_groups=2,
        latent_channels=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0,
    )


def encoders(cls: type) -> dict[str, None]:
    """The parts that pipelines of a class do without here: they are called with embeddings."""
    names = ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "image_encoder", "feature_extractor")
    return dict.fromkeys(name for name in names if name in inspect.signature(cls.__init__).parameters)


def _pipeline(cls: type, **parts: Any) -> Any:
    pipeline = cls(**encoders(cls), scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0), **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def latents_of(pipeline: Any) -> torch.Tensor:
    """Latents that a pipeline makes of random embeddings in two steps."""
    random, mask = partial(torch.randn, generator=torch.Generator().manual_seed(1)), torch.ones(1, 7)
    mask[:, -2:] = 0
    call: dict[str, Any] = {"height": 32, "width": 48}
    if isinstance(pipeline, FluxPipeline):
        call |= {"prompt_embeds": random(1, 7, TEXT_DIM), "height": 64, "width": 96}
        call["pooled_prompt_embeds"] = random(1, FLUX["pooled_projection_dim"])
    elif isinstance(pipeline, ChromaPipeline):
        call |= {"height": 64, "width": 96}
        for prefix in ("", "negative_"):
            call[f"{prefix}prompt_embeds"] = random(1, 7, TEXT_DIM)
            call[f"{prefix}prompt_attention_mask"] = mask
    elif isinstance(pipeline, QwenImagePipeline):
        call |= {"height": 64, "width": 96, "true_cfg_scale": 3.0}
        for prefix in ("", "negative_"):
            call[f"{prefix}prompt_embeds"] = random(1, 7, TEXT_DIM)
            call[f"{prefix}prompt_embeds_mask"] = mask.long()
    elif isinstance(pipeline, HunyuanVideoPipeline):
        call["num_frames"] = 9
        call |= {"prompt_embeds": random(1, 7, TEXT_DIM), "prompt_attention_mask": mask.long()}
        call["pooled_prompt_embeds"] = random(1, HUNYUAN_VIDEO["pooled_projection_dim"])
    else:
        call["num_frames"] = 9
        for prefix in ("", "negative_"):
            for suffix, tokens, width in (("", 6, TEXT_DIM), ("_2", 4, HUNYUAN_VIDEO_15["text_embed_2_dim"])):
                call[f"{prefix}prompt_embeds{suffix}"] = random(1, tokens, width)
                call[f"{prefix}prompt_embeds_mask{suffix}"] = mask[:, -tokens:].long()
    generator = torch.Generator().manual_seed(0)
    return pipeline(**call, num_inference_steps=2, output_type="latent", generator=generator)[0]


def with_encoders(pipeline: Any) -> Any:
    """The pipeline with tiny encoders of prompts, as its class has them."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    length, width = len(tokenizer), {"hidden_size": TEXT_DIM, "intermediate_size": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    clip = CLIPTextConfig(
        vocab_size=length, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, **ends
    )
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    language = {"vocab_size": length, **width, **heads, **ends}

    def t5(d_model: int) -> T5EncoderModel:
        sizes = {"d_model": d_model, "d_ff": 16, "d_kv": 4, "num_layers": 1, "num_heads": 2}
        return T5EncoderModel(T5Config(vocab_size=length, **sizes))

    parts: dict[str, Any]
    if isinstance(pipeline, FluxPipeline):
        parts = {"text_encoder": CLIPTextModel(clip), "text_encoder_2": t5(TEXT_DIM)}
    elif isinstance(pipeline, ChromaPipeline):
        parts = {"text_encoder": t5(TEXT_DIM)}
    elif isinstance(pipeline, HunyuanVideoPipeline):
        parts = {"text_encoder": LlamaModel(LlamaConfig(**language)), "text_encoder_2": CLIPTextModel(clip)}
    elif isinstance(pipeline, HunyuanVideo15Pipeline):
        config = Qwen2_5_VLTextConfig(**language, **rope)
        parts = {"text_encoder": Qwen2_5_VLTextModel(config), "text_encoder_2": t5(8)}
    else:
        vision = {"hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "depth": 1, "out_hidden_size": TEXT_DIM}
        config = Qwen2_5_VLConfig(text_config={**language, **rope}, vision_config=vision)
        parts = {"text_encoder": Qwen2_5_VLForConditionalGeneration(config)}
    parts = {name: part.eval() for name, part in parts.items()}
    for name, part in parts.items():
        own = copy.deepcopy(tokenizer)
        own.model_max_length = 77 if isinstance(part, CLIPTextModel) else 512
        pipeline.register_modules(**{name: part, name.replace("text_encoder", "tokenizer"): own})
    return pipeline
