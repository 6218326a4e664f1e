# SPDX-License-Identifier: Apache-2.0
"""`from_preset`: the paper's language model as a plain Llama configuration that trains, saves and reloads."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from mhla_hf import MHLA, MHLAConfig, from_preset
from mhla_hf.presets import PRESETS


TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


def tiny_model(**overrides):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(from_preset("mhla-lm-340m", **{**TINY, **overrides}))


def test_the_340m_model_has_340m_parameters():
    config = from_preset("mhla-lm-340m")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(config) is LlamaConfig
    assert type(model) is LlamaForCausalLM
    count = sum(parameter.numel() for parameter in model.parameters())
    assert abs(count / 340e6 - 1) < 0.03
    layers = [module for module in model.modules() if isinstance(module, MHLA)]
    assert len(layers) == config.num_hidden_layers == 24
    # 2,048 tokens in 32 chunks of 64.
    assert layers[0].mixing.shape == (32, 32)
    assert layers[0].gate.weight.shape == (1024, 1024)
    assert layers[0].output_norm.weight.shape == (64,)
    options = MHLAConfig.from_dict(model.config.mhla)
    assert (options.rope, options.normalizer, options.block_size) == ("after_feature_map", "none", (64,))


def test_a_small_one_trains():
    model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Longer than a block; every token follows from the one before.
    tokens = (torch.arange(80) * 5 + torch.arange(4)[:, None]) % TINY["vocab_size"]
    losses = []
    for _ in range(12):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    layer = model.model.layers[0].self_attn.mhla
    assert not torch.equal(layer.mixing, layer.initial_tensor("mixing"))
    assert layer.gate.weight.abs().sum() > 0


def test_save_and_plain_reload(tmp_path):
    model = tiny_model().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "llama"
    assert stored["mhla"]["block_size"] == [64]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(70)[None] % TINY["vocab_size"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    assert loaded.config.mhla == model.config.mhla


def test_the_configuration_alone_survives_saving(tmp_path):
    from_preset("mhla-lm-340m", **TINY).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(isinstance(module, MHLA) for module in model.modules()) == 2
    assert model.config.mhla["output_gate"] is True


def test_options_can_be_replaced():
    config = from_preset("mhla-lm-340m", mhla={"feature_map": "hedgehog", "output_gate": False}, **TINY)
    model = AutoModelForCausalLM.from_config(config)
    assert model.config.mhla["feature_map"] == "hedgehog"
    assert model.config.mhla["normalizer"] == "none"
    assert model.model.layers[0].self_attn.mhla.gate is None
    whole = from_preset("mhla-lm-340m", mhla=MHLAConfig(causal=True, block_size=16), **TINY)
    model = AutoModelForCausalLM.from_config(whole)
    assert model.config.mhla["output_norm"] is False
    assert model.model.layers[0].self_attn.mhla.mixing.shape == (4, 4)


def test_presets_are_not_shared():
    from_preset("mhla-lm-340m").mhla["block_size"] = [1]
    assert PRESETS["mhla-lm-340m"].mhla["block_size"] == [64]
    assert from_preset("mhla-lm-340m").mhla["block_size"] == [64]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mhla-lm-7b", {}, "'mhla-lm-7b' is not a preset. Presets: mhla-lm-340m."),
        ("mhla-lm-340m", {"num_layers": 2}, "LlamaConfig has no option num_layers"),
        ("mhla-lm-340m", {"mhla": {"chunk": 64}}, r"Unknown mhla option\(s\) chunk"),
    ],
)
def test_mistakes(name, options, message):
    with pytest.raises(ValueError, match=message):
        from_preset(name, **options)
