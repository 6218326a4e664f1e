# SPDX-License-Identifier: Apache-2.0
"""The recipe of each family where none is given, and the paper's own settings by name: the numbers that count."""

from __future__ import annotations

from typing import Any

from .recipes import Recipe, parse_recipe


# Measured on the small Wan of the demo: hedgehog features, RoPE before them, mixing weights of each head and LePE
# leave about 7 % of loss above softmax; see benchmarks/results/recovery.json.
_DIFFUSION: dict[str, Any] = {
    "mhla": {
        "feature_map": "hedgehog",
        "rope": "before_feature_map",
        "mixing_heads": "per_head",
        "lepe_kernel": 3,
    },
    "data": {"samples": 2048, "held_out": 96},
    "calibrate": {"batches": 8, "batch_size": 4},
    "match": {"steps": 1000, "batches": 160, "batch_size": 1, "learning_rate": 4e-3, "mhla_learning_rate": 2e-2},
    "distill": {"steps": 200, "batch_size": 4, "learning_rate": 2e-4, "mhla_learning_rate": 1e-3},
}
_IMAGES = {**_DIFFUSION, "mhla": {name: value for name, value in _DIFFUSION["mhla"].items() if name != "rope"}}
# Their attention is linear, and MHLA starts as exactly that: there is nothing to recover, only to gain.
_LINEAR: dict[str, Any] = {
    "mhla": {"mixing_heads": "per_head"},
    "finetune": {"steps": 2000, "batch_size": 8, "learning_rate": 2e-5, "mhla_learning_rate": 1e-3},
}

DEFAULTS: dict[str, dict[str, Any]] = {
    "wan": _DIFFUSION,
    "dit": _IMAGES,
    # No objective to distill it with yet: it learns from what it sees while its pipeline draws.
    "pixart": {
        "mhla": _IMAGES["mhla"],
        "data": {"samples": 128, "held_out": 16},
        "calibrate": {"batches": 32, "batch_size": 1},
        "match": {"steps": 600, "batches": 128, "batch_size": 1, "learning_rate": 3e-3, "mhla_learning_rate": 5e-3},
    },
    "sana": _LINEAR,
    "sana-video": {"mhla": {"mixing_heads": "per_head"}},
    "causal": {
        "mhla": {"mixing_heads": "per_head"},
        "layers": "auto:3/4",
        "data": {"samples": 4096, "held_out": 96},
        "calibrate": {"batches": 16, "batch_size": 4},
        "match": {"steps": 400, "batches": 200, "batch_size": 2, "learning_rate": 1e-3, "mhla_learning_rate": 1e-2},
        "distill": {"steps": 400, "batch_size": 4, "learning_rate": 3e-4, "mhla_learning_rate": 1e-3},
    },
    "encoder": {
        "mhla": {"mixing_heads": "per_head"},
        "data": {"samples": 4096, "held_out": 192},
        "calibrate": {"batches": 24, "batch_size": 16},
        # Many small steps get further than few large ones, and further than distillation in the same time.
        "match": {"steps": 1000, "batches": 500, "batch_size": 4, "learning_rate": 1e-3, "mhla_learning_rate": 3e-2},
    },
    "vision": {
        "mhla": {"feature_map": "hedgehog", "mixing_heads": "per_head", "lepe_kernel": 3},
        "data": {"samples": 2048, "held_out": 192},
        "calibrate": {"batches": 16, "batch_size": 16},
        "match": {"steps": 300, "batches": 64, "batch_size": 16, "learning_rate": 1e-3, "mhla_learning_rate": 5e-3},
        "distill": {"steps": 150, "batch_size": 16, "learning_rate": 3e-4, "mhla_learning_rate": 1e-3},
    },
}
"""By family. What `mhla` does not give is the model's own: for text hedgehog features, and RoPE where it suits."""

# With a window, calibration comes close already, and the higher rates above would lead away from there.
_GENTLE: dict[str, Any] = {
    "mhla": {"window_gains": "per_channel"},
    "match": {"steps": 800, "learning_rate": 1e-3, "mhla_learning_rate": 3e-3},
    "distill": {"steps": 150, "learning_rate": 5e-5, "mhla_learning_rate": 3e-4},
}
WINDOW: dict[str, dict[str, Any]] = dict.fromkeys(("wan", "dit", "pixart"), _GENTLE)
"""Changes for a softmax window beside MHLA, by family."""

# What arXiv 2601.07832 and its authors' code do: ReLU, mixing weights shared by all heads, RoPE after the map.
_PAPER_IMAGES: dict[str, Any] = {
    "feature_map": "relu",
    "mixing_heads": "shared",
    "mixing_init": "linear",
    "output_gate": True,
    "lepe_kernel": 3,
}
_PAPER: dict[str, dict[str, Any]] = {
    "wan": {
        "mhla": {
            "feature_map": "relu",
            "rope": "after_feature_map",
            "normalizer": "none",
            "mixing_heads": "shared",
            "mixing_init": "linear",
            "output_norm": True,
            "output_gate": True,
            "blocks": [3, 5, 10],
        },
        "layers": "2/3",
        "finetune": {"steps": 10_000, "batch_size": 4, "learning_rate": 2e-5},
    },
    "dit": {"mhla": _PAPER_IMAGES, "finetune": {"steps": 400_000, "batch_size": 256, "learning_rate": 1e-4}},
    "sana": {
        "mhla": {"mixing_heads": "shared", "mixing_init": "linear"},
        "finetune": {"steps": 40_000, "batch_size": 256, "learning_rate": 2e-5},
    },
    "causal": {
        "mhla": {
            "feature_map": "relu",
            "rope": "after_feature_map",
            "normalizer": "none",
            "mixing_heads": "shared",
            "mixing_init": "uniform",
            "output_norm": True,
            "output_gate": True,
            "block_size": [64],
        },
        "distill": {"steps": 2000, "batch_size": 8, "learning_rate": 3e-4},
    },
    "vision": {
        "mhla": {"feature_map": "relu", "mixing_heads": "shared", "mixing_init": "linear", "lepe_kernel": 5},
        "distill": {"steps": 2000, "batch_size": 64, "learning_rate": 1e-3},
    },
}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {"paper": _PAPER}
"""By name, then by family."""


def default_recipe(family: str, preset: str | None = None, window: str | None = None) -> Recipe:
    """The recipe of a family.

    Args:
        family: See `recipes.FAMILIES`.
        preset: `paper` for the settings of arXiv 2601.07832; `None` for the settings that measured best here.
        window: Softmax window beside MHLA; see [`MHLAConfig`].

    Raises:
        ValueError: If there is no such preset, or it has nothing for the family.
    """
    given = {} if window is None else {"mhla": {"window": window}}
    if preset is None:
        sections = [DEFAULTS[family], given, {} if window is None else WINDOW.get(family, {})]
        return parse_recipe({"family": family, **_merged(sections)}, f"the default recipe of {family}")
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r:.100}")
    if family not in PRESETS[preset]:
        raise ValueError(
            f"preset {preset!r} has no setting for models of the family {family}, only for "
            f"{', '.join(PRESETS[preset])}"
        )
    content = _merged([PRESETS[preset][family], given])
    return parse_recipe({"family": family, **content}, f"the preset {preset} of {family}")


def _merged(sections: list[dict[str, Any]]) -> dict[str, Any]:
    """Later sections laid over earlier ones, key by key."""
    merged: dict[str, Any] = {}
    for section in sections:
        for name, value in section.items():
            merged[name] = {**merged.get(name, {}), **value} if isinstance(value, dict) else value
    return merged
