# SPDX-License-Identifier: Apache-2.0
"""Compiles the Triton kernels for a GPU that is not there, and prints the registers and memory that they use.

Run as a program, `python -m tests.ops.kernel_compilation 90 64`, without TRITON_INTERPRET: compute capability times
ten, and the width of heads. It runs the operators on small CPU tensors, compiles each launch in place of making it,
and prints a JSON list of `{kernel, types, warps, registers, stack, local, shared}`.

With series of grids after those, `causal:1100,1200` or `block:8x12,10x10`, it compiles nothing, but runs attention
over grid after grid, and prints for each grid of each series how many compilations it would have to wait for.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton._utils import find_paths_if, get_iterable_path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from mhla_hf import BlockLayout
from mhla_hf.ops.triton import launching


COMPILER_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Compilations:
    """Takes the place of launching: compiles each kernel once for each combination of types and constants."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.backend = make_backend(self.target)
        self.results: list[dict[str, Any]] = []
        self.seen: set[str] = set()
        self.only_counts = False

    def launch(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        """Compiles `kernel` for these arguments, specialised as Triton would for a launch."""
        signature_of = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        given, specialization, options = signature_of(*args, **keywords)
        types = [kind for kind, _ in specialization]
        paths = find_paths_if(types, lambda _, kind: kind == "constexpr")
        constants = {path: get_iterable_path(list(given.values()), path) for path in paths}
        hints = ["" if kind == "constexpr" else hint for kind, hint in specialization]
        paths = find_paths_if(hints, lambda _, hint: isinstance(hint, str))
        attributes = {path: get_iterable_path(hints, path) for path in paths}
        named = {name: given[name] for path, name in enumerate(given) if (path,) in constants}
        description = f"{kernel.__name__} {types} {attributes} {named} {options}"
        if description in self.seen:
            return
        self.seen.add(description)
        if self.only_counts:
            return
        attributes = {path: self.backend.parse_attr(hint) for path, hint in attributes.items()}
        signature = dict(zip(given, types, strict=True))
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=self.target, options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            tool = [COMPILER_TOOLS / "cuobjdump", "-res-usage", file.name]
            usage = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
        used = {name: int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK", "LOCAL")}
        pointers = sorted(set(re.findall(r"'(\*\w+)'", str(types))))
        self.results.append({
            "kernel": kernel.__name__, "types": " ".join(pointers), "warps": options.get("num_warps", 4),
            "registers": used["REG"], "stack": used["STACK"], "local": used["LOCAL"],
            "shared": compiled.metadata.shared, "constants": description,
        })  # fmt: skip


def run_operators(width: int) -> None:
    """Launches every kernel: forward without gradients in bfloat16, then forward and backward in all types."""
    from mhla_hf.ops.triton.block import triton_block_mhla_attention
    from mhla_hf.ops.triton.causal import triton_causal_mhla_attention

    torch.backends.cuda.matmul.allow_tf32 = True
    chunked, blocks = BlockLayout((384,), block_size=(128,)), BlockLayout((384,), blocks=(3,))
    half, full = torch.bfloat16, torch.float32
    for dtype, trains in ((half, False), (half, True), (torch.float16, True), (full, True)):
        for attend, layout in ((triton_block_mhla_attention, blocks), (triton_causal_mhla_attention, chunked)):
            for normalizer, rotated in (("query", False), ("query", True), ("none", False)):
                tokens = [torch.ones(1, 384, 2, width, dtype=dtype, requires_grad=trains) for _ in range(5)]
                mixing = torch.ones(3, 3, requires_grad=trains)
                pair = {"normalizer_query": tokens[3], "normalizer_key": tokens[4]} if rotated else {}
                output = attend(*tokens[:3], mixing, layout, normalizer=normalizer, **pair)
                if trains:
                    output.sum().backward()
        run_fused(width, dtype, blocks, trains)
        run_recurrent(width, dtype)


def run_recurrent(width: int, dtype: torch.dtype) -> None:
    """Launches the recurrent form: one token, and prompts for a new state and for one that has seen tokens."""
    from mhla_hf.ops.recurrent import empty_state
    from mhla_hf.ops.triton.decode import decode_token
    from mhla_hf.ops.triton.prompt import extend_state

    state = empty_state(1, 2, width, width, 128, num_blocks=3, summary_dtype=dtype)
    tensors = state.summaries, state.current, state.prefix, state.upcoming, state.position
    mixing = torch.ones(3, 3)
    token, prompt = (torch.ones(1, length, 2, width, dtype=dtype) for length in (1, 384))
    decode_token(token, token, token, None, None, None, mixing, *tensors, 128, True, 1e-6)
    table, past = torch.arange(384, dtype=torch.int32).reshape(3, 128), torch.ones(1, 2, 3, width, width + 1)
    for before in ((None, None, None), (past, state.summaries, state.current)):
        extend_state(
            prompt, prompt, prompt, None, None, mixing, mixing, table, *before, state.position, state.position + 384,
            3, dtype, True, 1e-6,
        )  # fmt: skip


def run_fused(width: int, dtype: torch.dtype, layout: BlockLayout, trains: bool) -> None:
    """Launches the kernels that have norm, feature map and rotary embeddings inside, if they take heads that wide."""
    from mhla_hf.ops.triton import fits_fused_kernels, fused

    if not fits_fused_kernels(width, width, True, dtype):
        return
    table, angles = layout.token_table(torch.device("cpu")), torch.ones(384, width // 2)
    for normalizes in (True, False):
        tokens = torch.ones(1, 384, 2, width, dtype=dtype, requires_grad=trains)
        norm, output_norm = (torch.ones(size, dtype=dtype, requires_grad=trains) for size in (2 * width, width))
        shared = "relu", 1e-6, 1.0, 0.0, 1.0
        summaries, sums, _ = fused.fused_summary(
            tokens, tokens, norm, angles, angles, table, *shared, normalizes, not trains
        )
        output, _ = fused.fused_attend(
            tokens, summaries, sums if normalizes else None, tokens, norm, output_norm, angles, angles, table,
            *shared, 1e-6, 1e-6,
        )  # fmt: skip
        if trains:
            output.sum().backward()


def count_compilations(width: int, series: str, compilations: Compilations) -> list[int]:
    """Runs attention, forward and backward, over some grids of tokens; new compilations at each.

    Args:
        width: Of heads.
        series: `causal:` or `block:`, then grids between commas, each its sizes joined by `x`. Causal attention has
            chunks of 16 tokens, the other two blocks along each axis.
        compilations: Counts them.
    """
    from mhla_hf.ops.triton.block import triton_block_mhla_attention
    from mhla_hf.ops.triton.causal import triton_causal_mhla_attention

    kind, grids = series.split(":")
    attend = triton_causal_mhla_attention if kind == "causal" else triton_block_mhla_attention
    compilations.only_counts, compilations.seen = True, set()
    counts = []
    for text in grids.split(","):
        grid = tuple(map(int, text.split("x")))
        blocks = {"block_size": (16,)} if kind == "causal" else {"blocks": (2,) * len(grid)}
        before, layout = len(compilations.seen), BlockLayout(grid, **blocks)
        shape = (1, layout.num_tokens, 2, width)
        tokens = [torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        mixing = torch.ones(2, layout.num_blocks, layout.num_blocks, requires_grad=True)
        attend(*tokens, mixing, layout).sum().backward()
        counts.append(len(compilations.seen) - before)
    return counts


def main() -> None:
    capability, width = map(int, sys.argv[1:3])
    compilations = Compilations(capability)
    # Before the modules of kernels are imported, which copy this name.
    launching.multiplies_from_shared_memory = lambda device: capability >= 90
    JITFunction.run = lambda kernel, *args, **keywords: compilations.launch(kernel, *args, **keywords)
    if len(sys.argv) > 3:
        json.dump([count_compilations(width, series, compilations) for series in sys.argv[3:]], sys.stdout)
        return
    run_operators(width)
    json.dump(compilations.results, sys.stdout)


if __name__ == "__main__":
    main()
