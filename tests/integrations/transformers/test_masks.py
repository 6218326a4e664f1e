# SPDX-License-Identifier: Apache-2.0
"""Packed documents do not see each other; masks that MHLA cannot follow are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.masking_utils import and_masks, causal_mask_function, or_masks, sliding_window_causal_mask_function

from mhla_hf.utils.compat.transformers import adds_to_mask, cache_of_output

from .mhla_models import first_output, mhla_model
from .tiny_models import CACHE, inputs


LENGTHS = (5, 1, 9, 3)
BOUNDARIES = torch.tensor([0, 5, 6, 15, 18], dtype=torch.int32)


def packed(name: str, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    ids = inputs(name, batch=batch, length=sum(LENGTHS))["input_ids"]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].expand(batch, -1)
    return ids, positions


def alone(model, ids: torch.Tensor, **options) -> torch.Tensor:
    return torch.cat([first_output(model, input_ids=part, **options) for part in ids.split(LENGTHS, dim=1)], dim=1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "name", ["llama", "hybrid", "qwen3", "phi", "gpt_neox", "gpt2", "bert", "llama_yarn", "granite"]
)
def test_restarting_positions(name, batch):
    options = {"layers": [0, 2]} if name == "hybrid" else {}
    name = "llama" if options else name
    model = mhla_model(name, **options)
    ids, positions = packed(name, batch)
    given = {} if name == "bert" else {"use_cache": False}
    output = first_output(model, input_ids=ids, position_ids=positions, **given)
    torch.testing.assert_close(output, alone(model, ids, **given), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "smollm3", "bert", "gpt2"])
def test_cumulative_lengths(name):
    model = mhla_model(name)
    ids, positions = packed(name)
    given = {} if name == "bert" else {"use_cache": False}
    lengths = {"cu_seq_lens_q": BOUNDARIES, "cu_seq_lens_k": BOUNDARIES, "max_length_q": 9, "max_length_k": 9}
    output = first_output(model, input_ids=ids, position_ids=positions, **lengths, **given)
    torch.testing.assert_close(output, alone(model, ids, **given), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_mask_of_ones_makes_rows_of_restarting_positions_one_text_as_in_transformers(name):
    model = mhla_model(name)
    ids, positions = packed(name)
    given = {"position_ids": positions, "attention_mask": torch.ones_like(ids)}
    given |= {} if name == "bert" else {"use_cache": False}
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    first_output(model, inputs_embeds=embedded, **given)[:, 6:15].square().sum().backward()
    seen = 15 if name == "llama" else 18
    assert (embedded.grad.abs().sum(-1)[0] > 0).tolist() == [True] * seen + [False] * (18 - seen)
    lengths = {"cu_seq_lens_q": BOUNDARIES, "cu_seq_lens_k": BOUNDARIES, "max_length_q": 9, "max_length_k": 9}
    output = first_output(model, input_ids=ids, **given, **lengths)
    expected = alone(model, ids, **({} if name == "bert" else {"use_cache": False}))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=2e-5)


def test_gradients_stay_in_their_document():
    model = mhla_model("llama")
    ids, positions = packed("llama")
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, position_ids=positions, use_cache=False).logits
    logits[:, 6:15].square().sum().backward()
    touched = embedded.grad.abs().sum(-1)[0] > 0
    assert touched.tolist() == [False] * 6 + [True] * 9 + [False] * 3


def test_packed_documents_leave_no_cache_to_go_on_from():
    # use_cache is on by default; what comes out must still be right, and the cache must not be used.
    model = mhla_model("llama")
    ids, positions = packed("llama")
    output = model(input_ids=ids, position_ids=positions)
    torch.testing.assert_close(output.logits, alone(model, ids), rtol=1e-5, atol=2e-5)
    with pytest.raises(ValueError, match="filled with packed sequences"):
        model(input_ids=ids[:, :1], **{CACHE: cache_of_output(output)})


@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_other_masks_are_refused(name):
    model = mhla_model(name)
    given = inputs(name, length=6)
    block = torch.zeros(2, 1, 6, 6, dtype=torch.bool)
    block[:, :, :3, :3], block[:, :, 3:, 3:] = True, True
    for mask in (block, torch.zeros(2, 1, 6, 6), torch.ones(2, 6, 6, dtype=torch.long)):
        with pytest.raises(ValueError, match="attention_mask must be a padding mask"):
            model(**given, attention_mask=mask)


def test_a_causal_mask_with_padding_is_understood():
    model = mhla_model("llama")
    given = inputs("llama", length=7, padding="left", positions=True)
    expected = first_output(model, **given)
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    given["attention_mask"] = (given["attention_mask"].bool()[:, None] & causal)[:, None]
    torch.testing.assert_close(first_output(model, **given), expected)


def test_a_mask_must_cover_the_cache():
    model = mhla_model("llama")
    cache = DynamicCache(config=model.config)
    given = inputs("llama", length=6)
    model(**given, **{CACHE: cache})
    mask = torch.ones(2, 2)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="attention_mask covers 2 tokens"):
        model(input_ids=given["input_ids"][:, :2], attention_mask=mask, **{CACHE: cache})


def test_one_padding_mask_for_hybrids_too():
    model = mhla_model("llama", layers=[0, 2])
    given = inputs("llama", length=13, padding="right", positions=True)
    mask = given["attention_mask"].bool()
    output = first_output(model, **given)
    for row in range(2):
        ids = given["input_ids"][row : row + 1, mask[row]]
        torch.testing.assert_close(output[row : row + 1, mask[row]], first_output(model, input_ids=ids),
                                   rtol=1e-5, atol=2e-5)  # fmt: skip


def test_masks_that_show_more_are_found_inside_others():
    more = or_masks(causal_mask_function, sliding_window_causal_mask_function(4))
    assert adds_to_mask(more) and adds_to_mask(and_masks(causal_mask_function, more))
    assert not any(map(adds_to_mask, (None, causal_mask_function, sliding_window_causal_mask_function(4))))
