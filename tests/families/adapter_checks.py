# SPDX-License-Identifier: Apache-2.0
"""LoRA through diffusers' own adapter methods, and fused projections: what every MHLA model must do."""

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from tests.families.model_case import OPTION_SETS, ModelCase, mhla_parameters, relative_error


TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


@torch.no_grad()
def randomize_lora(model: torch.nn.Module) -> None:
    """Fresh LoRA matrices B are zero; as if trained, they are not."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


class AdapterChecks(ModelCase):
    """LoRA adapters, with and without MHLA parameters, and fused projections."""

    def with_lora(self, **options):
        model = self.make_mhla(**options)
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights="gaussian"))
        return model

    def test_fresh_adapter_changes_nothing_and_covers_mhla_layers(self):
        expected = self.run(self.make_mhla())
        model = self.with_lora()
        torch.testing.assert_close(self.run(model), expected)
        for index in model.mhla_layers:
            attention = model._self_attentions()[index]
            assert all(hasattr(getattr(attention, name), "lora_A") for name in ("to_q", "to_k", "to_v"))

    @pytest.mark.smoke
    def test_save_load_fuse_and_unfuse(self, tmp_path):
        model = self.with_lora()
        plain = self.run(model)
        randomize_lora(model)
        expected = self.run(model)
        assert relative_error(expected, plain) > 1e-3
        model.save_lora_adapter(tmp_path)
        other = self.make_mhla()
        other.load_lora_adapter(tmp_path, use_safetensors=True, prefix=None)
        torch.testing.assert_close(self.run(other), expected)
        other.set_adapters(["default_0"], [0.0])
        torch.testing.assert_close(self.run(other), plain)
        other.set_adapters(["default_0"], [1.0])
        other.fuse_lora()
        torch.testing.assert_close(self.run(other), expected, rtol=1e-4, atol=1e-5)
        other.unfuse_lora()
        torch.testing.assert_close(self.run(other), expected, rtol=1e-4, atol=1e-5)
        other.unload_lora()
        torch.testing.assert_close(self.run(other), plain, rtol=1e-4, atol=1e-5)

    @pytest.mark.smoke
    @pytest.mark.parametrize("options", ["default", "everything"])
    def test_lora_and_mhla_parameters_train_together(self, options, tmp_path):
        model = self.with_lora(**OPTION_SETS[options]).train()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name or ".mhla." in name)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=1e-3, weight_decay=0.0)
        for size in (0, 2):
            self.predict(model, **self.inputs(size)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            changed = not torch.equal(parameter, before[name])
            assert changed == (parameter.requires_grad and not name.endswith(self.untrained)), name
        model.eval()
        # The adapter file holds the adapter only; MHLA parameters go with the model.
        model.save_lora_adapter(tmp_path)
        assert not any(".mhla." in key for file in tmp_path.glob("*.safetensors") for key in load_file(file))
        base = self.make_mhla(**OPTION_SETS[options])
        base.load_state_dict(mhla_parameters(model), strict=False)
        base.load_lora_adapter(tmp_path, use_safetensors=True, prefix=None)
        torch.testing.assert_close(self.run(base), self.run(model))

    def test_adapter_that_carries_the_mhla_modules(self, tmp_path):
        model = self.make_mhla(**OPTION_SETS["everything"])
        model.add_adapter(LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["mhla"]))
        trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert any(name.endswith("mixing") for name in trainable)
        plain = self.run(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "modules_to_save" in name:
                    parameter.mul_(1.5)
        expected = self.run(model)
        assert relative_error(expected, plain) > 1e-3
        model.save_lora_adapter(tmp_path)
        assert any("mhla.mixing" in key for file in tmp_path.glob("*.safetensors") for key in load_file(file))

    def test_fused_projections(self):
        model = self.make_mhla(**OPTION_SETS["everything"])
        expected = self.run(model)
        for attention in model._self_attentions():
            attention.fuse_projections()
            assert attention.fused_projections
            # What is fused is what is used.
            attention.to_qkv.weight.data.mul_(2.0)
        assert relative_error(self.run(model), expected) > 1e-3
        for attention in model._self_attentions():
            attention.to_qkv.weight.data.div_(2.0)
        torch.testing.assert_close(self.run(model), expected)
