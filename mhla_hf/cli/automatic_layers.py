# SPDX-License-Identifier: Apache-2.0
"""`--layers auto:2/3`: which layers become MHLA is found out on a probe."""

import re
from collections.abc import Mapping
from typing import Any


AUTO = "auto:"


def automatic_layers(
    text: str,
    source: str,
    mhla: Mapping[str, Any],
    *,
    component: str | None,
    data: str | None,
    hub: Mapping[str, Any],
    quiet: bool,
) -> str:
    """The layers that become MHLA, as `--layers` takes them.

    Args:
        text: What was typed, `auto:p/q`: q - p of each q layers are kept softmax.
        source: The softmax model.
        mhla: Options of the conversion.
        component: Which transformer of a pipeline.
        data: See `mhla-hf calibrate`.
        hub: Where on the Hub the source is.
        quiet: Show no progress.

    Raises:
        ValueError: If it is no such fraction, or layers cannot be selected for the source.
    """
    from ..recovery.selection import select_layers_of
    from .calibrate import batch_progress

    match = re.fullmatch(r"(\d{1,9})\s*/\s*(\d{1,9})", text.strip().removeprefix(AUTO).strip())
    if match is None or not 0 < int(match[1]) < int(match[2]):
        raise ValueError(f"layers={text!r:.100} must be auto: and a fraction between 0 and 1, such as auto:2/3.")
    keep = 1 - int(match[1]) / int(match[2])
    with batch_progress("selecting layers", not quiet) as progress:
        report = select_layers_of(source, mhla, component=component, data=data, hub=hub, keep=keep, progress=progress)
    return report.option
