# SPDX-License-Identifier: Apache-2.0
"""DiT and PixArt: what is particular to them, the shared checks, and their pipelines."""

import numpy as np
import pytest
import torch

from mhla_hf import MHLADiTTransformer2DModel, MHLAPixArtTransformer2DModel, convert, load_pipeline, mhla_attention
from tests import tiny_images
from tests.families.checks import ModelChecks
from tests.families.image_checks import ImageChecks
from tests.families.image_pipeline_checks import ImagePipelineChecks, PromptedPipelineChecks, command
from tests.families.model_case import ModelCase, attention_inputs, captured, recorded_warnings, relative_error


class DiTCase(ModelCase):
    """Latents of 8×12 are a token grid of 4×6."""

    config = tiny_images.DIT
    block_class = "BasicTransformerBlock"
    patch = 2
    mhla_class = MHLADiTTransformer2DModel
    options = {"blocks": [2, 3], "grid": [4, 6]}
    thorough = True
    block_list = "transformer_blocks"
    # Square images only.
    upstream_size = (8, 8)
    # Height and width of the latents.
    sizes = ((8, 12), (4, 24), (10, 14))

    def make(self, cls=None, **options):
        model = super().make(cls, **options)
        for block in model.transformer_blocks:
            # Labels are dropped at random in training: two runs would not be the same.
            block.norm1.emb.class_embedder.dropout_prob = 0
        return model


class PixArtCase(ModelCase):
    """Latents of 8×12 are a token grid of 4×6."""

    config = tiny_images.PIXART
    masks = {"encoder_attention_mask": torch.long}
    block_class = "BasicTransformerBlock"
    patch = 2
    mhla_class = MHLAPixArtTransformer2DModel
    options = {"blocks": [2, 3], "grid": [4, 6]}
    block_list = "transformer_blocks"
    # Height and width of the latents.
    sizes = ((8, 12), (4, 24), (10, 14))


class TestDiT(DiTCase, ImageChecks, ModelChecks):
    offloads_blocks = False

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


@torch.no_grad()
def draw(pipeline, size, label, guidance_scale=4.0):
    """An image `[1, height, width, 3]` of any size by the parts of a pipeline, which itself draws squares only."""
    channels = pipeline.transformer.config.in_channels
    generator = torch.Generator().manual_seed(label)
    latents = torch.randn(1, channels, size[0] // 2, size[1] // 2, generator=generator).to(pipeline.transformer.dtype)
    pipeline.scheduler.set_timesteps(2)
    for timestep in pipeline.scheduler.timesteps:
        sample = pipeline.transformer(
            torch.cat([latents, latents]), timestep=timestep.expand(2), class_labels=torch.tensor([label, 1000])
        ).sample
        with_label, without = sample[:, :channels].chunk(2)
        noise = without + guidance_scale * (with_label - without)
        latents = pipeline.scheduler.step(noise, timestep, latents).prev_sample
    image = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor).sample
    return (image / 2 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float().numpy()


class TestDiTPipeline(ImagePipelineChecks):
    mhla_class = MHLADiTTransformer2DModel
    sizes = ((16, 16), (16, 24), (24, 16))
    thorough = True

    @classmethod
    def make_pipeline(cls, transformer_cls=None, **overrides):
        return tiny_images.dit_pipeline(transformer_cls, **overrides)

    def generate(self, pipeline, size=None, labels=(3,), **options):
        if size not in (None, (16, 16)):
            return draw(pipeline, size, labels[0])
        pipeline.set_progress_bar_config(disable=True)
        generator = [torch.Generator().manual_seed(label) for label in labels]
        arguments = {"num_inference_steps": 2, "generator": generator, "output_type": "np", **options}
        return pipeline(class_labels=list(labels), **arguments).images

    def test_guidance_and_batches(self, mhla_dir):
        pipeline = load_pipeline(mhla_dir)
        for scale in (1.0, 4.0):
            together = self.generate(pipeline, labels=(3, 5), guidance_scale=scale)
            apart = [self.generate(pipeline, labels=(label,), guidance_scale=scale)[0] for label in (3, 5)]
            np.testing.assert_allclose(together, np.stack(apart), atol=1e-4)

    def test_the_parts_draw_what_the_pipeline_draws(self, mhla_dir):
        pipeline = load_pipeline(mhla_dir)
        expected = self.generate(pipeline, guidance_scale=4.0)
        np.testing.assert_allclose(draw(pipeline, (16, 16), 3), expected, atol=1e-4)

    def test_images_of_another_size_than_the_weights_were_made_for(self, mhla_dir):
        """As someone would who trains at one resolution and draws at another."""
        pipeline = load_pipeline(mhla_dir)
        pipeline.transformer.register_to_config(sample_size=12)
        assert self.generate(pipeline).shape == (1, 24, 24, 3)

    def test_the_training_for_wan_is_refused(self, mhla_dir, tmp_path):
        arguments = (mhla_dir, tmp_path / "run", "--data", "digits", "--max-steps", "1")
        result = command("train", "wan", *arguments)
        assert result.exit_code == 2 and "use `mhla-hf train dit`" in result.output, result.output


class TestPixArt(PixArtCase, ImageChecks, ModelChecks):
    def test_cross_attention_is_not_bothered_with_the_grid(self):
        model = self.make_mhla(layers=[1])
        with recorded_warnings() as warnings:
            self.run(model)
        assert warnings == []

    def test_an_attention_mask_is_refused(self):
        model = self.make_mhla()
        with pytest.raises(ValueError, match="attention_mask"):
            model(**self.inputs(), attention_mask=torch.ones(1, 24))

    def test_fusing_is_refused(self):
        model = self.make_mhla(layers=[1])
        expected = self.run(model)
        with pytest.raises(ValueError, match="cannot be fused"):
            model.fuse_qkv_projections()
        torch.testing.assert_close(self.run(model), expected)
        softmax = self.make()
        softmax.fuse_qkv_projections()
        with pytest.raises(ValueError, match="unfuse_qkv_projections"):
            convert(softmax)


class PixArtPipelines(PromptedPipelineChecks):
    mhla_class = MHLAPixArtTransformer2DModel
    # Token grids of 4×4, 4×6 and 6×4.
    sizes = ((16, 16), (16, 24), (24, 16))
    own_options = {"clean_caption": False}
    latents_shape = (4, 8, 12)
    sigma = False

    @classmethod
    def make_pipeline(cls, transformer_cls=None, **overrides):
        return tiny_images.pixart_pipeline(transformer_cls, sigma=cls.sigma, **overrides)


class TestPixArtAlphaPipeline(PixArtPipelines):
    pass


class TestPixArtSigmaPipeline(PixArtPipelines):
    sigma = True
