# SPDX-License-Identifier: Apache-2.0
"""What is particular to SANA: its own attention is linear, and MHLA starts as exactly that."""

import pytest
import torch

from mhla_hf import MHLAConfig, convert
from mhla_hf.models.sana import MHLASanaTransformerBlock
from tests.models.image_checks import ImageChecks
from tests.models.model_case import relative_error
from tests.models.sana_case import SanaCase, SanaSprintCase


class TestSana(SanaCase, ImageChecks):
    patch = 1

    @pytest.mark.parametrize(
        "options",
        [
            {"blocks": [1, 1], "mixing_init": "linear"},
            {"blocks": [2, 3]},
            {"blocks": [4, 4], "mixing_heads": "per_head", "mixing_constraint": "nonnegative"},
            {"block_size": [2, 2], "grid": [4, 6], "resize": "block_size"},
            {"blocks": [2, 3], "output_gate": True, "lepe_kernel": 5},
            {},
        ],
        ids=["one_block", "blocks", "per_head", "block_size", "gate_and_convolution", "defaults"],
    )
    def test_a_converted_model_is_the_stock_model(self, options):
        """At every grid: those that the blocks divide, ragged ones, and ones that the weights are resampled for."""
        stock = self.make()
        sizes = [*self.sizes, (1, 1), (3, 11), (16, 16), (8, 24)]
        expected = [self.run(stock, size, batch=2) for size in sizes]
        model = convert(stock, options)
        assert all(type(block) is MHLASanaTransformerBlock for block in model.transformer_blocks)
        for size, output in zip(sizes, expected):
            assert relative_error(self.run(model, size, batch=2), output) < 1e-5, size

    def test_other_starts_are_not_the_stock_model(self):
        stock = self.make()
        expected = self.run(stock)
        model = convert(stock, {**self.options, "mixing_init": "linear"})
        assert relative_error(self.run(model), expected) > 1e-4

    @pytest.mark.parametrize(
        "options, same",
        [
            ({}, True),
            ({"mixing_init": "linear"}, False),
            ({"mixing_init": "linear", "blocks": [1, 1]}, True),
            ({"mixing_init": "linear", "blocks": None, "block_size": [4, 6]}, True),
            ({"mixing_heads": "per_head", "output_gate": True, "lepe_kernel": 3}, True),
            ({"output_norm": True}, False),
            ({"eps": 1e-2}, False),
            ({"feature_map": "elu"}, False),
            ({"feature_map_eps": 1e-2}, False),
            ({"normalizer": "none"}, False),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
    )
    def test_the_class_knows_when_it_starts_as_the_stock_model(self, options, same):
        stock = self.make()
        expected = self.run(stock)
        model = convert(stock, {**self.options, **options})
        assert self.mhla_class.starts_as_upstream(model.mhla_config) == same
        assert (relative_error(self.run(model), expected) < 1e-5) == same

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision_is_as_good_as_stock(self, dtype):
        stock = self.make()
        exact = self.run(stock)
        stock = stock.to(dtype)
        rounded = relative_error(self.run(stock, dtype=dtype), exact)
        model = convert(stock, self.options)
        assert relative_error(self.run(model, dtype=dtype), exact) < 1.5 * rounded

    def test_float16_is_clipped_to_its_range(self):
        model = self.make_mhla().to(torch.float16)
        attention = model._self_attentions()[0]
        attention.to_out[0].bias.data.fill_(65504.0)
        attention.to_out[0].weight.data.mul_(1000.0)
        output = attention(torch.randn(1, 24, 24, dtype=torch.float16) * 100, grid=(4, 6))
        assert output.isfinite().all() and output.max() == torch.finfo(torch.float16).max

    def test_controlnet_residuals(self):
        stock = self.make(num_layers=3)
        samples = (torch.randn(1, 24, 24),)
        with torch.no_grad():
            plain = stock(**self.inputs()).sample
            expected = stock(**self.inputs(), controlnet_block_samples=samples).sample
            actual = convert(stock, self.options)(**self.inputs(), controlnet_block_samples=samples).sample
        assert relative_error(expected, plain) > 1e-3 and relative_error(actual, expected) < 1e-5


class TestSanaSprint(SanaSprintCase):
    @pytest.mark.parametrize("blocks", [[1, 1], [2, 3]], ids=str)
    def test_a_converted_model_is_the_stock_model(self, blocks):
        stock = self.make()
        expected = [self.run(stock, size, batch=2) for size in range(3)]
        model = convert(stock, {"blocks": blocks})
        for size, output in enumerate(expected):
            assert relative_error(self.run(model, size, batch=2), output) < 1e-5

    def test_every_parameter_has_a_gradient(self):
        model = self.make_mhla().train()
        model(**self.inputs()).sample.square().mean().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_options_as_a_config_and_a_path_for_a_config(tmp_path):
    case = TestSana()
    model = convert(case.make(), MHLAConfig(blocks=(2, 3)).replace(output_gate=True))
    assert model.mhla_config.mixing_init == "uniform" and model.mhla_config.output_gate
    # diffusers' EMA of training scripts builds the model from the path of its configuration.
    model.save_config(tmp_path)
    again = case.mhla_class.from_config(str(tmp_path))
    assert again.mhla_config == model.mhla_config
