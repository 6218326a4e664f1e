# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for GPUs of two generations, without one, and keeps what it works on in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


pytest.importorskip("triton")

# A frame of a few bytes on the stack is no spilling to speak of.
FRAME = 16
# What a program may take of a multiprocessor's shared memory, in bytes (CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability").
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 72, 128, 256])
@pytest.mark.parametrize("capability", sorted(SHARED_MEMORY))
def test_kernels_fit_without_spilling(capability, width):
    """In the precisions that are chosen by themselves: half precision, and float32 through TF32."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.kernel_compilation", str(capability), str(width)]
    run = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    results = json.loads(run.stdout)
    names = {result["kernel"] for result in results}
    assert names >= {
        "outer_kernel", "attend_kernel", "apply_kernel", "mix_kernel", "mixing_gradient_kernel", "limit_kernel",
        "causal_attend_kernel", "query_gradient_kernel", "key_gradient_kernel", "plain_gradient_kernel",
        "decode_kernel",
    }  # fmt: skip
    for result in results:
        # The fused kernels are made for half precision; in float32 they hold more than there is room for.
        if not (result["kernel"].startswith("fused") and "bf16" not in result["types"]):
            assert result["stack"] <= FRAME and result["local"] == 0, f"spills: {result}"
        assert result["shared"] <= SHARED_MEMORY[capability], f"too much shared memory: {result}"
