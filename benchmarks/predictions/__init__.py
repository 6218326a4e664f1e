# SPDX-License-Identifier: Apache-2.0
"""Predictions of the kernels' times from bytes and operations; `python -m benchmarks.predictions`."""
