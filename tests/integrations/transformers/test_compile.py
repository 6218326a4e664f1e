# SPDX-License-Identifier: Apache-2.0
"""torch.compile without graph breaks: training, prefill, and decoding with a static cache."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing
from transformers import StaticCache

from .mhla_models import first_output, mhla_model, window_model
from .tiny_models import CACHE, inputs


ONE_LAYER = {"num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "padding"),
    [
        ("llama", "right"),
        pytest.param("llama", None, marks=pytest.mark.slow),
        pytest.param("bert", "right", marks=pytest.mark.slow),
        pytest.param("vit", None, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_training(name, padding):
    model = mhla_model(name, sizes=ONE_LAYER).train()
    given = inputs(name, padding=padding)
    if name == "llama":
        given["use_cache"] = False
    expected = first_output(model, **given)
    expected.square().sum().backward()
    gradients = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    output = first_output(torch.compile(model, fullgraph=True, backend="aot_eager"), **given)
    output.square().sum().backward()
    torch.testing.assert_close(output, expected)
    for key, value in model.named_parameters():
        if key in gradients:
            torch.testing.assert_close(value.grad, gradients[key], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("hybrid", [False, True])
def test_decoding_is_not_compiled_anew_for_every_token(hybrid):
    """Of MHLA alone, and with a window and a layer of softmax beside it."""
    model = (
        window_model(window=2, layers=[0], sizes={"num_hidden_layers": 2})
        if hybrid
        else mhla_model("llama", sizes=ONE_LAYER)
    )
    ids = inputs("llama", length=11)["input_ids"]
    prompt = torch.ones_like(ids)
    prompt[0, :4] = 0

    def decode(step):
        cache = StaticCache(config=model.config, max_cache_len=40)
        position = (prompt.cumsum(-1) - 1).clamp(min=0)
        logits = [model(ids, attention_mask=prompt, position_ids=position, **{CACHE: cache}).logits[:, -1:]]
        position = position[:, -1:]
        for index in range(12):
            mask = torch.zeros(2, 40, dtype=torch.long)
            mask[:, :11] = prompt
            mask[:, 11 : 12 + index] = 1
            position = position + 1
            token = logits[-1].argmax(-1)
            given = {"attention_mask": mask, "position_ids": position, CACHE: cache}
            if index % 4 == 3 and not hybrid:
                # A draft that is rejected.
                step((token + 1) % 64, **given)
                cache.crop(-1)
            logits.append(step(token, **given).logits)
        return torch.cat(logits, dim=1)

    expected = decode(model)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    output = decode(torch.compile(model, fullgraph=True, backend=counter))
    torch.testing.assert_close(output, expected)
    # One for the first token, one that serves all the others.
    assert counter.frame_count <= 2
