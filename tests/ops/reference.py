# SPDX-License-Identifier: Apache-2.0
"""Random operator inputs and comparison of outputs and gradients, shared by the operator's tests."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mhla_hf import BlockLayout, mhla_attention


def make_inputs(
    layout: BlockLayout,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    per_head: bool = False,
    rotated: bool = True,
    blocks: int | None = None,
    key_width: int = 5,
    value_width: int = 4,
) -> dict[str, torch.Tensor]:
    """Inputs of `mhla_attention` with batch 2 and 3 heads; all require gradients."""
    generator = torch.Generator().manual_seed(seed)
    tokens, count = layout.num_tokens, blocks or layout.num_blocks

    def positive(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64) + 0.05

    tensors = {
        "query": positive(2, tokens, 3, key_width),
        "key": positive(2, tokens, 3, key_width),
        "value": torch.randn(2, tokens, 3, value_width, generator=generator, dtype=torch.float64),
        "mixing": positive(*((3, count, count) if per_head else (count, count))),
    }
    if rotated:
        # The numerator's pair may have any sign once it is rotated; only the normaliser's has to stay positive.
        tensors["normalizer_query"], tensors["normalizer_key"] = tensors["query"], tensors["key"]
        tensors["query"] = torch.randn(2, tokens, 3, key_width, generator=generator, dtype=torch.float64)
        tensors["key"] = torch.randn(2, tokens, 3, key_width, generator=generator, dtype=torch.float64)
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}


def output_and_gradients(
    inputs: dict[str, torch.Tensor],
    layout: BlockLayout,
    attend: Callable[..., torch.Tensor] = mhla_attention,
    **options: object,
) -> dict[str, torch.Tensor]:
    """The output and the gradient of every input that takes part, under a fixed random cotangent."""
    output = attend(**inputs, layout=layout, **options)
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    cotangent = cotangent.to(output.device, output.dtype)
    gradients = torch.autograd.grad(output, list(inputs.values()), cotangent, allow_unused=True)
    named = {f"gradient of {name}": gradient for name, gradient in zip(inputs, gradients) if gradient is not None}
    return {"output": output.detach(), **named}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Compares each tensor in its own norm.

    Under a normaliser, some gradients cancel to nothing: with a single block, scaling its weight changes nothing,
    and with a single token query and key do not either. Their rounding error has the size of the terms that cancel,
    so no tensor is measured against less than a thousandth of the largest one (a tenth for a single token).
    """
    assert actual.keys() == expected.keys()
    largest = max(reference.double().norm().item() for reference in expected.values())
    floor = 0.1 if expected["output"].shape[1] == 1 else 1e-3
    for name, reference in expected.items():
        scale = max(reference.double().norm().item(), floor * largest)
        error = (actual[name].double() - reference.double()).norm().item() / scale
        assert error <= tolerance, f"{name}: relative error {error:.3e} above {tolerance:.0e}"
