# SPDX-License-Identifier: Apache-2.0
"""Tiny Wan models as their authors, ComfyUI and GGUF store them: one file under other names."""

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests import tiny


# One head as wide as those of every published Wan, so that the weights tell the whole configuration.
SIZES: dict[str, Any] = {"num_attention_heads": 1, "attention_head_dim": 128, "ffn_dim": 64, "rope_max_seq_len": 1024}

MODELS: dict[str, dict[str, Any]] = {
    "text to video": SIZES,
    "image to video": {**SIZES, "image_to_video": True, "added_kv_proj_dim": 128},
    "Wan 2.2 5B": {**SIZES, "in_channels": 48, "out_channels": 48},
}

PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")

# Written down from the authors' code, independently of the table in diffusers that the import uses.
AUTHORS_NAMES = [
    (r"^condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"^condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"^condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"^condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"^condition_embedder\.time_proj", "time_projection.1"),
    (r"^condition_embedder\.image_embedder\.norm1", "img_emb.proj.0"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj", "img_emb.proj.1"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2", "img_emb.proj.3"),
    (r"^condition_embedder\.image_embedder\.norm2", "img_emb.proj.4"),
    (r"^condition_embedder\.image_embedder\.pos_embed", "img_emb.emb_pos"),
    (r"^scale_shift_table", "head.modulation"),
    (r"^proj_out", "head.head"),
    (r"\.scale_shift_table", ".modulation"),
    (r"\.norm2\.", ".norm3."),
    (r"\.ffn\.net\.0\.proj", ".ffn.0"),
    (r"\.ffn\.net\.2", ".ffn.2"),
    (r"\.attn1\.mhla\.mixing", ".self_attn.block_attn.conv.weight"),
    (r"\.attn1\.mhla\.output_norm", ".self_attn.g_norm"),
    (r"\.attn1\.mhla\.gate", ".self_attn.g"),
    (r"\.attn1\.mhla\.lepe", ".self_attn.lepe"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.add_([kv])_proj\.", r".\1_img."),
    (r"\.norm_added_k\.", ".norm_k_img."),
]


def authors_name(name: str) -> str:
    """The authors' name of a weight of diffusers."""
    for pattern, theirs in AUTHORS_NAMES:
        name = re.sub(pattern, theirs, name)
    return name


def original_weights(model: torch.nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    """The weights under the names of Wan's authors."""
    return {prefix + authors_name(name): tensor for name, tensor in model.state_dict().items()}


def write_original(path: Path, model: torch.nn.Module | None = None, prefix: str = "") -> torch.nn.Module:
    """Writes a tiny Wan (a new one by default) as one safetensors file and returns it."""
    model = tiny.wan_transformer(**SIZES) if model is None else model
    save_file({name: tensor.contiguous() for name, tensor in original_weights(model, prefix).items()}, path)
    return model


def write_gguf(path: Path, weights: dict[str, torch.Tensor], kind: str) -> Path:
    """Writes a GGUF file as ComfyUI's do: matrices quantised, everything else in float32."""
    import gguf

    quantised = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "wan")
    writer.add_quantization_version(2)
    writer.add_file_type(7)
    writer.add_array("some.names", ["a", "b"])
    for name, tensor in weights.items():
        array = tensor.float().numpy()
        if tensor.ndim == 2 and name.endswith(".weight"):
            writer.add_tensor(name, gguf.quants.quantize(array, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
