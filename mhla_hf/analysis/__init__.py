# SPDX-License-Identifier: Apache-2.0
"""What MHLA layers attend to: attention matrices, their statistics, and pictures of them.

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.imports import lazy_names


_PUBLIC_NAMES = {
    "AttentionSummary": "findings",
    "AttentionTracker": "tracking",
    "DistanceDecay": "mixing",
    "FailureSignature": "signatures",
    "InspectionReport": "directories",
    "LayerInspection": "findings",
    "LayerTokens": "tokens",
    "MixingSummary": "mixing",
    "ModelInspection": "findings",
    "TrackingCallback": "callbacks",
    "attention_matrices": "tracking",
    "attention_modules": "recording",
    "attention_statistics": "statistics",
    "distance_decay": "mixing",
    "effective_rank": "statistics",
    "failure_signatures": "diagnosis",
    "inspect_directory": "directories",
    "inspect_model": "inspection",
    "layer_tokens": "tokens",
    "linear_matrix": "matrices",
    "mean_distance": "mixing",
    "mhla_matrix": "matrices",
    "mixing_figure": "plots",
    "mixing_summary": "mixing",
    "numerical_rank": "statistics",
    "plot_history": "history_plots",
    "plot_mixing": "plots",
    "rank_bound": "statistics",
    "reference_layout": "mixing",
    "relative_distance": "mixing",
    "render_html": "html",
    "row_entropy": "statistics",
    "singular_values": "statistics",
    "softmax_matrix": "matrices",
    "top_share": "statistics",
    "window_mask": "matrices",
    "write_html": "html",
}

__all__ = [
    "AttentionSummary",
    "AttentionTracker",
    "DistanceDecay",
    "FailureSignature",
    "InspectionReport",
    "LayerInspection",
    "LayerTokens",
    "MixingSummary",
    "ModelInspection",
    "TrackingCallback",
    "attention_matrices",
    "attention_modules",
    "attention_statistics",
    "distance_decay",
    "effective_rank",
    "failure_signatures",
    "inspect_directory",
    "inspect_model",
    "layer_tokens",
    "linear_matrix",
    "mean_distance",
    "mhla_matrix",
    "mixing_figure",
    "mixing_summary",
    "numerical_rank",
    "plot_history",
    "plot_mixing",
    "rank_bound",
    "reference_layout",
    "relative_distance",
    "render_html",
    "row_entropy",
    "singular_values",
    "softmax_matrix",
    "top_share",
    "window_mask",
    "write_html",
]

if TYPE_CHECKING:
    from .callbacks import TrackingCallback
    from .diagnosis import failure_signatures
    from .directories import InspectionReport, inspect_directory
    from .findings import AttentionSummary, LayerInspection, ModelInspection
    from .history_plots import plot_history
    from .html import render_html, write_html
    from .inspection import inspect_model
    from .matrices import linear_matrix, mhla_matrix, softmax_matrix, window_mask
    from .mixing import (
        DistanceDecay,
        MixingSummary,
        distance_decay,
        mean_distance,
        mixing_summary,
        reference_layout,
        relative_distance,
    )
    from .plots import mixing_figure, plot_mixing
    from .recording import attention_modules
    from .signatures import FailureSignature
    from .statistics import (
        attention_statistics,
        effective_rank,
        numerical_rank,
        rank_bound,
        row_entropy,
        singular_values,
        top_share,
    )
    from .tokens import LayerTokens, layer_tokens
    from .tracking import AttentionTracker, attention_matrices


__getattr__, __dir__ = lazy_names(__name__, _PUBLIC_NAMES)
