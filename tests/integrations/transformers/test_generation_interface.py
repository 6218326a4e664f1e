# SPDX-License-Identifier: Apache-2.0
"""What transformers' own generation tests ask of a model, beside the equality with recomputation tested elsewhere.

They are not part of the installed package, so their cases are written out here for a tiny Llama. Left out: formats of
key/value caches (the state has another one), quantised and offloaded key/value caches (refused, and for GPUs),
equality of eager, SDPA and flash attention (other functions), and models on several GPUs.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers.generation import GenerationMixin

from .mhla_models import mhla_model
from .test_generation import prompt


NEW = 6


@pytest.fixture(scope="module")
def llama():
    return mhla_model("llama")


def generate(model, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **options}
    return model.generate(**options)


def test_it_has_the_generation_mixin(llama):
    assert isinstance(llama, GenerationMixin) and llama.can_generate()


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("sample", [False, True])
def test_dictionary_outputs(llama, use_cache, beams, sample):
    torch.manual_seed(0)
    output = generate(
        llama, **prompt(True), num_beams=beams, do_sample=sample, use_cache=use_cache, output_scores=True,
        output_logits=True, output_hidden_states=True, output_attentions=True,
    )  # fmt: skip
    assert output.sequences.shape == (3, 11 + NEW)
    assert len(output.scores) == len(output.logits) == NEW
    assert all(step.shape == (3 * beams, 64) and step.isfinite().any() for step in output.scores)
    assert len(output.hidden_states) == NEW and len(output.hidden_states[0]) == 4
    lengths = [step[0].shape[1] for step in output.hidden_states]
    assert lengths == ([11] + [1] * (NEW - 1) if use_cache else list(range(11, 11 + NEW)))
    # There are no attention weights to return.
    assert all(layer is None for step in output.attentions for layer in step)
    assert (output.past_key_values is not None) == use_cache


@pytest.mark.parametrize("static", [False, True])
def test_from_embeddings(llama, static):
    given = prompt(True)
    embedded = llama.get_input_embeddings()(given["input_ids"])
    options = {"cache_implementation": "static"} if static else {}
    expected = generate(llama, **given).sequences[:, 11:]
    mask = given["attention_mask"]
    output = generate(llama, inputs_embeds=embedded, attention_mask=mask, **options)
    assert torch.equal(output.sequences, expected)
    both = generate(llama, **given, inputs_embeds=embedded)
    assert torch.equal(both.sequences[:, 11:], expected)


def test_going_on_from_embeddings(llama):
    given = prompt(False)
    embedded = llama.get_input_embeddings()(given["input_ids"])
    first = generate(llama, inputs_embeds=embedded, max_new_tokens=3)
    longer = torch.cat([embedded, llama.get_input_embeddings()(first.sequences)], dim=1)
    second = generate(llama, inputs_embeds=longer, past_key_values=first.past_key_values, max_new_tokens=3)
    expected = generate(llama, **given, max_new_tokens=6).sequences[:, 11:]
    assert torch.equal(torch.cat([first.sequences, second.sequences], dim=1), expected)


def test_without_a_prompt(llama):
    output = generate(llama, bos_token_id=1, num_return_sequences=1)
    assert output.sequences.shape == (1, 1 + NEW) and output.sequences[0, 0] == 1


def test_rows_that_have_ended_do_not_disturb_the_others(llama):
    plain = generate(llama, **prompt(True), max_new_tokens=12).sequences
    # The first row's third new token ends it.
    end = int(plain[0, 13])
    output = generate(llama, **prompt(True), max_new_tokens=12, eos_token_id=end, pad_token_id=0).sequences
    for row in range(3):
        new = plain[row, 11:].tolist()
        kept = new[: new.index(end) + 1] if end in new else new
        assert output[row, 11 : 11 + len(kept)].tolist() == kept
        assert not output[row, 11 + len(kept) :].any()


def test_prompt_lookup_stops_at_the_end(llama):
    one = {name: tensor[2:] for name, tensor in prompt(False).items()}
    plain = generate(llama, **one, max_new_tokens=10).sequences
    end = int(plain[0, 15])
    expected = generate(llama, **one, max_new_tokens=10, eos_token_id=end, pad_token_id=0).sequences
    output = generate(
        llama, **one, max_new_tokens=10, eos_token_id=end, pad_token_id=0, prompt_lookup_num_tokens=2
    ).sequences
    assert torch.equal(output, expected)


def test_only_the_last_logits(llama):
    given = prompt(True)
    whole = llama(**given).logits
    last = llama(**given, logits_to_keep=1).logits
    assert last.shape == (3, 1, 64)
    torch.testing.assert_close(last, whole[:, -1:])


@torch.no_grad()
def test_compiled_forward_inside_generate(llama):
    torch._dynamo.reset()
    expected = generate(llama, **prompt(True), max_new_tokens=3).sequences
    model = mhla_model("llama")
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(generate(model, **prompt(True), max_new_tokens=3).sequences, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "start",
    [
        lambda model: model.generate_batch([[5, 6, 7]], progress_bar=False),
        lambda model: model.generate(torch.tensor([[5, 6, 7]]), cache_implementation="paged"),
        lambda model: model.init_continuous_batching(),
    ],
    ids=["generate_batch", "paged", "manager"],
)
@pytest.mark.parametrize("layers", [None, [1]], ids=["all", "some"])
def test_continuous_batching_is_refused(start, layers):
    model = mhla_model("llama", layers=layers)
    with pytest.raises(ValueError, match="MHLA keeps summaries. Use model.generate with a padded batch"):
        start(model)
    assert model.config._attn_implementation == "mhla"


def test_softmax_models_batch_continuously(llama):
    softmax = copy.deepcopy(llama)
    softmax.set_attn_implementation("sdpa")
    assert softmax.init_continuous_batching().model is softmax
