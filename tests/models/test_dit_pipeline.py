# SPDX-License-Identifier: Apache-2.0
"""DiT pipelines."""

import numpy as np
import torch

from mhla_hf import MHLADiTTransformer2DModel, load_pipeline
from tests import tiny_images
from tests.models.image_pipeline_checks import ImagePipelineChecks, command


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
    trained_as = "dit"

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
        arguments = ("--model", mhla_dir, "--data", "digits", "--output", tmp_path / "run", "--max-steps", "1")
        result = command("train", "wan", *arguments)
        assert result.exit_code == 1 and "use `mhla-hf train dit`" in result.output, result.output
