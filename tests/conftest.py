# SPDX-License-Identifier: Apache-2.0
"""Has Triton interpret its kernels where there is no GPU: it decides that when it is first imported.

Where there is one, float32 is exact. Also fixtures that tests of several files share, and the choice of slow tests.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from importlib.util import find_spec

import pytest
import torch

from .browser import browser, page  # noqa: F401


# Kernels that fail shall fail their tests, and not be replaced.
os.environ.setdefault("MHLA_HF_KERNEL_CHECK", "0")
if torch.cuda.is_available():
    # float32 is what tests compare with: convolutions would round it to TF32, as matrix products do only if asked to.
    torch.backends.cudnn.allow_tf32 = False
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Half of the cases of every test of interpreted kernels are slow tests.

    Which half depends on the hash of the case's name, so that all values of each parameter remain among the fast ones.
    """
    cases = defaultdict(list)
    for item in items:
        callspec = getattr(item, "callspec", None)
        interpreted = callspec is not None and "interpreted" in callspec.id.split("-")
        if interpreted and not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        group.sort(key=lambda item: zlib.crc32(item.name.encode()))
        for item in group[(len(group) + 1) // 2 :]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def interpreter_that_imitates_a_gpu():
    """Kernels that are interpreted round and multiply as compiled ones do."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        from .ops.interpreter import imitate_gpu

        imitate_gpu()


@pytest.fixture
def fresh_accelerate_state():
    """For tests that train: accelerate keeps precision and device of the first run in the process."""
    yield
    # Not above: what it imports may import Triton.
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
