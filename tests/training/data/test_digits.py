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
)


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


def test_samples_for_training():
    samples = digit_videos(2, 32, 5)
    example = MovingDigits("train", 2, config=MovingDigitsConfig(num_frames=5, size=32, digit_size=14))[1]
    assert samples[1].condition == example.caption and torch.equal(samples[1].load(), frames_to_tensor(example.frames))
