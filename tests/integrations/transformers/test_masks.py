# SPDX-License-Identifier: Apache-2.0
"""Packed documents do not see each other; masks that MHLA cannot follow are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import BertForMultipleChoice, DynamicCache, GPT2DoubleHeadsModel

from .mhla_models import default_options, first_output, mhla_model, mhla_modules, unsettle
from .tiny_models import FAMILIES, inputs, sharpen


LENGTHS = (5, 1, 9, 3)
BOUNDARIES = torch.tensor([0, 5, 6, 15, 18], dtype=torch.int32)


def packed(name: str, batch: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    ids = inputs(name, batch=batch, length=sum(LENGTHS))["input_ids"]
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].expand(batch, -1)
    return ids, positions


def alone(model, ids: torch.Tensor, **options) -> torch.Tensor:
    return torch.cat([first_output(model, input_ids=part, **options) for part in ids.split(LENGTHS, dim=1)], dim=1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["llama", "qwen3", "phi", "gpt_neox", "gpt2", "bert", "llama_yarn", "granite"])
def test_restarting_positions(name, batch):
    model = mhla_model(name)
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
        model(input_ids=ids[:, :1], past_key_values=output.past_key_values)


def test_packing_in_a_hybrid():
    model = mhla_model("llama", layers=[0, 2])
    ids, positions = packed("llama")
    output = first_output(model, input_ids=ids, position_ids=positions, use_cache=False)
    torch.testing.assert_close(output, alone(model, ids, use_cache=False), rtol=1e-5, atol=2e-5)


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
    model(**given, past_key_values=cache)
    mask = torch.ones(2, 2)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="attention_mask covers 2 tokens"):
        model(input_ids=given["input_ids"][:, :2], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("layers", [None, [0, 2]])
def test_one_padding_mask_for_hybrids_too(layers):
    model = mhla_model("llama", layers=layers)
    given = inputs("llama", length=13, padding="right", positions=True)
    mask = given["attention_mask"].bool()
    output = first_output(model, **given)
    for row in range(2):
        ids = given["input_ids"][row : row + 1, mask[row]]
        torch.testing.assert_close(output[row : row + 1, mask[row]], first_output(model, input_ids=ids),
                                   rtol=1e-5, atol=2e-5)  # fmt: skip


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_encoders_called_without_their_hooks(name):
    # Some libraries call `forward` itself; padding is then read off what the layers get.
    model = mhla_model(name)
    given = inputs(name, length=13, padding="right")
    expected = first_output(model, **given)
    torch.testing.assert_close(model.base_model.forward(**given)[0], model.base_model(**given)[0])
    assert torch.equal(first_output(model, **given), expected)


def test_cumulative_lengths_in_a_hybrid():
    # transformers itself only separates documents by positions, and not with a cache.
    model = mhla_model("llama", layers=[0, 2])
    ids, positions = packed("llama")
    lengths = {"cu_seq_lens_q": BOUNDARIES, "cu_seq_lens_k": BOUNDARIES}
    for given in ({"position_ids": positions, "use_cache": False, **lengths}, {"position_ids": positions}):
        torch.testing.assert_close(
            first_output(model, input_ids=ids, **given), alone(model, ids, use_cache=False), rtol=1e-5, atol=2e-5
        )


def test_positions_given_once_for_the_batch():
    model = mhla_model("llama")
    ids, positions = packed("llama", batch=2)
    output = first_output(model, input_ids=ids, position_ids=positions[:1], use_cache=False)
    torch.testing.assert_close(output, alone(model, ids, use_cache=False), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("layers", [None, [1]], ids=["all layers", "hybrid"])
@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize(("name", "model_class"), [("gpt2", GPT2DoubleHeadsModel), ("bert", BertForMultipleChoice)])
def test_masks_of_several_choices(name, model_class, padding, layers):
    config = FAMILIES[name].config()
    config.mhla = {**default_options(name), "layers": layers}
    torch.manual_seed(0)
    model = model_class(config).eval()
    sharpen(model)
    unsettle(model)
    assert len(mhla_modules(model)) == (3 if layers is None else 1)
    ids = torch.randint(5, 60, (2, 3, 14), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, choice, count in ((0, 1, 4), (1, 2, 5), (1, 0, 9)):
        mask[row, choice, slice(count) if padding == "left" else slice(-count, None)] = 0
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=mask)
        for row, choice in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
            given = {"input_ids": ids[row, choice][None], "attention_mask": mask[row, choice][None]}
            if name == "bert":
                alone = model(**{name: value[None] for name, value in given.items()})
                torch.testing.assert_close(output.logits[row, choice], alone.logits[0, 0], rtol=1e-5, atol=2e-5)
                continue
            # Without a dimension of choices.
            tokens = mask[row, choice].bool()
            expected = model.lm_head(model.transformer(**given).last_hidden_state[0])
            torch.testing.assert_close(output.logits[row, choice][tokens], expected[tokens], rtol=1e-5, atol=2e-5)
