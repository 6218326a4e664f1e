# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for GPUs of two generations, without one, and spills no registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests import ROOT


pytest.importorskip("triton")

# A frame of a few registers on the stack is no spilling to speak of.
FRAME = 16
# Shared memory of a multiprocessor that a program may take, in bytes (CUDA C++ Programming Guide, table "Technical
# Specifications per Compute Capability"). What is compiled for 8.0 has to fit GPUs of 8.6, 8.9 and 12.0 too, which
# multiply in the same way and have less.
SHARED_MEMORY = {80: 99 * 1024, 90: 227 * 1024}


def compilations(*arguments: object) -> Any:
    """Output of `kernel_compilation`, run without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.kernel_compilation", *map(str, arguments)]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 72, 128, 256])
@pytest.mark.parametrize("capability", sorted(SHARED_MEMORY))
def test_kernels_fit_without_spilling(capability, width):
    """In the precisions that are chosen by themselves: half precision, and float32 through TF32."""
    results = compilations(capability, width)
    names = {result["kernel"] for result in results}
    assert names >= {
        "outer_kernel", "attend_kernel", "apply_kernel", "mix_kernel", "mixing_gradient_kernel", "limit_kernel",
        "causal_attend_kernel", "query_gradient_kernel", "key_gradient_kernel", "plain_gradient_kernel",
        "decode_kernel", "file_kernel",
    }  # fmt: skip
    for result in results:
        # The causal ones multiply float16 exactly, for which the widest heads leave too little room.
        causal = result["kernel"] in ("causal_attend_kernel", "query_gradient_kernel", "key_gradient_kernel")
        if not (causal and "fp16" in result["types"] and width == 256):
            assert result["stack"] <= FRAME and result["local"] == 0, f"spills: {result}"
        assert result["shared"] <= SHARED_MEMORY[capability], f"too much shared memory: {result}"


def test_grids_share_compilations():
    """Training on another grid of tokens compiles nothing, where rows of a tile or more make up a block.

    Neither do another number of chunks, another part of a single one, nor blocks whose slots are shared out.
    """
    causal = "causal:1100,1200,1301,2005,4000", "causal:1,5,12,16"
    block = "block:16x16,17x19,31x16,40x64,300x70", "block:9x9x8,6x10x11,13x8x21", "block:8x8,6x6,7x5"
    for first, *others in compilations(90, 64, *causal, *block):
        assert first > 0 and set(others) == {0}
