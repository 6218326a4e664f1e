# SPDX-License-Identifier: Apache-2.0
"""Buckets: sizes and lengths that the videos and images of a dataset are sorted into."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...utils.messages import shorten_value


# Buckets whose aspect ratios differ by less than this, relatively, crop about as much of an image.
_SAME_RATIO = 0.05
_MOST_BUCKETS = 100


@dataclass(frozen=True)
class Bucket:
    """A size in pixels, and of videos the number of frames; 1 for images."""

    height: int
    width: int
    num_frames: int = 1

    def __str__(self) -> str:
        return f"{self.height},{self.width}" + (f",{self.num_frames}" if self.num_frames > 1 else "")


def parse_buckets(text: str, num_frames: int = 1) -> tuple[Bucket, ...]:
    """Buckets from `"height,width;height,width"`, as diffusers' training scripts have it; of videos with the frames.

    Args:
        text: The buckets, `"480,832,81;832,480,81"` for videos.
        num_frames: Frames of those that do not say.

    Raises:
        ValueError: If the text is of another form, or names a bucket twice.
    """
    parts = [part.strip() for part in text.strip().strip(";").split(";")]
    if len(parts) > _MOST_BUCKETS:
        raise ValueError(f"buckets must be at most {_MOST_BUCKETS}, got {len(parts)}")
    found = []
    for part in parts:
        match = re.fullmatch(r"(\d{1,6})\s*,\s*(\d{1,6})(?:\s*,\s*(\d{1,6}))?", part)
        if match is None or "0" in (match[1], match[2], match[3]):
            raise ValueError(
                "buckets must be like '480,832;832,480', height and width, or with frames '480,832,81;832,480,49', "
                f"got {shorten_value(part)}"
            )
        found.append(Bucket(int(match[1]), int(match[2]), int(match[3] or num_frames)))
    twice = next((bucket for bucket in found if found.count(bucket) > 1), None)
    if twice is not None:
        raise ValueError(f"buckets has {twice} twice")
    return tuple(found)


def nearest_bucket(buckets: Sequence[Bucket], height: int, width: int, num_frames: int = 1) -> Bucket | None:
    """The bucket for an image or video.

    The aspect ratio comes first. Of buckets with about the nearest one, it is one of those with most frames among
    those that have no more than the video; of these the largest that enlarges nothing, and else the smallest.

    Args:
        buckets: To choose from.
        height: Height of the image or video.
        width: Its width.
        num_frames: Number of frames.

    Returns:
        None if the video is too short for the buckets of its aspect ratio.
    """

    def crop(bucket: Bucket) -> float:
        return abs(math.log(bucket.height / bucket.width) - math.log(height / width))

    nearest = min(map(crop, buckets))
    shaped = [bucket for bucket in buckets if crop(bucket) <= nearest + math.log1p(_SAME_RATIO)]
    long_enough = [bucket for bucket in shaped if bucket.num_frames <= num_frames]
    if not long_enough:
        return None
    most = max(bucket.num_frames for bucket in long_enough)
    candidates = [bucket for bucket in long_enough if bucket.num_frames == most]
    fitting = [bucket for bucket in candidates if bucket.height <= height and bucket.width <= width]
    by_area = {bucket.height * bucket.width: bucket for bucket in reversed(fitting or candidates)}
    return by_area[max(by_area) if fitting else min(by_area)]
