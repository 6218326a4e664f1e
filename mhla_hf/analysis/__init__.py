# SPDX-License-Identifier: Apache-2.0
"""What MHLA layers attend to: attention matrices, their statistics, and pictures of them.

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils.imports import lazy_names


if TYPE_CHECKING:
    from .callbacks import TrackingCallback as TrackingCallback
    from .diagnosis import failure_signatures as failure_signatures
    from .directories import InspectionReport as InspectionReport
    from .directories import inspect_directory as inspect_directory
    from .findings import AttentionSummary as AttentionSummary
    from .findings import LayerInspection as LayerInspection
    from .findings import ModelInspection as ModelInspection
    from .history_plots import plot_history as plot_history
    from .html import render_html as render_html
    from .html import write_html as write_html
    from .inspection import inspect_model as inspect_model
    from .matrices import linear_matrix as linear_matrix
    from .matrices import mhla_matrix as mhla_matrix
    from .matrices import softmax_matrix as softmax_matrix
    from .matrices import window_mask as window_mask
    from .mixing import DistanceDecay as DistanceDecay
    from .mixing import MixingSummary as MixingSummary
    from .mixing import distance_decay as distance_decay
    from .mixing import mean_distance as mean_distance
    from .mixing import mixing_summary as mixing_summary
    from .mixing import reference_layout as reference_layout
    from .mixing import relative_distance as relative_distance
    from .plots import mixing_figure as mixing_figure
    from .plots import plot_mixing as plot_mixing
    from .recording import attention_modules as attention_modules
    from .signatures import FailureSignature as FailureSignature
    from .statistics import attention_statistics as attention_statistics
    from .statistics import effective_rank as effective_rank
    from .statistics import numerical_rank as numerical_rank
    from .statistics import rank_bound as rank_bound
    from .statistics import row_entropy as row_entropy
    from .statistics import singular_values as singular_values
    from .statistics import top_share as top_share
    from .tokens import LayerTokens as LayerTokens
    from .tokens import layer_tokens as layer_tokens
    from .tracking import AttentionTracker as AttentionTracker
    from .tracking import attention_matrices as attention_matrices

__getattr__, __dir__, __all__ = lazy_names(__name__)
