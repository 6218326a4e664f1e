# SPDX-License-Identifier: Apache-2.0
"""Has Triton interpret its kernels where there is no GPU: it decides that when it is first imported.

Where there is one, float32 is exact. Also fixtures that tests of several files share, and the choice of slow tests.
"""

from __future__ import annotations

import os
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
    """Of each test of interpreted kernels, the first case is a fast test."""
    cases = defaultdict(list)
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and "interpreted" in callspec.id.split("-"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        for item in group[1:]:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def interpreter_that_imitates_a_gpu():
    """Kernels that are interpreted round and multiply as compiled ones do."""
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        from .ops.interpreter import imitate_gpu

        imitate_gpu()


@pytest.fixture(scope="session", autouse=True)
def short_fits():
    """Calibration takes few steps where a test does not say how many: quality is measured in benchmarks/."""
    # Not above: what it imports may import Triton.
    from mhla_hf.recovery import calibration

    for function in (calibration.calibrate, calibration.calibrate_model, calibration.calibrate_directory):
        function.__kwdefaults__["fit_steps"] = 4


@pytest.fixture(scope="session")
def softmax_dir(tmp_path_factory):
    """A tiny Wan pipeline on disk; tests do not change it."""
    from . import tiny

    folder = tmp_path_factory.mktemp("softmax") / "pipeline"
    tiny.wan_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def fresh_accelerate_state():
    """For tests that train: accelerate keeps precision and device of the first run in the process."""
    yield
    # Not above: what it imports may import Triton.
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)


@pytest.fixture
def one_process():
    """The mesh of a process group of this process alone, for models that FSDP 2 shards."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()
