# SPDX-License-Identifier: Apache-2.0
"""Processor time of one call, without a GPU: Triton compiles for Hopper and launches on a stub of libcuda.

All tensors are on the CPU and tiny, so that operations of torch take little more than it takes to call them. What the
kernels would write is never written. A GPU's host is slower by the driver's part of a launch, and by its own speed.
"""

from __future__ import annotations

import cProfile
import ctypes
import json
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


SOURCE = Path(__file__).with_name("cuda_stub.c")


def run_on_stub(*arguments: str) -> int:
    """Builds the stub and runs this module on it, in a process of its own; returns the process's status.

    Raises:
        ValueError: If there is no C compiler, or it does not compile the stub.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        raise ValueError("host needs a C compiler (cc, gcc or clang, or CC), which builds a stub of libcuda.")
    with tempfile.TemporaryDirectory() as folder:
        built = subprocess.run(
            [*compiler.split(), "-O2", "-w", "-shared", "-fPIC", "-o", f"{folder}/libcuda.so.1", str(SOURCE)],
            capture_output=True, text=True,
        )  # fmt: skip
        if built.returncode:
            raise ValueError(f"{compiler} does not compile {SOURCE.name}: {built.stderr.strip()}")
        # For Triton's tools that link with it.
        shutil.copy(f"{folder}/libcuda.so.1", f"{folder}/libcuda.so")
        libraries = os.pathsep.join(filter(None, [folder, os.environ.get("LD_LIBRARY_PATH")]))
        # The profiler's own messages.
        quiet = {"KINETO_LOG_LEVEL": "5", "MHLA_HF_KERNEL_CHECK": "0"}
        changed = {"TRITON_LIBCUDA_PATH": folder, "LD_LIBRARY_PATH": libraries, "CUDA_VISIBLE_DEVICES": "", **quiet}
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | changed
        return subprocess.run([sys.executable, "-m", __name__, *arguments], env=environment).returncode


def use_stub() -> None:
    """Has Triton compile for a GPU of compute capability 9.0, and the package take kernels for tensors on the CPU."""
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    from mhla_hf.ops import backends, plans

    stub: Any = CudaDriver()
    stub.get_device_capability, stub.get_current_device = lambda device: (9, 0), lambda: 0
    stub.get_current_stream = lambda device: 0
    driver.set_active(stub)
    backends.triton_obstacle = lambda *tokens: None
    plans.ON_CPU = True
    # Kernels that do nothing leave results as memory was.
    plans._same_bits = lambda *results: True


def host_cases() -> dict[str, Callable[[], Any]]:
    """Calls by name: the operator and the layer, blocks of a grid and causal, forward and both directions."""
    from mhla_hf import BlockLayout, MHLAConfig, mhla_attention
    from mhla_hf.layers import MHLA
    from mhla_hf.layers.state import TokenSequence

    shape = 1, 16, 2, 16
    tokens = [torch.rand(shape, dtype=torch.bfloat16) for _ in range(3)]
    wanted = [tensor.clone().requires_grad_() for tensor in tokens]
    gradient = torch.rand(shape, dtype=torch.bfloat16)
    cases: dict[str, Callable[[], Any]] = {}

    def add(name: str, call: Callable[..., torch.Tensor], mixing: torch.Tensor) -> None:
        cases[f"{name}, forward"] = lambda: call(*tokens)
        cases[f"{name}, forward, gradients recorded"] = lambda: call(*wanted)
        cases[f"{name}, both directions"] = lambda: torch.autograd.grad(call(*wanted), [*wanted, mixing], gradient)

    layouts = {"block": BlockLayout((4, 4), blocks=(2, 2)), "causal": BlockLayout((16,), block_size=(4,))}
    for name, layout in layouts.items():
        mixing = torch.rand(4, 4, requires_grad=True)
        options = {"mixing": mixing, "layout": layout, "causal": name == "causal", "backend": "triton"}
        add(f"operator, {name}", partial(mhla_attention, **options), mixing)
    configs = {
        "block": (MHLAConfig(blocks=(2, 2), backend="triton"), {"grid": (4, 4)}),
        "causal": (
            MHLAConfig(grid=(16,), block_size=(4,), causal=True, backend="triton"),
            {"sequence": TokenSequence(causal=True)},
        ),
    }
    for name, (config, arguments) in configs.items():
        layer = MHLA(config, hidden_size=32, num_heads=2, head_dim=16)
        add(f"layer, {name}", partial(layer, **arguments), layer.mixing)
    return cases


def processor_microseconds(call: Callable[[], Any], rounds: int = 30, calls: int = 50) -> tuple[float, float]:
    """Least and median processor time of a call: other load on the machine hardly changes the least."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        for _ in range(calls):
            call()
        times.append((time.process_time() - start) / calls * 1e6)
    return min(times), sorted(times)[rounds // 2]


def torch_operations(call: Callable[[], Any]) -> int:
    """Number of torch's own operations in a call, without those that they call themselves."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    events = profiler.events() or []
    return sum(e.name.startswith("aten::") and not _is_within_operation(e) for e in events)


def _is_within_operation(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith("aten::"):
        parent = parent.cpu_parent
    return parent is not None


def shares(call: Callable[[], Any], calls: int = 300) -> dict[str, float]:
    """Parts of a call's time, which cProfile makes longer, by who spends it: Triton, torch, the package, others."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(calls):
        call()
    profiler.disable()
    totals: Counter[str] = Counter()
    # Built-in functions have no file, and are nearly all torch's.
    owners = {"/triton/": "triton", "mhla_hf": "package", "<plan": "package", "/torch/": "torch", "torch": "torch"}
    for (file, _, function), (_, _, own, *_) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        place = f"{file} {function}"
        places = ["mhla_hf"] if "mhla_hf/ops/triton" in place else [part for part in owners if part in place]
        totals[owners[places[0]] if places else "others"] += own
    return {name: round(own / sum(totals.values()), 3) for name, own in totals.most_common()}


def main() -> None:
    """Measures every case, prints it and writes it to the file that is given."""
    use_stub()
    launches = ctypes.CDLL("libcuda.so.1").stub_launches
    launches.restype = ctypes.c_long
    torch.set_num_threads(1)
    rows = []
    for name, call in host_cases().items():
        torch.set_grad_enabled(not name.endswith(", forward"))
        # Compiles, and makes what is remembered of a call.
        for _ in range(5):
            call()
        before = launches()
        call()
        row = {"case": name, "launches": launches() - before, "torch_operations": torch_operations(call)}
        row["microseconds"], row["median_microseconds"] = processor_microseconds(call)
        row["shares"] = shares(call)
        rows.append(row)
        print(
            f"{name:45s} {row['microseconds']:7.1f} µs (median {row['median_microseconds']:.1f}), "
            f"{row['launches']} launches, {row['torch_operations']} operations of torch, {row['shares']}",
            flush=True,
        )
        if len(sys.argv) > 1:
            report = {"device": "CPU, libcuda stub", **versions(), "results": rows}
            Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Releases that the figures depend on."""
    import platform

    import triton

    return {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}


if __name__ == "__main__":
    main()
