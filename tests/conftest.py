# SPDX-License-Identifier: Apache-2.0
"""Has Triton interpret its kernels where there is no GPU: it decides that when it is first imported.

And what tests of several files share.
"""

from __future__ import annotations

import os

import pytest
import torch


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def fresh_accelerate_state():
    """For tests that train: accelerate keeps precision and device of the first run in the process."""
    yield
    # Not above: what it imports may import Triton.
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
