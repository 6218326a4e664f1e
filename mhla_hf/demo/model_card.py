# SPDX-License-Identifier: Apache-2.0
"""The model card of the demo's pipeline, as the Hub shows it."""

from __future__ import annotations

from typing import Any

from .digits import MovingDigitsConfig


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
Then it had {transfer_steps} steps that match each layer's attention output to the softmax model's (batch
{transfer_batch_size}) and {steps} steps of fine-tuning (batch {batch_size}), with seed {seed}. `conversion.json` says
what was copied and what initialised, `training.json` how it was fine-tuned.

## Evaluation

Flow-matching loss on held-out scans, the same noise for all models:

| model | loss | above softmax |
|---|---|---|
| softmax | {softmax:.4f} | |
| this one | {mhla:.4f} | {mhla_above:+.2f} % |
| the same with vanilla linear attention | {linear:.4f} | {linear_above:+.2f} % |
"""


def converted_layers(options: dict[str, Any]) -> str:
    """Which layers were converted and with what convolution, in words; `options` as in `report.json`."""
    layers, kernel = options["layers"], options["lepe_kernel"]
    which = "every layer" if layers == "all" else f"layers {layers}; the others stay softmax"
    return which if kernel is None else f"{which}; depthwise convolution of the values, kernel {kernel}"


def model_card(report: dict[str, Any]) -> str:
    """Write the model card from the demo's report.

    Args:
        report: As in `report.json`.

    Returns:
        Markdown with the Hub's metadata on top.
    """
    options, appearance = report["options"], MovingDigitsConfig()
    last = {name: entry["held_out"]["finetune"] for name, entry in report["variants"].items()}
    return _CARD.format(
        prompt=options["prompts"][0],
        parameters=report["variants"]["mhla"]["parameters"],
        frames=appearance.num_frames,
        size=appearance.size,
        inference_steps=options["inference_steps"],
        guidance=options["guidance"],
        blocks="×".join(str(count) for count in options["blocks"]),
        what=converted_layers(options),
        transfer_steps=options["transfer_steps"],
        steps=options["steps"],
        transfer_batch_size=options["transfer_batch_size"],
        batch_size=options["batch_size"],
        seed=report["seed"],
        softmax=report["softmax"]["held_out_loss"],
        mhla=last["mhla"]["loss"],
        mhla_above=last["mhla"]["above_softmax_percent"],
        linear=last["linear"]["loss"],
        linear_above=last["linear"]["above_softmax_percent"],
    )
