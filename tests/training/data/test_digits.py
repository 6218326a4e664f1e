# SPDX-License-Identifier: Apache-2.0
"""Moving digits: determinism, captions, motion, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mhla_hf.training.data.digits import (
    DIRECTIONS,
    MovingDigits,
    MovingDigitsConfig,
    digit_videos,
    frames_to_tensor,
    load_scans,
    stack_videos,
)


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
        # Nothing leaves the image: the amount of white stays the same.
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


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="split='test' is not one of 'train', 'held_out'"):
        MovingDigits("test", 1)
    with pytest.raises(IndexError):
        MovingDigits("train", 2)[2]


def test_samples_for_training():
    samples = digit_videos(2, 32, 5)
    example = MovingDigits("train", 2, config=MovingDigitsConfig(num_frames=5, size=32, digit_size=14))[1]
    assert samples[1].condition == example.caption and torch.equal(samples[1].load(), example.tensor())
