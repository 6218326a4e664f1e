# SPDX-License-Identifier: Apache-2.0
"""peft: LoRA of the projections with MHLA's own parameters trained next to it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import transformers
from packaging.version import Version
from peft import (
    AutoPeftModelForCausalLM,
    LoraConfig,
    PeftModel,
    get_peft_model,
)
from transformers import AutoModelForCausalLM

import mhla_hf
from mhla_hf.integrations.transformers.attaching import convert_transformers_model

from .mhla_models import default_options, first_output, mhla_modules
from .test_generation import recompute
from .tiny_files import save_softmax
from .tiny_models import FAMILIES, inputs


# Texts of three blocks and more go beyond the stored weights, and train their decay too.
SMALL_BLOCKS = {"block_size": 4, "grid": [8]}


@pytest.fixture
def softmax_directory(tmp_path):
    return save_softmax("llama", tmp_path / "softmax")


@pytest.fixture
def mhla_directory(tmp_path, softmax_directory):
    load(softmax_directory).save_pretrained(tmp_path / "mhla")
    return tmp_path / "mhla"


def load(directory):
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="mhla", mhla=SMALL_BLOCKS)


def lora(**options):
    defaults = {"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["mhla"], "task_type": "CAUSAL_LM"}
    return LoraConfig(**{**defaults, **options})


def language_loss(model):
    batch = inputs("llama", padding="right")
    return model(**batch, labels=batch["input_ids"]).loss


def train(model, loss_of=language_loss, steps=5):
    """A few steps on one batch, after which the loss is lower."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@torch.no_grad()
def logits(model):
    return model.eval()(**inputs("llama", padding="left")).logits


def trained(directory, **options):
    torch.manual_seed(0)
    model = get_peft_model(load(directory), lora(**options))
    train(model)
    return model


def test_lora_and_mhla_train(mhla_directory):
    torch.manual_seed(0)
    model = get_peft_model(load(mhla_directory), lora())
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or ".mhla.modules_to_save." in name for name in trainable)
    assert sum(".mhla.modules_to_save." in name for name in trainable) == 3 * 6
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    train(model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in trainable), name


def test_an_adapter_comes_back(tmp_path, mhla_directory):
    model = trained(mhla_directory)
    model.save_pretrained(tmp_path / "adapter")
    expected = logits(model)
    with torch.no_grad(), model.disable_adapter():
        assert not torch.allclose(logits(model), expected, atol=1e-3)
        torch.testing.assert_close(logits(model), logits(AutoModelForCausalLM.from_pretrained(mhla_directory)))
    base = AutoModelForCausalLM.from_pretrained(mhla_directory)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(base, tmp_path / "adapter")), expected)
    # The adapter names its base, which is the MHLA directory.
    torch.testing.assert_close(logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")), expected)


def test_generation_with_an_adapter(mhla_directory):
    model = trained(mhla_directory).eval()
    tokens = inputs("llama", batch=1, length=7)["input_ids"]
    result = model.generate(input_ids=tokens, max_new_tokens=10, do_sample=False)
    assert torch.equal(result, recompute(model, tokens, torch.ones_like(tokens), steps=10)[0])


def test_merging_gives_a_plain_model(tmp_path, mhla_directory):
    model = trained(mhla_directory)
    expected = logits(model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert reloaded.state_dict().keys() == load(mhla_directory).state_dict().keys()
    assert len(mhla_modules(reloaded)) == 3
    torch.testing.assert_close(logits(reloaded), expected, atol=1e-5, rtol=1e-4)


def test_an_adapter_is_refused_by_a_base_without_mhla(tmp_path, softmax_directory, mhla_directory):
    model = trained(mhla_directory)
    model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(softmax_directory)
    before = logits(base)
    with pytest.raises(ValueError, match="needs a base model with MHLA layers, but LlamaForCausalLM has none"):
        PeftModel.from_pretrained(base, tmp_path / "adapter")
    with pytest.raises(ValueError, match="needs a base model with MHLA layers"):
        get_peft_model(base, lora())
    assert torch.equal(logits(base), before)
    # Without MHLA's parameters an adapter is for anyone.
    get_peft_model(base, lora(modules_to_save=None))
    again = convert_transformers_model(AutoModelForCausalLM.from_pretrained(softmax_directory), SMALL_BLOCKS)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(again, tmp_path / "adapter")), logits(model))


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="transformers itself drops modules_to_save there"
)
def test_adapters_loaded_by_transformers(tmp_path, softmax_directory, mhla_directory):
    model = trained(mhla_directory)
    model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(mhla_directory)
    base.load_adapter(str(tmp_path / "adapter"))
    assert torch.equal(logits(base), logits(model))
    # A directory with nothing but an adapter stands for the adapter on its base.
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")), logits(model))
    with pytest.raises(ValueError, match="needs a base model with MHLA layers"):
        AutoModelForCausalLM.from_pretrained(softmax_directory).load_adapter(str(tmp_path / "adapter"))


def test_models_with_adapters_are_not_converted(softmax_directory):
    # What a saved adapter holds is chosen when it is added: MHLA's parameters would be trained, and lost.
    base = AutoModelForCausalLM.from_pretrained(softmax_directory)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj"])).base_model.model
    message = r"is given adapters already. Convert it first, .*modules_to_save=\['mhla'\]"
    for change in (lambda: mhla_hf.convert(model), lambda: model.set_attn_implementation("mhla")):
        with pytest.raises(ValueError, match=message):
            change()
    assert model.config._attn_implementation == "sdpa" and not hasattr(model.model.layers[0].self_attn, "mhla")


def test_all_linear_leaves_the_gate_to_modules_to_save(softmax_directory):
    base = AutoModelForCausalLM.from_pretrained(
        softmax_directory, attn_implementation="mhla", mhla={**SMALL_BLOCKS, "output_gate": True}
    )
    model = get_peft_model(base, lora(target_modules="all-linear"))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad and ".mhla." in name]
    assert any(name.endswith("modules_to_save.default.gate.weight") for name in names)
    assert not any("lora_" in name for name in names)


EXPERTS = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 0, "moe_layer_start_index": 0, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.skipif(not find_spec("peft.utils.transformers_weight_conversion"), reason="an older peft maps no routers")
@pytest.mark.parametrize(
    "targets",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["gate", "q_proj"]},
        {"target_modules": ["q_proj"], "target_parameters": ["gate.weight"]},
    ],
    ids=["all-linear", "gate", "target_parameters"],
)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "Olmoe", "Glm4Moe"])
def test_loras_of_routers_leave_the_output_gate_alone(tmp_path, name, targets):
    def base():
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**EXPERTS)).eval()
        return convert_transformers_model(model, {**SMALL_BLOCKS, "output_gate": True})

    model = get_peft_model(base(), lora(init_lora_weights=False, **targets))
    adapted = {key for key, _ in model.named_parameters() if "lora_" in key}
    assert any("mlp.gate." in key for key in adapted) and not any(".mhla." in key for key in adapted)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "modules_to_save" in key:
                parameter.add_(0.05)
    expected = logits(model)
    assert not torch.allclose(expected, logits(base()), atol=1e-2)
    model.save_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(PeftModel.from_pretrained(base(), tmp_path / "adapter")), expected)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_encoders_and_vision_models_train_reload_and_merge(tmp_path, name):
    model_class = FAMILIES[name].model_class
    base = model_class.from_pretrained(
        save_softmax(name, tmp_path / "softmax"), attn_implementation="mhla", mhla=default_options(name)
    )
    base.save_pretrained(tmp_path / "mhla")
    batch = inputs(name, padding="right" if name == "bert" else None)
    # Their projections are called query and value, or q_proj and v_proj, by version.
    names = {
        linear.rpartition(".")[2] for linear, module in base.named_modules() if isinstance(module, torch.nn.Linear)
    }
    targets = sorted(names & {"query", "value", "q_proj", "v_proj"})
    torch.manual_seed(0)
    model = get_peft_model(base, lora(target_modules=targets, task_type=None))
    trainable = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert sum("lora_" in key for key in trainable) == 12 and len(targets) == 2
    before = {key: parameter.clone() for key, parameter in model.named_parameters()}
    with torch.no_grad():
        untrained = first_output(model.eval(), **batch)
    train(model, lambda model: (first_output(model.train(), **batch) - untrained.roll(1, 0)).square().mean())
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, before[key]) == (key not in trainable), key
    with torch.no_grad():
        expected = first_output(model.eval(), **batch)
        assert not torch.allclose(expected, untrained, atol=1e-2)
        model.save_pretrained(tmp_path / "adapter")
        again = PeftModel.from_pretrained(model_class.from_pretrained(tmp_path / "mhla"), tmp_path / "adapter")
        torch.testing.assert_close(first_output(again.eval(), **batch), expected)
        merged = model.merge_and_unload()
        torch.testing.assert_close(first_output(merged, **batch), expected, atol=1e-5, rtol=1e-4)
        merged.save_pretrained(tmp_path / "merged")
        reloaded = model_class.from_pretrained(tmp_path / "merged").eval()
        assert len(mhla_modules(reloaded)) == 3
        torch.testing.assert_close(first_output(reloaded, **batch), expected, atol=1e-5, rtol=1e-4)
    softmax = model_class.from_pretrained(tmp_path / "softmax")
    with pytest.raises(ValueError, match="needs a base model with MHLA layers"):
        PeftModel.from_pretrained(softmax, tmp_path / "adapter")
