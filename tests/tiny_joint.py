# SPDX-License-Identifier: Apache-2.0
"""Tiny models with joint attention, random weights: real classes, no network and no files.

Two heads, and two layers of each kind; the text of the second sample is padded.
"""

from __future__ import annotations

import copy
import inspect
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

from tests.tiny import character_tokenizer


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


class _Random:
    """Draws tensors one after the other."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)


def text_mask(batch: int, tokens: int) -> torch.Tensor:
    """`[B, X]`, zeros for padding: none in the first sample, two tokens in the others."""
    mask = torch.ones(batch, tokens, dtype=torch.long)
    mask[1:, -2:] = 0
    return mask


def _make(cls: type, sizes: dict[str, Any], *, seed: int = 0, **overrides: Any) -> Any:
    """A tiny transformer in evaluation mode; `overrides` replace entries of its sizes."""
    torch.manual_seed(seed)
    return cls(**{**sizes, **overrides}).eval()


def hunyuan_video(cls: type = HunyuanVideoTransformer3DModel, **options: Any) -> HunyuanVideoTransformer3DModel:
    return _make(cls, HUNYUAN_VIDEO, **options)


def hunyuan_video_15(cls: type = HunyuanVideo15Transformer3DModel, **options: Any) -> HunyuanVideo15Transformer3DModel:
    return _make(cls, HUNYUAN_VIDEO_15, **options)


def qwen_image(cls: type = QwenImageTransformer2DModel, **options: Any) -> QwenImageTransformer2DModel:
    return _make(cls, QWEN_IMAGE, **options)


def flux(cls: type = FluxTransformer2DModel, **options: Any) -> FluxTransformer2DModel:
    return _make(cls, FLUX, **options)


def chroma(cls: type = ChromaTransformer2DModel, **options: Any) -> ChromaTransformer2DModel:
    return _make(cls, CHROMA, **options)


def hunyuan_video_inputs(
    batch: int = 1,
    frames: int = 3,
    height: int = 4,
    width: int = 8,
    *,
    text_tokens: int = 7,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> dict[str, torch.Tensor]:
    """Keyword arguments for the transformer's `forward`; sizes are of the latents, in patches of 2×2."""
    random = _Random(dtype, seed)
    return {
        "hidden_states": random(batch, HUNYUAN_VIDEO["in_channels"], frames, height, width),
        "timestep": torch.full((batch,), 500),
        "encoder_hidden_states": random(batch, text_tokens, TEXT_DIM),
        "encoder_attention_mask": text_mask(batch, text_tokens),
        "pooled_projections": random(batch, HUNYUAN_VIDEO["pooled_projection_dim"]),
    }


def hunyuan_video_15_inputs(
    batch: int = 1,
    frames: int = 3,
    height: int = 2,
    width: int = 4,
    *,
    text_tokens: int = 6,
    with_image: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> dict[str, torch.Tensor]:
    """Keyword arguments for the transformer's `forward`; sizes are of the latents, each of which is a token."""
    random = _Random(dtype, seed)
    return {
        "hidden_states": random(batch, HUNYUAN_VIDEO_15["in_channels"], frames, height, width),
        "timestep": torch.full((batch,), 500.0, dtype=dtype),
        "encoder_hidden_states": random(batch, text_tokens, TEXT_DIM),
        "encoder_attention_mask": text_mask(batch, text_tokens),
        "encoder_hidden_states_2": random(batch, 4, HUNYUAN_VIDEO_15["text_embed_2_dim"]),
        "encoder_attention_mask_2": text_mask(batch, 4),
        # Without an image the embeddings are zeros, and the model takes them for padding.
        "image_embeds": random(batch, 3, HUNYUAN_VIDEO_15["image_embed_dim"]) * float(with_image),
    }


def qwen_image_inputs(
    batch: int = 1,
    height: int = 4,
    width: int = 6,
    *,
    text_tokens: int = 7,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> dict[str, Any]:
    """Keyword arguments for the transformer's `forward`; sizes are of the grid."""
    random = _Random(dtype, seed)
    return {
        "hidden_states": random(batch, height * width, QWEN_IMAGE["in_channels"]),
        "timestep": torch.full((batch,), 0.5, dtype=dtype),
        "encoder_hidden_states": random(batch, text_tokens, TEXT_DIM),
        "encoder_hidden_states_mask": text_mask(batch, text_tokens),
        "img_shapes": [[(1, height, width)]] * batch,
    }


def flux_inputs(
    batch: int = 1,
    height: int = 4,
    width: int = 6,
    *,
    text_tokens: int = 7,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> dict[str, Any]:
    """Keyword arguments for the transformer's `forward`; sizes are of the grid."""
    random = _Random(dtype, seed)
    ids = torch.zeros(height, width, 3)
    ids[..., 1], ids[..., 2] = torch.arange(height)[:, None], torch.arange(width)
    return {
        "hidden_states": random(batch, height * width, FLUX["in_channels"]),
        "timestep": torch.full((batch,), 0.5, dtype=dtype),
        "encoder_hidden_states": random(batch, text_tokens, TEXT_DIM),
        "pooled_projections": random(batch, FLUX["pooled_projection_dim"]),
        "img_ids": ids.flatten(0, 1).to(dtype),
        "txt_ids": torch.zeros(text_tokens, 3, dtype=dtype),
    }


def chroma_inputs(batch: int = 1, height: int = 4, width: int = 6, **options: Any) -> dict[str, Any]:
    """As `flux_inputs`, with a mask of text and image."""
    inputs = flux_inputs(batch, height, width, **options)
    del inputs["pooled_projections"]
    image, text = torch.ones(batch, height * width, dtype=torch.bool), len(inputs["txt_ids"])
    return {**inputs, "attention_mask": torch.cat([text_mask(batch, text).bool(), image], dim=1)}


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
    return _pipeline(HunyuanVideoPipeline, vae=vae, transformer=hunyuan_video(guidance_embeds=True))


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
    transformer = hunyuan_video_15(in_channels=9)
    return _pipeline(HunyuanVideo15Pipeline, vae=vae, transformer=transformer, guider=ClassifierFreeGuidance())


def qwen_image_pipeline() -> QwenImagePipeline:
    """A pipeline without its encoder; 8×8 pixels are a latent, and 2×2 of those a token."""
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    return _pipeline(QwenImagePipeline, vae=vae, transformer=qwen_image())


def flux_pipeline(cls: type = FluxPipeline) -> Any:
    """A pipeline without its encoders; 8×8 pixels are a latent, and 2×2 of those a token."""
    return _pipeline(cls, vae=_image_vae(), transformer=flux())


def chroma_pipeline(cls: type = ChromaPipeline) -> Any:
    """As `flux_pipeline`."""
    return _pipeline(cls, vae=_image_vae(), transformer=chroma())


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
    random = _Random(torch.float32, 1)
    call: dict[str, Any] = {"height": 32, "width": 48}
    if isinstance(pipeline, FluxPipeline):
        call |= {"prompt_embeds": random(1, 7, TEXT_DIM), "height": 64, "width": 96}
        call["pooled_prompt_embeds"] = random(1, FLUX["pooled_projection_dim"])
    elif isinstance(pipeline, ChromaPipeline):
        call |= {"height": 64, "width": 96}
        for prefix in ("", "negative_"):
            call[f"{prefix}prompt_embeds"] = random(1, 7, TEXT_DIM)
            call[f"{prefix}prompt_attention_mask"] = text_mask(2, 7)[1:].float()
    elif isinstance(pipeline, QwenImagePipeline):
        call |= {"height": 64, "width": 96, "true_cfg_scale": 3.0}
        for prefix in ("", "negative_"):
            call[f"{prefix}prompt_embeds"] = random(1, 7, TEXT_DIM)
            call[f"{prefix}prompt_embeds_mask"] = text_mask(2, 7)[1:]
    elif isinstance(pipeline, HunyuanVideoPipeline):
        call["num_frames"] = 9
        call |= {"prompt_embeds": random(1, 7, TEXT_DIM), "prompt_attention_mask": text_mask(2, 7)[1:]}
        call["pooled_prompt_embeds"] = random(1, HUNYUAN_VIDEO["pooled_projection_dim"])
    else:
        call["num_frames"] = 9
        for prefix in ("", "negative_"):
            for suffix, tokens, width in (("", 6, TEXT_DIM), ("_2", 4, HUNYUAN_VIDEO_15["text_embed_2_dim"])):
                call[f"{prefix}prompt_embeds{suffix}"] = random(1, tokens, width)
                call[f"{prefix}prompt_embeds_mask{suffix}"] = text_mask(2, tokens)[1:]
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
