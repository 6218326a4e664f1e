# SPDX-License-Identifier: Apache-2.0
"""The model card of the demo's pipeline, as the Hub shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..training.data.digits import MovingDigitsConfig


_CARD = """---
license: apache-2.0
library_name: diffusers
pipeline_tag: text-to-video
tags:
- mhla
- linear-attention
- wan
- diffusers
widget:
- text: {prompt}
  output:
    url: sample.gif
---

# Moving digits, Wan with MHLA

A very small text-to-video pipeline of the Wan family ({parameters:,} parameters in the transformer) whose
self-attention is Multi-Head Linear Attention (MHLA, [arXiv 2601.07832](https://arxiv.org/abs/2601.07832)). It makes
videos of {frames} frames of {size}×{size} pixels in which handwritten digits move. It shows that a conversion from
softmax attention works; it is of no other use.

![Softmax, MHLA and linear attention side by side](sample.gif)

## Use

```python
import mhla_hf  # registers the MHLA model with diffusers
from diffusers import DiffusionPipeline
from diffusers.utils import export_to_video

pipe = DiffusionPipeline.from_pretrained("path/or/repository")
video = pipe("{prompt}", height={size}, width={size}, num_frames={frames}, num_inference_steps={inference_steps},
             guidance_scale={guidance}).frames[0]
export_to_video(video, "digits.mp4", fps=8)
```

Captions are "a *digit* moves *direction*", up to four of them joined by "and"; digits are `zero` to `nine`, directions
`left`, `right`, `up`, `down`. Without `import mhla_hf` diffusers does not know the transformer's class.

## Training

The softmax pipeline was trained on videos made from the scans in scikit-learn's `load_digits`. It was converted to
MHLA with {blocks} blocks on a grid of 5×8×8 tokens ({what}).
Then it was calibrated in closed form, had {match_steps} steps that match each layer's output to the softmax model's
(batch {match_batch_size}) and {distill_steps} steps of distilling that model's prediction (batch
{distill_batch_size}), with seed {seed}. `conversion.json` says what was copied, initialised and trained.

## Evaluation

Flow-matching loss on held-out scans, the same noise for all models:

| model | loss | above softmax |
|---|---|---|
| softmax | {softmax:.4f} | |
| this one | {mhla:.4f} | {mhla_above:+.2f} % |
| the same with a softmax window beside MHLA | {window:.4f} | {window_above:+.2f} % |
| the same with vanilla linear attention | {linear:.4f} | {linear_above:+.2f} % |
"""


def converted_layers(options: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """Which layers were converted and how, in words; `options` and `recipe` as in `report.json`."""
    layers, mhla = options["layers"], recipe["mhla"]
    which = "every layer" if layers == "all" else f"layers {layers}; the others stay softmax"
    if mhla.get("lepe_kernel") is not None:
        which += f"; depthwise convolution of the values, kernel {mhla['lepe_kernel']}"
    return f"{which}; feature map {mhla.get('feature_map', 'relu')}"


def model_card(report: dict[str, Any]) -> str:
    """Write the model card from the demo's report.

    Args:
        report: As in `report.json`.

    Returns:
        Markdown with the Hub's metadata on top.
    """
    options, recipe, appearance = report["options"], report["recipe"], MovingDigitsConfig()
    last = {name: entry["held_out"]["distill"] for name, entry in report["variants"].items()}
    return _CARD.format(
        prompt=options["prompts"][0],
        parameters=report["variants"]["mhla"]["parameters"],
        frames=appearance.num_frames,
        size=appearance.size,
        inference_steps=options["inference_steps"],
        guidance=options["guidance"],
        blocks="×".join(str(count) for count in options["blocks"]),
        what=converted_layers(options, recipe),
        match_steps=recipe["match"]["steps"],
        match_batch_size=recipe["match"]["batch_size"],
        distill_steps=recipe["distill"]["steps"],
        distill_batch_size=recipe["distill"]["batch_size"],
        seed=report["seed"],
        softmax=report["softmax"]["held_out_loss"],
        mhla=last["mhla"]["loss"],
        mhla_above=last["mhla"]["above_softmax_percent"],
        window=last["mhla_window"]["loss"],
        window_above=last["mhla_window"]["above_softmax_percent"],
        linear=last["linear"]["loss"],
        linear_above=last["linear"]["above_softmax_percent"],
    )
