# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo and HunyuanVideo-1.5: models from an image, and the shared checks."""

import copy

import pytest
import torch
from diffusers import HunyuanVideoImageToVideoPipeline

from mhla_hf import (
    MHLAHunyuanVideo15Transformer3DModel,
    MHLAHunyuanVideoTransformer3DModel,
    convert,
    load_pipeline,
    unconvert,
)
from tests import tiny_joint
from tests.families.checks import EagerChecks, ModelChecks
from tests.families.joint_checks import JointCase, JointChecks
from tests.families.model_case import OPTION_SETS, gradient_error, relative_error, text_mask


class HunyuanVideoCase(JointCase):
    """Two blocks with two streams and two with a single stream; latents of 3×4×8 are a token grid of 3×2×4."""

    config = tiny_joint.HUNYUAN_VIDEO
    masks = {"encoder_attention_mask": torch.long}
    make_pipeline = staticmethod(tiny_joint.hunyuan_video_pipeline)
    full_size = {"height": 720, "width": 1280, "num_frames": 129}
    block_class = "HunyuanVideoTransformerBlock"
    mhla_class = MHLAHunyuanVideoTransformer3DModel
    options = {"blocks": [3, 1, 2], "grid": [3, 2, 4]}
    # Frames, height and width of the latents.
    sizes = ((3, 4, 8), (1, 8, 12), (5, 6, 14))


class HunyuanVideo15Case(JointCase):
    """Two blocks with two streams; every latent is a token."""

    config = tiny_joint.HUNYUAN_VIDEO_15
    masks = {"encoder_attention_mask": torch.long}
    make_pipeline = staticmethod(tiny_joint.hunyuan_video_15_pipeline)
    full_size = {"height": 480, "width": 832, "num_frames": 121}
    block_class = "HunyuanVideo15TransformerBlock"
    mhla_class = MHLAHunyuanVideo15Transformer3DModel
    options = {"blocks": [3, 1, 2], "grid": [3, 2, 4]}
    # What the last block makes of the text.
    unused = ("attn.to_add_out", "attn.add_q_proj", "attn.norm_added_q", "ff_context")
    sizes = ((3, 2, 4), (1, 4, 6), (5, 3, 7))

    def inputs(self, size=0, *, with_image=True, **options):
        """With four tokens of glyphs, and three of an image; without one its embeddings are zeros: padding."""
        inputs = super().inputs(size, **options)
        glyphs, image = inputs["encoder_hidden_states_2"][:, :4], inputs["image_embeds"][:, :3]
        image = image + float(with_image) * torch.linspace(-1, 1, image[0].numel()).view(image[0].shape).to(image)
        inputs |= {"encoder_hidden_states_2": glyphs, "encoder_attention_mask_2": text_mask(len(glyphs), 4)}
        return {**inputs, "image_embeds": image}


def test_an_image_beside_the_text():
    case = HunyuanVideo15Case()
    model = case.make_mhla()
    without, image = (case.run(model, with_image=each) for each in (False, True))
    assert without.isfinite().all() and relative_error(image, without) > 1e-4


@pytest.mark.parametrize("kind", ["latent_concat", "token_replace"])
def test_hunyuan_video_from_an_image(kind):
    """Blocks that leave the first frame clean are classes of their own; their attention is the same."""
    case = HunyuanVideoCase()
    stock = case.make(image_condition_type=kind)
    model = convert(copy.deepcopy(stock), {**case.options, "layers": [0, 3]})
    assert type(model) is case.mhla_class and model.mhla_layers == [0, 3]
    expected = case.run(stock, batch=2)
    output = case.run(model, batch=2)
    assert output.isfinite().all() and relative_error(output, expected) > 1e-4
    assert relative_error(case.run(unconvert(model), batch=2), expected) == 0
    assert case.run(convert(stock, case.options), 1).isfinite().all()


@pytest.mark.parametrize("kind, channels", [("latent_concat", 9), ("token_replace", 4)])
def test_hunyuan_video_pipeline_from_an_image(kind, channels, tmp_path):
    stock = tiny_joint.hunyuan_video_pipeline()
    transformer = HunyuanVideoCase().make(image_condition_type=kind, in_channels=channels)
    parts = {"transformer": transformer, "vae": stock.vae, "scheduler": stock.scheduler}
    absent = {**tiny_joint.encoders(HunyuanVideoImageToVideoPipeline), "image_processor": None}
    pipeline = HunyuanVideoImageToVideoPipeline(**parts, **absent)
    pipeline.save_pretrained(tmp_path)
    options = {"blocks": [3, 2, 2], "layers": [0, 3]}
    random = torch.Generator().manual_seed(1)
    call = {
        "image": torch.rand(1, 3, 32, 48, generator=random), "height": 32, "width": 48, "num_frames": 9,
        "prompt_embeds": torch.randn(1, 7, tiny_joint.TEXT_DIM, generator=random),
        "pooled_prompt_embeds": torch.randn(1, 8, generator=random),
        "prompt_attention_mask": torch.ones(1, 7), "num_inference_steps": 2, "output_type": "latent",
    }  # fmt: skip
    converted, loaded = (
        each(**call, generator=torch.Generator().manual_seed(0))[0]
        for each in (convert(pipeline, options), load_pipeline(tmp_path, mhla=options, **absent))
    )
    assert loaded.isfinite().all() and loaded.ndim == 5 and pipeline.transformer.mhla_layers == [0, 3]
    assert relative_error(loaded, converted) < 1e-6


def test_grids_that_pipelines_sample_at():
    expected = {HunyuanVideoCase: ((33, 45, 80), (4, 8)), HunyuanVideo15Case: ((31, 30, 52), (4, 16))}
    for case, (grid, compression) in expected.items():
        assert case.mhla_class.reference_grid({}) == case.mhla_class.reference_grid({}, compression) == grid


class TestHunyuanVideo(HunyuanVideoCase, JointChecks, ModelChecks):
    pass


class TestHunyuanVideo15(HunyuanVideo15Case, JointChecks, EagerChecks):
    """Compiled by blocks alone: upstream's forward sorts the text by the values of its masks."""

    @pytest.mark.slow
    @pytest.mark.parametrize("options", ["default", "everything"])
    def test_blocks_trace_without_graph_breaks(self, options):
        model = self.make_mhla(**OPTION_SETS[options])
        expected = [self.gradients(model, (size,)) for size in (0, 2)]
        torch.compiler.reset()
        model.compile_repeated_blocks(fullgraph=True, dynamic=False, backend="aot_eager")
        for size, gradients in zip((0, 2), expected):
            assert gradient_error(self.gradients(model, (size,)), gradients) < 1e-4
        torch.compiler.reset()
