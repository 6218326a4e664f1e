# SPDX-License-Identifier: Apache-2.0
"""Inspecting models: which layers are MHLA, statistics of their attention, and errors against the base model."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import mhla_hf
from mhla_hf.analysis import attention_statistics, inspect_model, layer_tokens, softmax_matrix
from mhla_hf.analysis.inspection import plain
from mhla_hf.training.layers import run
from tests.families.cases import FluxCase, HunyuanVideoCase, WanCase
from tests.integrations.transformers.mhla_models import default_options
from tests.integrations.transformers.tiny_models import inputs, softmax_model


def wan(**options: object):
    case = WanCase()
    softmax = case.make(case.upstream)
    model = mhla_hf.convert(copy.deepcopy(softmax), {**case.options, **options}).eval()
    return softmax, model, [{**case.inputs(case.upstream_size), "return_dict": False}]


def language_model(name: str = "llama", **options: object):
    softmax = softmax_model(name)
    model = mhla_hf.convert(copy.deepcopy(softmax), {**default_options(name), **options}).eval()
    return softmax, model, [inputs(name)]


def test_hybrid_layers_are_listed():
    _, model, batches = wan(layers=(1,))
    report = inspect_model(model, batches, component="transformer")
    assert [(layer.index, layer.name, layer.kind) for layer in report.layers] == [
        (0, "blocks.0.attn1", "softmax"),
        (1, "blocks.1.attn1", "mhla"),
    ]
    softmax_layer, layer = report.layers
    assert softmax_layer.mixing is softmax_layer.attention is None
    assert layer.mixing.movement == [0.0] and layer.attention.samples == 1
    assert set(layer.attention.statistics) == {"original", "mhla", "linear"}
    assert layer.attention.statistics["mhla"]["rank"]["mean"] <= layer.attention.rank_bound
    assert layer.attention.statistics["linear"]["rank"]["mean"] <= layer.attention.linear_bound
    facts = json.loads(json.dumps(plain(report), allow_nan=False))
    assert [entry["kind"] for entry in facts["layers"]] == ["softmax", "mhla"]


def test_statistics_are_those_of_the_matrices():
    _, model, batches = wan()
    report = inspect_model(model, batches, layers=[0])
    assert [layer.mixing is not None for layer in report.layers] == [True, False]
    values = []

    def observe(module, args, kwargs, output):
        values.extend(attention_statistics(sample.matrix("mhla")) for sample in layer_tokens(module, *args, **kwargs))

    hook = model.blocks[0].attn1.mhla.register_forward_hook(observe, with_kwargs=True)
    with torch.no_grad():
        run(model, batches[0])
    hook.remove()
    for name, found in report.layers[0].attention.statistics["mhla"].items():
        expected = torch.cat([value[name] for value in values])
        assert found["mean"] == pytest.approx(expected.mean().item(), abs=1e-9)
        assert found["std"] == pytest.approx(expected.std().item(), abs=1e-9)


def test_original_attention_is_that_of_the_model_without_mhla():
    """The queries and keys of the first layer are those of the softmax model; its own attention weights are known."""
    softmax, model, _ = language_model()
    batches = [inputs("llama", padding="left")]
    with torch.no_grad():
        weights = run(softmax.set_attn_implementation("eager") or softmax, {**batches[0], "output_attentions": True})
    expected, valid = weights.attentions[0], batches[0]["attention_mask"].bool()
    seen = []

    def observe(module, args, kwargs, output):
        seen.extend(layer_tokens(module, *args, **kwargs))

    hook = model.model.layers[0].self_attn.mhla.register_forward_hook(observe, with_kwargs=True)
    with torch.no_grad():
        run(model, batches[0])
    hook.remove()
    for index, sample in enumerate(seen):
        whole = expected[index][:, valid[index]][:, :, valid[index]]
        torch.testing.assert_close(sample.matrix("original").float(), whole, atol=1e-5, rtol=1e-4)
        # By hand: a causal softmax of the scaled products.
        assert sample.causal
        by_hand = softmax_matrix(sample.query, sample.key, scale=sample.scaling, causal=True)[0]
        torch.testing.assert_close(sample.matrix("original"), by_hand)


@pytest.mark.parametrize("case", (FluxCase(), HunyuanVideoCase()), ids=("flux", "padded"))
@pytest.mark.parametrize(
    "options",
    ({"text": "softmax", "window": "block"}, {"text": "block", "feature_map": "relu"}),
    ids=lambda options: options["text"],
)
def test_joint_attention_is_taken_apart(case, options):
    """The matrix and the share of the text give what layers compute; softmax's are those of softmax over all."""
    model = mhla_hf.convert(case.make(case.upstream), {**case.options, **options}).eval()
    batch, seen = case.inputs(batch=2), []
    layers = [module for module in model.modules() if isinstance(module, mhla_hf.MHLA)]
    with torch.no_grad():
        for layer in layers:
            layer.mixing.add_(0.1 * torch.randn(layer.mixing.shape, generator=torch.Generator().manual_seed(0)))
            if options["text"] == "softmax":
                layer.text_bias.copy_(torch.tensor([0.3, -0.5]))

    def observe(module, args, kwargs, output):
        samples = layer_tokens(module, *args, **kwargs)
        seen.extend((sample, output[index], kwargs["text"], index) for index, sample in enumerate(samples))

    hooks = [layer.register_forward_hook(observe, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        run(model, batch)
    for hook in hooks:
        hook.remove()
    assert len(seen) == 2 * len(layers)
    for sample, output, text, index in seen:
        count = 0 if text.valid is None else int((~text.valid[index]).sum())
        tokens, row = sample.num_tokens, sample.num_tokens - 1
        of_row = [torch.tensor(sample.text_share(torch.tensor([row]))[kind]) for kind in ("original", "mhla")]
        attended = torch.einsum("htj,jhv->thv", sample.matrix("mhla"), sample.value[0])
        if options["text"] == "block":
            keep = [*range(text.key.shape[1] - count), *range(text.key.shape[1], len(output))]
            torch.testing.assert_close(attended.float(), output[keep], atol=1e-5, rtol=1e-4)
            of_text = sample.matrix("original")[:, row, : sample.layout.num_prefix_tokens].sum(-1)
        else:
            keys = torch.cat([sample.text, sample.key], dim=1)
            weights = torch.einsum("hk,jhk->hj", sample.query[0, row], keys[0]) * keys.shape[-1] ** -0.5
            of_text = weights.softmax(-1)[:, :-tokens].sum(-1)
            words = weights[:, :-tokens].softmax(-1)
            valid = slice(None) if text.valid is None else text.valid[index]
            words = torch.einsum("hx,xhv->hv", words, text.value[index, valid].double())
            share = of_row[1][:, None]
            expected = share * words + (1 - share) * attended[row]
            torch.testing.assert_close(expected.float(), output[row], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(of_row[0].double(), of_text, atol=1e-6, rtol=1e-5)


def test_the_share_of_the_text_is_exact_where_blocks_are_tokens():
    case = FluxCase()
    model = mhla_hf.convert(case.make(case.upstream), {**case.options, "blocks": [4, 6]}).eval()
    report = inspect_model(model, [case.inputs(batch=2), case.inputs(seed=3)])
    for layer in report.mhla_layers:
        assert 0 < min(layer.attention.text_share["original"]) < 1 and len(layer.attention.text_share["mhla"]) == 2
        assert layer.attention.text_share["mhla"] == pytest.approx(layer.attention.text_share["original"])
    share = sum(sum(layer.attention.text_share["mhla"]) / 2 for layer in report.mhla_layers) / len(report.layers)
    assert report.facts()["attention to the text, MHLA"] == f"{100 * share:.0f}\N{NO-BREAK SPACE}%"
    assert plain(report)["layers"][0]["attention"]["text_share"] == report.layers[0].attention.text_share


def test_causal_models_have_no_bound_and_fewer_rows():
    _, model, batches = language_model()
    layer = inspect_model(model, batches, tokens=5).mhla_layers[0]
    assert (layer.attention.rows, layer.attention.rank_bound, layer.attention.linear_bound) == (5, None, None)
    assert layer.attention.tokens > 5
    assert 0 <= layer.attention.statistics["mhla"]["relative_entropy"]["mean"] <= 1
    assert not layer.mixing.mean_matrix.triu(1).any()


@pytest.mark.parametrize("make", (wan, language_model), ids=("wan", "llama"))
def test_errors_against_the_base_model(make):
    softmax, model, batches = make()
    told = []
    report = inspect_model(model, batches, base=softmax, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]
    # The first layer has the inputs there that it has in the base model.
    name = report.layers[0].name
    (target, whole_target), (output, whole) = (outputs_of(item, name, batches[0]) for item in (softmax, model))
    errors = [(a - b).norm() / b.norm() for a, b in zip(output, target)]
    assert report.mhla_layers[0].output_error["mean"] == pytest.approx(sum(errors).item() / len(errors), rel=1e-4)
    expected = ((whole - whole_target).norm() / whole_target.norm()).item()
    assert report.output_error["mean"] == pytest.approx(expected, rel=1e-4)
    assert all(layer.output_error["mean"] > 0.01 for layer in report.mhla_layers)


@torch.no_grad()
def outputs_of(model, name, batch):
    """Outputs of one module, and of the whole model."""
    caught = []

    def keep(module, args, output):
        caught.append(output[0] if isinstance(output, tuple) else output)

    hook = model.get_submodule(name).register_forward_hook(keep)
    whole = run(model, batch)[0]
    hook.remove()
    return caught[0], whole


def test_model_is_left_as_it_was():
    softmax, model, batches = wan()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    model.train()
    inspect_model(model, batches, base=softmax)
    assert model.training
    assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_mistakes():
    softmax, model, batches = wan()
    with pytest.raises(ValueError, match="no MHLA layers: convert it first"):
        inspect_model(softmax)
    with pytest.raises(ValueError, match="layers names none of the MHLA layers of this MHLAWan.*: 1"):
        inspect_model(wan(layers=(1,))[1], layers=[0])
    with pytest.raises(ValueError, match="layers names 7, but the model has layers 0 to 1"):
        inspect_model(model, layers="0,7")
    with pytest.raises(ValueError, match="tokens=1 must be"):
        inspect_model(model, tokens=1)
    with pytest.raises(ValueError, match="original has MHLA layers"):
        inspect_model(model, batches, base=copy.deepcopy(model))
    with torch.no_grad():
        model.blocks[1].attn1.to_q.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="layer blocks.1.attn1: attention of the probe is not finite"):
        inspect_model(model, batches)
    with torch.no_grad():
        model.blocks[0].attn1.mhla.mixing.fill_(float("inf"))
    with pytest.raises(ValueError, match="layer blocks.0.attn1: the mixing weights are not finite"):
        inspect_model(model)
