# SPDX-License-Identifier: Apache-2.0
"""Gives Triton's interpreter the arithmetic of a GPU: bfloat16, and tensor cores' TF32."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from mhla_hf.ops import backends


def imitate_gpu() -> None:
    """Replaces conversions from and to bfloat16, which would cut float32 off, and products, which lack bfloat16.

    So tests may choose the kernels for bfloat16 tokens on a CPU, which others may not.
    """
    backends.INTERPRETED_DTYPES = backends.KERNEL_DTYPES
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def cast_impl(builder: InterpreterBuilder, source: TensorHandle, dtype: Any) -> TensorHandle:
        before, after = source.dtype.scalar, dtype.scalar
        if (before, after) == (tl.float32, tl.bfloat16):
            return TensorHandle(_to_bfloat16(source.data), after)
        if (before, after) == (tl.bfloat16, tl.float32):
            return TensorHandle(_from_bfloat16(source.data), after)
        return cast(builder, source, dtype)

    def create_dot(
        builder: InterpreterBuilder, left: TensorHandle, right: TensorHandle, total: Any, precision: Any, *rest: Any
    ) -> TensorHandle:
        cut = precision == ir.INPUT_PRECISION.TF32
        left, right = (_factor(handle, cut) for handle in (left, right))
        return dot(builder, left, right, total, precision, *rest)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_dot = create_dot


def _factor(handle: TensorHandle, cut: bool) -> TensorHandle:
    """What a tensor core multiplies: bfloat16 as it is, float32 without its last 13 bits where `cut`."""
    if handle.dtype.scalar == tl.bfloat16:
        return TensorHandle(_from_bfloat16(handle.data), tl.float32)
    if cut and handle.dtype.scalar == tl.float32:
        return TensorHandle((handle.data.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32), tl.float32)
    return handle


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16, ties to even, as the 16 bits that the interpreter keeps of it."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (np.where(np.isnan(values), bits | np.uint32(0x400000), rounded) >> np.uint32(16)).astype(np.uint16)


def _from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
