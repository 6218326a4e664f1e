# SPDX-License-Identifier: Apache-2.0
"""What transformers' own generation tests ask of a model, beside the equality with recomputation tested elsewhere.

They are not part of the installed package, so their cases are written out here for a tiny Llama. Left out: formats of
key/value caches (the state has another one), quantised and offloaded key/value caches (refused, and for GPUs),
equality of eager, SDPA and flash attention (other functions), and models on several GPUs.
"""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching import continuous_api

from mhla_hf.utils.compat.transformers import cache_of_output

from .mhla_models import mhla_model
from .test_generation import prompt
from .tiny_models import CACHE


NEW = 6


@pytest.fixture(scope="module")
def llama():
    return mhla_model("llama")


def generate(model, **options):
    options = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, **options}
    return model.generate(**options)


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
    second = generate(llama, inputs_embeds=longer, **{CACHE: cache_of_output(first)}, max_new_tokens=3)
    expected = generate(llama, **given, max_new_tokens=6).sequences[:, 11:]
    assert torch.equal(torch.cat([first.sequences, second.sequences], dim=1), expected)


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
def test_continuous_batching_is_refused(start, layers, monkeypatch):
    # Where flash attention is installed, transformers switches models that can use it.
    monkeypatch.setattr(continuous_api, "is_flash_attn_2_available", lambda **_: True)
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, name, **_: name)
    model = mhla_model("llama", layers=layers)
    with pytest.raises(ValueError, match="has MHLA layers: they switch to 'sdpa' or 'eager' alone"):
        start(model)
    assert model.config._attn_implementation == "mhla"
