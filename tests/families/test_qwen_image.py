# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image: images beside the one that is drawn, and the shared checks."""

import pytest
import torch

from mhla_hf import MHLAQwenImageTransformer2DModel, convert
from tests import tiny_joint
from tests.families.checks import ModelChecks
from tests.families.joint_checks import JointCase, JointChecks


class QwenImageCase(JointCase):
    """Two blocks with two streams; the height and width of the grid."""

    config = tiny_joint.QWEN_IMAGE
    masks = {"encoder_hidden_states_mask": torch.long}
    make_pipeline = staticmethod(tiny_joint.qwen_image_pipeline)
    full_size = {"height": 1328, "width": 1328}
    block_class = "QwenImageTransformerBlock"
    mhla_class = MHLAQwenImageTransformer2DModel
    options = {"blocks": [2, 3], "grid": [4, 6]}
    # What the last block makes of the text.
    unused = ("attn.to_add_out", "attn.add_q_proj", "attn.norm_added_q", "txt_mlp")
    sizes = ((4, 6), (2, 12), (5, 7))


def test_reference_images_are_refused():
    case = QwenImageCase()
    model, inputs = case.make_mhla(), case.inputs()
    tokens = torch.cat([inputs["hidden_states"]] * 2, dim=1)
    message = "take one image of one size: no images to edit and no layers beside it"
    for shapes in ([[(1, 4, 6), (1, 4, 6)]], [[(2, 4, 6)]]):
        with pytest.raises(ValueError, match=message):
            model(**{**inputs, "hidden_states": tokens, "img_shapes": shapes})
    with pytest.raises(ValueError, match=message):
        model(**{**case.inputs(batch=2), "img_shapes": [[(1, 4, 6)], [(1, 6, 4)]]})
    stock = case.make(use_layer3d_rope=True)
    with pytest.raises(ValueError, match="Qwen-Image-Layered .* has no MHLA version"):
        convert(stock, case.options)
    assert type(stock) is case.upstream


class TestQwenImage(QwenImageCase, JointChecks, ModelChecks):
    pass
