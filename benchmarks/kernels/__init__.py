# SPDX-License-Identifier: Apache-2.0
"""Checks, times and sweeps of the kernels on a GPU: `python -m benchmarks.kernels`, see benchmarks/README.md."""
