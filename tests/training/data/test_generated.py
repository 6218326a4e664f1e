# SPDX-License-Identifier: Apache-2.0
"""Data drawn with the teacher: latents of pipelines and texts of language models."""

import json

import pytest
import torch

from mhla_hf.conversion import convert_pretrained
from mhla_hf.training import CacheConfig, DiffusionTrainer, LatentDataset, TrainingConfig
from mhla_hf.training.data import generated
from mhla_hf.training.data.batch_sources import PackedText
from mhla_hf.training.data.batches import stable_seed
from mhla_hf.training.data.cache import make_cache
from mhla_hf.training.data.generated import generate_text, read_prompts
from mhla_hf.training.processes import make_accelerator
from tests import tiny
from tests.integrations.transformers.tiny_models import softmax_model


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")

SIZES = {"height": 32, "width": 32, "num_frames": 5, "max_sequence_length": 8}


@pytest.fixture(scope="module")
def wan(tmp_path_factory):
    directory = tmp_path_factory.mktemp("generated") / "softmax"
    tiny.wan_pipeline(num_layers=2).save_pretrained(directory)
    convert_pretrained(directory, directory.parent / "converted", {"blocks": (1, 2, 2)}, progress=False)
    return directory.parent


def cached(folder, model, **options):
    config = TrainingConfig(model=model, cache=str(folder), device="cpu", progress=False, seed=3)
    base = {"data": "generated", "generated_steps": 2, "num_samples": 3}
    make_cache(config, CacheConfig(**{**base, **options}), make_accelerator(config))
    return LatentDataset(folder)


def test_latents_are_those_the_original_pipeline_ends_with(wan, tmp_path, monkeypatch):
    from diffusers import WanPipeline

    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a three moves left\n\na one moves up\n")
    options = {**SIZES, "prompts": str(prompts), "generated_guidance": 3.0}
    # Of a converted pipeline the one that it was made from draws them.
    dataset = cached(tmp_path / "cache", wan / "converted", **options)
    assert len(dataset) == 3 and dataset.latent_shape == (16, 2, 4, 4)
    pipeline = WanPipeline.from_pretrained(wan / "softmax")
    pipeline.set_progress_bar_config(disable=True)
    for number, prompt in enumerate(("a three moves left", "a one moves up", "a three moves left")):
        expected = pipeline(
            prompt, num_inference_steps=2, guidance_scale=3.0, output_type="latent",
            generator=torch.Generator().manual_seed(stable_seed(3, "generated", number)), **SIZES,
        ).frames[0]  # fmt: skip
        torch.testing.assert_close(dataset[number]["latents"], expected.float())
        assert dataset[number]["prompt_embeds"].shape == (8, tiny.TEXT_DIM)
    fingerprint = dataset.fingerprint()

    drawn = []
    draw = generated.LatentGenerator.draw
    monkeypatch.setattr(
        generated.LatentGenerator,
        "draw",
        lambda self, condition, number: drawn.append(number) or draw(self, condition, number),
    )
    assert cached(tmp_path / "cache", wan / "converted", **options).fingerprint() == fingerprint and not drawn
    # What a kill leaves: a sample less, and the cache not complete.
    (tmp_path / "cache" / "samples" / "000001.safetensors").unlink()
    manifest = json.loads((tmp_path / "cache" / "cache.json").read_text())
    (tmp_path / "cache" / "cache.json").write_text(json.dumps({**manifest, "complete": False}))
    again = cached(tmp_path / "cache", wan / "converted", **options)
    assert drawn == [1] and again.fingerprint() == fingerprint
    torch.testing.assert_close(again[1]["latents"], dataset[1]["latents"])
    with pytest.raises(ValueError, match="was made with generated_guidance 3.0 not 5.0"):
        cached(tmp_path / "cache", wan / "converted", **{**options, "generated_guidance": 5.0})
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


def test_mistakes_are_named(wan, tmp_path):
    with pytest.raises(ValueError, match="prompts, a text file with one prompt a line, must be given"):
        cached(tmp_path / "cache", wan / "softmax", **SIZES)
    with pytest.raises(ValueError, match="prompts is for data='generated' only"):
        CacheConfig(data="digits", prompts="a.txt")
    with pytest.raises(ValueError, match="data='generated' has one size"):
        CacheConfig(data="generated", buckets="32,32;32,64")
    with pytest.raises(ValueError, match="prompts: .*missing.txt must be a text file .*No such file"):
        read_prompts(tmp_path / "missing.txt")
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="empty.txt must be a text file with one prompt a line .it is empty"):
        read_prompts(tmp_path / "empty.txt")


class TestTexts:
    def test_rows_are_sampled_from_the_original(self, tmp_path):
        softmax = softmax_model("llama")
        table = generate_text(softmax, tmp_path / "a", rows=12, length=9, seed=5)
        assert (len(table), set(table.lengths().tolist())) == (12, {9})
        rows = torch.stack([table[number] for number in range(12)])
        assert (rows[:, 0] == softmax.config.bos_token_id).all() and len(rows.unique(dim=0)) == 12
        # A row starts with what its first prefix makes likely, by its own seed.
        with torch.no_grad():
            chances = softmax(rows[:1, :1]).logits[0, -1].softmax(-1)
        first = torch.multinomial(chances, 1, generator=torch.Generator().manual_seed(stable_seed(5, "generated", 0)))
        assert rows[0, 1] == first
        batch = PackedText(table, held_out=2).batch("distill", 0, 2)
        assert batch["input_ids"].shape == (2, 9)

    def test_what_is_there_is_kept(self, tmp_path, monkeypatch):
        model = softmax_model("llama")
        whole = generate_text(model, tmp_path, rows=12, length=5)
        (folder,) = tmp_path.iterdir()
        files = sorted(folder.glob("*.safetensors"))
        assert [file.name for file in files] == ["rows-00000000.safetensors", "rows-00000008.safetensors"]
        files[0].unlink()
        drawn = []
        row = generated._row
        monkeypatch.setattr(generated, "_row", lambda *arguments: drawn.append(1) or row(*arguments))
        again = generate_text(model, tmp_path, rows=12, length=5)
        assert torch.equal(again.tokens, whole.tokens) and len(drawn) == 8
        assert again.fingerprint == whole.fingerprint

    def test_prompts(self, tmp_path):
        model = softmax_model("gpt2")
        table = generate_text(model, tmp_path, rows=3, length=6, prompts=[[5, 6], [7]])
        assert table[0][:2].tolist() == [5, 6] == table[2][:2].tolist() and table[1][0] == 7
        with pytest.raises(ValueError, match="prompts must be given, with a token each"):
            generate_text(model, tmp_path, rows=2, length=4, prompts=[[]])

    def test_models_that_do_not_generate_are_named(self, tmp_path):
        with pytest.raises(ValueError, match="needs a model that generates, and BertForMaskedLM does not"):
            generate_text(softmax_model("bert"), tmp_path, rows=2, length=4)
