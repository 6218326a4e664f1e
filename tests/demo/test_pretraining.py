# SPDX-License-Identifier: Apache-2.0
"""Pretraining of the demo's base model (`conversion/digits`): its components, and whole runs at the smallest size."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from diffusers import WanPipeline

from conversion.digits import PretrainingConfig, pretrain
from conversion.digits.models import BaseModelConfig, build_text_encoder, build_tokenizer, build_transformer, build_vae
from conversion.digits.text import encode_text, install_padded_text, padding_bias, tokenize
from mhla_hf.demo.run import TEXT_LENGTH
from mhla_hf.training.data.digits import DIRECTIONS, caption_for
from tests import ROOT

from .. import tiny


TINY = BaseModelConfig(**tiny.DIGITS_MODEL)


TINY_PRETRAINING = {
    **tiny.DIGITS_MODEL,
    "vae_crop_steps": 1,
    "vae_full_steps": 1,
    "decoder_steps": 1,
    "pool_size": 8,
    "held_out_size": 4,
    "steps": 2,
    "batch_size": 2,
    "device": "cpu",
}


def test_tokenizer_knows_every_caption():
    tokenizer = build_tokenizer()
    caption = caption_for(range(4), list(DIRECTIONS)) + " and " + caption_for(range(4, 10), ["left"] * 6)
    ids = tokenizer(caption).input_ids
    assert tokenizer.unk_token_id not in ids and ids[-1] == tokenizer.eos_token_id
    assert tokenizer("A THREE zooms left").input_ids.count(tokenizer.unk_token_id) == 1
    longest = caption_for([0] * 4, ["left"] * 4)
    assert len(tokenizer(longest).input_ids) < TEXT_LENGTH


@pytest.mark.parametrize("length", [24, 226, 512])
def test_pretraining_text_is_what_the_pipeline_feeds(length):
    """A short text with a raised padding score equals the pipeline's text padded to any length."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    encoder = build_text_encoder(TINY, len(tokenizer)).eval()
    transformer = build_transformer(TINY).eval()
    torch.nn.init.normal_(transformer.proj_out.weight)
    pipeline = WanPipeline(tokenizer, encoder, build_vae(TINY).eval(), None, transformer)
    captions = ["a three moves left", "a two moves up and a nine moves down"]
    latents, timestep = torch.randn(2, 4, 2, 4, 4), torch.tensor([300.0, 700.0])
    with torch.no_grad():
        embeddings, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False, max_sequence_length=length)
        expected = transformer(latents, timestep, embeddings).sample
        processor = install_padded_text(transformer)
        token_ids, lengths = tokenize(tokenizer, captions)
        processor.bias = padding_bias(lengths, token_ids.shape[1], length)
        actual = transformer(latents, timestep, encode_text(encoder, token_ids, lengths)).sample
    assert torch.allclose(actual, expected, atol=1e-5 * expected.abs().max().item())


@pytest.mark.slow
def test_pretraining_goes_on_where_it_stopped(tmp_path):
    options = {**TINY_PRETRAINING, "steps": 4, "ema_decay": 0.5, "snapshot_minutes": 0.0}
    whole = pretrain(PretrainingConfig(**options), tmp_path / "whole", tmp_path / "work", log=lambda line: None)
    # A time limit of nothing stops after the first step; the rest of the work directory is shared.
    (tmp_path / "work" / "transformer.pt").rename(tmp_path / "done")
    for minutes in (0.0, 0.0, None):
        config = PretrainingConfig(**options, minutes=minutes)
        lines: list[str] = []
        parts = pretrain(config, tmp_path / "parts", tmp_path / "work", log=lines.append)
    assert "resumed at step 2" in lines
    expected = whole.transformer.state_dict()
    for name, tensor in parts.transformer.state_dict().items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name
    assert (tmp_path / "work" / "snapshot" / "model_index.json").is_file()
    facts = json.loads((tmp_path / "parts" / "pretraining.json").read_text())
    assert facts["steps"] == 4 and facts["parameters"] > 0


@pytest.mark.slow
def test_pretraining_goes_on_from_a_finished_pipeline(tmp_path):
    base = tmp_path / "base"
    pretrain(PretrainingConfig(**TINY_PRETRAINING), base, tmp_path / "base.work", log=lambda line: None)
    config = PretrainingConfig(**{**TINY_PRETRAINING, "steps": 0, "base": str(base)})
    pipeline = pretrain(config, tmp_path / "further", tmp_path / "work", log=lambda line: None)
    before = WanPipeline.from_pretrained(base, torch_dtype=torch.float32)
    for component in ("transformer", "text_encoder", "vae"):
        expected = getattr(before, component).state_dict()
        for name, tensor in getattr(pipeline, component).state_dict().items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
def test_the_command_makes_a_pipeline(tmp_path):
    options = {**TINY_PRETRAINING, "seed": 3}
    arguments = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "conversion.digits", str(tmp_path / "wan"), *arguments]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "vae step 2/2" in shown and "encoded train-3-00000-00008.safetensors" in shown
    facts = json.loads((tmp_path / "wan" / "pretraining.json").read_text())
    assert facts["steps"] == 2 and facts["config"]["seed"] == 3
    assert (tmp_path / "wan.work" / "transformer.pt").is_file()
