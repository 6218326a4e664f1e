# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels for a GPU that is not there, and reports what they use of it.

    python -m tests.ops.kernel_compilation 90 wan dit        compute capability times ten, then cases
    python -m tests.ops.kernel_compilation 90 --json wan     the same as a JSON list
    python -m tests.ops.kernel_compilation 90                names of the cases

Cases are those of `kernel_cases`. The operators run on meta tensors, and each launch is compiled in place of being
made. Reported are registers, stack, shared memory, bytes that single loads and stores of global memory move, how many
programs a multiprocessor holds at a time, and how many times the launch fills the whole GPU with them.

With `--count` and series of grids, `causal:1100,1200` or `block:8x12,10x10`, it compiles nothing, but runs attention
over grid after grid, and prints for each grid of each series how many compilations it would have to wait for.

TRITON_INTERPRET must not be set. Kernels are compiled by the Triton that is installed; for another one, put it into a
folder (`pip install --no-deps --target FOLDER triton==3.6.0`) and that folder first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton
from torch._library import simple_registry
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from mhla_hf import BlockLayout
from mhla_hf.ops import backends
from mhla_hf.ops.triton import launching


COMPILER_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Processor:
    """A GPU, by the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".

    Attributes:
        multiprocessors: How many it has.
        shared: Bytes of shared memory of one.
        shared_of_program: Bytes that a program can have.
        threads: Threads of a multiprocessor.
        programs: Programs of a multiprocessor.
    """

    multiprocessors: int
    shared: int
    shared_of_program: int
    threads: int = 2048
    programs: int = 32

    def programs_at_a_time(self, registers: int, warps: int, shared: int) -> int:
        """Programs that a multiprocessor holds: registers come in units of 8 a thread, shared memory of 128 bytes."""
        by_registers = 65536 // max(1, -(-registers // 8) * 8 * 32 * warps)
        # Each program takes 1 KB more for the system.
        by_shared = self.shared // (-(-shared // 128) * 128 + 1024)
        return min(by_registers, by_shared, self.threads // (32 * warps), self.programs)


# A100, H200, B200 and GeForce RTX 5090. What is compiled for 8.0 has to fit GPUs of 8.6 and 8.9, too, which multiply
# in the same way and have less shared memory.
PROCESSORS = {
    80: Processor(108, shared=164 << 10, shared_of_program=99 << 10),
    90: Processor(132, shared=228 << 10, shared_of_program=227 << 10),
    100: Processor(148, shared=228 << 10, shared_of_program=227 << 10),
    120: Processor(170, shared=100 << 10, shared_of_program=99 << 10, threads=1536, programs=24),
}


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel uses.

    Attributes:
        registers: Of a thread.
        stack: Bytes of a thread's stack; spilled registers lie there.
        local: Further bytes of local memory.
        shared: Bytes of shared memory.
        overtaken: Buffers of shared memory that copies may overwrite while wgmma still reads them.
        loads: Number of instructions that load from global memory, by the bytes that each moves.
        stores: The same of stores.
        loops: Number of instructions of each innermost loop that multiplies by tensor cores, and how many of them copy
            to shared memory while it runs.
    """

    registers: int
    stack: int
    local: int
    shared: int
    overtaken: int
    loads: dict[int, int]
    stores: dict[int, int]
    loops: list[tuple[int, int]]


@dataclass(frozen=True)
class Launch:
    """A launch of a case.

    Attributes:
        case: Name of the case.
        stage: Part of it.
        kernel: Name of the kernel.
        types: Types of the data behind its pointers.
        constants: Sizes that it is compiled for.
        programs: Number of programs.
        warps: Of a program.
        programs_at_a_time: How many a multiprocessor holds.
        waves: How many times the launch fills the GPU.
        usage: Of the kernel.
    """

    case: str
    stage: str
    kernel: str
    types: str
    constants: str
    programs: int
    warps: int
    programs_at_a_time: int
    waves: float
    usage: Usage


class Launched:
    """What a launch returns in place of the compiled kernel: further launches by it do nothing."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args: None


class Compilations:
    """Takes the place of launching: compiles each kernel once for each combination of types and constants."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.target = GPUTarget("cuda", capability, 32)
        self.backend = make_backend(self.target)
        self.launches: list[Launch] = []
        self.failures: list[str] = []
        self.usages: dict[str, Usage] = {}
        self.seen: set[tuple[str, str, str]] = set()
        self.only_counts = False
        self.case = self.stage = ""
        self.binders = cache(
            lambda kernel: create_function_from_signature(kernel.signature, kernel.params, self.backend)
        )

    def launch(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> Launched:
        """Compiles `kernel` for these arguments, specialised as Triton would for a launch."""
        given, specialization, options = self.binders(kernel)(*args, **keywords)
        types = [kind for kind, _ in specialization]
        paths = find_paths_if(types, lambda _, kind: kind == "constexpr")
        constants = {path: get_iterable_path(list(given.values()), path) for path in paths}
        hints = ["" if kind == "constexpr" else hint for kind, hint in specialization]
        paths = find_paths_if(hints, lambda _, hint: isinstance(hint, str))
        attributes = {path: get_iterable_path(hints, path) for path in paths}
        named = {name: given[name] for path, name in enumerate(given) if (path,) in constants}
        description = f"{kernel.__name__} {types} {attributes} {named} {options}"
        place = self.case, self.stage, description
        if self.only_counts or place in self.seen:
            self.seen.add(place)
            return Launched()
        self.seen.add(place)
        if description not in self.usages:
            attributes = {path: self.backend.parse_attr(hint) for path, hint in attributes.items()}
            signature = dict(zip(given, types, strict=True))
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
            try:
                compiled = triton.compile(source, target=self.target, options=options)
            # Whatever type it has: the others are compiled all the same.
            except Exception as error:
                self.failures.append(f"{self.case}, {self.stage}: {kernel.__name__} does not compile: {error}")
                return Launched()
            self.usages[description] = inspect(compiled)
        usage, warps = self.usages[description], options.get("num_warps", 4)
        processor, programs = PROCESSORS[self.capability], int(torch.Size(grid).numel())
        at_a_time = processor.programs_at_a_time(usage.registers, warps, usage.shared)
        self.launches.append(
            Launch(
                self.case,
                self.stage,
                kernel.__name__,
                " ".join(re.findall(r"'\*(\w+)'", str(types))),
                " ".join(f"{name}={value}" for name, value in named.items() if value is not None),
                programs,
                warps,
                at_a_time,
                programs / (processor.multiprocessors * max(at_a_time, 1)),
                usage,
            )
        )
        return Launched()

    def run(self, case: str) -> None:
        """Compiles what a case launches."""
        from .kernel_cases import CASES

        self.case = case
        for self.stage in CASES[case]():
            pass


def inspect(compiled: Any) -> Usage:
    """What a kernel compiled for a GPU uses, from its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        resources = run_tool("cuobjdump", "-res-usage", file.name)
        code = run_tool("nvdisasm", "-c", file.name)
    used = [int(re.search(rf"{name}:(\d+)", resources).group(1)) for name in ("REG", "STACK", "LOCAL")]
    overtaken = overtaken_buffers(compiled.asm["ttgir"])
    loads, stores = moved_bytes(code, "LDG", "LDGSTS"), moved_bytes(code, "STG")
    return Usage(*used, compiled.metadata.shared, overtaken, loads, stores, product_loops(code))


def product_loops(code: str) -> list[tuple[int, int]]:
    """`Usage.loops` of machine code."""
    names: list[str] = []
    labels: dict[str, int] = {}
    loops = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(names)
        elif instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)(.*)", line):
            target = re.search(r"\.L_x_\d+", instruction[2])
            if instruction[1] == "BRA" and target and target[0] in labels:
                loops.append((labels[target[0]], len(names)))
            names.append(instruction[1])
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    bodies = [names[first : last + 1] for first, last in sorted(inner)]
    products = {"HGMMA", "UTCHMMA", "HMMA"}
    return [(len(body), body.count("LDGSTS")) for body in bodies if products & set(body)]


def overtaken_buffers(code: str) -> int:
    """Number of buffers that copies of a pipelined loop may overwrite while products before them still run.

    A loop that copies n rounds ahead has n copies before it and one within. Products that it does not wait for in the
    same round read a buffer of one round more: it needs a place for each of these copies.
    """
    pending = set(re.findall(r"%\w+", " ".join(re.findall(r"warp_group_dot_wait ([^{]*)\{pendings = [1-9]", code))))
    sizes = {
        name: int(size) for name, size in re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x", code)
    }
    views = dict(re.findall(r"(%\w+) = ttg\.memdesc_(?:index|subview) (%\w+)\[", code))
    views |= dict(re.findall(r"(%\w+) = ttg\.memdesc_trans (%\w+) ", code))

    def buffer_of(operand: str) -> str:
        return buffer_of(views[operand]) if operand in views else operand

    copies = Counter(map(buffer_of, re.findall(r"ttg\.async_copy_global_to_local %\w+, (%\w+)", code)))
    found = set()
    for result, *names in re.findall(r"(%\w+) = ttng\.warp_group_dot (%\w+), (%\w+),.*isAsync = true", code):
        if result in pending:
            found |= {buffer for buffer in map(buffer_of, names) if sizes.get(buffer, 0) < copies[buffer]}
    return len(found)


def run_tool(name: str, *arguments: str) -> str:
    """Output of one of the tools for machine code that come with Triton."""
    return subprocess.run([COMPILER_TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def moved_bytes(code: str, *instructions: str) -> dict[int, int]:
    """Number of some instructions in machine code, by the bytes that each moves for a thread."""
    sizes = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
    counts: Counter[int] = Counter()
    for name, suffixes in re.findall(r"\b(LDG|LDGSTS|STG)((?:\.\w+)*)\b", code):
        if name in instructions:
            counts[next((sizes[suffix] for suffix in suffixes.split(".") if suffix in sizes), 4)] += 1
    return dict(sorted(counts.items()))


def count_compilations(series: str, compilations: Compilations) -> list[int]:
    """Runs attention, forward and backward, over some grids of tokens; new compilations at each.

    Args:
        series: `causal:` or `block:`, then grids between commas, each its sizes joined by `x`. Causal attention has
            chunks of 16 tokens, the other two blocks along each axis.
        compilations: Counts them.
    """
    from .kernel_cases import attend

    kind, grids = series.split(":")
    causal = kind == "causal"
    compilations.only_counts, compilations.seen = True, set()
    counts = []
    for text in grids.split(","):
        grid = tuple(map(int, text.split("x")))
        blocks = {"block_size": (16,)} if causal else {"blocks": (2,) * len(grid)}
        before, layout = len(compilations.seen), BlockLayout(grid, **blocks)
        stages = attend(
            layout, 1, 2, 64, normalizer="query", causal=causal, trains=True, dtype=torch.bfloat16, per_head=True
        )
        for _ in stages:
            pass
        counts.append(len(compilations.seen) - before)
    return counts


def print_table(launches: list[Launch]) -> None:
    """One line for each launch; loads and stores as the number of instructions x bytes."""
    case = ""
    for launch in launches:
        if launch.case != case:
            case = launch.case
            print(f"\n{case}")
            print(f"  {'stage':<19} {'kernel':<25} programs wps regs stack shared /SM  waves  loads; stores; loops")
        usage = launch.usage
        loads, stores = (
            " ".join(f"{count}x{size}" for size, count in counts.items()) for counts in (usage.loads, usage.stores)
        )
        print(
            f"  {launch.stage:<19} {launch.kernel:<25} {launch.programs:>8} {launch.warps:>3} {usage.registers:>4} "
            f"{usage.stack + usage.local:>5} {usage.shared:>6} {launch.programs_at_a_time:>3} {launch.waves:>6.2f}  "
            f"{loads}; {stores}; " + " ".join(f"{size} ({copies} copies)" for size, copies in usage.loops)
        )


def prepare(capability: int) -> Compilations:
    """Makes launches compile for a capability, and the operators take meta tensors."""
    compilations = Compilations(capability)
    # Before the modules of kernels are imported, which copy this name.
    launching.multiplies_from_shared_memory = lambda device: capability in (90, 100)
    launching.multiplies_by_wgmma = lambda device: capability == 90
    backends.triton_obstacle = lambda *tokens: None
    os.environ["MHLA_HF_KERNEL_CHECK"] = "0"
    JITFunction.run = lambda kernel, *args, **keywords: compilations.launch(kernel, *args, **keywords)
    package = importlib.import_module("mhla_hf.ops.triton")
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    from mhla_hf.ops.plans import BODIES

    for name, run in BODIES.items():
        # Meta tensors would get the fake implementation, which launches nothing.
        simple_registry.singleton.find(name).fake_impl.kernel.func = run
    # There is none for meta tensors.
    torch.autocast = lambda *args, **keywords: contextlib.nullcontext()
    torch.backends.cuda.matmul.allow_tf32 = True
    return compilations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capability", type=int, choices=PROCESSORS)
    parser.add_argument("cases", nargs="*", metavar="case", help="names of cases, or `all`; or series of grids")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.add_argument("--count", action="store_true", help="count compilations over series of grids")
    arguments = parser.parse_intermixed_args()
    compilations = prepare(arguments.capability)
    from .kernel_cases import CASES

    if arguments.count:
        print(json.dumps([count_compilations(series, compilations) for series in arguments.cases]))
        return
    unknown = set(arguments.cases) - {*CASES, "all"}
    if unknown or not arguments.cases:
        parser.error(f"no case {', '.join(sorted(unknown)) or 'given'}; there are {', '.join(CASES)}")
    for case in CASES if "all" in arguments.cases else arguments.cases:
        compilations.run(case)
    if arguments.json:
        print(json.dumps([asdict(launch) for launch in compilations.launches]))
    else:
        print(f"Triton {triton.__version__}, compute capability {arguments.capability / 10}")
        print_table(compilations.launches)
    if compilations.failures:
        sys.exit("\n".join(compilations.failures))


if __name__ == "__main__":
    main()
