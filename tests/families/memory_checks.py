# SPDX-License-Identifier: Apache-2.0
"""Group offload, layer-wise casting, and conversion in place of models with hooks: shared by all MHLA models."""

from typing import ClassVar

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import apply_group_offloading

from mhla_hf import convert
from tests.families.model_case import OPTION_SETS, ModelCase, mhla_parameters, relative_error


class MemoryChecks(ModelCase):
    """Attributes: offloads_blocks: Whether the diffusers class lets whole layers be offloaded."""

    offloads_blocks: ClassVar[bool] = True

    @pytest.mark.parametrize(
        "offload",
        [
            {"offload_type": "block_level", "num_blocks_per_group": 1},
            {"offload_type": "block_level", "num_blocks_per_group": 2},
            {"offload_type": "leaf_level"},
        ],
        ids=["one_block", "two_blocks", "leaves"],
    )
    @pytest.mark.parametrize("options", ["default", "everything"])
    def test_group_offload(self, offload, options, tmp_path):
        if offload["offload_type"] == "block_level" and not self.offloads_blocks:
            pytest.skip("upstream's forward uses a layer's submodules outside the layer")
        model = self.make_mhla(**OPTION_SETS[options])
        expected = [self.run(model, size) for size in (0, 1)]
        cpu = torch.device("cpu")
        # Through files: what is offloaded is really gone between two forwards, as it would be from a GPU.
        apply_group_offloading(
            model, onload_device=cpu, offload_device=cpu, offload_to_disk_path=str(tmp_path), **offload
        )
        assert list(tmp_path.glob("*.safetensors"))
        for parameter in mhla_parameters(model).values():
            parameter.data = torch.full_like(parameter.data, float("nan"))
        for size, output in enumerate(expected):
            torch.testing.assert_close(self.run(model, size), output)

    def test_group_offload_by_the_model_itself(self):
        model = self.make_mhla()
        expected = self.run(model)
        if not self.offloads_blocks:
            with pytest.raises(ValueError, match="does not support group offloading"):
                model.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")
            return
        model.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")
        torch.testing.assert_close(self.run(model), expected)

    def test_layerwise_casting(self):
        model = self.make_mhla(**OPTION_SETS["everything"])
        expected = self.run(model)
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
        assert {parameter.dtype for parameter in mhla_parameters(model).values()} == {torch.float32}
        assert model._self_attentions()[0].to_q.weight.dtype == torch.float8_e4m3fn
        assert relative_error(self.run(model), expected) < 0.1


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
    "cpu_offload": (lambda model, folder: cpu_offload(model, CPU), "weights that are offloaded"),
    "disk_offload": (lambda model, folder: disk_offload(model, str(folder), CPU), "weights that are offloaded"),
    "group_offload": (group_offload, "has hooks .*Convert it before"),
    "layerwise_casting": (layerwise_casting, "8 bits .*Convert the original weights"),
    "bfloat16_casting": (bfloat16_casting, "has hooks on "),
    "meta": (lambda model, folder: model.to("meta"), "on meta"),
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
        for module in (layer, getattr(layer, self.attention)):
            add_hook_to_module(module, ModelHook())
        remove_hook_from_module(model, recurse=True)
        # It leaves the methods of the old classes on the modules.
        assert "forward" in vars(model)
        convert(model, self.options)
        torch.testing.assert_close(self.run(model), self.run(plain))
