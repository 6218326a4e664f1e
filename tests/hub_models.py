# SPDX-License-Identifier: Apache-2.0
"""Tiny trained MHLA models of three kinds for tests of the Hub, and what each makes of fixed inputs."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import transformers

import mhla_hf
from tests import tiny, tiny_images
from tests.families.model_case import perturb_mhla


OPTIONS: dict[str, dict[str, Any]] = {
    "wan": {"blocks": [2, 1, 2]},
    "sana": {"blocks": [1, 2]},
    "language": {"block_size": [4]},
}
KINDS = tuple(OPTIONS)


def make(kind: str, seed: int = 5) -> Any:
    """A pipeline of Wan or SANA, or a language model, whose MHLA parameters are not the initial ones."""
    if kind == "wan":
        model = tiny.wan_pipeline(mhla_hf.MHLAWanTransformer3DModel, mhla=OPTIONS[kind])
        perturb_mhla(model.transformer, seed)
    elif kind == "sana":
        model = tiny_images.sana_pipeline(mhla_hf.MHLASanaTransformer2DModel, mhla=OPTIONS[kind])
        perturb_mhla(model.transformer, seed)
    else:
        torch.manual_seed(0)
        sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        config = transformers.Qwen3Config(**sizes, **heads, head_dim=8, mhla=OPTIONS[kind])
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="mhla").eval()
        perturb_mhla(model, seed)
    return model


def load(kind: str, location: str, **options: Any) -> Any:
    """Loads it by the library's own `from_pretrained`."""
    if kind == "language":
        return transformers.AutoModelForCausalLM.from_pretrained(location, **options)
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(location, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.no_grad()
def output(kind: str, model: Any) -> np.ndarray:
    """A video of 5 frames, an image, or logits with a continuation."""
    noise = torch.Generator().manual_seed(0)
    call = functools.partial(model, num_inference_steps=2, generator=noise, output_type="np")
    if kind == "wan":
        return call("a three moves left", height=16, width=32, num_frames=5, max_sequence_length=16).frames[0]
    if kind == "sana":
        options = {"height": 64, "width": 128, "max_sequence_length": 16, "use_resolution_binning": False}
        return call("a red ball", complex_human_instruction=None, **options).images[0]
    ids = torch.arange(3, 14)[None]
    continuation = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return np.concatenate([model(ids).logits.flatten().numpy(), continuation.flatten().numpy()])
