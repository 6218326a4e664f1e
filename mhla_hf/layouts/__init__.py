# SPDX-License-Identifier: Apache-2.0
"""Blocks of token grids and sequences, windows, and mixing weights resampled between layouts."""

# The mixing weights of this many blocks take a gigabyte in each layer. M² ≤ T then holds for the most tokens.
MAX_BLOCKS = 2**14
MAX_TOKENS = 2**28
