# SPDX-License-Identifier: Apache-2.0
"""Models with sliding windows: which layers become MHLA, and what to set where all of them have a window."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.command_line import run_command
from tests.edits import edit_json

from .mhla_models import TEXT_OPTIONS, first_output, mhla_modules, unsettle
from .tiny_models import DECODER, inputs, sharpen


SIZES = {**DECODER, "head_dim": 8, "sliding_window": 32}
SLIDING, FULL = "sliding_attention", "full_attention"
# What helps; None where nothing does, since those layers alone have rotary embeddings.
HELP = {
    "Mistral": {"sliding_window": None},
    "Ministral": {"layer_types": [FULL] * 3},
    "Exaone4": {"sliding_window": None, "layer_types": [FULL] * 3},
    "Cohere2": None,
}
TYPED = [name for name in HELP if name != "Mistral"]


def softmax(name, **changes):
    kinds = {"layer_types": [SLIDING] * 3} if name in TYPED else {}
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**{**SIZES, **kinds, **changes})
    )
    sharpen(model)
    return model.eval()


@pytest.mark.parametrize("name", HELP)
def test_windows_in_all_layers_are_refused_with_the_setting_that_helps(name, tmp_path):
    original = softmax(name)
    original.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no layer can be MHLA, the first one because") as refused:
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="mhla")
    assert "\n" not in str(refused.value) and "load it with sliding_window=None" in str(refused.value)
    settings = HELP[name]
    if settings is None:
        return

    # Without windows it loads, and within the window's length the softmax model is the same.
    given = inputs("llama", length=21)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="mhla", mhla=TEXT_OPTIONS, **settings)
    assert len(mhla_modules(model)) == 3
    unsettle(model)
    model.eval()
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(first_output(model, **given), first_output(original, **given))
    model.set_attn_implementation("mhla")
    expected = first_output(model, **given)
    model.save_pretrained(tmp_path / "mhla")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "mhla").eval()
    assert torch.equal(first_output(again, **given), expected)
    texts = [again.generate(**given, max_new_tokens=9, do_sample=False, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", TYPED)
def test_full_layers_among_windows_become_mhla(name, tmp_path):
    softmax(name, layer_types=[SLIDING, SLIDING, FULL]).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="mhla", mhla=TEXT_OPTIONS).eval()
    assert [hasattr(layer.self_attn, "mhla") for layer in model.model.layers] == [False, False, True]
    unsettle(model)
    given = inputs("llama", length=21)
    texts = [model.generate(**given, max_new_tokens=9, do_sample=False, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*texts)


@pytest.mark.parametrize("name", ["Mistral", "Exaone4"])
def test_the_command_says_the_same_and_takes_an_edited_configuration(name, tmp_path):
    softmax(name).save_pretrained(tmp_path / "softmax")
    command = "convert", tmp_path / "softmax", tmp_path / "mhla"
    assert "load it with sliding_window=None" in " ".join(run_command(*command, code=1).output.split())
    edit_json(tmp_path / "softmax" / "config.json", **HELP[name])
    run_command(*command)
    assert len(mhla_modules(AutoModelForCausalLM.from_pretrained(tmp_path / "mhla"))) == 3
