# SPDX-License-Identifier: Apache-2.0
"""MHLA as a kernel for the `kernels` library: a folder for the Hub that loads without this package."""

from .folder import export_kernel


__all__ = ["export_kernel"]
