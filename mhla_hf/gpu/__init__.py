# SPDX-License-Identifier: Apache-2.0
"""Checks and times of the Triton kernels at the sizes of models, for `mhla-hf doctor --gpu` and benchmarks/kernels.

On a GPU if there is one. Otherwise kernels are interpreted at small sizes, which shows that the checks work.
"""
