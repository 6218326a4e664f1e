# SPDX-License-Identifier: Apache-2.0
"""Tiny Wan models as their authors, ComfyUI and GGUF store them: one file under other names."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mhla_hf.models.wan_keys import authors_name
from tests import tiny


# One head as wide as those of every published Wan, so that the weights tell the whole configuration.
SIZES: dict[str, Any] = {"num_attention_heads": 1, "attention_head_dim": 128, "ffn_dim": 64, "rope_max_seq_len": 1024}

MODELS: dict[str, dict[str, Any]] = {
    "text to video": SIZES,
    "image to video": {**SIZES, "image_to_video": True, "added_kv_proj_dim": 128},
    "Wan 2.2 5B": {**SIZES, "in_channels": 48, "out_channels": 48},
}

PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")


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
