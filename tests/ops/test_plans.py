# SPDX-License-Identifier: Apache-2.0
"""Plans of calls: they compute what the calls compute, and serve no call of another kind.

There is no GPU: kernels are interpreted, and stand for compiled ones that take addresses.
"""

from __future__ import annotations

import ctypes
from collections import Counter

import pytest
import torch


pytest.importorskip("triton")

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.layouts.sequences import SequenceLayout
from mhla_hf.ops import backends, plans
from mhla_hf.ops.triton import launching


pytestmark = pytest.mark.skipif(not backends.interprets_kernels(), reason="needs TRITON_INTERPRET=1")


class Compiled:
    """An interpreted kernel in the place of a compiled one, which knows types but no tensors."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel, keywords, arguments):
        self.kernel, self.keywords = kernel, keywords
        self.types = [_types(argument) for argument in arguments]
        self.streams = []

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        assert (function, metadata, launch_metadata, enter, leave) == ("function", "metadata", None, None, None)
        self[x, y, z](*arguments, stream=stream)

    def __getitem__(self, grid):
        def start(*arguments, stream):
            self.streams.append(stream)
            count = len(self.types)
            tensors = [_tensor(value, kind) for value, kind in zip(arguments, self.types)]
            names = self.kernel.arg_names[count:]
            options = {name: self.keywords[name] for name in ("num_warps", "num_stages")}
            self.kernel[grid](*tensors, **dict(zip(names, arguments[count:], strict=True)), **options)

        return start


def _types(argument):
    if isinstance(argument, torch.Tensor):
        storage = argument.untyped_storage()
        return argument.dtype, storage.nbytes() - argument.storage_offset() * argument.element_size()
    return tuple(map(_types, argument)) if isinstance(argument, tuple) else None


def _tensor(value, kind):
    """A tensor behind an address, as long as the one that the kernel was compiled with."""
    if isinstance(value, tuple):
        parts = [_tensor(*pair) for pair in zip(value, kind, strict=True)]
        names = {4: launching.Rows, 5: launching.AlignedRows}
        is_rows = isinstance(parts[0], torch.Tensor) and len(parts) in names and isinstance(parts[3], int)
        return names[len(parts)](*parts) if is_rows else tuple(parts)
    if kind is None or not isinstance(kind, tuple):
        return value
    dtype, size = kind
    if not size:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * size).from_address(value), dtype=dtype)


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that were compiled, in order; afterwards there are no plans."""
    made, original = [], launching.first_launch

    def first_launch(kernel, grid, *arguments, **keywords):
        original(kernel, grid, *arguments, **keywords)
        made.append(Compiled(kernel, keywords, arguments))
        return made[-1]

    monkeypatch.setattr(launching, "first_launch", first_launch)
    monkeypatch.setattr(plans, "ON_CPU", True)
    plans.forget()
    yield made
    plans.forget()


def counts() -> Counter[str]:
    """Kinds that have been seen, those that have a plan, and those that have none."""
    return Counter("plan" if isinstance(entry, plans.Plan) else entry for entry in plans._plans.values())


def tokens(seed: int, dtype=torch.float32, heads=2, key_heads=2, batch=1, gradients=False):
    """Queries, keys and values of 12 tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, 12, count, 16) for count in (heads, key_heads, key_heads)]
    made = [torch.rand(shape, generator=generator).to(dtype) for shape in shapes]
    return [tensor.requires_grad_(gradients) for tensor in made]


LAYOUTS = {
    "even": BlockLayout((12,), blocks=(3,)),
    "ragged": BlockLayout((3, 4), blocks=(2, 3)),
    "causal": BlockLayout((12,), block_size=(4,)),
    "causal, ragged": BlockLayout((12,), block_size=(5,)),
}


@pytest.mark.parametrize("normalizer", ["query", "none", "block_query"])
@pytest.mark.parametrize("per_head", [False, True], ids=["shared", "per head"])
@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_later_calls_compute_the_same(compiled, name, key_heads, per_head, normalizer):
    """Outputs and all gradients beside float64, of calls with other numbers than the recorded one."""
    layout, causal = LAYOUTS[name], name.startswith("causal")
    if normalizer == "block_query" and not layout.is_uniform and not causal:
        pytest.skip("needs even blocks")
    for seed in range(5):
        for gradients in (False, True):
            given = tokens(seed, key_heads=key_heads, batch=2, gradients=gradients)
            blocks = layout.num_blocks
            mixing = torch.rand((2, blocks, blocks) if per_head else (blocks, blocks), requires_grad=gradients)
            options = {"normalizer": normalizer, "causal": causal}
            output = mhla_attention(*given, mixing, layout, backend="triton", **options)
            exact = [tensor.detach().double().requires_grad_(gradients) for tensor in (*given, mixing)]
            expected = mhla_attention(*exact, layout, backend="naive", **options)
            torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
            if gradients:
                upstream = torch.rand_like(output)
                got = torch.autograd.grad(output, [*given, mixing], upstream)
                wanted = torch.autograd.grad(expected, exact, upstream.double())
                for one, other in zip(got, wanted, strict=True):
                    torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)
    if not (causal and normalizer == "block_query"):
        assert counts()["plan"] >= 2 and not counts()["none"]
    # Two calls of each kind were not by a plan.
    assert all(len(kernel.streams) <= 8 for kernel in compiled)
