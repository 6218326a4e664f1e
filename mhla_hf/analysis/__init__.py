# SPDX-License-Identifier: Apache-2.0
"""What MHLA layers attend to: attention matrices, their statistics, and figures of them.

Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..utils import lazy_names


if TYPE_CHECKING:
    from .inspection import InspectionReport as InspectionReport
    from .inspection import LayerInspection as LayerInspection
    from .inspection import ModelInspection as ModelInspection
    from .inspection import inspect_directory as inspect_directory
    from .inspection import inspect_model as inspect_model
    from .matrices import LayerTokens as LayerTokens
    from .matrices import layer_tokens as layer_tokens
    from .matrices import linear_matrix as linear_matrix
    from .matrices import mhla_matrix as mhla_matrix
    from .matrices import softmax_matrix as softmax_matrix
    from .plots import mixing_figure as mixing_figure
    from .plots import write_html as write_html
    from .signatures import FailureSignature as FailureSignature
    from .statistics import MixingSummary as MixingSummary
    from .statistics import attention_statistics as attention_statistics
    from .statistics import effective_rank as effective_rank
    from .statistics import mean_distance as mean_distance
    from .statistics import mixing_summary as mixing_summary
    from .statistics import numerical_rank as numerical_rank
    from .statistics import rank_bound as rank_bound
    from .statistics import reference_layout as reference_layout
    from .statistics import singular_values as singular_values
    from .tracking import AttentionSummary as AttentionSummary
    from .tracking import AttentionTracker as AttentionTracker
    from .tracking import TrackingCallback as TrackingCallback
    from .tracking import attention_matrices as attention_matrices

__getattr__, __dir__, __all__ = lazy_names(__name__)
