# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions over three axes whose gradients are quick on a CPU too."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F


_MIN_ELEMENTS = 2**15
"""Elements of the smallest input that gains: below, calls from Python cost more than PyTorch's gradients."""


class DepthwiseConv3d(nn.Conv3d):
    """A depthwise convolution that keeps the size of its input, with an odd kernel, padding to match and a bias.

    PyTorch computes both of its gradients on a CPU ten times as slowly as the convolution. That of the input is a
    convolution itself, and that of the weight a sum of those of convolutions over two axes, which are quick.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Convolve `[B, C, F, H, W]`."""
        if self._gains(input):
            return DepthwiseConvolution.apply(input, self.weight, self.bias)
        return super().forward(input)

    def _gains(self, image: torch.Tensor) -> bool:
        # The quick kernels are those of oneDNN for 3 × 3 weights. Compilers, tracing and function transforms need a
        # convolution that they know.
        return (
            not torch.compiler.is_compiling()
            and not torch.jit.is_tracing()
            and not torch._C._are_functorch_transforms_active()
            and torch.is_grad_enabled()
            and image.device.type == self.weight.device.type == "cpu"
            and image.dtype == self.weight.dtype == torch.float32
            and self.kernel_size == (3, 3, 3)
            and image.numel() >= _MIN_ELEMENTS
            and not torch.is_autocast_enabled("cpu")
            and torch.backends.mkldnn.is_available()
        )


class DepthwiseConvolution(torch.autograd.Function):
    """The convolution of [`DepthwiseConv3d`] and its gradients, in steps that are differentiable themselves."""

    @staticmethod
    def forward(ctx: Any, image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(image, weight)
        return _convolve(image, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (image, weight), (gradient,) = ctx.saved_tensors, gradients
        needs_image, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            _convolve(gradient, weight.flip((2, 3, 4))) if needs_image else None,
            _weight_gradient(image, gradient, weight) if needs_weight else None,
            gradient.sum((0, 2, 3, 4)) if needs_bias else None,
        )


def _convolve(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.conv3d(image, weight, bias, padding=[size // 2 for size in weight.shape[2:]], groups=len(weight))


def _weight_gradient(image: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient of the weight, one slice of it after the other: frames are images of a batch for each."""
    frames, (depth, *plane) = image.shape[2], weight.shape[2:]
    padding = [size // 2 for size in plane]
    slices = []
    for shift, part in enumerate(weight.unbind(2), -(depth // 2)):
        start = max(shift, 0)
        stop = max(start, min(frames + shift, frames))
        images, gradients = (
            tensor.transpose(1, 2).flatten(0, 1)
            for tensor in (image[:, :, start:stop], gradient[:, :, start - shift : stop - shift])
        )
        ones, zeros, mask = [1, 1], [0, 0], (False, True, False)
        slices.append(
            torch.ops.aten.convolution_backward(
                gradients, images, part, None, ones, padding, ones, False, zeros, len(weight), mask
            )[1]
        )
    return torch.stack(slices, 2)
