# SPDX-License-Identifier: Apache-2.0
"""Group offload and layer-wise casting: what every MHLA model must do."""

from typing import ClassVar

import pytest
import torch
from diffusers.hooks import apply_group_offloading

from tests.models.model_case import OPTION_SETS, ModelCase, mhla_parameters, relative_error


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
