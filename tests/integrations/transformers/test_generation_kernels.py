# SPDX-License-Identifier: Apache-2.0
"""Generation by the decoding kernel against the same models in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.ops.recurrent_cases import kernel_counted
from tests.ops.triton_checks import DEVICES

from .mhla_models import mhla_model
from .test_generation import generate, prompt


# The counter of operations asks for what is registered when it starts.
pytest.importorskip("mhla_hf.ops.triton.decode")


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "padded, options",
    [
        pytest.param(False, {}, id="full"),
        pytest.param(True, {}, id="left-padded"),
        pytest.param(True, {"prefill_chunk_size": 6, "cache_implementation": "static"}, id="in-parts"),
    ],
)
def test_same_tokens(padded, options, device, monkeypatch):
    model = mhla_model("llama", sizes={"num_hidden_layers": 1}).to(device)
    given = {name: tensor[:2].to(device) for name, tensor in prompt(padded).items()}
    results = {}
    for backend in ("torch", "triton"):
        monkeypatch.setenv("MHLA_HF_BACKEND", backend)
        with FlopCounterMode(display=False) as counter:
            results[backend] = generate(model, given, max_new_tokens=4, disable_compile=True, **options)
        assert kernel_counted(counter) == (backend == "triton")
    assert torch.equal(results["triton"].sequences, results["torch"].sequences)
    logits = (torch.stack(results[backend].logits) for backend in ("triton", "torch"))
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)
