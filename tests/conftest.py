# SPDX-License-Identifier: Apache-2.0
"""Has Triton interpret its kernels where there is no GPU: it decides that when it is first imported."""

from __future__ import annotations

import os

import torch


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
