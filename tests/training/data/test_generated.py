# SPDX-License-Identifier: Apache-2.0
"""Data drawn with the teacher: latents of pipelines and texts of language models."""

import dataclasses
import json

import pytest
import torch

from mhla_hf.conversion import convert_pretrained
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.training import CacheConfig, DiffusionTrainer, LatentDataset, TrainingConfig
from mhla_hf.training.data import latent_cache as caching
from mhla_hf.training.data.latent_cache import make_cache
from mhla_hf.training.data.order import stable_seed
from mhla_hf.training.data.texts import PackedText, generate_text
from mhla_hf.training.processes import make_accelerator
from tests import tiny
from tests.integrations.transformers.tiny_models import softmax_model


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")

SIZES = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 8}
OPTIONS = {"data": "generated", "num_samples": 3, "sizes": "32,32,5", "max_sequence_length": 8}


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generated") / "softmax"
    tiny.wan_pipeline(num_layers=2).save_pretrained(directory)
    convert_pretrained(directory, directory.parent / "converted", {"blocks": (1, 2, 2)}, progress=False)
    return directory.parent


def cached(folder, model, **options):
    config = TrainingConfig(model=model, cache=str(folder), device="cpu", progress=False, seed=3)
    make_cache(config, CacheConfig(**{**OPTIONS, **options}), make_accelerator(config), ModelDirectory.open(model))
    return LatentDataset(folder)


def test_a_video_of_one_frame(wan, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a three moves left\n")
    dataset = cached(tmp_path / "cache", wan / "softmax", prompts=str(prompts), num_samples=1, sizes="32,32,1")
    assert dataset[0]["latents"].shape == (16, 1, 4, 4)


def test_latents_are_those_the_original_pipeline_ends_with(wan, tmp_path, monkeypatch):
    from diffusers import WanPipeline

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a three moves left\n\na one moves up\n")
    options = {"prompts": str(prompts)}
    # Of a converted pipeline the one that it was made from draws them.
    dataset = cached(tmp_path / "cache", wan / "converted", **options)
    assert len(dataset) == 3 and dataset[0]["latents"].shape == (16, 2, 4, 4)
    pipeline = WanPipeline.from_pretrained(wan / "softmax")
    pipeline.set_progress_bar_config(disable=True)
    for number, prompt in enumerate(("a three moves left", "a one moves up", "a three moves left")):
        expected = pipeline(
            prompt, output_type="latent",
            generator=torch.Generator().manual_seed(stable_seed(3, "generated", number)), **SIZES,
        ).frames[0]  # fmt: skip
        torch.testing.assert_close(dataset[number]["latents"], expected.float())
        assert dataset[number]["prompt_embeds"].shape == (8, tiny.TEXT_DIM)
    fingerprint = dataset.fingerprint()

    drawn, drawn_samples = [], caching.drawn_samples

    def counted(*args):
        def sample(number, made):
            return dataclasses.replace(made, load=lambda: drawn.append(number) or made.load())

        return [sample(number, made) for number, made in enumerate(drawn_samples(*args))]

    monkeypatch.setattr(caching, "drawn_samples", counted)
    assert cached(tmp_path / "cache", wan / "converted", **options).fingerprint() == fingerprint and not drawn
    # What a kill leaves: a sample less, and the cache not complete.
    (tmp_path / "cache" / "samples" / "000001.safetensors").unlink()
    manifest = json.loads((tmp_path / "cache" / "cache.json").read_text())
    (tmp_path / "cache" / "cache.json").write_text(json.dumps({**manifest, "complete": False}))
    again = cached(tmp_path / "cache", wan / "converted", **options)
    assert drawn == [1] and again.fingerprint() == fingerprint
    torch.testing.assert_close(again[1]["latents"], dataset[1]["latents"])
    with pytest.raises(ValueError, match=r"was made with sizes '32,32,5' \(now '32,32,9'\)"):
        cached(tmp_path / "cache", wan / "converted", **{**options, "sizes": "32,32,9"})
    # And they are data like any other.
    config = TrainingConfig(
        model=wan / "converted",
        cache=str(tmp_path / "cache"),
        distill_steps=2,
        max_steps=0,
        device="cpu",
        progress=False,
    )
    assert len(DiffusionTrainer(config).run().losses["distill"]) == 2


class TestTexts:
    def test_rows_are_sampled_from_the_original(self, tmp_path):
        softmax = softmax_model("llama")
        table = generate_text(softmax, tmp_path / "a", rows=12, length=9, seed=5)
        assert (len(table), set(table.offsets.diff().tolist())) == (12, {9})
        rows = torch.stack([table[number] for number in range(12)])
        assert (rows[:, 0] == softmax.config.bos_token_id).all() and len(rows.unique(dim=0)) == 12
        again = generate_text(softmax, tmp_path / "b", rows=12, length=9, seed=5)
        assert torch.equal(again.tokens, table.tokens) and again.fingerprint == table.fingerprint
        assert not torch.equal(generate_text(softmax, tmp_path / "b", rows=12, length=9, seed=6).tokens, table.tokens)

    def test_rows_follow_the_distribution_past_ends_of_texts(self, tmp_path):
        softmax = softmax_model("llama")
        # Defaults of a chat model, which would make every row the same and end it at its first token.
        softmax.generation_config.update(top_k=1, temperature=0.1, eos_token_id=list(range(64)))
        table = generate_text(softmax, tmp_path, rows=400, length=2)
        with torch.no_grad():
            chances = softmax(torch.tensor([[softmax.config.bos_token_id]])).logits[0, -1].softmax(-1)
        drawn = torch.stack([table[number] for number in range(400)])[:, 1].bincount(minlength=64) / 400
        assert (drawn - chances).abs().max() < 0.05

    def test_batches(self, tmp_path):
        table = generate_text(softmax_model("llama"), tmp_path, rows=12, length=9)
        batch = PackedText(table, held_out=2).batch("distill", 0, 2)
        assert batch["input_ids"].shape == (2, 9)
