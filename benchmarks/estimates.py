# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/worth_it.md: what `mhla-hf estimate` counts for published models.

    python -m benchmarks.estimates

Nothing is downloaded: the configurations are those of the published models, as far as operations depend on them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages import table_row, with_sections
from benchmarks.presets import TextWithoutValues, further_text
from mhla_hf.estimate import Estimate, estimate, find_candidate, find_grid
from mhla_hf.utils.messages import format_bytes


PAGE = Path(__file__).parents[1] / "docs" / "worth_it.md"


@dataclass(frozen=True)
class Model:
    """A published model, and the sizes to look at.

    Args:
        name: Its name.
        config: Contents of its `config.json`.
        sizes: Arguments of `find_grid` by the name of the size.
    """

    name: str
    config: dict[str, Any]
    sizes: dict[str, dict[str, int]]


def _images(*sides: int) -> dict[str, dict[str, int]]:
    return {f"{side}²": {"height": side, "width": side} for side in sides}


def _videos(*sizes: tuple[int, int, int]) -> dict[str, dict[str, int]]:
    return {
        f"{height} × {width}, {frames} frames": {"height": height, "width": width, "num_frames": frames}
        for height, width, frames in sizes
    }


def _texts(*lengths: int) -> dict[str, dict[str, int]]:
    return {f"{length:,}": {"tokens": length} for length in lengths}


def _wan(**sizes: int) -> dict[str, Any]:
    return {"_class_name": "WanTransformer3DModel", "attention_head_dim": 128, "text_dim": 4096, **sizes}


def _qwen(**sizes: Any) -> dict[str, Any]:
    fixed = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "head_dim": 128}
    return {**fixed, "num_key_value_heads": 8, "max_position_embeddings": 40_960, **sizes}


_VIDEOS = _videos((480, 832, 81), (720, 1280, 81))
_PROMPTS = _texts(2048, 8192, 32_768, 131_072)

MODELS = (
    Model("Wan2.1 1.3B", _wan(num_attention_heads=12, ffn_dim=8960, num_layers=30), _VIDEOS),
    Model("Wan2.1 14B", _wan(num_attention_heads=40, ffn_dim=13_824, num_layers=40), _VIDEOS),
    Model(
        "HunyuanVideo",
        {"_class_name": "HunyuanVideoTransformer3DModel"},
        _videos((544, 960, 129), (720, 1280, 129)),
    ),
    Model(
        "HunyuanVideo-1.5",
        {"_class_name": "HunyuanVideo15Transformer3DModel"},
        _videos((480, 832, 121), (720, 1280, 121)),
    ),
    Model("LTX-Video 2B", {"_class_name": "LTXVideoTransformer3DModel"}, _videos((512, 704, 161), (704, 1216, 121))),
    Model(
        "LTX-Video 13B",
        {
            "_class_name": "LTXVideoTransformer3DModel", "attention_head_dim": 128, "num_layers": 48,
            "cross_attention_dim": 4096,
        },
        _videos((704, 1216, 121)),
    ),
    Model(
        "LTX-2",
        {"_class_name": "LTX2VideoTransformer3DModel"},
        _videos((512, 768, 121), (1024, 1536, 121), (1088, 1920, 241)),
    ),
    Model(
        "DiT-XL/2",
        {"_class_name": "DiTTransformer2DModel", "out_channels": 8, "sample_size": 32},
        _images(256, 512),
    ),
    Model(
        "PixArt-Σ",
        {"_class_name": "PixArtTransformer2DModel", "caption_channels": 4096, "sample_size": 128},
        _images(1024, 2048, 4096),
    ),
    Model("SANA 1.6B", {"_class_name": "SanaTransformer2DModel"}, _images(4096)),
    Model("Qwen-Image", {"_class_name": "QwenImageTransformer2DModel"}, _images(1328, 2048)),
    Model("FLUX.1-dev", {"_class_name": "FluxTransformer2DModel", "guidance_embeds": True}, _images(1024, 2048)),
    Model(
        "Qwen3-0.6B",
        _qwen(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            tie_word_embeddings=True,
        ),
        _PROMPTS,
    ),
    Model(
        "Qwen3-8B",
        _qwen(
            hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36, num_attention_heads=32,
            tie_word_embeddings=False,
        ),
        _PROMPTS,
    ),
    Model(
        "all-MiniLM-L6-v2",
        {
            "model_type": "bert", "architectures": ["BertModel"], "vocab_size": 30_522, "hidden_size": 384,
            "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536,
        },
        _texts(256, 512),
    ),
)  # fmt: skip


def estimates(model: Model) -> Iterator[tuple[str, Estimate]]:
    """Yield the estimate of a model at each of its sizes, by the name of the size."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model.config), encoding="utf-8")
        candidate: Any = find_candidate(folder)
        inputs = candidate.inputs
        candidate.inputs = lambda model, *args: {**inputs(model, *args), **further_text(model)}
        with TextWithoutValues():
            for size, given in model.sizes.items():
                yield size, estimate(candidate, find_grid(candidate, **given))


def bounds_row(model: str, size: str, found: Estimate) -> str:
    """Return the row of the first table."""
    gains = [
        row["with_mhla"] or row["mixing_free"] for row in found.bounds() if row["layers"] in ("all", "3/4", "2/3")
    ]
    cells = [f"{gain:.2f} ×" for gain in gains] or ["–", "–", "–"]
    advice = "linear already" if found.is_linear else found.advice
    note = "" if found.refusal is None else " (not supported)"
    return table_row(f"{model}{note}", size, f"{found.tokens:,}", f"{100 * found.share:.0f} %", *cells, advice)


def cache_rows(found: dict[str, Estimate]) -> list[str]:
    """Return the rows of the table of caches."""
    titles = {"kv_bytes": "keys and values", "state_bytes": "MHLA in all layers"}
    return [
        table_row(title, *(format_bytes(getattr(each, name)) for each in found.values()))
        for name, title in titles.items()
    ]


RECIPES = {
    "Wan2.1 1.3B": ("wan-1.3b", "wan-1.3b-hybrid"),
    "Wan2.1 14B": ("wan-14b", "wan-1.3b", "wan-1.3b-hybrid"),
    "HunyuanVideo-1.5": ("hunyuan-video-1.5",),
    "LTX-2": ("ltx-2",),
    "Qwen-Image": ("qwen-image",),
}
"""Recipes of the table of recoveries, by model."""


def training_rows(model: str, found: Estimate) -> list[str]:
    """Return the rows of the table of recoveries: the recipes for large models of videos and images."""
    rows = {row["recipe"]: row for row in found.training}
    sizes = ("weights", "training", "records", "block_records")
    return [
        table_row(model, f"`{name}`", f"{rows[name]['steps']:,}", *(format_bytes(rows[name][size]) for size in sizes))
        for name in RECIPES.get(model, ())
    ]


def main() -> None:
    """Write the tables."""
    tables: dict[str, list[str]] = {"bounds": [], "caches": [], "training": []}
    for model in MODELS:
        found = dict(estimates(model))
        tables["bounds"] += [bounds_row(model.name, size, each) for size, each in found.items()]
        if model.name == "Qwen3-8B":
            tables["caches"] = cache_rows(found)
        tables["training"] += training_rows(model.name, next(iter(found.values())))
    heads = {
        "bounds": table_row("model", "size", "tokens", "in softmax", "all layers", "3/4", "2/3", "advice"),
        "caches": table_row("cache", *_PROMPTS),
        "training": table_row("model", "recipe", "steps", "weights", "training", "records", "of blocks"),
    }
    lines = {name: [heads[name], "|" + "---|" * (heads[name].count("|") - 1), *tables[name]] for name in tables}
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_sections(page, "table", lambda name: "\n".join(lines[name])), encoding="utf-8")


if __name__ == "__main__":
    main()
