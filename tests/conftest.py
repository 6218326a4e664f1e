# SPDX-License-Identifier: Apache-2.0
"""Has Triton interpret its kernels where there is no GPU: it decides that when it is first imported.

Where there is one, float32 is exact. And what tests of several files share.
"""

from __future__ import annotations

import os

import pytest
import torch


if torch.cuda.is_available():
    # float32 is what tests compare with: convolutions would round it to TF32, as matrix products do only if asked to.
    torch.backends.cudnn.allow_tf32 = False
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def fresh_accelerate_state():
    """For tests that train: accelerate keeps precision and device of the first run in the process."""
    yield
    # Not above: what it imports may import Triton.
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
