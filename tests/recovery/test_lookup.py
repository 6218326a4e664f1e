# SPDX-License-Identifier: Apache-2.0
"""Look-up scores against attention weights of the original, recall against losses, and choices by look-up."""

import math

import pytest
import torch

import mhla_hf
from mhla_hf.layers.weight_record import original_values
from mhla_hf.recovery import lookup
from mhla_hf.recovery.selection import select_layers
from mhla_hf.recovery.stages import Quality
from mhla_hf.training.data.texts import PackedText, TokenTable
from mhla_hf.training.layers import mhla_layers, original_heads
from mhla_hf.training.processes import Processes
from tests.integrations.transformers.mhla_models import default_options
from tests.integrations.transformers.tiny_models import inputs, softmax_model
from tests.recovery.test_calibration import converted, probe


def batches(rows=4, length=100, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(0, 64, (2, length), generator=generator)} for _ in range(rows // 2)]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", ["llama", "llama_yarn", "gpt_neox", "gpt2", "gemma3"])
def test_scores_are_those_of_attention_weights(name, seed):
    """In float64, from the probabilities that the softmax model returns itself."""
    sizes = {} if name == "gpt2" else {"max_position_embeddings": 301}
    model = softmax_model(name, seed=seed, **sizes).double()
    model.set_attn_implementation("eager")
    seen = []
    copy = mhla_hf.convert(softmax_model(name, seed=seed, **sizes).double(), default_options(name))
    copy.base_model.register_forward_pre_hook(lambda *call: seen.append(call[2]), with_kwargs=True)
    found = lookup.lookup_scores(copy, batches(), seed=seed)
    (tokens,) = seen[-1]["input_ids"]
    length, between = (63, 1) if name == "gpt2" else (128, 44)
    assert tokens[0] == 1 and len(tokens) == 1 + 2 * length + between
    passage = tokens[1 : 1 + length]
    assert torch.equal(passage, tokens[-length:]) and len(passage.unique()) > 55
    assert not torch.isin(passage, torch.tensor([0, 1])).any()
    assert torch.equal(tokens[1 + length : -length], batches()[0]["input_ids"].flatten()[:between])
    with torch.no_grad():
        weights = model(input_ids=tokens[None], output_attentions=True).attentions
    weights = weights[1:] if name == "gemma3" else weights
    for (own,), scores in zip(weights, found, strict=True):
        rows = range(len(tokens) - length, len(tokens) - 1)
        direct = torch.stack([own[:, row, row - length - between + 1] for row in rows]).mean(0)
        groups = direct.unflatten(0, (len(scores), -1)).amax(1)
        assert torch.allclose(torch.tensor(scores, dtype=torch.float64), groups, rtol=1e-5, atol=1e-7)


def test_tokens_are_those_of_the_probe():
    """Few kinds of tokens are repeated; the seed chooses their order; other models and batches are refused."""
    model = mhla_hf.convert(softmax_model("llama"), default_options("llama"))
    few = [{"input_ids": torch.tensor([[5, 1, 6, 0, 7, 5]])}]
    assert lookup.lookup_scores(model, few) == lookup.lookup_scores(model, few)
    assert lookup.lookup_scores(model, batches(), seed=1) != lookup.lookup_scores(model, batches())
    for other, given in (
        (converted("bert")[0], [inputs("bert")]),
        (model, [{"inputs_embeds": torch.zeros(1, 2, 32)}]),
    ):
        with pytest.raises(ValueError, match="look-up is measured on causal language models"):
            lookup.lookup_scores(other, given)


def long_model():
    return softmax_model("llama", max_position_embeddings=768)


def test_recall_is_the_loss_of_repeated_text():
    model, rows = long_model(), batches(26)
    texts = lookup.recall_texts(model, rows)
    flat = torch.cat([row["input_ids"].flatten() for row in rows])
    assert [len(text) for text in texts] == [768] * 4 and torch.equal(texts[1][:640], flat[640:1280])
    assert torch.equal(texts[1][640:], flat[640:768])
    first, second = lookup.recall(model, texts)
    for begin, bits in ((0, first), (640, second)):
        with torch.no_grad():
            logits = model(input_ids=torch.stack(texts)).logits.double().log_softmax(-1)
        own = [-logits[i, t - 1, texts[i][t]] for i in range(4) for t in range(begin + 9, begin + 128)]
        assert bits == pytest.approx(float(torch.stack(own).mean()) / math.log(2), rel=1e-5)
    assert lookup.recall_texts(softmax_model("llama"), rows) == []
    assert lookup.recall_texts(model, batches(2)) == []


def test_recovery_reports_recall():
    tokens = torch.cat([row["input_ids"].flatten() for row in batches(64)])
    table = TokenTable(tokens, torch.arange(0, len(tokens) + 1, 64), 0, "test")
    source = PackedText(table, 20, decode=lambda row: "x" * len(row))
    softmax = long_model()
    model = mhla_hf.convert(long_model(), default_options("llama")).eval()
    quality = Quality(model, source, Processes(alone=True))
    texts = lookup.recall_texts(softmax, source.held_out(16))
    assert list(quality.original) == ["bits_per_byte", "recall_bits"]
    assert quality.original["recall_bits"] == pytest.approx(lookup.recall(softmax, texts)[1], rel=1e-5)
    measured = quality.measure(model)
    assert measured["recall_bits"] == pytest.approx(lookup.recall(model, texts)[1], rel=1e-6)
    assert list(measured) == ["bits_per_byte", "recall_bits", "above_softmax_percent"]


def test_layers_are_chosen_by_lookup():
    """Language models by look-up, with figures of the hybrid; by error where that is asked."""
    model = mhla_hf.convert(long_model(), {**default_options("llama"), "feature_map": "elu"}).eval()
    given = batches(14)
    scores = lookup.lookup_scores(model, given)
    seen = []
    report = select_layers(model, given, keep=1, progress=lambda *count: seen.append(count))
    assert seen[-1][0] == seen[-1][1] and report.by == "lookup"
    assert [layer.lookup for layer in report.layers] == scores
    best = max(range(3), key=lambda index: max(scores[index]))
    assert report.order == [best] and [layer.kept for layer in report.layers] == [index == best for index in range(3)]
    assert all(layer.restored is None for layer in report.layers) and len(report.errors) == 2
    texts = lookup.recall_texts(model, given)
    assert report.recall["mhla"] == lookup.recall(model, texts)
    assert report.recall["softmax"] == pytest.approx(lookup.recall(long_model(), texts), rel=1e-5)
    before = {name: value.clone() for name, value in original_values(model, "compare").items()}
    kept = [layer for index, layer in enumerate(mhla_layers(model)) if index == best]
    name = f"model.layers.{best}.self_attn.o_proj.weight"
    with torch.no_grad():
        model.get_parameter(name).copy_(before.get(name, model.get_parameter(name)))
    with original_heads(kept):
        assert report.recall["chosen"] == pytest.approx(lookup.recall(model, texts), rel=1e-5)
    report = select_layers(model, given, keep=1, by="error")
    assert report.by == "error" and all(layer.restored is not None for layer in report.layers)
    assert [layer.lookup for layer in report.layers] == scores


def test_groups_of_heads_are_chosen_by_lookup():
    """A share is one of groups; figures are those of the mixed model with the calibrated parameters of its heads."""
    options = {**default_options("llama"), "feature_map": "elu", "mixing_heads": "per_head"}
    model, given = mhla_hf.convert(long_model(), options).eval(), batches(14)
    scores = {
        f"{layer}.{group}": score
        for layer, own in enumerate(lookup.lookup_scores(model, given))
        for group, score in enumerate(own)
    }
    report = select_layers(model, given, keep="34%")
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:2]
    assert report.order == best and len(report.errors) == 2
    layers = report.mhla_layers
    assert sum(1 if isinstance(entry, str) else 2 for entry in layers) == 4 and not {*best} & {*layers}
    assert report.option == ",".join(map(str, layers))
    mixed = mhla_hf.convert(long_model(), {**options, "layers": layers}).eval()
    own, other = (dict(each.named_parameters()) for each in (mixed, model))
    for name, parameter in own.items():
        layer = next((part for part in name.split(".") if part.isdecimal()), "")
        groups = mixed.model.layers[int(layer)].self_attn.mhla.groups if layer and ".mhla." in name else None
        if groups is not None:
            parameter.data.copy_(groups.split(other[name], 0)[0])
        elif int(layer or -1) in layers:
            parameter.data.copy_(other[name])
    texts = lookup.recall_texts(model, given)
    assert report.recall["chosen"] == pytest.approx(lookup.recall(mixed, texts), rel=1e-5)
    assert report.recall["chosen"] != pytest.approx(report.recall["mhla"], rel=1e-5)
    with pytest.raises(ValueError, match="keep='99%' keeps 6 of 6 groups of heads"):
        select_layers(model, given, keep="99%")


def test_mistakes():
    model, example = converted("bert")
    with pytest.raises(ValueError, match="look-up is measured on causal language models"):
        select_layers(model, probe(example), by="lookup")
    with pytest.raises(ValueError, match="by='much' is not one of 'lookup', 'error'"):
        select_layers(model, probe(example), by="much")
    mixed = mhla_hf.convert(softmax_model("llama"), {**default_options("llama"), "layers": ["0.1", 1]})
    with pytest.raises(ValueError, match="groups of heads that are softmax: select layers of its original"):
        select_layers(mixed, batches())
