# SPDX-License-Identifier: Apache-2.0
"""Converting loaded models in place that hooks, offloading or casting hold on to: refused before anything changes."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import apply_group_offloading

from mhla_hf import convert
from tests.models.model_case import ModelCase, relative_error


CPU = torch.device("cpu")


def group_offload(model, folder):
    apply_group_offloading(model, onload_device=CPU, offload_device=CPU, offload_type="leaf_level")


def layerwise_casting(model, folder):
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def bfloat16_casting(model, folder):
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


def integers(model, folder):
    # Modules refuse integers when they are cast as a whole.
    weight = next(iter(model.parameters())).requires_grad_(False)
    weight.data = weight.data.to(torch.int8)


PREPARATIONS = {
    "hook": (lambda model, folder: add_hook_to_module(model, ModelHook()), "has hooks .*remove_hook_from_module"),
    "cpu_offload": (lambda model, folder: cpu_offload(model, CPU), "are offloaded .*Load it without offloading"),
    "disk_offload": (lambda model, folder: disk_offload(model, str(folder), CPU), "are offloaded"),
    "group_offload": (group_offload, "has hooks .*Convert it before"),
    "layerwise_casting": (layerwise_casting, "8 bits .*Convert the original weights"),
    "bfloat16_casting": (bfloat16_casting, "has hooks on "),
    "meta": (lambda model, folder: model.to("meta"), "have no weights"),
    "int8": (integers, "quantised"),
}


class InPlaceChecks(ModelCase):
    @pytest.mark.parametrize("preparation", PREPARATIONS)
    def test_what_holds_on_to_the_model_is_refused(self, preparation, tmp_path):
        prepare, message = PREPARATIONS[preparation]
        model = self.make()
        expected = self.run(model, self.upstream_size)
        prepare(model, tmp_path)
        before = dict(model.named_modules())
        classes = [type(module) for module in model.modules()]
        keys = set(model.state_dict())
        with pytest.raises(ValueError, match=message):
            convert(model, self.options)
        assert type(model) is self.upstream and dict(model.named_modules()) == before
        assert [type(module) for module in model.modules()] == classes
        assert set(model.state_dict()) == keys and "mhla" not in model.config
        if preparation not in ("meta", "int8"):
            assert relative_error(self.run(model, self.upstream_size), expected) < 0.1

    def test_a_model_without_its_hooks_converts(self, tmp_path):
        model, plain = self.make(), convert(self.make(), self.options)
        add_hook_to_module(model, ModelHook())
        layer = getattr(model, self.block_list)[0]
        for module in (layer, layer.attn1):
            add_hook_to_module(module, ModelHook())
        remove_hook_from_module(model, recurse=True)
        # It leaves the methods of the old classes on the modules.
        assert "forward" in vars(model)
        convert(model, self.options)
        torch.testing.assert_close(self.run(model), self.run(plain))
