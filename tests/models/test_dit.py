# SPDX-License-Identifier: Apache-2.0
"""What is particular to DiT."""

import torch

from tests.models.dit_case import DiTCase
from tests.models.image_checks import ImageChecks


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

    def test_output_as_a_tuple(self):
        model = self.make_mhla()
        (output,) = model(**self.inputs(), return_dict=False)
        assert output.shape == (1, 8, 8, 12)
