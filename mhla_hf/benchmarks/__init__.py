# SPDX-License-Identifier: Apache-2.0
"""Measurements that compare MHLA with softmax attention in the same run."""

from .decode import DecodeOptions, measure_decoding


__all__ = ["DecodeOptions", "measure_decoding"]
