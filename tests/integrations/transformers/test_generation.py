# SPDX-License-Identifier: Apache-2.0
"""Generation with the MHLA cache against recomputing the whole text at every step."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from transformers import DynamicCache, StaticCache

from mhla_hf import MHLACache
from mhla_hf.integrations.transformers.cache import MHLACacheLayer
from mhla_hf.utils.compat import UnsupportedVersionError
from mhla_hf.utils.compat.transformers import CACHE_NAMES, cache_names, cache_of_output

from .mhla_models import mhla_model, window_model
from .tiny_models import CACHE, FIRST_ORDINARY_TOKEN, VOCABULARY, names


STEPS = 17


def prompt(padded: bool, batch: int = 3, length: int = 11) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(FIRST_ORDINARY_TOKEN, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3], mask[1, :7] = 0, 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@torch.no_grad()
def recompute(model, input_ids, attention_mask, steps=STEPS):
    """Greedy decoding without any cache: tokens and the logits of every step."""
    logits = []
    for _ in range(steps):
        # OPT counts positions from its mask by itself.
        positions = {"position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0)}
        given = {} if model.config.model_type == "opt" else positions
        step = model(input_ids, attention_mask=attention_mask, use_cache=False, **given).logits[:, -1]
        logits.append(step)
        input_ids = torch.cat([input_ids, step.argmax(-1, keepdim=True)], dim=1)
        attention_mask = torch.cat([attention_mask, torch.ones_like(attention_mask[:, :1])], dim=1)
    return input_ids, torch.stack(logits, dim=1)


def model_named(name):
    windows = {"window": 0, "sinks": 2}
    return window_model(window=windows[name]) if name in windows else mhla_model(name)


def generate(model, given, **options):
    options = {"max_new_tokens": STEPS, "do_sample": False, **options}
    return model.generate(**given, return_dict_in_generate=True, output_logits=True, **options)


def check_greedy(model, padded):
    """Generation is as recomputed; returns what was generated."""
    ids, logits = recompute(model, **prompt(padded))
    result = generate(model, prompt(padded))
    assert torch.equal(result.sequences, ids)
    torch.testing.assert_close(torch.stack(result.logits, dim=1), logits, rtol=1e-5, atol=1e-5)
    return result


@pytest.fixture(scope="module")
def llama():
    return mhla_model("llama")


@pytest.fixture(scope="module")
def greedy(llama):
    return {padded: recompute(llama, **prompt(padded)) for padded in (False, True)}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left-padded"])
@pytest.mark.parametrize("name", names(generates=True))
def test_greedy_equals_recomputation(name, padded):
    # Eleven prompt tokens and seventeen more in blocks of four: one block past the six rows of mixing weights.
    result = check_greedy(mhla_model(name), padded)
    kinds = [type(layer) is MHLACacheLayer for layer in cache_of_output(result).layers]
    assert sum(kinds) == 3 - (name == "gemma3")


@pytest.mark.parametrize("options", [{"normalizer": "none"}, {"rope": "before_feature_map"}, {"layers": [1]},
                                     {"feature_map": "relu", "output_norm": True, "output_gate": True},
                                     {"mixing_heads": "shared", "feature_map": "elu"}], ids=str)  # fmt: skip
def test_options_decode_as_they_attend(options):
    check_greedy(mhla_model("llama", **options), True)


@pytest.mark.parametrize("name", ["llama", "gemma3", "window", "sinks"])
@pytest.mark.parametrize(
    "options",
    [
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"prefill_chunk_size": 4},
        {"prefill_chunk_size": 3, "cache_implementation": "static"},
    ],
    ids=str,
)
def test_other_ways_to_the_same_tokens(name, options):
    model = model_named(name)
    ids, _ = recompute(model, **prompt(True))
    assert torch.equal(generate(model, prompt(True), **options).sequences, ids)


@pytest.mark.parametrize("name", ["llama", "window", "sinks"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}], ids=str)
def test_beam_search(name, padded, options):
    model = model_named(name)
    with_cache = generate(model, prompt(padded), **options)
    without = generate(model, prompt(padded), use_cache=False, **options)
    assert torch.equal(with_cache.sequences, without.sequences)


def test_sampling(llama):
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(11)
        options = {"do_sample": True, "top_k": 20, "temperature": 1.3, "num_return_sequences": 2}
        samples.append(generate(llama, prompt(True), use_cache=use_cache, **options).sequences)
    assert torch.equal(*samples)


def speculations(model, drafts: tuple[int, ...], lookup: bool = True, **options) -> Iterator[torch.Tensor]:
    """Tokens after the last prompt, guessed by a model that is a little different, and looked up in the prompt."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for index, parameter in enumerate(draft.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) * 0.02)
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    one = {name: tensor[2:] for name, tensor in prompt(False).items()}
    for count in drafts:
        draft.generation_config.num_assistant_tokens = count
        yield generate(model, one, assistant_model=draft, **options).sequences
    if lookup:
        yield generate(model, one, prompt_lookup_num_tokens=3, **options).sequences


@pytest.mark.parametrize("name", ["llama", "window", "sinks"])
def test_assisted_decoding_and_prompt_lookup(name):
    model = model_named(name)
    expected, _ = recompute(model, **{name: tensor[2:] for name, tensor in prompt(False).items()})
    assert all(torch.equal(found, expected) for found in speculations(model, (2, 5)))


@pytest.mark.skipif(len(cache_names()) == 1, reason="transformers refuses static caches here before 5.24")
def test_assisted_decoding_in_static_caches(llama, greedy):
    found = list(speculations(llama, (2, 5), lookup=False, cache_implementation="static"))
    # Drafts by prompt lookup may reach past the end of a cache that is made for the answer alone.
    one = {name: tensor[2:] for name, tensor in prompt(False).items()}
    cache = StaticCache(config=llama.config, max_cache_len=60)
    found.append(generate(llama, one, prompt_lookup_num_tokens=3, **{CACHE: cache}).sequences)
    assert all(torch.equal(one, greedy[False][0][2:]) for one in found)
    assert {type(layer) for layer in cache.layers} == {MHLACacheLayer}


@pytest.mark.parametrize("make", [DynamicCache, MHLACache], ids=lambda kind: kind.__name__)
def test_a_conversation_goes_on_from_a_returned_cache(llama, make):
    cache = make(config=llama.config)
    first = generate(llama, prompt(True), **{CACHE: cache}, max_new_tokens=7)
    extra = torch.randint(FIRST_ORDINARY_TOKEN, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(5))
    ids = torch.cat([first.sequences, extra], dim=1)
    mask = torch.cat([prompt(True)["attention_mask"], torch.ones(3, 12, dtype=torch.long)], dim=1)
    expected, _ = recompute(llama, ids, mask, steps=6)
    result = generate(
        llama, {"input_ids": ids, "attention_mask": mask}, **{CACHE: cache_of_output(first)}, max_new_tokens=6
    )
    assert torch.equal(result.sequences, expected)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
@pytest.mark.parametrize("name", cache_names())
def test_a_cache_goes_by_each_of_its_names(llama, greedy, name):
    cache = DynamicCache(config=llama.config)
    result = generate(llama, prompt(True), **{name: cache})
    assert torch.equal(result.sequences, greedy[True][0])
    assert cache_of_output(result) is cache and all(type(layer) is MHLACacheLayer for layer in cache.layers)
    ids, again = prompt(False)["input_ids"], DynamicCache(config=llama.config)
    logits = torch.cat([llama(part, **{name: again}).logits for part in ids.split(4, dim=1)], dim=1)
    torch.testing.assert_close(logits, llama(ids, use_cache=False).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_cache_by_an_unknown_name_is_refused(llama, monkeypatch):
    # As transformers 5.24 was to versions of this package that did not know its name.
    for hook in (hook for module in llama.modules() for hook in module._forward_pre_hooks.values()):
        known = {name: index for name, index in hook.positions.items() if name not in CACHE_NAMES}
        monkeypatch.setattr(hook, "positions", known)
    with pytest.raises(UnsupportedVersionError, match="does not have the known names of the cache"):
        llama.generate(**prompt(False), max_new_tokens=3, do_sample=False)


def test_a_cache_starts_anew_after_reset(llama, greedy):
    cache = MHLACache(config=llama.config)
    generate(llama, prompt(False), **{CACHE: cache})
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(llama, prompt(True), **{CACHE: cache}).sequences, greedy[True][0])


@torch.no_grad()
def test_crop_takes_tokens_back(llama):
    ids = torch.randint(FIRST_ORDINARY_TOKEN, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(6))
    cache = DynamicCache(config=llama.config)
    llama(ids[:, :20], **{CACHE: cache}, use_cache=True)
    llama(torch.flip(ids[:, 20:], dims=(1,)), **{CACHE: cache}, use_cache=True)
    cache.crop(-13)
    assert cache.get_seq_length() == 17
    output = llama(ids[:, 17:], **{CACHE: cache}, use_cache=True).logits
    torch.testing.assert_close(output, llama(ids, use_cache=False).logits[:, 17:], rtol=1e-5, atol=1e-5)
    long = DynamicCache(config=llama.config)
    llama(ids.repeat(1, 4), **{CACHE: long}, use_cache=True)
    with pytest.raises(ValueError, match="last 64 tokens, of which 64 are left, not 65"):
        long.crop(-65)
    long.crop(-40)
    with pytest.raises(ValueError, match="of which 24 are left, not 30"):
        long.crop(-30)
    long.crop(-20)
    output = llama(ids[:, :9], **{CACHE: long}).logits
    whole = torch.cat([ids.repeat(1, 2), ids[:, :9]], dim=1)
    torch.testing.assert_close(output, llama(whole, use_cache=False).logits[:, 60:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_full_static_cache_is_refused(llama):
    ids = torch.randint(FIRST_ORDINARY_TOKEN, VOCABULARY, (1, 60), generator=torch.Generator().manual_seed(6))
    cache = StaticCache(config=llama.config, max_cache_len=32)
    with pytest.raises(ValueError, match="The static cache is full: it was made for 32 tokens"):
        llama(ids, **{CACHE: cache})
    cache = StaticCache(config=llama.config, max_cache_len=32)
    llama(ids[:, :32], **{CACHE: cache})
    with pytest.raises(RuntimeError, match="The static cache is full"):
        llama(ids[:, 32:33], **{CACHE: cache})


@torch.no_grad()
def test_softmax_refuses_a_cache_of_summaries(llama):
    model = copy.deepcopy(llama)
    cache = DynamicCache(config=model.config)
    model(**prompt(False), **{CACHE: cache})
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="filled by MHLA attention"):
        model(prompt(False)["input_ids"][:, :1], **{CACHE: cache})


@torch.no_grad()
def test_positions_of_a_static_cache_are_not_read_back(llama):
    given = prompt(False)
    cache = StaticCache(config=llama.config, max_cache_len=32)
    llama(**given, **{CACHE: cache})
    layer = cache.layers[0]
    assert isinstance(layer, MHLACacheLayer) and isinstance(layer.get_seq_length(), torch.Tensor)
    assert layer.state.num_slots == 8 and layer.get_max_length() == 32


def test_memory_of_the_cache_is_that_of_its_summaries(llama):
    cache = MHLACache(config=llama.config)
    generate(llama, prompt(False), **{CACHE: cache})
    state = cache.layers[0].state
    # Hedgehog features are twice as wide as keys; one column more than values for the normaliser.
    # Six blocks of text, and half as many again as there were when the room was made last.
    assert state.summaries.shape == (3, 2, 8, 16, 9)
    assert state.current.shape == (3, 2, 16, 9) and state.prefix.shape == (3, 4, 16, 9)
    # Features with and without rotation, and what the model gave.
    last = 3 * 64 * 2 * (16 + 16 + 8 + 8) * 4 + 3 * 64
    summaries = 3 * 2 * state.num_slots * 16 * 9 * 4
    # Positions, numbers of blocks that left, and hashes of the padding.
    rest = 3 * (2 + 4 + 4 + 4) * 16 * 9 * 4 + 3 * 3 * 8
    assert cache.layers[0].num_bytes == last + summaries + rest
    assert cache.num_bytes == 3 * cache.layers[0].num_bytes


def test_bfloat16_models_keep_their_summaries_in_bfloat16(llama):
    model = copy.deepcopy(llama).bfloat16()
    result = generate(model, prompt(True))
    state = cache_of_output(result).layers[0].state
    assert state.summaries.dtype == torch.bfloat16
    assert state.current.dtype == state.prefix.dtype == torch.float32


@torch.no_grad()
def test_caches_that_cannot_keep_the_state_are_refused(llama):
    cache = DynamicCache()
    keys = torch.zeros(3, 2, 4, 8)
    for index in range(3):
        cache.update(keys, keys, index)
    with pytest.raises(ValueError, match="MHLA needs an empty cache"):
        llama(prompt(False)["input_ids"], **{CACHE: cache})
    window = StaticCache(config=mhla_model("gemma3").config, max_cache_len=32)
    with pytest.raises(ValueError, match="cannot keep MHLA state"):
        llama(prompt(False)["input_ids"], **{CACHE: window})
    other = DynamicCache(config=llama.config)
    llama(**prompt(False), **{CACHE: other})
    with pytest.raises(ValueError, match="The cache has a batch of 3, but the input has 2"):
        llama(prompt(False)["input_ids"][:2], **{CACHE: other})
    with pytest.raises(ValueError, match="not -3"):
        other.layers[0].crop(3)
