# SPDX-License-Identifier: Apache-2.0
"""The small Flux of digits with captions: pretrained, recovered by the command, and measured, at tiny size."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from benchmarks import captions


QUICK = "--samples 4 --held-out 1 --calibrate-batches 2 --calibrate-fit-steps 2 --match-steps 2 --match-batches 2"


def test_captions_name_what_is_painted():
    images, words = captions.canvases(40, "train", 0)
    assert images.shape == (40, 3, 24, 24)
    for image, caption in zip(images[:, 0], words):
        *named, style = caption.split()
        background = 1.0 if style == "inverted" else -1.0
        painted = {place for place in range(4) if (quadrant(image, place) != background).any()}
        assert painted == {captions.PLACES.index(place) for place in named[1::2]}
        assert style != "dim" or image.max() <= 0


def quadrant(image: torch.Tensor, place: int) -> torch.Tensor:
    row, column = divmod(place, 2)
    return image[12 * row : 12 * row + 12, 12 * column : 12 * column + 12]


@pytest.mark.slow
def test_the_experiment_at_tiny_size(tmp_path):
    options = [*QUICK.split(), "--blockwise-steps", "2", "--blockwise-batches", "2"]
    facts = captions.run(
        tmp_path / "work", seeds=1, steps=2, distill_steps=2, variants=["softmax", "linear"], results=tmp_path,
        options=options, vae_steps=2, images=32, width=48,
    )  # fmt: skip
    assert json.loads((tmp_path / "captions.json").read_text())["recoveries"] == facts["recoveries"]
    assert (tmp_path / "captions_samples.png").stat().st_size > 1000
    for runs in facts["recoveries"].values():
        assert set(runs[0]) == set(captions.STAGES)
        assert all(np.isfinite(list(figures.values())).all() for figures in runs[0].values())
    assert set(facts["distilled"]) == set(captions.DISTILLED)
    # The weights of each stage were measured, not those of one of them.
    found = [figures["output"] for figures in facts["recoveries"]["softmax"][0].values()]
    assert len(set(found)) == len(captions.STAGES)
