# SPDX-License-Identifier: Apache-2.0
"""Caches of MHLA layers as other code looks at them: keys and values, formats, refusals, and compiled decoding."""

from __future__ import annotations

import copy
import inspect
import logging

import pytest
import torch
import torch._dynamo.testing
from transformers import CompileConfig, DynamicCache, QuantizedCache, StaticCache

from mhla_hf import MHLACache
from mhla_hf.integrations.transformers.cache import MHLACacheLayer
from mhla_hf.utils.compat.transformers import cache_of_output

from .mhla_models import mhla_model
from .tiny_models import CACHE, FIRST_ORDINARY_TOKEN, VOCABULARY, softmax_model


# The only quantised cache that needs no other package.
needs_fp8 = pytest.mark.skipif(
    "fp8" not in inspect.getsource(QuantizedCache), reason="this version of transformers has no fp8 cache"
)


def tokens(batch: int = 2, length: int = 11, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ORDINARY_TOKEN, VOCABULARY, (batch, length), generator=generator)


@pytest.fixture(scope="module")
def model():
    return mhla_model("llama")


@pytest.fixture(scope="module")
def stock():
    return softmax_model("llama")


@torch.no_grad()
@pytest.mark.parametrize("length", [11, 64, 90])
def test_keys_and_values_are_those_of_the_last_tokens(model, stock, length):
    ids = tokens(length=length)
    ours, theirs = DynamicCache(config=model.config), DynamicCache(config=stock.config)
    for part in (ids[:, :5], ids[:, 5:]):
        model(part, **{CACHE: ours})
        stock(part, **{CACHE: theirs})
    kept = min(length, 64)
    # The first layer's input is the same whatever its attention.
    torch.testing.assert_close(ours.layers[0].keys, theirs.layers[0].keys[:, :, -kept:])
    torch.testing.assert_close(ours.layers[0].values, theirs.layers[0].values[:, :, -kept:])
    assert all(layer.keys.shape == layer.values.shape == (2, 2, kept, 8) for layer in ours.layers)
    assert ours.batch_size == 2 and ours.is_initialized and ours.get_seq_length() == length


@torch.no_grad()
def test_a_static_cache_has_its_columns_from_the_start(model, stock):
    ids = tokens()
    ours, theirs = (StaticCache(config=model.config, max_cache_len=20) for _ in range(2))
    for part in (ids[:, :10], ids[:, 10:]):
        model(part, **{CACHE: ours})
        stock(part, **{CACHE: theirs})
    assert ours.layers[0].keys.shape == theirs.layers[0].keys.shape == (2, 2, 20, 8)
    torch.testing.assert_close(ours.layers[0].keys, theirs.layers[0].keys)
    torch.testing.assert_close(ours.layers[0].values, theirs.layers[0].values)
    assert ours.is_compileable and ours.get_max_length() == 20


@torch.no_grad()
def test_they_follow_what_is_done_to_the_cache(model):
    ids = tokens(length=80)
    cache = DynamicCache(config=model.config)
    model(ids, **{CACHE: cache})
    layer = cache.layers[1]
    keys, values = layer.keys, layer.values
    cache.crop(-10)
    assert torch.equal(layer.keys, keys[:, :, :-10]) and torch.equal(layer.values, values[:, :, :-10])
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(layer.keys, keys.flip(0)[:, :, :-10])
    cache.batch_repeat_interleave(3)
    assert layer.keys.shape == (6, 2, 54, 8) and cache.batch_size == 6
    cache.batch_select_indices(torch.tensor([0, 5]))
    twin = copy.deepcopy(cache)
    assert torch.equal(twin.layers[1].keys, keys.flip(0)[:, :, :-10])
    model(ids[:, :3], **{CACHE: cache})
    assert layer.keys.shape[2] == 57 and twin.layers[1].keys.shape[2] == 54
    cache.reset()
    assert layer.keys is None and layer.values is None and not hasattr(layer, "batch_size")


@torch.no_grad()
def test_a_text_in_two_parts_leaves_the_same_cache(model):
    options = {"do_sample": False, "return_dict_in_generate": True}
    whole = model.generate(tokens(), max_new_tokens=6, **options)
    half = model.generate(tokens(), max_new_tokens=3, **options)
    rest = model.generate(half.sequences, **{CACHE: cache_of_output(half)}, max_new_tokens=3, **options)
    assert torch.equal(rest.sequences, whole.sequences)
    for first, second in zip(cache_of_output(whole).layers, cache_of_output(rest).layers):
        assert first.keys.shape == (2, 2, 16, 8)
        torch.testing.assert_close(first.keys, second.keys)
        torch.testing.assert_close(first.values, second.values)


@torch.no_grad()
def test_what_would_be_wrong_is_refused(model):
    cache = MHLACache(config=model.config)
    model(tokens(), **{CACHE: cache})
    layer = cache.layers[0]
    assert isinstance(layer, MHLACacheLayer)
    with pytest.raises(ValueError, match="its keys and values cannot be set. Use reorder_cache, batch_repeat"):
        layer.keys = layer.keys.flip(0)
    with pytest.raises(ValueError, match="its keys and values cannot be set"):
        layer.values = layer.values.flip(0)


@needs_fp8
def test_quantised_caches_are_refused_with_the_way_out(model, stock):
    options = {"max_new_tokens": 2, "cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    with pytest.raises(ValueError, match="cannot keep MHLA state. Use cache_implementation='dynamic'"):
        model.generate(tokens(), **options)
    # Softmax models, and those that were switched back to it, keep theirs.
    softmax = copy.deepcopy(model)
    softmax.set_attn_implementation("sdpa")
    for other in (stock, softmax):
        try:
            assert other.generate(tokens(), **options).shape == (2, 13)
        except ImportError as error:
            assert "quanto" in str(error)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"window": "adjacent"}, {"window": "block", "sink_tokens": 1}], ids=str)
def test_a_static_cache_stays_where_it_is(options):
    """CUDA graphs know tensors by their addresses."""
    model = mhla_model("llama", **options)
    cache = StaticCache(config=model.config, max_cache_len=32)

    def addresses():
        found = {}
        for index, layer in enumerate(cache.layers):
            kept = {**vars(layer), **layer._last, **vars(layer.state), **vars(layer.window_state or layer.state)}
            found |= {(index, name): x.data_ptr() for name, x in kept.items() if isinstance(x, torch.Tensor)}
        return found

    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, :3] = 0
    for count, given in enumerate([tokens(), *tokens(length=12).split(1, dim=1)]):
        mask = mask if count == 0 else torch.nn.functional.pad(mask, (0, 1), value=1)
        model(given, attention_mask=mask, **{CACHE: cache})
        if count == 0:
            expected = addresses()
    cache.reorder_cache(torch.tensor([1, 1]))
    cache.crop(-3)
    assert addresses().items() >= expected.items() and len(expected) > 30
    cache.reset()
    model(tokens(), **{CACHE: cache})
    assert {name: x for name, x in addresses().items() if name in expected} == expected


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": "adjacent"}, {"window": "block", "sink_tokens": 1}], ids=str)
def test_compiled_decoding_returns_logits_alone(options, padded):
    """CUDA graphs overwrite what they return in the next step: nothing of it may be kept for that."""
    model = mhla_model("llama", sizes={"num_hidden_layers": 1}, **options)
    cache, mask, returned = StaticCache(config=model.config, max_cache_len=32), None, []
    if padded:
        mask = torch.ones(2, 11, dtype=torch.long)
        mask[0, :3] = 0
    torch._dynamo.reset()

    def backend(graph, inputs):
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        returned.append(output.args[0])
        return graph.forward

    model(tokens(), attention_mask=mask, **{CACHE: cache})
    decode = torch.compile(model, fullgraph=True, backend=backend)
    for token in tokens(length=4).split(1, dim=1):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1) if padded else None
        decode(token, attention_mask=mask, **{CACHE: cache})
    torch._dynamo.reset()
    assert returned and all(len(tensors) == 1 for tensors in returned)


def compilations(model, lengths, padded, caplog, **options):
    """How often decoding is compiled in full graphs while texts of these lengths are generated one after another."""
    torch._dynamo.reset()
    torch._logging.set_logs(recompiles=True)
    guards = logging.getLogger("torch._dynamo.guards")
    guards.addHandler(caplog.handler)
    caplog.clear()
    compiled = CompileConfig(fullgraph=True, dynamic=None, backend="eager", mode=None)
    compiled._compile_all_devices = True
    try:
        for length in lengths:
            mask = torch.ones(2, length, dtype=torch.long)
            mask[0, : 3 if padded else 0] = 0
            given = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False}
            expected = model.generate(tokens(length=length), **given)
            options.update(cache_implementation="static", compile_config=compiled)
            assert torch.equal(model.generate(tokens(length=length), **given, **options), expected)
    finally:
        guards.removeHandler(caplog.handler)
        torch._logging.set_logs()
        torch._dynamo.reset()
    assert hasattr(model, "_compiled_call")
    messages = {record.getMessage() for record in caplog.records}
    return 1 + sum("Recompiling" in message for message in messages)


@pytest.mark.slow
def test_compiled_generation_serves_all_lengths_by_two_graphs(caplog):
    model = mhla_model("llama", sizes={"num_hidden_layers": 1})
    assert compilations(model, (11, 17, 9), True, caplog, output_attentions=True) == 2


@pytest.mark.slow
def test_prompts_in_parts_are_not_compiled():
    """A CUDA graph that makes the state overwrites it when it runs again."""
    model, given = mhla_model("llama", sizes={"num_hidden_layers": 1}), {"max_new_tokens": 3, "do_sample": False}
    expected, compiled_lengths = model.generate(tokens(length=10), **given), []
    torch._dynamo.reset()
    compiled = CompileConfig(fullgraph=True, dynamic=None, backend="eager", mode=None)
    compiled._compile_all_devices = True
    options = {"cache_implementation": "static", "prefill_chunk_size": 4, "compile_config": compiled}

    def note_length(module, arguments, keywords):
        if torch.compiler.is_compiling():
            compiled_lengths.append(keywords["input_ids"].shape[1])

    model.register_forward_pre_hook(note_length, with_kwargs=True)
    assert torch.equal(model.generate(tokens(length=10), **given, **options), expected)
    torch._dynamo.reset()
    assert hasattr(model, "_compiled_call") and set(compiled_lengths) == {1}


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize(("padded", "allowed"), [(False, 2), (True, 3)])
def test_a_cache_is_not_compiled_anew_for_every_block(padded, allowed):
    model = mhla_model("llama", sizes={"num_hidden_layers": 1})
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")

    def decode(step):
        cache, mask = DynamicCache(config=model.config), torch.ones(2, 11, dtype=torch.long)
        mask[0, :3] = 0
        logits = [model(tokens(), attention_mask=mask if padded else None, **{CACHE: cache}).logits[:, -1:]]
        # Ten blocks of four tokens, of which the prompt fills three.
        for _ in range(28):
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            given = {"attention_mask": mask if padded else None, CACHE: cache}
            logits.append(step(logits[-1].argmax(-1), **given).logits)
        return torch.cat(logits, dim=1)

    output = decode(torch.compile(model, fullgraph=True, backend=counter))
    torch.testing.assert_close(output, decode(model))
    # One for the first token, one for the others; another for masks of any length.
    assert counter.frame_count <= allowed
    torch._dynamo.reset()
