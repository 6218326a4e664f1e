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

from mhla_hf.training import LatentDataset, TrainingConfig
from mhla_hf.training.config import CacheConfig
from mhla_hf.training.data.cache import make_cache, open_samples
from mhla_hf.training.data.digits import DIGIT_WORDS, digit_images, load_scans
from mhla_hf.training.data.folders import UnusableSampleError
from mhla_hf.training.data.images import (
    captioned_images,
    class_images,
    folder_labels,
    image_grid,
    pipeline_labels,
    read_image,
)
from mhla_hf.training.families import FAMILIES
from mhla_hf.training.families.sana import sana_instruction
from mhla_hf.training.loading import PipelineSource
from mhla_hf.training.validation import make_validator

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

    def test_every_mode_becomes_rgb(self, tmp_path):
        for mode in ("L", "P", "RGBA", "1", "CMYK"):
            path = tmp_path / ("image.tif" if mode == "CMYK" else "image.png")
            Image.new("RGB", (6, 5), (255, 255, 255)).convert(mode).save(path)
            image = read_image(path)
            assert image.shape == (5, 6, 3) and image.dtype == np.uint8 and image.min() == 255
        Image.fromarray(np.array([[0, 0x0100, 0x80FF, 0xFFFF]], np.uint16)).save(tmp_path / "grey.png")
        assert read_image(tmp_path / "grey.png")[0, :, 2].tolist() == [0, 1, 128, 255]

    def test_a_grid_has_all_images(self):
        images = np.stack([np.full((2, 3, 3), 10 * number, np.uint8) for number in range(1, 6)])
        grid = image_grid(images)
        assert grid.shape == (4, 9, 3)
        assert grid[::2, ::3, 0].tolist() == [[10, 20, 30], [40, 50, 0]]
        assert np.array_equal(image_grid(images[:1]), images[0])


class TestFolders:
    def test_captions_beside_the_images(self, tmp_path):
        for name in ("b.jpg", "inner/a.png"):
            save_image(tmp_path / name)
        (tmp_path / "b.txt").write_text(" a brown wall\n")
        with pytest.raises(UnusableSampleError, match=r"a\.png has no caption"):
            captioned_images(tmp_path, height=8, width=8)[1].load()
        (tmp_path / "inner" / "a.txt").write_text("again")
        samples = captioned_images(tmp_path, height=8, width=16)
        assert [sample.condition for sample in samples] == ["a brown wall", "again"]
        image = samples[1].load()
        assert image.shape == (3, 8, 16) and image.dtype == torch.float32
        expected = torch.tensor([200, 100, 50]) / 127.5 - 1
        assert torch.allclose(image, expected[:, None, None].expand_as(image), atol=1e-5)
        # A metadata file wins.
        (tmp_path / "metadata.csv").write_text("image,prompt\nb.jpg,a wall\n")
        assert [sample.condition for sample in captioned_images(tmp_path, height=8, width=8)] == ["a wall"]

    def test_bad_folders_are_named(self, tmp_path):
        def classes():
            return class_images(tmp_path, height=8, width=8, known_labels={}, num_classes=3)

        with pytest.raises(ValueError, match="existing folder"):
            captioned_images(tmp_path / "none", height=8, width=8)
        with pytest.raises(ValueError, match="has no images"):
            captioned_images(tmp_path, height=8, width=8)
        with pytest.raises(ValueError, match="one folder of images per class"):
            classes()
        (tmp_path / "empty").mkdir()
        with pytest.raises(ValueError, match="these have none: empty"):
            classes()

    def test_classes_alternate(self, tmp_path):
        for name in ("dog/2.png", "dog/1.png", "cat/x/1.png", "cat/2.webp", "cat/3.png", ".hidden/1.png"):
            save_image(tmp_path / name)
        (tmp_path / "cat" / "notes.txt").write_text("no image")
        samples = class_images(tmp_path, height=8, width=8, known_labels={}, num_classes=1000)
        assert [(sample.key.split(":")[0], sample.condition, sample.class_name) for sample in samples] == [
            ("cat/2.webp", 0, "cat"),
            ("dog/1.png", 1, "dog"),
            ("cat/3.png", 0, "cat"),
            ("dog/2.png", 1, "dog"),
            ("cat/x/1.png", 0, "cat"),
        ]

    @pytest.mark.parametrize(
        ("names", "stored", "expected"),
        [
            (["b", "a", "c"], None, [0, 1, 2]),
            (["10", "2", "7"], None, [10, 2, 7]),
            (["magpie", "tabby_cat"], None, [30, 20]),
            (["goldfish"], None, [7]),
            (["magpie", "other"], {"magpie": 1, "other": 2, "absent": 3}, [1, 2]),
        ],
        ids=["sorted", "numbers", "known to the pipeline", "synonym", "classes.json"],
    )
    def test_numbers_of_classes(self, names, stored, expected, directories, tmp_path, caplog):
        if stored is not None:
            (tmp_path / "classes.json").write_text(json.dumps(stored))
        labels = folder_labels(tmp_path, names, pipeline_labels(PipelineSource(directories["dit"])), 1000)
        assert [labels[name] for name in sorted(names)] == expected
        assert ("they are numbered 0 to 2 in the order of the names" in caplog.text) == ("c" in names)

    @pytest.mark.parametrize(
        ("names", "stored", "message"),
        [
            (["a", "b", "c", "d"], None, "different numbers from 0 to 2, as the model has 3 classes; got .*'d' 3"),
            (["01", "1"], None, "different numbers .*; got '01' 1, '1' 1"),
            (["first", "a"], None, "knows 1 of the 2 classes of .*, but not a; rename"),
            (["a", "b"], '{"a": 0, "b": "1"}', "it has none for b"),
            (["a"], "{", "not valid JSON"),
        ],
    )
    def test_bad_classes_are_named(self, names, stored, message, tmp_path):
        if stored is not None:
            (tmp_path / "classes.json").write_text(stored)
        with pytest.raises(ValueError, match=message):
            folder_labels(tmp_path, names, {"first": 0}, 3)


def test_digits_are_the_scans():
    scans, digits = load_scans("train", 24)
    for captions in (True, False):
        samples = digit_images(20, 24, captions=captions)
        assert len(samples) == 20
        for number in (0, 7, 19):
            image = samples[number].load()
            assert image.shape == (3, 24, 24)
            assert torch.allclose(image[1] / 2 + 0.5, torch.from_numpy(scans[number]), atol=1e-6)
            word = DIGIT_WORDS[digits[number]]
            assert samples[number].condition == (f"the digit {word}" if captions else digits[number])
            assert samples[number].class_name == (None if captions else word)
    assert len(digit_images(5000, 8, captions=True, split="held_out")) == 299


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
            latents = FAMILIES[family].encode_media(pipelines[family], self.image)
            assert latents.shape == shape and latents.dtype == torch.float32
            encoded = vae.encode(self.image[None])
            expected = encoded.latent if family == "sana" else encoded.latent_dist.mean
            assert torch.allclose(latents / vae.config.scaling_factor, expected[0], atol=1e-6)

    def test_text_is_what_the_pipeline_gives_the_transformer(self, pipelines):
        """With the pipeline's own instruction before the prompt, and without before the empty one."""
        pipeline, family, config = pipelines["sana"], FAMILIES["sana"], CacheConfig(max_sequence_length=24)
        assert sana_instruction(pipeline)[-1] == "User Prompt: "
        inputs = transformer_inputs(pipeline, prompt="a three", max_sequence_length=24, height=512, width=512)
        texts = family.encode_null_condition(pipeline, config, 0), family.encode_condition(pipeline, "a three", config)
        for row, own in enumerate(texts):
            mask = inputs["encoder_attention_mask"][row]
            length = len(own["prompt_attention_mask"])
            assert torch.equal(own["prompt_attention_mask"], mask[:length])
            assert not mask[length:].any() or length == 24
            assert torch.allclose(own["prompt_embeds"], inputs["encoder_hidden_states"][row, :length], atol=1e-6)
        other = family.encode_condition(pipeline, "a four", config)
        assert not torch.equal(other["prompt_embeds"], texts[1]["prompt_embeds"])

    def test_classes_are_what_the_pipeline_gives_the_transformer(self, pipelines):
        labels = transformer_inputs(pipelines["dit"], class_labels=[20])["class_labels"]
        family, config = FAMILIES["dit"], CacheConfig()
        own = family.encode_condition(None, 20, config), family.encode_null_condition(None, config, 1000)
        assert labels.tolist() == [each["class_label"] for each in own]


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
        cache_config = CacheConfig(data=str(data), height=64, max_sequence_length=16)
        directory = make_cache(config, cache_config, Accelerator(cpu=True))
        assert f"cache: left out: {data / 'green.png'} cannot be read" in caplog.text
        assert "cache: 1 of 3 samples were left out; 'skipped' in" in caplog.text
        dataset = LatentDataset(directory)
        assert len(dataset) == 2 and dataset.latent_shape == (4, 2, 2)
        assert [entry.split(":")[0] for entry in dataset.manifest["skipped"]] == ["green.png"]
        sample, family = dataset[1], FAMILIES["sana"]
        with torch.no_grad():
            own = family.encode_condition(pipelines["sana"], "a red wall", cache_config)
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
        make_cache(config, cache_config, Accelerator(cpu=True))
        repaired = LatentDataset(directory)
        assert len(repaired) == 3 and repaired.manifest["skipped"] == []
        assert {path.name: path.stat().st_mtime_ns for path in samples.iterdir()}.items() >= times.items()

    def test_classes_of_images(self, directories, tmp_path):
        for name in ("magpie/1.png", "magpie/2.png", "tabby_cat/1.png"):
            save_image(tmp_path / "data" / name)
        config, cache_config = options(directories["dit"], tmp_path), CacheConfig(data=str(tmp_path / "data"))
        dataset = LatentDataset(make_cache(config, cache_config, Accelerator(cpu=True)))
        assert [int(dataset[index]["class_label"]) for index in range(3)] == [20, 30, 30]
        assert dataset[0]["class_label"].shape == () and dataset[0]["class_label"].dtype == torch.int64
        assert dataset[0]["latents"].shape == (4, 8, 8)
        assert int(dataset.null_condition["class_label"]) == 1000
        assert dataset.manifest["classes"] == {"magpie": 30, "tabby_cat": 20}
        # The first samples have all classes.
        fewer = cache_config.replace(num_samples=2)
        _, samples, _ = open_samples(PipelineSource(directories["dit"]), fewer, 0, torch.device("cpu"))
        assert {sample.condition for sample in samples} == {20, 30}


class TestValidation:
    def validator(self, family, directories, tmp_path, cache=None, **changes):
        config = options(
            directories[family], tmp_path, **{"validation_inference_steps": 2, "validation_guidance": 3.0, **changes}
        )
        cache_config = CacheConfig(data="digits", num_samples=6, **(cache or {}))
        dataset = LatentDataset(make_cache(config, cache_config, Accelerator(cpu=True)))
        return make_validator(PipelineSource(directories[family]), config, dataset, Accelerator(cpu=True))

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
            paths, images = validator.write(transformer, folder, 5)
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

    @pytest.mark.parametrize(
        ("changes", "cache", "message"),
        [
            ({"validation_prompts": "elephant"}, {}, "must be classes, by number .*got 'elephant'"),
            ({"validation_prompts": "4"}, {"height": 24}, "makes images of 16x16 only, and the cache has 24x24"),
        ],
    )
    def test_what_cannot_be_made_is_refused(self, changes, cache, message, directories, tmp_path):
        with pytest.raises(ValueError, match=message):
            self.validator("dit", directories, tmp_path, cache, **changes)
