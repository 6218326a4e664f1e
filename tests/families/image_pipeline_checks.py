# SPDX-License-Identifier: Apache-2.0
"""Complete image pipelines: loading, converting in place and by command, saving, and plain diffusers loading."""

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from typer.testing import CliRunner

from mhla_hf import MHLAConfig, convert, load_pipeline
from mhla_hf.cli.main import app
from tests.families.model_case import assert_fresh, assert_same_parameters, captured, perturb_mhla, recorded_warnings


def command(*arguments):
    """Runs a command of `mhla-hf` in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "300"})


class ImagePipelineChecks:
    """A family's pipelines.

    Attributes:
        sizes: Heights and widths of the images to draw.
        mhla_class: Class of the MHLA transformer.
        mhla: Options for it.
        thorough: See [`ModelCase`].
    """

    sizes: ClassVar[tuple[tuple[int, int], ...]]
    mhla_class: ClassVar[Any]
    mhla: ClassVar[dict[str, Any]] = {"blocks": [2, 2]}
    thorough: ClassVar[bool] = False

    def typed(self):
        """The options as one types them."""
        return [part for name, axes in self.mhla.items() for part in (f"--{name}", ",".join(map(str, axes)))]

    @classmethod
    def make_pipeline(cls, transformer_cls=None, **overrides):
        """A complete tiny pipeline."""
        raise NotImplementedError

    def generate(self, pipeline, size=None, **options):
        """Seeded images as an array `[N, height, width, 3]`."""
        raise NotImplementedError

    def images(self, pipeline):
        """One image of each size."""
        images = [self.generate(pipeline, size) for size in self.sizes]
        assert all(image.shape[1:] == (*size, 3) for image, size in zip(images, self.sizes))
        assert all(np.isfinite(image).all() for image in images)
        return images

    @pytest.fixture(scope="class")
    @classmethod
    def ordinary_dir(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("ordinary")
        cls.make_pipeline().save_pretrained(folder)
        return folder

    @pytest.fixture(scope="class")
    @classmethod
    def mhla_dir(cls, tmp_path_factory):
        """A trained MHLA pipeline."""
        folder = tmp_path_factory.mktemp("mhla")
        pipeline = cls.make_pipeline(cls.mhla_class, mhla={**cls.mhla, "output_gate": True, "lepe_kernel": 3})
        perturb_mhla(pipeline.transformer)
        pipeline.save_pretrained(folder)
        return folder

    @pytest.mark.smoke
    def test_load_pipeline_from_an_ordinary_directory(self, ordinary_dir):
        with recorded_warnings() as warnings:
            pipeline = load_pipeline(ordinary_dir, attn_implementation="mhla", mhla=self.mhla)
        assert len([message for message in warnings if "newly initialised" in message]) == 1
        stock = DiffusionPipeline.from_pretrained(ordinary_dir)
        assert type(pipeline) is type(stock) and type(pipeline.transformer) is self.mhla_class
        # Videos may have any length, so that their models know no grid.
        grid = self.mhla_class.config_grid(stock.transformer.config)
        options = {**self.mhla_class.default_options, "grid": grid, **self.mhla}
        assert pipeline.transformer.mhla_config == MHLAConfig(**options)
        assert_fresh(pipeline.transformer)
        assert_same_parameters(pipeline.transformer, stock.transformer, only_common=True)
        self.images(pipeline)

    @pytest.mark.smoke
    def test_plain_diffusers_draws_the_same(self, mhla_dir, tmp_path):
        first = load_pipeline(mhla_dir)
        second = DiffusionPipeline.from_pretrained(mhla_dir)
        assert type(second) is type(first) and type(second.transformer) is self.mhla_class
        assert_same_parameters(second.transformer, first.transformer)
        images = self.images(first)
        for actual, expected in zip(self.images(second), images):
            np.testing.assert_allclose(actual, expected, atol=1e-5)
        second.save_pretrained(tmp_path)
        for actual, expected in zip(self.images(DiffusionPipeline.from_pretrained(tmp_path)), images):
            np.testing.assert_allclose(actual, expected, atol=1e-5)

    @pytest.mark.smoke
    def test_convert_in_place_and_by_command(self, ordinary_dir, tmp_path):
        pipeline = convert(
            DiffusionPipeline.from_pretrained(ordinary_dir), {**self.mhla, "layers": [1], "lepe_kernel": 3}
        )
        options = ("--layers", "1", "--lepe-kernel", "3")
        result = command("convert", ordinary_dir, tmp_path / "mhla", *self.typed(), *options)
        assert result.exit_code == 0, result.output
        converted = DiffusionPipeline.from_pretrained(tmp_path / "mhla")
        assert type(converted.transformer) is self.mhla_class and converted.transformer.mhla_layers == [1]
        assert converted.transformer.config.mhla == pipeline.transformer.config.mhla
        assert_same_parameters(converted.transformer, pipeline.transformer)
        notes = json.loads((tmp_path / "mhla/conversion.json").read_text())["components"]["transformer"]
        assert notes["target_class"] == self.mhla_class.__name__ and notes["mhla_layers"] == [1]
        expected = self.images(pipeline)
        for index, each in enumerate((pipeline, converted)):
            folder = tmp_path / f"saved{index}"
            each.save_pretrained(folder)
            saved = json.loads((folder / "model_index.json").read_text())["transformer"]
            assert saved == ["mhla_hf", self.mhla_class.__name__]
            again = DiffusionPipeline.from_pretrained(folder)
            for one, two, three in zip(expected, self.images(each), self.images(again)):
                np.testing.assert_allclose(two, one, atol=1e-5)
                np.testing.assert_allclose(three, one, atol=1e-5)

    def test_images_at_twice_the_size(self, mhla_dir):
        """Where a model knows its grid, blocks keep their size from twice that on, and the weights are resampled."""
        pipeline = load_pipeline(mhla_dir)
        module = pipeline.transformer.mhla_modules()[0]
        for size in [tuple(2 * length for length in size) for size in self.sizes]:
            with captured(module) as calls:
                image = self.generate(pipeline, size)
            assert image.shape[1:] == (*size, 3) and np.isfinite(image).all()
            blocks = module.layout_for(calls[0].keywords["grid"]).blocks
            doubled = pipeline.transformer.mhla_config.grid is not None
            assert (np.prod(blocks) > np.prod(self.mhla["blocks"])) == doubled

    def test_command_says_whether_the_model_is_as_good_as_before(self, ordinary_dir, tmp_path):
        source, linear = ordinary_dir / "transformer", self.mhla_class.upstream_is_linear
        fresh = self.typed()
        assert ("output as it was" in command("convert", source, tmp_path / "one", *fresh).output) == linear
        result = command("convert", source, tmp_path / "two", *fresh, "--mixing-init", "linear")
        assert (
            "The new parameters are untrained. Recover the model before you use it: mhla-hf recover" in result.output
        )

    def test_another_pipeline_takes_the_transformer_over(self, mhla_dir, tmp_path):
        pipeline = load_pipeline(mhla_dir)
        expected = self.generate(pipeline)
        with recorded_warnings() as warnings:
            other = type(pipeline).from_pipe(pipeline)
        assert not [message for message in warnings if "switched over" in message]
        assert other is not pipeline and other.transformer is pipeline.transformer
        assert other.config["transformer"] == ("mhla_hf", self.mhla_class.__name__)
        other.save_pretrained(tmp_path)
        index = json.loads((tmp_path / "model_index.json").read_text())
        assert index["transformer"] == ["mhla_hf", self.mhla_class.__name__]
        np.testing.assert_allclose(self.generate(other), expected, atol=1e-5)

    def test_half_precision(self, mhla_dir):
        pipeline = load_pipeline(mhla_dir, torch_dtype=torch.bfloat16)
        assert pipeline.transformer.dtype == torch.bfloat16
        assert pipeline.transformer.mhla_modules()[0].mixing.dtype == torch.float32
        self.images(pipeline)

    # What the command refuses

    def refused(self, source, tmp_path, *parts):
        result = command("convert", source, tmp_path / "result", *self.typed())
        assert result.exit_code in (1, 2) and len(result.output.strip().splitlines()) == 1, result.output
        assert all(part in result.output for part in parts), result.output
        # Neither the result nor a part of it under another name.
        assert set(tmp_path.iterdir()) <= {Path(source)}

    def test_convert_refuses_another_architecture(self, ordinary_dir, tmp_path):
        self.refused(ordinary_dir / "vae", tmp_path, "cannot be converted. Supported: ChromaTransformer2DModel, DiT")
        folder = tmp_path / "other"
        shutil.copytree(ordinary_dir, folder, ignore=shutil.ignore_patterns("transformer"))
        index = json.loads((folder / "model_index.json").read_text())
        index["transformer"] = ["diffusers", "AuraFlowTransformer2DModel"]
        (folder / "model_index.json").write_text(json.dumps(index))
        self.refused(
            folder, tmp_path, "no model that can be converted", "AuraFlowTransformer2DModel", "DiTTransformer2DModel"
        )


class PromptedPipelineChecks(ImagePipelineChecks):
    """Pipelines that draw after a prompt.

    Attributes:
        latents_shape: Of one image of the second of the `sizes`.
        images_per_prompt: What the pipeline calls the number of images for each prompt.
        guidance_scales: Two that differ.
        without_noise: Options under which the scheduler adds no noise of its own.
        own_options: Options that the pipeline takes beside those of the others.
    """

    latents_shape: ClassVar[tuple[int, ...]]
    images_per_prompt: ClassVar[str] = "num_images_per_prompt"
    guidance_scales: ClassVar[tuple[float, ...]] = (1.0, 4.5)
    without_noise: ClassVar[dict[str, Any]] = {}
    own_options: ClassVar[dict[str, Any]] = {}

    def generate(self, pipeline, size=None, **options):
        return self.draw(pipeline, size, **options).images

    def draw(self, pipeline, size=None, prompt="a blue seven", **options):
        """What a pipeline gives in two steps from the same noise, of the first of the `sizes` if none is given."""
        height, width = self.sizes[0] if size is None else size
        pipeline.set_progress_bar_config(disable=True)
        arguments = {
            "height": height,
            "width": width,
            "num_inference_steps": 2,
            "use_resolution_binning": False,
            **self.own_options,
            "max_sequence_length": 16,
            "output_type": "np",
            "generator": torch.Generator().manual_seed(0),
            **options,
        }
        return pipeline(prompt, **arguments)

    def test_guidance_and_batches(self, mhla_dir):
        """Several prompts with several images each are what each would be alone."""
        pipeline = load_pipeline(mhla_dir)
        latents = torch.randn(4, *self.latents_shape, generator=torch.Generator().manual_seed(1))
        # Of one length: for several prompts and images of each, SANA mixes up the masks of their padding.
        prompts = ["a blue seven", "a green four"]
        drawn = []
        for scale in self.guidance_scales:
            options = {"size": self.sizes[1], "guidance_scale": scale, **self.without_noise}
            together = self.all_images(
                pipeline, prompt=prompts, latents=latents, **options, **{self.images_per_prompt: 2}
            )
            assert len(together) == 4
            apart = [
                self.all_images(pipeline, prompt=prompts[index // 2], latents=latents[index : index + 1], **options)[0]
                for index in range(4)
            ]
            np.testing.assert_allclose(together, np.stack(apart), atol=1e-4)
            drawn.append(together)
        assert np.abs(drawn[0] - drawn[1]).max() > 1e-4

    def all_images(self, pipeline, **options):
        """What `generate` returns the first of, for pipelines that make videos."""
        return self.generate(pipeline, **options)
