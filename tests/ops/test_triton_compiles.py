# SPDX-License-Identifier: Apache-2.0
"""Every kernel compiles for GPUs of four generations, without one, and uses them well at the sizes that are measured.

`make test-kernels` runs these tests with the Triton of the GPUs that the kernels are tuned for. For the figures
themselves see `kernel_compilation`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

from tests import ROOT


pytest.importorskip("triton")

from .kernel_cases import CASES
from .kernel_compilation import PROCESSORS


# Kernels are tuned for this Triton and later ones. What earlier ones make of them is bounded, but no more.
IS_TUNED = tuple(map(int, version("triton").split(".")[:2])) >= (3, 6)
# A frame of a few registers on the stack is no spilling to speak of.
FRAME = 16 if IS_TUNED else 80
# Kernels that spill up to 40 bytes for now.
SPILLING = {(90, name) for name in ("query_gradient_kernel", "small_attend_kernel", "small_gradient_kernel")}
CAUSAL = {"causal_attend_kernel", "query_gradient_kernel", "key_gradient_kernel"}
# Loads of two bytes that a kernel may have: a vector has fewer numbers than there are threads.
VECTORS = 2
# Kernels that load or store one number of two bytes at a time. A row of the recurrent state is V + 1 numbers, and rows
# of mixing weights are few.
NARROW = {"decode_kernel", "weigh_kernel"}
# A case whose rows start at no multiple of 16 bytes, and cannot be loaded by them.
UNALIGNED = "width-20"
# Kernels whose rows are on their way to shared memory while others are multiplied.
PIPELINED = {"outer_kernel", "attend_kernel"}
# Instructions that a warp may take at most for a tile of tokens, compiled for 9.0 by a tuned Triton: 3.9 takes some
# fewer than 3.6.
INSTRUCTIONS = {
    ("wan", "outer_kernel"): 380,
    ("wan", "attend_kernel"): 460,
    ("dit-16-blocks-64", "outer_kernel"): 200,
    ("dit-16-blocks-64", "attend_kernel"): 440,
    ("dit-32-blocks-64", "outer_kernel"): 130,
    ("dit-32-blocks-64", "attend_kernel"): 270,
    ("dit-16-blocks-72", "outer_kernel"): 200,
    ("dit-16-blocks-72", "attend_kernel"): 480,
    ("dit-32-blocks-72", "outer_kernel"): 200,
    ("dit-32-blocks-72", "attend_kernel"): 300,
    ("causal-2k", "outer_kernel"): 200,
    ("causal-2k", "causal_attend_kernel"): 400,
}
# Programs that a multiprocessor of an H200 holds at least, in inference and in training; 1 for kernels not here.
PROGRAMS = {
    "outer_kernel": (2, 2),
    "weigh_kernel": (3, 3),
    "attend_kernel": (2, 2),
    "apply_kernel": (2, 2),
    "fused_outer_kernel": (2, 2),
    "fused_attend_kernel": (2, 2),
    "fused_gradient_kernel": (2, 2),
    "output_gradient_kernel": (2, 2),
    "norm_gradient_kernel": (2, 2),
    "hedgehog_features_kernel": (2, 2),
    "combine_kernel": (6, 6),
    "combine_gradient_kernel": (3, 3),
    "causal_attend_kernel": (3, 3),
    "query_gradient_kernel": (2, 2),
    "key_gradient_kernel": (2, 2),
    "decode_kernel": (2, 2),
    "small_attend_kernel": (2, 2),
}
# Kernels that hold one program where hedgehog features make rows twice as wide.
HALVED = {"outer_kernel", "apply_kernel"}
WIDTH_CASES = tuple(name for name in CASES if name.startswith("width-"))
SIZES = tuple(name for name in CASES if name not in WIDTH_CASES)


def compilations(*arguments: object) -> Any:
    """Output of `kernel_compilation`, run without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.kernel_compilation", *map(str, arguments)]
    run = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)


def complaints(capability: int, launch: dict[str, Any], *, measured: bool) -> list[str]:
    """What a launch does badly; how many programs fit is judged at the sizes that are `measured`."""
    kernel, usage = launch["kernel"], launch["usage"]
    found = []
    frame = max(40, FRAME) if (capability, kernel) in SPILLING else FRAME
    if usage["stack"] > frame or usage["local"]:
        found.append(f"spills {usage['stack'] + usage['local']} bytes")
    if usage["overtaken"]:
        found.append("overwrites rows while they are multiplied")
    if usage["shared"] > PROCESSORS[capability].shared_of_program:
        found.append(f"takes {usage['shared']} bytes of shared memory")
    loops = usage["loops"]
    if "forward" in launch["stage"]:
        if measured and kernel in PIPELINED and not (loops and all(copies for _, copies in loops)):
            found.append("waits for rows in every round")
        most = INSTRUCTIONS.get((launch["case"], kernel))
        if most and IS_TUNED and capability == 90 and max(size for size, _ in loops) > most:
            found.append(f"takes {loops} instructions a round, not {most}")
    may_be_narrow = kernel in NARROW or launch["case"] == UNALIGNED
    if usage["loads"].get("2", 0) + usage["stores"].get("2", 0) > VECTORS and not may_be_narrow:
        found.append("moves two bytes at a time")
    trains = "training" in launch["stage"]
    judged = IS_TUNED and measured and capability == 90 and not (kernel in HALVED and "hedgehog" in launch["case"])
    least = PROGRAMS.get(kernel, (1, 1))[trains] if judged else 1
    if launch["programs_at_a_time"] < least:
        found.append(f"leaves room for {launch['programs_at_a_time']} programs, not {least}")
    return [f"{launch['case']}, {launch['stage']}: {kernel} {text} ({launch['constants']})" for text in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [SIZES, *((name,) for name in CASES if name not in SIZES)], ids=lambda names: names[-1]
)
@pytest.mark.parametrize("capability", sorted(PROCESSORS))
def test_kernels_use_a_gpu_well(capability, cases):
    """No spills, wide loads, enough programs, no rows overwritten: in half precision, and float32 through TF32."""
    launches = compilations(capability, "--json", *cases)
    names = {launch["kernel"] for launch in launches}
    assert names >= {"outer_kernel", "weigh_kernel", "attend_kernel", "apply_kernel", "decode_kernel", *CAUSAL}
    found = [line for launch in launches for line in complaints(capability, launch, measured=cases is SIZES)]
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_grids_share_compilations():
    """Training on another grid of tokens compiles nothing, where rows of a tile or more make up a block.

    Neither do another number of chunks, another part of a single one, nor blocks whose slots are shared out.
    """
    causal = "causal:1100,1200,1301,2005,4000", "causal:1,5,12,16"
    block = "block:16x16,17x19,31x16,40x64,300x70", "block:9x9x8,6x10x11,13x8x21", "block:8x8,6x6,7x5"
    for first, *others in compilations(90, "--count", *causal, *block):
        assert first > 0 and set(others) == {0}
