# SPDX-License-Identifier: Apache-2.0
"""Layers of which some groups of heads are MHLA and others softmax: heads, gradients, caches, files, calibration."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

import mhla_hf
from mhla_hf import MHLACache, MHLAConfig
from mhla_hf.integrations.transformers.attaching import convert_transformers_model
from mhla_hf.ops.sums import HeadGroups
from mhla_hf.recovery.recipes import load_recipe
from mhla_hf.training.layers import find_projections, mhla_layers, original_heads, record_calls
from mhla_hf.training.teacher import SharedTeacher
from tests import tiny

from .mhla_models import WINDOWS, default_options, mhla_model, unsettle
from .test_generation import check_greedy, generate, prompt, recompute, speculations
from .test_tensor_parallel import SPLITS_MHLA
from .tiny_models import CACHE, inputs, softmax_model


GROUPS = {"llama": ("0.1", 1), "gpt_neox": ("0.1", "0.3", 1, "2.0"), "qwen3": ("0.0", "2.1"), "gpt2": ("0.2", "1.0")}


def mixed(name: str, **options):
    return mhla_model(name, **{"layers": list(GROUPS[name]), **options})


def heads_of_first_layer(model, given):
    """What goes into the first output projection, `[B, T, H, V]`."""
    seen = []
    end = ("attn.o_proj", "attn.c_proj", "attention.dense")
    projection = next(module for name, module in model.named_modules() if name.endswith(end))
    hook = projection.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(**given)
    hook.remove()
    return seen[0].unflatten(-1, (4, -1))


@pytest.mark.parametrize("padding", [None, "left", "packed"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", [*GROUPS, "window"])
def test_heads_are_those_of_softmax_and_of_mhla(name, seed, padding):
    """In float64: each group equals that of a softmax layer, or of an MHLA layer with the same parameters."""
    window = WINDOWS[0] if name == "window" else {}
    name = "llama" if name == "window" else name
    softmax = softmax_model(name, seed=seed).double()
    options = {**default_options(name), **window}
    whole = convert_transformers_model(copy.deepcopy(softmax), options)
    unsettle(whole, seed)
    model = convert_transformers_model(copy.deepcopy(softmax), {**options, "layers": list(GROUPS[name])})
    groups = model.get_submodule(next(key for key, one in model.named_modules() if hasattr(one, "groups"))).groups
    own = [int(entry.partition(".")[2]) for entry in GROUPS[name] if str(entry).startswith("0.")]
    assert groups == HeadGroups(tuple(own), len(groups.own + groups.others)) and len(model.config.mhla["layers"]) > 1
    (first, *_), (other, *_) = (
        [one.mhla for one in each.modules() if hasattr(one, "mhla")] for each in (model, whole)
    )
    for key, parameter in first.named_parameters():
        parameter.data.copy_(groups.split(other.get_parameter(key), 0)[0])
    given = inputs(name, padding=None if padding == "packed" else padding, length=23)
    if padding == "packed":
        given["position_ids"] = torch.cat([torch.arange(9), torch.arange(14)])[None]
        given["use_cache"] = False
    heads = [heads_of_first_layer(each, given) for each in (model, softmax, whole)]
    valid = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()
    size = 4 // groups.count
    weight = torch.randn(heads[0][valid].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    wanted = torch.cat([heads[2 if head // size in own else 1][:, :, head : head + 1] for head in range(4)], 2)
    torch.testing.assert_close(heads[0][valid], wanted[valid], rtol=1e-9, atol=1e-10)
    (heads[0][valid] * weight).sum().backward()
    (wanted[valid] * weight).sum().backward()
    for key, parameter in model.named_parameters():
        # RMSNorms below it compute in float32.
        if parameter.grad is not None and ".mhla." not in key and ("attention." in key or "attn." in key):
            gradient = softmax.get_parameter(key).grad + whole.get_parameter(key).grad
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-10)
    for key, parameter in first.named_parameters():
        if parameter.grad is not None:
            expected = groups.split(other.get_parameter(key).grad, 0)[0]
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize("name", [*GROUPS, "window"])
def test_greedy_equals_recomputation(name, padded):
    options = WINDOWS[0] if name == "window" else {}
    check_greedy(mixed("llama" if name == "window" else name, **options), padded)


@pytest.mark.parametrize("layers", [["0.1", 1], ["0.0", "1.1", "2.1"]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 3},
        {"prefill_chunk_size": 3, "cache_implementation": "static"},
    ],
    ids=str,
)
def test_other_caches(layers, options):
    model = mixed("llama", layers=layers)
    ids, _ = recompute(model, **prompt(True))
    assert torch.equal(generate(model, prompt(True), **options).sequences, ids)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
def test_beam_search(options):
    model = mixed("llama")
    found = [generate(model, prompt(True), use_cache=cached, **options).sequences for cached in (True, False)]
    assert torch.equal(*found)


def test_assisted_decoding():
    model = mixed("llama")
    expected, _ = recompute(model, **{name: tensor[2:] for name, tensor in prompt(False).items()})
    assert all(torch.equal(found, expected) for found in speculations(model, (2, 5)))


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True])
def test_tokens_are_taken_back(static):
    model = mixed("llama", layers=["0.0", "1.1", "2.0"])
    ids = inputs("llama", length=30)["input_ids"]
    cache = StaticCache(config=model.config, max_cache_len=40) if static else DynamicCache(config=model.config)
    model(ids[:, :20], **{CACHE: cache})
    model(ids.flip(1)[:, :9], **{CACHE: cache})
    cache.crop(-9)
    found = [model(ids[:, index : index + 1], **{CACHE: cache}).logits for index in range(20, 30)]
    torch.testing.assert_close(torch.cat(found, 1), model(ids, use_cache=False).logits[:, 20:], rtol=1e-4, atol=1e-5)
    cache.reset()
    found = model(ids, **{CACHE: cache}).logits
    torch.testing.assert_close(found, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_cache_holds_keys_of_softmax_groups_alone():
    model, cache = mixed("llama", layers=["0.0", 1, 2]), MHLACache()
    whole, other = mixed("llama", layers=[0, 1, 2]), MHLACache()
    ids = inputs("llama", length=80)["input_ids"]
    model(ids, **{CACHE: cache}), whole(ids, **{CACHE: other})
    keys, values = cache.layers[0].softmax_tokens
    assert keys.shape == values.shape == (2, 1, 80, 8)
    assert cache.layers[1].num_bytes == other.layers[1].num_bytes
    assert (
        other.layers[0].num_bytes / 2
        < cache.layers[0].num_bytes - keys.nbytes - values.nbytes
        < other.layers[0].num_bytes
    )


def test_saving_and_restoring(tmp_path):
    softmax, given = softmax_model("llama"), inputs("llama")
    model = mixed("llama")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.config.mhla["layers"] == ["0.1", 1]
    assert loaded.model.layers[0].self_attn.mhla.num_heads == 2
    assert torch.equal(loaded(**given).logits, model(**given).logits)
    model = mhla_hf.convert(softmax_model("llama"), {**default_options("llama"), "layers": ["0.1", 1]}).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    loaded.set_attn_implementation("sdpa")
    assert torch.equal(loaded(**given).logits, softmax(**given).logits)
    loaded.set_attn_implementation("mhla")
    assert torch.equal(loaded(**given).logits, model(**given).logits)
    restored = mhla_hf.unconvert(loaded)
    assert torch.equal(restored(**given).logits, softmax(**given).logits) and restored.config.mhla is None
    all_named = mixed("llama", layers=["0.0", "0.1", 1])
    assert all_named.model.layers[0].self_attn.mhla.groups is None


def test_the_original_in_the_model():
    """Heads, projections and recorded outputs are those of the softmax model, and calibration lowers errors."""
    softmax, given = softmax_model("llama"), {**inputs("llama", padding="left"), "use_cache": False}
    model = mhla_hf.convert(softmax_model("llama"), {**default_options("llama"), "layers": ["0.1", 1, "2.0"]}).eval()
    layers = find_projections(model, mhla_layers(model), given)
    assert [layer.projection_name for layer in layers] == [f"model.layers.{i}.self_attn.o_proj" for i in range(3)]
    seen = given["attention_mask"].bool()
    with original_heads(layers), torch.no_grad():
        torch.testing.assert_close(model(**given).logits[seen], softmax(**given).logits[seen], rtol=1e-4, atol=1e-5)
    teacher = SharedTeacher(model)
    torch.testing.assert_close(teacher(**given).logits[seen], softmax(**given).logits[seen], rtol=1e-4, atol=1e-5)
    assert set(record_calls(model, layers, given)) == {layer.name for layer in layers}
    batches = [inputs("llama", batch=4, length=32, seed=seed) for seed in range(8)]
    report = mhla_hf.calibrate(model, batches, fit_steps=20)
    assert all(layer.error_after < layer.error_before for layer in report.layers)
    assert all("feature_map" in layer.changed and "projection" in layer.changed for layer in report.layers)
    teacher = SharedTeacher(model)
    torch.testing.assert_close(teacher(**given).logits[seen], softmax(**given).logits[seen], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "layers", "message"),
    [
        ("llama", ["0.2"], r"layers names group 2 of layer 0 of LlamaModel, which has key/value heads 0 to 1"),
        ("llama", ["3.0"], r"Layer 3 of LlamaModel cannot be MHLA: the model has layers 0 to 2"),
        ("gemma3", ["0.0"], r"Layer 0 of .* cannot be MHLA: it is a layer of sliding attention"),
        ("bert", ["0.1"], r"layers names single groups of layer 0 of .*: only models that look back only can"),
        ("llama", [0, "0.1"], r"layers=.* must be all, different layer indices"),
        ("llama", ["0.1", "0.01"], r"layers=.* must be all, different layer indices"),
        ("llama", [0.1], r"layers=.* must be all, different layer indices"),
    ],
)
def test_mistakes(name, layers, message):
    model = softmax_model(name)
    with pytest.raises(ValueError, match=message):
        convert_transformers_model(model, {**default_options(name), "layers": layers})
    assert not any("mhla" in key for key in model.state_dict())


@pytest.mark.skipif(not SPLITS_MHLA, reason="this version of transformers does not split MHLA layers")
def test_a_layer_with_groups_is_not_split():
    from mhla_hf.integrations.transformers.tensor_parallel import _check_heads

    layer = mixed("llama").model.layers[0].self_attn.mhla
    with pytest.raises(ValueError, match="some heads stay softmax cannot be split over processes"):
        _check_heads("model.layers.0.self_attn.mhla", layer, 2)


def test_who_cannot_refuses(tmp_path):
    with pytest.raises(ValueError, match="only language models can have groups of heads as MHLA"):
        mhla_hf.convert(tiny.wan_pipeline().transformer, {"blocks": [1, 2, 2], "layers": ["0.1"]})
    assert MHLAConfig(layers="1, 0.10,0.2").layers == ("0.2", "0.10", 1)
    (tmp_path / "recipe.yaml").write_text("family: causal\nlayers: [1, 0.10]\ncalibrate: {}\n")
    assert load_recipe(tmp_path / "recipe.yaml").layers == "1,0.10"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(backend):
    model, given = mixed("llama"), {**inputs("llama"), "use_cache": False}
    torch.testing.assert_close(
        torch.compile(model, fullgraph=True, backend=backend)(**given).logits, model(**given).logits
    )
