# SPDX-License-Identifier: Apache-2.0
"""A loss or gradient that is no number any more: which samples the step saw, and which checkpoint to go back to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from .checkpoints import Position, last_good_checkpoint


_SHOWN = 8


def divergence_error(
    what: str,
    position: Position,
    batches: Sequence[tuple[float, tuple[int, ...]]],
    dataset: Any,
    output: Path | None,
    accelerator: Accelerator,
) -> FloatingPointError:
    """What ends a run whose loss or gradient is not finite. Every process must call it.

    Args:
        what: What it is and its value, such as "loss is nan".
        position: The step that it came up in; it counts as not done.
        batches: Loss and indices of samples of this process's micro-batches.
        dataset: The data set; its `sample_name`, if it has one, says what a sample is.
        output: Directory of the run.
        accelerator: The processes.
    """
    from accelerate.utils import gather_object

    every = gather_object(list(batches))
    # Where every loss is finite and the gradient is not, any of them may be the cause.
    suspects = [indices for loss, indices in every if not math.isfinite(loss)] or [indices for _, indices in every]
    numbers = list(dict.fromkeys(index for indices in suspects for index in indices))
    name = getattr(dataset, "sample_name", str)
    samples = ", ".join(name(index) for index in numbers[:_SHOWN])
    if len(numbers) > _SHOWN:
        samples += f" and {len(numbers) - _SHOWN} more"
    if output is None:
        way_out = "nothing was saved, for there is no output"
    else:
        good = last_good_checkpoint(output / "checkpoints", position)
        way_out = "there is no good checkpoint to go back to"
        if good is not None:
            way_out = f"--resume {good.name} goes on from the last good checkpoint"
    return FloatingPointError(
        f"the {what} in {position.stage} step {position.step}, batch of sample {samples} of the data set; {way_out}; "
        "lower the learning rate if the samples are sound"
    )
