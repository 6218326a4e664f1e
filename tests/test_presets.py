# SPDX-License-Identifier: Apache-2.0
"""`from_preset`: the paper's models by name, at full size on the meta device, and shallow ones that run and reload."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.presets import TextWithoutValues, example_inputs, make_model
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
# One of each kind is fast enough; the others differ by size.
FAST = ("deit-t", "vlt-t", "dit-s-2-256", "sana-0.6b")
BY_SPEED = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in PRESETS]


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


PUBLISHED = {
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_language_models_have_the_published_number_of_parameters(name):
    config = from_preset(name, mhla=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert type(model).__name__ == config.architectures[0]


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


DEPTH = {"transformers": "num_hidden_layers", "diffusers": "num_layers"}


def shallow(name, mhla=None, **overrides):
    """A preset at its full width, with one layer; of a hybrid with two, the first of them softmax."""
    layers = 1 if "layers" not in PRESETS[name].mhla else 2
    # Entries of the configuration that go with the number of layers.
    fixed = {"WanVACETransformer3DModel": {"vace_layers": [0]}}
    fixed["WanAnimateTransformer3DModel"] = {"inject_face_latents_blocks": 1}
    fixed |= dict.fromkeys(("HunyuanVideoTransformer3DModel", "FluxTransformer2DModel"), {"num_single_layers": 1})
    fixed |= dict.fromkeys(("LlamaConfig", "Qwen3Config", "Gemma3TextConfig"), {"vocab_size": 512})
    # Of Gemma only every sixth layer has no window.
    fixed["Gemma3TextConfig"] = {"vocab_size": 512, "layer_types": ["full_attention"] * layers}
    overrides = {**fixed.get(PRESETS[name].model, {}), **overrides}
    torch.manual_seed(0)
    return make_model(name, mhla, **{DEPTH[PRESETS[name].library]: layers, **overrides})


def forward_and_backward(model, inputs):
    model.train()
    # LTX-2 predicts audio as well.
    with TextWithoutValues():
        outputs = [output for output in model(**inputs, return_dict=False) if isinstance(output, torch.Tensor)]
    sum(output.float().square().mean() for output in outputs).backward()
    return outputs[0]


def without_gradient(model):
    """Parameters without one; nothing reads the text after the last block, where that has text of its own."""
    last = f"transformer_blocks.{len(getattr(model, 'transformer_blocks', ())) - 1}."
    unread = ("add_q_proj", "norm_added_q", "to_add_out", "ff_context", "txt_mlp")
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None and not (name.startswith(last) and any(part in name for part in unread))
    ]


@pytest.mark.parametrize("name", BY_SPEED)
def test_forward_and_backward_at_full_size(name):
    with torch.device("meta"):
        model = make_model(name)
    inputs = example_inputs(model)
    output = forward_and_backward(model, inputs)
    layers = [module for module in model.modules() if isinstance(module, MHLA)]
    sizes = PRESETS[name].sizes
    depth = sizes[DEPTH[PRESETS[name].library]] + len(sizes.get("vace_layers", ())) + sizes.get("num_single_layers", 0)
    # Layers with a sliding window stay softmax.
    depth -= getattr(model.config, "layer_types", None) is not None and model.config.layer_types.count(
        "sliding_attention"
    )
    assert len(layers) == len(MHLAConfig.from_dict(PRESETS[name].mhla).mhla_layers(depth))
    assert output.is_meta
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not without_gradient(model)


@pytest.mark.parametrize("name", BY_SPEED)
def test_a_shallow_one_runs_saves_and_reloads(name, tmp_path):
    model = shallow(name)
    inputs = example_inputs(model, tokens=100, grid=(3, 5, 10))
    output = forward_and_backward(model, inputs)
    assert output.isfinite().all()
    assert not without_gradient(model)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    model.eval().save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert loaded.config.mhla == model.config.mhla
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    with torch.no_grad():
        expected, found = (one(**inputs, return_dict=False)[0] for one in (model, loaded))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mhla-lm-7b", {}, "name='mhla-lm-7b' is not one of 'deit-t', .*Did you mean"),
        (["deit-t"], {}, "is not one of"),
        ("mhla-lm-340m", {"num_layers": 2}, "LlamaConfig of preset .* option num_layers. Known options: .*num_hidden"),
        ("dit-s-2-256", {"depth": 2}, "DiTTransformer2DModel of preset .* option depth. Known options: .*num_layers"),
        ("dit-s-2-256", {"mhla": {"chunk": 64}}, "Unknown mhla option.* chunk"),
        ("wan2.1-1.3b", {"mhla": {"layers": [30]}}, r"layers names 30"),
        ("deit-t", {"mhla": "linear"}, "mhla='linear' must be a dict of options"),
    ],
)
def test_mistakes(name, options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        from_preset(name, **options)
