# SPDX-License-Identifier: Apache-2.0
"""The moving digits, and the small parts that the demo's pretraining is made of."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from diffusers import WanPipeline

from mhla_hf.demo.base_model import build_text_encoder, build_tokenizer, build_transformer, build_vae
from mhla_hf.demo.checkpoints import load_checkpoint, save_checkpoint
from mhla_hf.demo.digits import (
    DIGIT_WORDS,
    DIRECTIONS,
    MovingDigits,
    MovingDigitsConfig,
    caption_for,
    frames_to_tensor,
    load_scans,
    stack_videos,
)
from mhla_hf.demo.muon import Muon, orthogonalize
from mhla_hf.demo.text import (
    PRETRAINING_TEXT_LENGTH,
    encode_text,
    install_padded_text,
    normal_quantiles,
    padding_bias,
    tokenize,
)

from .. import tiny


TINY = tiny.digits_model()


def test_a_video_depends_on_split_seed_and_index_alone():
    long, short = MovingDigits("train", 100, seed=3), MovingDigits("train", 10, seed=3)
    assert np.array_equal(long[7].frames, short[7].frames) and long[7].caption == short[7].caption
    assert not np.array_equal(long[7].frames, long[8].frames)
    assert not np.array_equal(long[7].frames, MovingDigits("train", 10, seed=4)[7].frames)
    assert not np.array_equal(long[7].frames, MovingDigits("held_out", 10, seed=3)[7].frames)


def test_splits_share_no_scan():
    train, held_out = (load_scans(split)[0] for split in ("train", "held_out"))
    assert len(train) + len(held_out) == 1797
    seen = {scan.tobytes() for scan in train}
    # A few of the 8x8 scans are the same in pixels; what matters is that scans are not shared wholesale.
    assert sum(scan.tobytes() in seen for scan in held_out) < 5


def test_captions_say_what_moves_where():
    dataset = MovingDigits("train", 60, config=MovingDigitsConfig(count_weights=(1, 1, 1, 1)))
    counts = set()
    for index in range(len(dataset)):
        example = dataset[index]
        counts.add(len(example.digits))
        phrases = example.caption.split(" and ")
        words = [phrase.split() for phrase in phrases]
        assert [DIGIT_WORDS.index(word[1]) for word in words] == list(example.digits)
        assert [word[3] for word in words] == list(example.directions)
    assert counts == {1, 2, 3, 4}


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_digit_sets_off_as_captioned_and_stays_inside(direction):
    dataset = MovingDigits("train", 40, config=MovingDigitsConfig(count_weights=(1,)))
    axis = 0 if direction in ("up", "down") else 1
    checked = 0
    for index in range(len(dataset)):
        example = dataset[index]
        if example.directions != (direction,):
            continue
        mass = example.frames.astype(float)
        place = np.indices(mass.shape[1:])[axis]
        centers = (mass * place).sum(axis=(1, 2)) / mass.sum(axis=(1, 2))
        step = centers[1] - centers[0]
        assert step * DIRECTIONS[direction][axis] > 0.5
        # Nothing leaves the picture: the amount of white stays the same.
        assert np.allclose(mass.sum(axis=(1, 2)), mass[0].sum(), rtol=1e-6)
        checked += 1
    assert checked


def test_tensors_have_three_equal_channels_between_minus_one_and_one():
    videos, captions = stack_videos(MovingDigits("train", 3), 0, 3)
    assert videos.shape == (3, 3, 17, 64, 64) and len(captions) == 3
    assert videos.min() == -1 and 0.5 < videos.max() <= 1
    assert torch.equal(videos[:, 0], videos[:, 2])
    assert frames_to_tensor(np.full((2, 4, 4), 255, np.uint8)).eq(1).all()
    assert torch.equal(MovingDigits("train", 3)[1].tensor(), videos[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MovingDigits("test", 1), "split must be one of train, held_out"),
        (lambda: caption_for([1], ["sideways"]), "directions must be among"),
        (lambda: caption_for([10], ["left"]), "digits must be 0 to 9"),
        (lambda: caption_for([1, 2], ["left"]), "as many"),
        (lambda: MovingDigitsConfig(digit_size=65), "digit_size"),
        (lambda: MovingDigitsConfig(num_frames=0), "num_frames"),
        (lambda: MovingDigitsConfig(count_weights=(1,) * 5), "count_weights"),
    ],
    ids=["split", "direction", "digit", "lengths", "digit_size", "num_frames", "count_weights"],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_index_out_of_range():
    with pytest.raises(IndexError):
        MovingDigits("train", 2)[2]


def test_tokenizer_knows_every_caption():
    tokenizer = build_tokenizer()
    caption = caption_for(range(4), list(DIRECTIONS)) + " and " + caption_for(range(4, 10), ["left"] * 6)
    ids = tokenizer(caption).input_ids
    assert tokenizer.unk_token_id not in ids and ids[-1] == tokenizer.eos_token_id
    assert tokenizer("A THREE zooms left").input_ids.count(tokenizer.unk_token_id) == 1
    longest = caption_for([0] * 4, ["left"] * 4)
    assert len(tokenizer(longest).input_ids) < PRETRAINING_TEXT_LENGTH


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


def test_quantiles_are_stratified_and_normal():
    draws = normal_quantiles(1000, torch.Generator().manual_seed(0))
    assert abs(draws.mean()) < 0.02 and abs(draws.std() - 1) < 0.02
    ranks = (0.5 * (1 + torch.erf(draws / math.sqrt(2))) * 1000).floor().long().sort().values
    assert (ranks - torch.arange(1000)).abs().max() <= 1


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_orthogonalize_evens_out_singular_values(shape):
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices, steps=8))
    assert values.min() > 0.6 and values.max() < 1.3


def test_muon_learns_a_linear_map():
    torch.manual_seed(0)
    target, weight = torch.randn(8, 8), torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = Muon([weight], lr=0.05)
    for _ in range(300):
        loss = (weight - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05
    with pytest.raises(ValueError, match="matrices"):
        Muon([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: None)


def test_checkpoint_survives_a_kill_between_its_two_renames(tmp_path):
    folder = tmp_path / "checkpoint"
    assert load_checkpoint(folder) is None
    save_checkpoint(folder, 5, {"weight": torch.ones(2)}, {"optimizer": {"lr": 0.1}})
    save_checkpoint(folder, 6, {"weight": torch.zeros(2)}, {"optimizer": {"lr": 0.1}})
    folder.rename(tmp_path / "checkpoint.old")
    tensors, state = load_checkpoint(folder)
    assert state["step"] == 6 and tensors["weight"].eq(0).all()
