# SPDX-License-Identifier: Apache-2.0
"""torch.export of a Wan model with batch and text length left open, at one size of the videos."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim, export

from tests.families.cases import WanCase
from tests.families.model_case import OPTION_SETS


SHAPES = {
    "hidden_states": {0: Dim("batch")},
    "timestep": {0: Dim("batch")},
    "encoder_hidden_states": {0: Dim("batch"), 1: Dim("text", min=2)},
}


OPTIONS = {
    "mhla": {},
    "window": {"window": "adjacent"},
    "everything": OPTION_SETS["everything"],
    "hybrid": {"layers": [1]},
}


@pytest.mark.parametrize("options", ["mhla", *[pytest.param(name, marks=pytest.mark.slow) for name in [*OPTIONS][1:]]])
def test_batch_and_text_of_videos(options):
    model = WanCase().make_mhla(**OPTIONS[options])
    program = export(model, (), WanCase().inputs(batch=2), dynamic_shapes=SHAPES, strict=False).module()
    for batch, tokens in ((1, 3), (2, 5), (3, 9)):
        inputs = WanCase().inputs(batch=batch, text_tokens=tokens)
        with torch.no_grad():
            torch.testing.assert_close(program(**inputs)[0], model(**inputs)[0], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_size_of_videos_is_refused():
    model = WanCase().make_mhla()
    shapes = {**SHAPES, "hidden_states": {0: Dim("batch"), 2: Dim("frames", min=2, max=40)}}
    with pytest.raises(torch._dynamo.exc.UserError, match="frames"):
        export(model, (), WanCase().inputs(batch=2), dynamic_shapes=shapes, strict=False)
