# SPDX-License-Identifier: Apache-2.0
"""Images for training: folders, captions and classes, encoding, the cache, and validation images."""

import copy
import json

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import DiffusionPipeline
from PIL import Image

from mhla_hf.models.directory import ModelDirectory
from mhla_hf.models.registry import TRAINED
from mhla_hf.training import LatentDataset, TrainingConfig
from mhla_hf.training.config import Bucket, CacheConfig
from mhla_hf.training.data.folders import UnusableSampleError
from mhla_hf.training.data.images import (
    captioned_images,
    class_images,
    image_grid,
    read_image,
)
from mhla_hf.training.data.latent_cache import make_cache
from mhla_hf.training.evaluation import Validator

from ... import tiny_images


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Pipeline directories by family; DiT's knows three of its classes by name."""
    found = {family: tmp_path_factory.mktemp(family) for family in ("sana", "dit")}
    tiny_images.sana_pipeline().save_pretrained(found["sana"])
    tiny_images.dit_pipeline().save_pretrained(found["dit"])
    index = found["dit"] / "model_index.json"
    names = {"7": "goldfish, Carassius auratus", "20": "tabby cat", "30": "magpie"}
    index.write_text(json.dumps({**json.loads(index.read_text()), "id2label": names}))
    return found


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def pipelines(directories):
    return {family: DiffusionPipeline.from_pretrained(directory) for family, directory in directories.items()}


def save_image(path, colour=(200, 100, 50), size=(24, 16), **options):
    """A plain image; `size` is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **options)
    return path


class TestReading:
    def test_images_are_turned_as_their_exif_data_say(self, tmp_path):
        pixels = np.zeros((4, 8, 3), np.uint8)
        pixels[:, :4] = 255
        exif = Image.Exif()
        exif[0x0112] = 6  # To be shown turned by 90 degrees, clockwise.
        Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
        image = read_image(tmp_path / "turned.png")
        assert image.shape == (8, 4, 3)
        assert image[:4].min() == 255 and image[4:].max() == 0

    @pytest.mark.parametrize("name", ["a.png", "a.webp", "a.tif", "la.png", "palette.png", "keyed.png", "a.gif"])
    def test_transparent_parts_show_the_background(self, tmp_path, name):
        # Half of it is transparent, and something is hidden there.
        image = Image.new("RGBA", (8, 4), (90, 90, 90, 255))
        image.paste((10, 10, 10, 0), (4, 0, 8, 4))
        options = {"lossless": True, "exact": True} if name == "a.webp" else {}
        if name == "la.png":
            image = image.convert("LA")
        elif name == "palette.png":
            image = image.quantize()
        elif name == "keyed.png":
            image, options = image.convert("L"), {"transparency": 10}
        image.save(tmp_path / name, **options)
        pixels = read_image(tmp_path / name)
        assert (pixels[:, :4] == 90).all() and (pixels[:, 4:] == 255).all()
        (tmp_path / name).with_suffix(".txt").write_text("half")
        (sample,) = captioned_images(tmp_path, [Bucket(4, 8)], background="black")
        assert sample.load()[:, :, 4:].max() == -1

    def test_half_transparent_colours_are_mixed(self, tmp_path):
        Image.new("RGBA", (4, 4), (255, 0, 0, 128)).save(tmp_path / "a.png")
        assert np.unique(read_image(tmp_path / "a.png").reshape(-1, 3), axis=0).tolist() == [[255, 127, 127]]

    def test_greys_of_16_bits_are_scaled(self, tmp_path):
        greys = np.array([[0, 256, 32768, 65535]], np.uint16)
        image = Image.fromarray(greys)
        image.save(tmp_path / "a.png")
        image.save(tmp_path / "a.tif")
        image.save(tmp_path / "inverted.tif", tiffinfo={262: 0})
        image.save(tmp_path / "keyed.png", transparency=256)
        assert read_image(tmp_path / "a.png")[0, :, 0].tolist() == [0, 1, 128, 255]
        assert read_image(tmp_path / "a.tif")[0, :, 0].tolist() == [0, 1, 128, 255]
        assert read_image(tmp_path / "inverted.tif")[0, :, 0].tolist() == [255, 254, 127, 0]
        assert read_image(tmp_path / "keyed.png")[0, :, 0].tolist() == [0, 255, 128, 255]

    @pytest.mark.parametrize("dtype", [np.int32, np.float32])
    def test_greys_without_a_range_are_left_out(self, tmp_path, dtype):
        Image.fromarray(np.array([[0, 1], [70000, 2]], dtype)).save(tmp_path / "a.tif")
        with pytest.raises(UnusableSampleError, match=r"a\.tif has greys of 32 bits"):
            read_image(tmp_path / "a.tif")


class TestFolders:
    def test_captions_beside_the_images(self, tmp_path, caplog):
        for name in ("b.jpg", "inner/a.png"):
            save_image(tmp_path / name)
        (tmp_path / "b.txt").write_text(" a brown wall\n")
        assert len(captioned_images(tmp_path, [Bucket(8, 8)])) == 1 and "a.png has no caption" in caplog.text
        (tmp_path / "inner" / "a.txt").write_text("again")
        samples = captioned_images(tmp_path, [Bucket(8, 16)])
        assert [sample.condition for sample in samples] == ["a brown wall", "again"]
        image = samples[1].load()
        assert image.shape == (3, 8, 16) and image.dtype == torch.float32
        expected = torch.tensor([200, 100, 50]) / 127.5 - 1
        assert torch.allclose(image, expected[:, None, None].expand_as(image), atol=1e-5)
        # A metadata file wins.
        (tmp_path / "metadata.csv").write_text("image,prompt\nb.jpg,a wall\n")
        assert [sample.condition for sample in captioned_images(tmp_path, [Bucket(8, 8)])] == ["a wall"]

    def test_bad_folders_are_named(self, tmp_path):
        def classes():
            return class_images(tmp_path, [Bucket(8, 8)], known_labels={}, num_classes=3)

        with pytest.raises(ValueError, match="existing folder"):
            captioned_images(tmp_path / "none", [Bucket(8, 8)])
        with pytest.raises(ValueError, match="has no images"):
            captioned_images(tmp_path, [Bucket(8, 8)])
        with pytest.raises(ValueError, match="one folder of images per class"):
            classes()
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match="these have none: empty"):
            classes()


def transformer_inputs(pipeline, **call):
    """What the transformer is given when the pipeline is called."""
    seen = []
    hook = pipeline.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True
    )
    try:
        pipeline(num_inference_steps=1, output_type="latent" if "prompt" in call else "np", **call)
    finally:
        hook.remove()
    return seen[0]


@pytest.mark.usefixtures("without_gradients")
class TestEncoding:
    image = torch.rand(3, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1

    def test_latents_are_what_the_pipelines_decode(self, pipelines):
        for family, shape in (("sana", (4, 2, 3)), ("dit", (4, 32, 48))):
            vae = pipelines[family].vae
            latents = TRAINED[family].load_objective().encode_media(pipelines[family], self.image)
            assert latents.shape == shape and latents.dtype == torch.float32
            encoded = vae.encode(self.image[None])
            expected = encoded.latent if family == "sana" else encoded.latent_dist.mean
            assert torch.allclose(latents / vae.config.scaling_factor, expected[0], atol=1e-6)

    def test_text_is_what_the_pipeline_gives_the_transformer(self, pipelines):
        """With the pipeline's own instruction before the prompt, and without before the empty one."""
        pipeline, family = pipelines["sana"], TRAINED["sana"].load_objective()
        assert family.prompt_options(pipeline)["complex_human_instruction"][-1] == "User Prompt: "
        inputs = transformer_inputs(pipeline, prompt="a three", max_sequence_length=24, height=512, width=512)
        texts = family.encode_null_condition(pipeline, 24, 0), family.encode_condition(pipeline, "a three", 24)
        for row, own in enumerate(texts):
            mask = inputs["encoder_attention_mask"][row]
            length = len(own["prompt_attention_mask"])
            assert torch.equal(own["prompt_attention_mask"], mask[:length])
            assert not mask[length:].any() or length == 24
            assert torch.allclose(own["prompt_embeds"], inputs["encoder_hidden_states"][row, :length], atol=1e-6)
        other = family.encode_condition(pipeline, "a four", 24)
        assert not torch.equal(other["prompt_embeds"], texts[1]["prompt_embeds"])


def options(directory, tmp_path, **changes):
    values = {"model": str(directory), "output": str(tmp_path / "run"), "device": "cpu", "progress": False}
    return TrainingConfig(**{**values, **changes})


class TestCache:
    def test_captioned_images(self, directories, pipelines, tmp_path, caplog):
        data = tmp_path / "data"
        colours = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
        for name, colour in colours.items():
            save_image(data / f"{name}.png", colour, size=(80, 64))
            (data / f"{name}.txt").write_text(f"a {name} wall")
        (data / "green.png").write_bytes(b"damaged")
        config = options(directories["sana"], tmp_path)
        cache_config = CacheConfig(data=str(data), sizes="64,64", max_sequence_length=16)
        directory = make_cache(config, cache_config, Accelerator(cpu=True), ModelDirectory.open(config.model))
        assert f"cache: left out: {data / 'green.png'} cannot be read" in caplog.text
        assert "cache: 1 of 3 samples were left out; 'skipped' in" in caplog.text
        dataset = LatentDataset(directory)
        assert len(dataset) == 2 and dataset[0]["latents"].shape == (4, 2, 2)
        assert [entry.split(":")[0] for entry in dataset.manifest["skipped"]] == ["green.png"]
        sample, family = dataset[1], TRAINED["sana"].load_objective()
        with torch.no_grad():
            own = family.encode_condition(pipelines["sana"], "a red wall", 16)
            image = torch.tensor([1.0, -1.0, -1.0])[:, None, None].expand(3, 64, 64)
            latents = family.encode_media(pipelines["sana"], image)
        length = len(own["prompt_attention_mask"])
        assert sample["prompt_embeds"].shape == (16, tiny_images.CAPTION_DIM)
        assert sample["prompt_attention_mask"].tolist() == [1] * length + [0] * (16 - length)
        assert torch.allclose(sample["prompt_embeds"][:length], own["prompt_embeds"], atol=1e-6)
        assert torch.allclose(sample["latents"], latents, atol=1e-5)
        assert set(dataset.null_condition) == {"prompt_embeds", "prompt_attention_mask"}
        assert dataset.null_condition["prompt_attention_mask"].dtype == torch.int64

        # The damaged file is repaired: it alone is encoded.
        samples = directory / "samples"
        times = {path.name: path.stat().st_mtime_ns for path in samples.iterdir()}
        save_image(data / "green.png", colours["green"])
        make_cache(config, cache_config, Accelerator(cpu=True), ModelDirectory.open(config.model))
        repaired = LatentDataset(directory)
        assert len(repaired) == 3 and repaired.manifest["skipped"] == []
        assert {path.name: path.stat().st_mtime_ns for path in samples.iterdir()}.items() >= times.items()


class TestValidation:
    def validator(self, family, directories, tmp_path, cache=None, **changes):
        config = options(
            directories[family], tmp_path, **{"validation_inference_steps": 2, "validation_guidance": 3.0, **changes}
        )
        cache_config = CacheConfig(data="digits", num_samples=6, **(cache or {}))
        source, accelerator = ModelDirectory.open(directories[family]), Accelerator(cpu=True)
        dataset = LatentDataset(make_cache(config, cache_config, accelerator, source))
        return Validator(source, config, dataset, accelerator.device)

    def test_images_are_those_of_the_pipeline(self, directories, pipelines, tmp_path):
        """The same as from the whole pipeline with this seed; and the model is left as it was."""
        calls = {
            "sana": {
                "prompt": "the digit four",
                "negative_prompt": "a cat",
                "max_sequence_length": 16,
                "height": 64,
                "width": 64,
                "use_resolution_binning": False,
            },
            "dit": {"class_labels": [4]},
        }
        specific = {
            "sana": {"validation_prompts": ("the digit four", "a"), "validation_negative_prompt": "a cat"},
            "dit": {"validation_prompts": ("four", "goldfish", "30")},
        }
        for family, call in calls.items():
            folder = tmp_path / family
            cache = {"max_sequence_length": 16} if family == "sana" else None
            validator = self.validator(family, directories, folder, cache, **specific[family])
            transformer = copy.deepcopy(pipelines[family].transformer).train()
            paths, images = validator.write(transformer, folder, 5), validator.generate(transformer)
            assert transformer.training
            assert [path.name for path in paths] == ["step-00000005.png"]
            side = 64 if family == "sana" else 16
            assert images.shape == (len(specific[family]["validation_prompts"]), side, side, 3)
            expected = pipelines[family](
                **call,
                num_inference_steps=2,
                guidance_scale=3.0,
                generator=torch.Generator().manual_seed(0),
                output_type="np",
            ).images[0]
            assert np.abs(images[0] - expected * 255).max() <= 1
            assert images[0].std() > 0 and not np.array_equal(images[0], images[1])
            assert np.array_equal(read_image(paths[0]), image_grid(images))
