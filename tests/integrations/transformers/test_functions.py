# SPDX-License-Identifier: Apache-2.0
"""Whole models against the dense definition, written out in an attention function of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from mhla_hf import BlockLayout, mhla_attention
from mhla_hf.integrations.transformers import functions
from mhla_hf.ops import FEATURE_MAPS, extend_mixing

from .mhla_models import first_output, mhla_model, mhla_modules, served_names
from .tiny_models import FAMILIES, inputs


# Queries and keys before RoPE, by attention module; filled by hooks on the projections.
_PLAIN: dict[int, dict[str, torch.Tensor]] = {}


def _dense_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    mhla = getattr(module, "mhla", None)
    if mhla is None:
        attend = AttentionInterface()["sdpa"]
        return attend(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    root = math.sqrt(scaling)

    def features(tokens: torch.Tensor, which: str) -> torch.Tensor:
        learned = getattr(mhla, f"feature_map_{which}")
        tokens = tokens.transpose(1, 2).double() * root
        if learned is None:
            return FEATURE_MAPS[mhla.config.feature_map].forward(tokens)
        projected = torch.einsum("bthk,hfk->bthf", tokens, learned.weight.double())
        return torch.cat([projected, -projected], dim=-1).softmax(dim=-1)

    options = {}
    if id(module) in _PLAIN and mhla.config.rope == "after_feature_map":
        plain = _PLAIN[id(module)]
        options = {f"normalizer_{which}": features(plain[which], which) for which in ("query", "key")}
        cos, sin = (part.double() for part in plain["angles"])

        def rotate(tokens: torch.Tensor) -> torch.Tensor:
            # Rotary embeddings of Llama: the first half of a head is paired with the second.
            first, second = tokens.transpose(1, 2).chunk(2, dim=-1)
            turned = torch.cat([-second, first], dim=-1)
            return (tokens.transpose(1, 2) * cos[:, None] + turned * sin[:, None]).transpose(1, 2)

        rotated = [
            torch.cat([rotate(part) for part in options[f"normalizer_{which}"].split(mhla.head_dim, dim=-1)], dim=-1)
            for which in ("query", "key")
        ]
    else:
        rotated = [features(query, "query"), features(key, "key")]
    causal = kwargs.get("is_causal")
    causal = module.is_causal if causal is None else causal
    layout = BlockLayout((query.shape[2],), block_size=mhla.config.block_size)
    stored = mhla.stored_mixing()
    decay = None if stored.decay is None else stored.decay.double()
    mixing = extend_mixing(stored.weights.double(), layout.num_blocks, causal=causal, mixing_decay=decay)
    output = mhla_attention(
        *rotated, value.transpose(1, 2).double(), mixing, layout, backend="naive",
        causal=causal, normalizer=mhla.config.normalizer, eps=mhla.config.eps, **options,
    )  # fmt: skip
    return output.to(query.dtype), None


DENSE = (_dense_attention, AttentionMaskInterface()["sdpa"])


@pytest.fixture
def record_plain() -> Iterator:
    """Notes queries and keys before RoPE in models with separate projections."""
    hooks = []

    def record(model: torch.nn.Module) -> None:
        for mhla_owner in [module for module in model.modules() if getattr(module, "mhla", None) is not None]:
            entry = _PLAIN.setdefault(id(mhla_owner), {})

            def note_angles(module, args, kwargs, entry=entry):
                entry["angles"] = kwargs["position_embeddings"]

            hooks.append(mhla_owner.register_forward_pre_hook(note_angles, with_kwargs=True))
            for name, which in (("q_proj", "query"), ("k_proj", "key")):

                def note(module, args, output, entry=entry, which=which, width=mhla_owner.head_dim):
                    entry[which] = output.unflatten(-1, (-1, width)).transpose(1, 2)

                hooks.append(getattr(mhla_owner, name).register_forward_hook(note))

    yield record
    for hook in hooks:
        hook.remove()
    _PLAIN.clear()


def compare(model, given) -> None:
    """Output and the gradient of every parameter under both attention functions."""
    results = []
    ours = AttentionInterface()["mhla"], AttentionMaskInterface()["mhla"]
    # The last ones stay.
    for attend, mask in (ours, DENSE, ours):
        AttentionInterface.register("mhla", attend)
        AttentionMaskInterface.register("mhla", mask)
        model.zero_grad()
        output = first_output(model, **given)
        output.square().sum().backward()
        grads = {key: value.grad.clone() for key, value in model.named_parameters() if value.grad is not None}
        results.append((output.detach(), grads))
    (output, gradients), (expected, expected_gradients), _ = results
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=2e-5)
    assert gradients.keys() == expected_gradients.keys()
    for key, gradient in expected_gradients.items():
        # Key biases and others cancel to nothing: they are measured against the largest gradient.
        largest = max(tensor.norm() for tensor in expected_gradients.values())
        error = (gradients[key] - gradient).norm() / max(gradient.norm(), 1e-3 * largest)
        assert error < 2e-4, (key, error)


@pytest.mark.parametrize("length", [1, 4, 13, 31])
@pytest.mark.parametrize(
    "options", [{}, {"normalizer": "none", "feature_map": "elu"}, {"mixing_heads": "shared"}], ids=str
)
def test_llama_with_rope_after_the_feature_map(length, options, record_plain):
    model = mhla_model("llama", **options)
    record_plain(model)
    compare(model, inputs("llama", length=length))


@pytest.mark.parametrize("name", ["llama_linear", "llama_llama3", "qwen2", "mistral"])
def test_other_models_that_rotate_as_llama_does(name, record_plain):
    model = mhla_model(name)
    record_plain(model)
    compare(model, inputs(name, length=21))


@pytest.mark.parametrize(
    "name", [name for name in served_names("causal", "encoder") if name not in ("opt", "gemma3", "modernbert")]
)
def test_every_family_with_rope_before_the_feature_map(name):
    # Without anything to undo, queries and keys are what every attention function gets.
    model = mhla_model(name, rope="before_feature_map")
    compare(model, inputs(name, length=18))


@pytest.mark.parametrize("name", ["llama_yarn", "phi", "gpt_neox", "gemma3", "smollm3", "phi3", "qwen3"])
def test_rotations_are_undone_and_applied_again(name):
    # A feature map that does nothing leaves rotation before and after it the same but for the normaliser.
    options = {"feature_map": "identity", "normalizer": "none"}
    before, after = (mhla_model(name, rope=f"{order}_feature_map", **options) for order in ("before", "after"))
    given = inputs(name, length=23)
    expected, output = first_output(before, **given), first_output(after, **given)
    if name == "llama_yarn":
        # Scaled angles scale queries and keys before the map, and do not scale features after it: the same here.
        assert before.model.rotary_emb.attention_scaling > 1.1
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "llama_yarn", "phi", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_angles_are_undone(name, dtype, monkeypatch):
    monkeypatch.setattr(functions, "_CHECKED", set())
    model = mhla_model(name)
    given = inputs(name, length=23)
    expected = first_output(model, **given)
    output = first_output(model.to(dtype), **given).float()
    assert (output - expected).norm() / expected.norm() < (0.05 if dtype == torch.bfloat16 else 0.01)


def test_layers_without_rotary_embeddings_are_left_alone():
    model = mhla_model("smollm3")
    uses = [bool(layer.self_attn.use_rope) for layer in model.model.layers]
    assert uses == [True, True, False]
    assert [
        hook.rotary for layer in model.model.layers for hook in layer.self_attn._forward_pre_hooks.values()
    ] == uses


def test_scaled_queries_are_balanced():
    # OPT scales its queries and calls attention with scaling=1; both sides of the feature map get the root instead.
    model = mhla_model("opt", feature_map="identity", normalizer="none")
    attention = model.model.decoder.layers[0].self_attn
    seen = {}
    attention.mhla.register_forward_pre_hook(lambda module, args: seen.update(query=args[0], key=args[1]))
    projected = {}
    for name in ("q_proj", "k_proj"):
        getattr(attention, name).register_forward_hook(
            lambda module, args, output, name=name: projected.update({name: output.unflatten(-1, (4, 8))})
        )
    first_output(model, **inputs("opt"))
    root = 8**-0.25
    torch.testing.assert_close(seen["query"], projected["q_proj"] * root)
    torch.testing.assert_close(seen["key"], projected["k_proj"] * root)


@pytest.mark.parametrize("name", served_names("vision"))
def test_vision_models_against_the_dense_form(name):
    model = mhla_model(name).double()
    given = inputs(name, image_size=(16, 28))
    given["pixel_values"] = given["pixel_values"].double()
    calls = []

    def note(module, args, kwargs, output):
        calls.append((module, args, kwargs, output))

    for module in mhla_modules(model):
        module.register_forward_hook(note, with_kwargs=True)
    first_output(model, **given)
    assert len(calls) == 3
    for module, (query, key, value), kwargs, output in calls:
        layout = module.layout_for((4, 7))
        assert layout.num_prefix_tokens == FAMILIES[name].prefix_tokens
        root = math.sqrt(kwargs["scaling"])
        query, key = (query * root).relu(), (key * root).relu()
        expected = mhla_attention(query, key, value, module.mixing_matrix(layout), layout, backend="naive")
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_forward_may_be_called_in_place_of_the_model(name):
    model = mhla_model(name)
    given = inputs(name)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    given["attention_mask"][0, -3:] = 0
    assert torch.equal(model.forward(**given)[0], model(**given)[0])
