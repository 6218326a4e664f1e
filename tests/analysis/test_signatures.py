# SPDX-License-Identifier: Apache-2.0
"""Failure signatures: each failure is named, in its layer, and sound models show none."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

import mhla_hf
from mhla_hf import MHLA, MHLAConfig
from mhla_hf.analysis import AttentionTracker
from mhla_hf.analysis.signatures import SIGNATURES, directory_signatures, weight_signatures
from tests.families.cases import DiTCase, SanaCase, WanCase
from tests.integrations.transformers.mhla_models import default_options
from tests.integrations.transformers.tiny_models import inputs, softmax_model


def failure_signatures(model: torch.nn.Module, batch: dict) -> list:
    return AttentionTracker(batch).probe(model)[1]


def layer(prefix: int = 0, width: int = 8, **options: object) -> MHLA:
    options = {"blocks": (4, 4), "grid": (8, 8), **options}
    return MHLA(MHLAConfig(**options), hidden_size=2 * width, num_heads=2, head_dim=width, num_prefix_tokens=prefix)


def names(mhla: MHLA, **options: object) -> list[str]:
    found = weight_signatures(mhla, "layer", **options)
    assert {signature.name for signature in found} <= set(SIGNATURES)
    for signature in found:
        assert signature.layer == "layer" and "\n" not in signature.message
        json.dumps(signature.to_dict(), allow_nan=False)
    return [signature.name for signature in found]


def fill(mhla: MHLA, weights: torch.Tensor | float) -> MHLA:
    with torch.no_grad():
        mhla.mixing.copy_(torch.as_tensor(weights).expand(mhla.mixing.shape))
    return mhla


INITIAL = (
    {}, {"mixing_init": "cos"}, {"mixing_init": "exp"}, {"mixing_init": "gaussian"}, {"mixing_init": "local"},
    {"mixing_init": "uniform"}, {"mixing_heads": "per_head"}, {"mixing_constraint": "nonnegative"},
    {"mixing_range": 3.0}, {"prefix": 2}, {"blocks": (1, 2)}, {"window": "block", "blocks": (1, 1)},
    {"blocks": (16,), "grid": (64,)}, {"blocks": None, "grid": (64,), "block_size": (8,), "causal": True},
)  # fmt: skip


@pytest.mark.parametrize("options", INITIAL, ids=str)
def test_fresh_layers_show_none(options):
    assert names(layer(**options)) == names(layer(**options).to(torch.bfloat16)) == []


@pytest.mark.parametrize(
    ("options", "prefix"), [({}, 2), ({"mixing_heads": "per_head"}, 0), ({"mixing_constraint": "nonnegative"}, 0)]
)
def test_mixing_that_collapsed(options, prefix):
    mhla = fill(layer(prefix, **options), 0.03)
    (found,) = weight_signatures(mhla, "blocks.1.attn1")
    assert str(found).startswith(
        "blocks.1.attn1: uniform-mixing: its mixing weights differ from equal ones by 0.00%, so it is plain linear "
    )
    assert found.figure == pytest.approx(0, abs=1e-6)
    generator = torch.Generator().manual_seed(0)
    noise = 0.03 * (1 + 0.01 * torch.randn(mhla.mixing.shape, generator=generator))
    assert names(fill(layer(prefix, **options), noise)) == ["uniform-mixing"]
    # A tenth of noise is not equal.
    assert names(fill(layer(prefix, **options), 0.03 + 10 * (noise - 0.03))) == []


def test_rows_that_cancel_die_or_explode():
    alternating = torch.tensor([1.0, -1.0]).repeat(8) + torch.eye(16)[0] * 0.1
    mhla = fill(layer(), alternating)
    assert names(mhla) == ["cancelling-mixing"]
    assert names(fill(layer(normalizer="none"), alternating)) == []
    # All negative weights leave the quotient as it is.
    assert names(fill(layer(), -layer().mixing.detach())) == []
    dead = layer()
    with torch.no_grad():
        dead.mixing[3] = 0
    (found,) = weight_signatures(dead, "layer")
    assert (found.name, found.figure) == ("dead-mixing", 1 / 16)
    exploded = layer()
    with torch.no_grad():
        exploded.mixing[3] *= -1000
    (found,) = weight_signatures(exploded, "layer")
    assert found.name == "exploding-mixing" and found.figure == pytest.approx(1000, rel=1e-3)
    (found,) = weight_signatures(fill(layer(), float("nan")), "layer")
    assert (found.name, found.figure) == ("non-finite-attention", None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"blocks": (2, 2), "grid": (16, 16)}, ["too-few-blocks"]),
        ({"blocks": (1, 1), "grid": (16, 16)}, ["too-few-blocks"]),
        ({"blocks": (3, 3), "grid": (16, 16)}, []),
        ({"blocks": (2, 2), "grid": (16, 16), "width": 32}, []),
        ({"blocks": (2, 2), "grid": (16, 16), "window": "block"}, []),
        ({"blocks": (2, 2), "grid": None}, []),
        ({"blocks": None, "grid": (256,), "block_size": (64,), "causal": True}, []),
        ({"blocks": None, "grid": (256,), "block_size": (64,), "resize": "extend"}, ["too-few-blocks"]),
    ],
    ids=str,
)
def test_too_few_blocks(options, expected):
    assert names(layer(**options)) == expected


@pytest.mark.parametrize("name", ("llama", "bert", "vit", "gemma3"))
def test_fresh_models_of_transformers_show_none(name):
    model = mhla_hf.convert(softmax_model(name), default_options(name)).eval()
    assert failure_signatures(model, inputs(name)) == []


@pytest.mark.parametrize("case", [WanCase(), DiTCase(), SanaCase()], ids=lambda case: type(case).__name__)
def test_fresh_models_of_diffusers_show_none(case):
    model = mhla_hf.convert(case.make(case.upstream), case.options).eval()
    assert failure_signatures(model, case.inputs(case.upstream_size)) == []


def bert(**options: object):
    return mhla_hf.convert(softmax_model("bert"), {**default_options("bert"), **options}).eval()


TEXT = {"input_ids": torch.randint(3, 64, (2, 96), generator=torch.Generator().manual_seed(0))}


def test_normalizer_that_divides_by_nothing():
    model = bert(feature_map="elu", mixing_constraint="none")
    mhla = model.bert.encoder.layer[1].attention.self.mhla
    with torch.no_grad():
        mhla.mixing.copy_(torch.tensor([1.0, -1.0]).repeat(3).expand(mhla.mixing.shape))
        # Without positions all tokens are the same, and so are the sums of all blocks.
        model.bert.embeddings.position_embeddings.weight.zero_()
    found = failure_signatures(model, {"input_ids": torch.full((1, 24), 5)})
    assert {(each.name, each.layer) for each in found if "mixing" not in each.name} == {
        ("unstable-normalizer", "bert.encoder.layer.1.attention.self")
    }
    assert "cancelling-mixing" in [each.name for each in found]
    figures = AttentionTracker({"input_ids": torch.full((1, 24), 5)}).probe(model)[0]
    assert [layer["unstable_rows"] for layer in figures.values()] == [0.0, 1.0, 0.0]


def test_outputs_that_grow_with_length():
    options = {"block_size": 8, "grid": [32], "normalizer": "none", "feature_map": "elu", "mixing_tail": "constant"}
    batch = {"input_ids": torch.randint(3, 64, (1, 256), generator=torch.Generator().manual_seed(0))}
    grown = mhla_hf.convert(softmax_model("llama"), {**options, "mixing_init": "uniform"})
    layers, signatures = AttentionTracker(batch).probe(grown)
    assert all(figures["growth"] > 4 for figures in layers.values())
    messages = {signature.name: signature.message for signature in signatures}
    assert set(messages) == {"unstable-normalizer", "heavy-tail"}
    assert "times as large for late tokens" in messages["unstable-normalizer"]
    # 29 blocks of the farthest weight, over three nearer ones; a decaying tail amounts to 11.1 of them.
    assert "get 9.7 times as much weight as all of these at 256 tokens" in messages["heavy-tail"]
    for tail in ("decay", "none"):
        model = mhla_hf.convert(softmax_model("llama"), {**options, "mixing_init": "uniform", "mixing_tail": tail})
        assert "heavy-tail" not in {found.name for found in AttentionTracker(batch).probe(model)[1]}
    steady = mhla_hf.convert(softmax_model("llama"), {**options, "mixing_init": "linear"})
    layers, signatures = AttentionTracker(batch).probe(steady)
    assert all(figures["growth"] < 2 for figures in layers.values()) and signatures == []
    # Inside of a block, every token adds to what nothing divides.
    layers, signatures = AttentionTracker({"input_ids": batch["input_ids"][:, :8]}).probe(steady)
    assert all("growth" not in figures for figures in layers.values()) and signatures == []
    assert failure_signatures(bert(normalizer="none", output_norm=True, feature_map="elu"), TEXT) == []


def test_rows_of_the_history_are_json_where_outputs_are_not_finite():
    options = {"block_size": 8, "grid": [32], "normalizer": "none", "feature_map": "elu"}
    model = mhla_hf.convert(softmax_model("llama"), options)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(float("nan"))
    row = AttentionTracker(TEXT).record(model, 0)
    json.dumps(row, allow_nan=False)
    assert row["layers"]["model.layers.1.self_attn"]["growth"] is None


def test_tracker_warns_once_for_each_signature_and_layer(caplog):
    model = bert(mixing_init="uniform", feature_map="elu")
    tracker = AttentionTracker(TEXT, settle=10)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="mhla_hf.analysis.tracking"):
        for step in (0, 5, 10, 15):
            tracker.record(model, step)
    assert [[each["name"] for each in row["signatures"]] for row in tracker.history] == [
        [], [], ["uniform-mixing"] * 3, ["uniform-mixing"] * 3
    ]  # fmt: skip
    assert len(caplog.records) == 3
    assert (
        caplog.records[0]
        .getMessage()
        .startswith(
            "step 10: bert.encoder.layer.0.attention.self: uniform-mixing: its mixing weights differ from equal ones"
        )
    )
    # A resumed run has said it already.
    resumed = AttentionTracker(TEXT, settle=10)
    resumed.restore(tracker.history, 15)
    resumed.record(model, 20)
    assert len(caplog.records) == 3


def saved(folder, kind: str):
    """A directory of an MHLA model whose mixing weights have not trained, and the name of a layer."""
    if kind == "bert":
        mhla_hf.convert(softmax_model("bert"), default_options("bert")).save_pretrained(folder)
        return "bert.encoder.layer.1.attention.self"
    if kind == "shards":
        case = WanCase()
        mhla_hf.convert(case.make(case.upstream), case.options).save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        return "blocks.1.attn1"
    case = SanaCase()
    mhla_hf.convert(case.make(case.upstream), case.options).save_pretrained(folder)
    return "transformer_blocks.1.attn1"


@pytest.mark.parametrize("kind", ("bert", "shards", "sana"))
def test_directories(kind, tmp_path):
    folder = tmp_path / "model"
    name = saved(folder, kind)
    assert directory_signatures(folder) == []
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for key in tensors:
            if key.endswith(f"{name}.mhla.mixing"):
                tensors[key] = 300 * torch.eye(tensors[key].shape[-1]).expand_as(tensors[key]).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
    found = directory_signatures(folder)
    assert [(path, each.layer, each.name) for path, each in found] == [(folder, name, "exploding-mixing")]
    assert found[0][1].figure == pytest.approx(300.0, rel=0.01)
