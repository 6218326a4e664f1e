# SPDX-License-Identifier: Apache-2.0
"""Bounds of what visitors may ask for."""

import math

import pytest

from mhla_hf.app.limits import Limits, check_number, check_text, check_whole


@pytest.mark.parametrize(
    "value", [0, 51, 2.5, math.nan, math.inf, True, None, "7", [7], pytest.param(10**400, id="long")]
)
def test_whole_numbers_out_of_bounds_are_refused(value):
    with pytest.raises(ValueError, match="Steps must be a whole number from 1 to 50") as error:
        check_whole("Steps", value, 1, 50)
    assert len(str(error.value)) < 150


def test_whole_numbers_may_have_a_step():
    assert check_whole("Frames", 17.0, 1, 33, step=4) == 17
    with pytest.raises(ValueError, match="Frames must be 1 plus a multiple of 4, not 18"):
        check_whole("Frames", 18, 1, 33, step=4)


@pytest.mark.parametrize("value", [-0.1, 30.1, math.nan, "4", None, False])
def test_numbers_out_of_bounds_are_refused(value):
    with pytest.raises(ValueError, match="Guidance must be a number from 0 to 30"):
        check_number("Guidance", value, 30.0)
    assert check_number("Guidance", 4, 30.0) == 4.0


@pytest.mark.parametrize(
    "value, message", [("", "not empty"), (" \n", "not empty"), (7, "text"), ("a" * 11, "11 char")]
)
def test_texts_out_of_bounds_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        check_text("Prompt", value, 10)


@pytest.mark.parametrize("name", ["steps", "pixels", "frames", "prompt", "new_tokens", "seconds", "queue"])
@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "8"])
def test_limits_are_positive(name, value):
    with pytest.raises(ValueError, match=f"limit {name}="):
        Limits(**{name: value})


def test_sizes_follow_the_model_unless_they_are_given():
    assert Limits().pixels_for(480, 832) == 480 * 832
    assert Limits().pixels_for(None, None) == Limits().pixels_for(64, 64) == 256 * 256
    assert Limits(pixels=1000).pixels_for(480, 832) == 1000
    assert (Limits().frames_for(81), Limits().frames_for(17), Limits(frames=5).frames_for(81)) == (81, 33, 5)
