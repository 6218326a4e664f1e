# SPDX-License-Identifier: Apache-2.0
"""Sizes of the presets: parameters, and multiply-adds with their own attention, linear attention and MHLA.

python -m benchmarks.presets            # prints all tables
python -m benchmarks.presets --write    # replaces those of docs/presets.md

Models are built on the meta device, so that nothing is allocated. Multiply-adds are those of matrix products and
convolutions in a forward pass for one text, image or video, as torch's flop counter sees them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.pages import table_row, with_sections
from mhla_hf import MHLA, from_preset
from mhla_hf.bench import OperatorShape
from mhla_hf.families import inputs as family_inputs
from mhla_hf.models.registry import mhla_class_for
from mhla_hf.presets import PRESETS


PAGE = Path(__file__).resolve().parents[1] / "docs" / "presets.md"

WAN_GRID = (21, 30, 50)
"""Latent frames, height and width of 81 frames of 480 × 800."""

_WAN_FAMILY = [f"{name}Transformer3DModel" for name in ("Wan", "WanVACE", "WanAnimate", "SkyReelsV2")]
_TEXT_TOKENS = {"SanaTransformer2DModel": 300, **dict.fromkeys(_WAN_FAMILY, 512)}
_TEXT_TOKENS |= {"LTXVideoTransformer3DModel": 128, "LTX2VideoTransformer3DModel": 1024}
_TEXT_TOKENS |= {"HunyuanVideoTransformer3DModel": 256, "HunyuanVideo15Transformer3DModel": 1000}
_TEXT_TOKENS |= {"QwenImageTransformer2DModel": 256, "FluxTransformer2DModel": 512, "SD3Transformer2DModel": 333}
# Tokens of glyphs and of the image, which HunyuanVideo-1.5 has beside the text.
_GLYPHS, _IMAGE = 256, 729


def make_model(name: str, mhla: Any = None, **overrides: Any) -> nn.Module:
    """The model of a preset with fresh weights on the current device; arguments as for `from_preset`."""
    import transformers

    made = from_preset(name, mhla=mhla, **overrides)
    if isinstance(made, nn.Module):
        return made
    return getattr(transformers, made.architectures[0])._from_config(made)


def example_inputs(
    model: Any, *, tokens: int | None = None, grid: tuple[int, int, int] | None = None
) -> dict[str, Any]:
    """Random arguments of `forward` for one text, image or video, on the model's device.

    Args:
        model: The model of a preset.
        tokens: Length of a text; the longest by default.
        grid: Tokens of a video along each axis; by default those of its pipeline.
    """
    config, kind = model.config, type(model).__name__.removeprefix("MHLA")
    if kind.endswith("ForCausalLM"):
        shape = (1, tokens or config.max_position_embeddings)
        return {"input_ids": torch.randint(config.vocab_size, shape, device=model.device)}
    if kind == "DeiTForImageClassification":
        size = (1, config.num_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(size, device=model.device, dtype=model.dtype)}
    own = _grid(model)
    size = own if grid is None or "sample_size" in config else grid[-len(own) :]
    inputs = family_inputs.example_inputs(model, size, model.dtype, model.device, text=_TEXT_TOKENS.get(kind, 0))
    return {**inputs, **further_text(model)}


def further_text(model: Any) -> dict[str, Any]:
    """What HunyuanVideo-1.5 takes beside its text; nothing for other models."""
    config = model.config
    if not type(model).__name__.endswith("HunyuanVideo15Transformer3DModel"):
        return {}
    shapes = {"encoder_hidden_states_2": (_GLYPHS, config.text_embed_2_dim)}
    shapes["image_embeds"] = (_IMAGE, config.image_embed_dim)
    inputs = {name: torch.zeros(1, *shape, device=model.device, dtype=model.dtype) for name, shape in shapes.items()}
    masks = {"encoder_attention_mask": _TEXT_TOKENS["HunyuanVideo15Transformer3DModel"]}
    masks["encoder_attention_mask_2"] = _GLYPHS
    ones = {name: torch.ones(1, count, dtype=torch.long, device=model.device) for name, count in masks.items()}
    return {**inputs, **ones}


def _grid(model: Any) -> tuple[int, ...]:
    """Token grid of what a pipeline makes without being asked for a size, those of Wan as in the paper."""
    kind = type(model).__name__.removeprefix("MHLA")
    return WAN_GRID if kind in _WAN_FAMILY else mhla_class_for(kind).reference_grid(model.config)


class TextWithoutValues(TorchFunctionMode):
    """Lets HunyuanVideo-1.5, which sorts its text by a mask, run where tensors have no values: all text is valid."""

    def __init__(self) -> None:
        super().__init__()
        self.padding: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_mask = func is torch.Tensor.__getitem__ and isinstance(args[1], torch.Tensor) and args[1].is_meta
        if is_mask and args[1].dtype == torch.bool:
            return args[0][:0] if any(args[1] is mask for mask in self.padding) else args[0]
        if func is torch.all and args[0].is_meta:
            return False
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.__invert__:
            self.padding.append(result)
        return result


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a preset.

    Attributes:
        tokens: Tokens of its self-attention.
        blocks: M, prefix tokens' block included.
        parameters: With its own attention, and with MHLA.
        copies: Parameters that are further copies of an embedding, one in every layer: those of diffusers' DiT.
        operations: Multiply-adds with its own attention, with linear attention, and with MHLA.
    """

    tokens: int
    blocks: int
    parameters: tuple[int, int]
    copies: int
    operations: tuple[int, int, int]


@cache
def size_of(name: str) -> Size:
    """Measures a preset.

    Linear attention has one block and neither convolution nor gate, in the layers that are MHLA; causal linear
    attention has the chunks of MHLA. Of causal attention, only the pairs of tokens and of chunks that look back count.

    Args:
        name: Name of the preset.
    """
    with torch.device("meta"):
        own, mhla = make_model(name, mhla=False), make_model(name)
    shape, layers = operator_shape(mhla), len(mhla_layers(mhla))
    pairs = shape.heads * shape.tokens
    softmax = 2 * pairs * shape.tokens * shape.width // (2 if shape.causal else 1)
    linear = pairs * shape.width * (2 * shape.width + (shape.chunk or 0))
    operations = multiply_adds(own) - layers * pairs_ahead(shape, "softmax")
    is_linear = type(own).__name__.startswith("Sana")
    return Size(
        tokens=shape.tokens,
        blocks=shape.layout().num_blocks,
        parameters=(_parameters(own), _parameters(mhla)),
        copies=_copies(own),
        operations=(
            operations,
            operations if is_linear else operations - layers * (softmax - linear),
            multiply_adds(mhla) - layers * pairs_ahead(shape, "mhla"),
        ),
    )


def multiply_adds(model: nn.Module) -> int:
    """Counts the multiply-adds of a forward pass."""
    with torch.no_grad(), TextWithoutValues(), FlopCounterMode(display=False) as counter:
        model(**example_inputs(model))
    return counter.get_total_flops() // 2


def operator_shape(model: nn.Module) -> OperatorShape:
    """The problem that one MHLA layer of a preset's model solves."""
    layer = mhla_layers(model)[0]
    config: Any = model.config
    if layer.config.causal:
        grid, chunk = (config.max_position_embeddings,), layer.config.block_size
    else:
        if hasattr(model, "patch_sizes"):
            return OperatorShape(1, layer.num_heads, layer.head_dim, _grid(model), layer.blocks)
        grid, chunk = ((config.image_size // config.patch_size) ** 2 + layer.num_prefix_tokens,), None
    blocks = None if chunk else (layer.mixing.shape[-1],)
    return OperatorShape(1, layer.num_heads, layer.head_dim, grid, blocks, chunk[0] if chunk else None)


def mhla_layers(model: nn.Module) -> list[MHLA]:
    """The MHLA modules of a model."""
    return [module for module in model.modules() if isinstance(module, MHLA)]


def pairs_ahead(shape: OperatorShape, family: str) -> int:
    """Multiply-adds of causal attention in plain torch that are masked out, and that kernels leave out."""
    if shape.chunk is None:
        return 0
    if family == "softmax":
        return shape.heads * shape.tokens**2 * shape.width
    mixing = shape.heads * shape.layout().num_blocks ** 2 * shape.width**2 // 2
    return shape.heads * shape.tokens * shape.chunk * shape.width + mixing


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _copies(model: nn.Module) -> int:
    """Parameters of all timestep and class embeddings of a DiT but one."""
    embeddings = [module for key, module in model.named_modules() if key.endswith(".norm1.emb")]
    return sum(map(_parameters, embeddings[1:]))


def size_table() -> str:
    """A table of all sizes, in Markdown."""
    titles = ["preset", "tokens", "M", "parameters", "with MHLA", "GMACs", "linear", "MHLA"]
    lines = [table_row(*titles), "|---" * len(titles) + "|"]
    for name in PRESETS:
        size = size_of(name)
        parameters = [_millions(count, size.copies) for count in size.parameters]
        operations = [_thousands(count) for count in size.operations]
        if operations[1] == operations[0]:
            operations[1] = "as it is"
        cells = [f"{size.tokens:,}", str(size.blocks), *parameters, *operations]
        lines.append(table_row(f"`{name}`", *cells))
    return "\n".join(lines)


def _millions(count: int, copies: int) -> str:
    text = f"{count / 1e6:,.1f}M"
    return f"{text} ({(count - copies) / 1e6:,.1f}M)" if copies else text


def _thousands(count: int) -> str:
    digits = max(0, 2 - int(math.log10(count / 1e9)))
    return f"{count / 1e9:,.{digits}f}"


def option_table() -> str:
    """A table of the MHLA options of each preset, in Markdown."""
    entries = {}
    for name, preset in PRESETS.items():
        options = ", ".join(
            f"`{option}={_written(value)}`" for option, value in preset.mhla.items() if option != "layers"
        )
        if preset.mhla.get("layers") == "2/3":
            options += "; every 3rd layer, from the first on, stays softmax"
        entries[name] = (f"`{preset.model}`", options or "the defaults")
    return "\n".join(["| preset | made from | MHLA options |", "|---|---|---|", *_grouped(entries)])


def _grouped(entries: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Rows with the names of all presets that have the same cells."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, cells in entries.items():
        rows.setdefault(cells, []).append(f"`{name}`")
    return [table_row(", ".join(names), *cells) for cells, names in rows.items()]


def _written(value: Any) -> str:
    return repr(tuple(value)) if isinstance(value, list) else repr(value).replace("'", '"')


SECTIONS: dict[str, Callable[[], str]] = {"sizes": size_table, "options": option_table}
"""Tables of the page, by the name in their markers."""


def with_tables(text: str, sections: Mapping[str, Callable[[], str]] = SECTIONS) -> str:
    """Text with what is between markers, `<!-- presets: NAME -->` and `<!-- end -->`, replaced by tables."""
    return with_sections(text, "presets", lambda name: sections[name]())


def main() -> None:
    """Prints or writes all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables of docs/presets.md")
    if parser.parse_args().write:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for name, table in SECTIONS.items():
        print(f"\n{name}\n\n{table()}")


if __name__ == "__main__":
    main()
