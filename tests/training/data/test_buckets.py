# SPDX-License-Identifier: Apache-2.0
"""Videos and images of several sizes and lengths: buckets, the order of batches, caches, and training on them."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from mhla_hf.cli.main import app
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.training import CacheConfig, DiffusionTrainer, LatentDataset, TrainingConfig, evaluate
from mhla_hf.training.config import Bucket, parse_sizes
from mhla_hf.training.data.latent_cache import with_sizes
from mhla_hf.training.data.order import DataOrder

from ... import tiny_images
from ..cases import CASES


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")

VIDEO, IMAGE = (
    ModelDirectory("x", Path(), None, {"transformer": config}, "transformer")
    for config in (
        {"_class_name": "WanTransformer3DModel"},
        {"_class_name": "SanaTransformer2DModel", "sample_size": 16},
    )
)


class TestSizes:
    def test_texts(self):
        assert parse_sizes("480,832; 832,480 ;") == (Bucket(480, 832), Bucket(832, 480))
        assert parse_sizes("480,832,81;480,832", 49) == (Bucket(480, 832, 81), Bucket(480, 832, 49))

    @pytest.mark.parametrize("text", ["480x832", "480,832;;1", "0,8"])
    def test_mistakes_are_named(self, text):
        with pytest.raises(ValueError, match="sizes must be like '480,832;832,480'.* got '"):
            CacheConfig(data="x", sizes=text)

    @pytest.mark.parametrize(
        ("pipeline", "options", "message"),
        [
            (VIDEO, "480,832;832,488", "height must be a multiple of 16, width of 16.*; got 832,488,81"),
            (VIDEO, "480,832,80", "frames a multiple of 4 plus 1; got 480,832,80"),
            (IMAGE, "512,512,5", "a multiple of 32, width of 32; got 512,512,5"),
        ],
    )
    def test_what_does_not_fit_a_pipeline(self, pipeline, options, message):
        with pytest.raises(ValueError, match=message):
            with_sizes(CacheConfig(data="x", sizes=options), pipeline)

    def test_defaults(self):
        def completed(pipeline, **options):
            return with_sizes(CacheConfig(**options), pipeline)[0].sizes

        assert completed(VIDEO, data="x") == "480,832,81"
        assert completed(VIDEO, data="x", sizes="480,832;832,480,49") == "480,832,81;832,480,49"
        assert completed(VIDEO, data="digits", sizes="32,32") == "32,32,17"
        assert completed(IMAGE, data="x") == "512,512"
        assert completed(IMAGE, data="digits") == "64,64"


BUCKETS = [0, 1, 0, 0, 2, 0, 1, 0, 1, 0, 0]


def order(batch_size=3, **changes):
    options = {"dataset_size": len(BUCKETS), "batch_size": batch_size, "seed": 0, "stage": "finetune"}
    return DataOrder(**{**options, "buckets": BUCKETS, **changes})


def batch(order, step, micro_step=0):
    return [order.dataset_index(number) for number in order.sample_numbers(step, micro_step)]


class TestOrder:
    def test_a_batch_holds_one_bucket_and_every_sample_has_its_share(self):
        seen = Counter()
        for step in range(110):
            indices = batch(order(), step)
            assert len({BUCKETS[index] for index in indices}) == 1
            seen.update(indices)
        # 110 batches of 3 are 30 epochs of 11 samples, up to the last batch of each bucket.
        assert sorted(seen) == list(range(11)) and all(28 <= count <= 32 for count in seen.values())
        # The turns of the buckets are mixed: in the long run none comes twice in a row all the time.
        turns = [BUCKETS[batch(order(), step)[0]] for step in range(110)]
        assert turns != sorted(turns) and turns[:55] != turns[55:]


class Sizes(list):
    """Samples of two sizes."""

    buckets = (0, 1, 0, 1, 0)


def of_two_sizes(family):
    case = CASES[family]
    data = Sizes(case.dataset())
    for index, bucket in enumerate(data.buckets):
        if bucket:
            latents = data[index]["latents"]
            data[index] = {**data[index], "latents": torch.cat([latents, latents], -2)[..., ::2]}
    return case, data


class TestTraining:
    @pytest.mark.parametrize("family", ["wan", "dit"])
    def test_a_model_trains_on_several_grids(self, family):
        case, data = of_two_sizes(family)
        assert len({tuple(sample["latents"].shape) for sample in data}) == 2
        teacher = case.make_teacher()
        student = case.student(teacher)
        config = TrainingConfig(max_steps=16, batch_size=2, learning_rate=3e-3, progress=False, device="cpu")
        before = evaluate(student, data, batch_size=2, draws_per_sample=2)
        result = DiffusionTrainer(config, student, data, teacher=teacher, null_condition=case.null_condition).run()
        assert len(result.losses["finetune"]) == 16
        assert evaluate(result.model, data, batch_size=2, draws_per_sample=2).loss < before.loss


def run(*arguments):
    result = CliRunner().invoke(app, ["train", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


class TestCaches:
    def test_images(self, tmp_path):
        source, images = tmp_path / "source", tmp_path / "images"
        tiny_images.sana_pipeline(num_layers=1).save_pretrained(source)
        images.mkdir()
        shapes = [(64, 128), (128, 64), (70, 120), (64, 64), (120, 70), (60, 130)]
        for number, (height, width) in enumerate(shapes):
            Image.fromarray(np.full((height, width, 3), 40 * number, np.uint8)).save(images / f"{number}.png")
            (images / f"{number}.txt").write_text("a wall")
        options = [
            "--data", images, "--sizes", "64,64;64,128;128,64", "--max-sequence-length", 8, "--quiet", "--device",
            "cpu",
        ]  # fmt: skip
        run("cache", source, tmp_path / "cache", *options)
        manifest = json.loads((tmp_path / "cache" / "cache.json").read_text())
        assert manifest["settings"]["sizes"] == "64,64;64,128;128,64"
        dataset = LatentDataset(tmp_path / "cache")
        named = [dataset[index]["latents"].shape[1:] for index in range(6)]
        assert [(round(height / width, 1)) for height, width in named] == [0.5, 2, 0.5, 1, 2, 0.5]
        groups = Counter(dataset.buckets)
        assert sorted(groups.values()) == [1, 2, 3] and len(set(zip(dataset.buckets, named))) == 3
        output = run(
            "sana", source, tmp_path / "run", "--cache", tmp_path / "cache", *options, "--mhla",
            '{"blocks": [2, 2]}', "--max-steps", 4, "--batch-size", 2,
        )  # fmt: skip
        assert "finetune: loss" in output
        # Another choice of buckets is another cache.
        changed = [source, tmp_path / "cache", *options[:3], "64,64", *options[4:]]
        result = CliRunner().invoke(app, ["train", "cache", *map(str, changed)], env={"COLUMNS": "400"})
        assert result.exit_code == 1 and "was made with sizes '64,64;64,128;128,64'" in " ".join(result.output.split())
