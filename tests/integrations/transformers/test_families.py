# SPDX-License-Identifier: Apache-2.0
"""Every tested family: load from a softmax directory, pad, differentiate, save, reload, other image sizes."""

from __future__ import annotations

import json

import pytest
import torch

import mhla_hf
from mhla_hf.models.registry import TRANSFORMERS_FAMILIES

from .mhla_models import UNSERVED, default_options, first_output, mhla_model, mhla_modules, served_names
from .tiny_models import FAMILIES, inputs, names, softmax_model


@pytest.mark.parametrize("name", served_names())
def test_an_ordinary_checkpoint_loads_saves_and_reloads(name, tmp_path):
    softmax = softmax_model(name)
    softmax.save_pretrained(tmp_path / "softmax")
    model_class = FAMILIES[name].model_class
    model = model_class.from_pretrained(
        tmp_path / "softmax", attn_implementation="mhla", mhla=default_options(name)
    ).eval()
    layers = softmax.config.num_hidden_layers - len(FAMILIES[name].softmax_layers)
    assert len(mhla_modules(model)) == layers
    # Nothing of the checkpoint is lost, and what is new has its initial value.
    loaded = model.state_dict()
    for key, tensor in softmax.state_dict().items():
        assert torch.equal(loaded[key], tensor), key
    for module in mhla_modules(model):
        for key, parameter in module.named_parameters():
            assert torch.equal(parameter, module.initial_tensor(key)), key
    given = inputs(name)
    expected = first_output(model, **given)
    assert (expected - first_output(softmax, **given)).abs().max() > 1e-3

    model.save_pretrained(tmp_path / "mhla")
    written = json.loads((tmp_path / "mhla" / "config.json").read_text())
    assert written["attn_implementation"] == "mhla" and written["mhla"]["mixing_heads"] == "per_head"
    again = model_class.from_pretrained(tmp_path / "mhla").eval()
    assert torch.equal(first_output(again, **given), expected)
    # Untouched, it is still the softmax model.
    again.set_attn_implementation("sdpa")
    torch.testing.assert_close(first_output(again, **given), first_output(softmax, **given))
    again.set_attn_implementation("mhla")
    assert torch.equal(first_output(again, **given), expected)


@pytest.mark.parametrize("padding", ["left", "right", "interior"])
@pytest.mark.parametrize("name", names("causal", "encoder"))
def test_padding_does_not_matter(name, padding):
    family = FAMILIES[name]
    if padding == "interior" and family.softmax_layers:
        pytest.skip("sliding windows count padding")
    model = mhla_model(name)
    # Models that make their positions themselves count padding too, on the left and inside.
    positions = name not in ("distilbert", "modernbert")
    if not positions and padding != "right":
        pytest.skip("takes no position_ids")
    given = inputs(name, padding=padding, positions=positions)
    mask = given["attention_mask"].bool()
    with torch.no_grad():
        output = first_output(model, **given)
        for row in range(mask.shape[0]):
            alone = {"input_ids": given["input_ids"][row : row + 1, mask[row]]}
            if positions:
                alone["position_ids"] = given["position_ids"][row : row + 1, mask[row]]
            expected = first_output(model, **alone)
            torch.testing.assert_close(output[row : row + 1, mask[row]], expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("name", served_names())
def test_every_parameter_gets_a_gradient(name):
    # The decay of causal models learns from blocks beyond the stored weights.
    options = {"grid": [8]} if FAMILIES[name].kind == "causal" else {}
    model = mhla_model(name, **options).train()
    first_output(model, **inputs(name)).square().sum().backward()
    for module in mhla_modules(model):
        for key, parameter in module.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("size", [(16, 24), (28, 20)], ids=str)
@pytest.mark.parametrize("name", served_names("vision"))
def test_other_image_sizes(name, size):
    model = mhla_model(name, output_gate=True, lepe_kernel=3)
    prefix, patches = FAMILIES[name].prefix_tokens, (size[0] // 4) * (size[1] // 4)
    output = first_output(model, **inputs(name, image_size=size))
    assert output.shape == (2, prefix + patches, 32) and output.isfinite().all()
    # The class, distillation and register tokens have a block of their own beside the four of the grid.
    assert {module.mixing.shape[-1] for module in mhla_modules(model)} == {4 + (prefix > 0)}
    layout = mhla_modules(model)[0].layout_for((size[0] // 4, size[1] // 4))
    assert layout.num_tokens == prefix + patches and layout.block_of_token[:prefix].tolist() == [0] * prefix


@pytest.mark.parametrize("name", UNSERVED)
def test_models_whose_layers_drop_keywords_are_refused(name):
    with pytest.raises(ValueError, match="its layers drop keyword arguments in this version of transformers"):
        mhla_model(name)


def test_the_families_are_listed():
    tested = {family.config().model_type for family in FAMILIES.values()}
    assert tested <= set(TRANSFORMERS_FAMILIES)
    assert mhla_hf.MHLAConfig is not None
