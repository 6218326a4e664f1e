# SPDX-License-Identifier: Apache-2.0
"""Pictures of mixing weights: of any layer, head and query block of the MHLA model."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from ..analysis import mixing_figure, mixing_summary, reference_layout
from ..analysis.grids import middle_block
from ..layouts.blocks import BlockLayout
from ..training.matching.layers import mhla_layers
from ..utils.figures import figure_image
from ..utils.messages import check_choice
from .limits import check_whole
from .models import Comparison


ALL_HEADS = "mean of all heads"

_PICTURES = 64


class MixingBrowser:
    """Mixing matrices of an MHLA model's layers, drawn one at a time and kept.

    Args:
        comparison: Has the model.

    Attributes:
        layers: Names of the layers.
    """

    def __init__(self, comparison: Comparison) -> None:
        models = comparison.mhla_models()
        self._layers = {
            f"{component}.{layer.name}" if len(models) > 1 else layer.name: layer.mhla
            for component, model in models.items()
            for layer in mhla_layers(model)
        }
        self.layers = tuple(self._layers)
        # For one browser each: its models may be gone tomorrow.
        self._draw = lru_cache(maxsize=_PICTURES)(self._drawn)

    def heads(self, layer: str) -> list[str]:
        """Choices of heads of a layer: each by itself, and their mean."""
        matrix = self._mhla(layer).mixing
        return [ALL_HEADS] + [str(head) for head in range(matrix.shape[0] if matrix.dim() == 3 else 0)]

    def blocks(self, layer: str) -> tuple[int, int]:
        """First and last block of a layer on the token grid."""
        layout = self._layout(layer)
        return layout.num_prefix_blocks, layout.num_blocks - 1

    def middle(self, layer: str) -> int:
        """The block in the middle of a layer's token grid."""
        return middle_block(self._layout(layer))

    def picture(self, layer: Any, head: Any, block: Any) -> Any:
        """Draws the mixing matrix of a layer's head, and one block's weights laid out on the token grid.

        Args:
            layer: One of `layers`.
            head: One of [`heads`][mhla_hf.app.mixing.MixingBrowser.heads].
            block: Number of the block whose queries are looked at.

        Returns:
            A PIL image.

        Raises:
            ValueError: If there is no such layer, head or block.
        """
        check_choice("Layer", layer, self.layers)
        if head not in self.heads(layer):
            head = check_whole("Head", int(head) if str(head).isdecimal() else head, 0, len(self.heads(layer)) - 2)
        return self._draw(layer, str(head), check_whole("Block", block, *self.blocks(layer)))

    def _mhla(self, layer: str) -> Any:
        return self._layers[layer]

    def _layout(self, layer: str) -> BlockLayout:
        return reference_layout(self._mhla(layer))

    def _drawn(self, layer: str, head: str, block: int) -> Any:
        # Without the weights of later blocks, which causal layers do not use.
        matrix = mixing_summary(self._mhla(layer)).matrix
        number = re.search(r"\.(\d+)\.", layer)
        # The figure calls a row by its key.
        key: Any = number[1] if number else layer
        if head != ALL_HEADS:
            key, matrix = f"{key}, head {head}", matrix[int(head)]
        figure = mixing_figure({key: matrix}, self._layout(layer), block=block)
        return figure_image(figure)
