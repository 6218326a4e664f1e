# SPDX-License-Identifier: Apache-2.0
"""What is particular to DiT."""

import pytest
import torch

from mhla_hf import mhla_attention
from tests.models.dit_case import DiTCase
from tests.models.image_checks import ImageChecks
from tests.models.model_case import attention_inputs, captured, relative_error


class TestDiT(DiTCase, ImageChecks):
    patch = 2

    def test_patches_of_an_image_that_is_not_square_stay_in_place(self):
        """Without attention and positions a patch depends on itself only: two halves are as good as the whole."""
        model = self.make_mhla()
        model.pos_embed.pos_embed = None
        for attention in model._self_attentions():
            attention.to_out[0].weight.data.zero_()
        for dim, size in ((2, (16, 8)), (3, (8, 16))):
            inputs = self.inputs(size)
            with torch.no_grad():
                whole = model(**inputs).sample
                halves = [
                    model(**{**inputs, "hidden_states": half}).sample for half in inputs["hidden_states"].chunk(2, dim)
                ]
            torch.testing.assert_close(whole, torch.cat(halves, dim))

    def test_the_normalizer_of_the_authors_image_code(self):
        model = self.make_mhla(normalizer="block_query", lepe_kernel=3)
        module = model._self_attentions()[0].mhla
        torch.nn.init.zeros_(module.lepe.weight)
        torch.nn.init.zeros_(module.lepe.bias)
        with captured(module) as calls:
            self.run(model)
        query, key, value = attention_inputs(calls[0])
        layout, options = module.layout_for((4, 6)), {"normalizer": "block_query", "backend": "naive"}
        expected = mhla_attention(query.relu(), key.relu(), value, module.mixing_matrix(layout), layout, **options)
        assert relative_error(calls[0].output, expected) < 1e-5
        # It needs blocks of equal size.
        with pytest.raises(ValueError, match="block_query"):
            self.run(model, 2)

    def test_output_as_a_tuple(self):
        model = self.make_mhla()
        (output,) = model(**self.inputs(), return_dict=False)
        assert output.shape == (1, 8, 8, 12)
