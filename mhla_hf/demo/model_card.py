# SPDX-License-Identifier: Apache-2.0
"""Model card of the demo's pipeline, as the Hub shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from ..training.data.digits import MovingDigitsConfig
from .figures import TITLES


_TEXT = """
# Moving digits, Wan with MHLA

A very small text-to-video pipeline of the Wan family ({parameters:,} parameters in the transformer) whose
self-attention is Multi-Head Linear Attention (MHLA, [arXiv 2601.07832](https://arxiv.org/abs/2601.07832)). Its videos
of {frames} frames of {size}×{size} pixels show moving handwritten digits. It demonstrates the conversion from softmax
attention and has no other use.

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
MHLA with {blocks} blocks on a grid of 5×8×8 tokens ({layers}).
It was then calibrated in closed form, matched to the output of each softmax layer for {match[steps]} steps (batch
{match[batch_size]}) and distilled from the softmax model's prediction for {distill[steps]} steps (batch
{distill[batch_size]}), with seed {seed}. `conversion.json` lists the copied, initialised and trained weights.

## Evaluation

Flow-matching loss on held-out scans, with the same noise for all models:

{table}
"""


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def converted_layers(options: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """Description of the converted layers; `options` and `recipe` as in `report.json`."""
    layers, mhla = options["layers"], recipe["mhla"]
    text = "every layer" if layers == "all" else f"layers {layers}; the others stay softmax"
    if mhla.get("lepe_kernel") is not None:
        text += f"; depthwise convolution of the values, kernel {mhla['lepe_kernel']}"
    return f"{text}; feature map {mhla.get('feature_map', 'relu')}"


def model_card(report: dict[str, Any]) -> ModelCard:
    """Builds the model card from the demo's report, the dictionary of `report.json`."""
    options, recipe, appearance = report["options"], report["recipe"], MovingDigitsConfig()
    prompt, softmax = options["prompts"][0], report["softmax"]["held_out_loss"]
    losses = {name: entry["held_out"]["distill"] for name, entry in report["variants"].items()}
    rows = [["softmax", f"{softmax:.4f}", ""]]
    for name, figures in losses.items():
        title = f"{TITLES[name]} (this model)" if name == "mhla" else TITLES[name]
        rows.append([title, f"{figures['loss']:.4f}", f"{figures['above_softmax_percent']:+.2f} %"])
    data = ModelCardData(
        license="apache-2.0",
        library_name="diffusers",
        pipeline_tag="text-to-video",
        tags=["mhla", "linear-attention", "wan", "diffusers"],
        model_name="Moving digits, Wan with MHLA",
        eval_results=[
            EvalResult(
                task_type="text-to-video",
                dataset_type="digits",
                dataset_name="Moving digits of scikit-learn's load_digits",
                dataset_split="held-out scans",
                metric_type="loss",
                metric_name="Flow-matching loss",
                metric_value=round(losses["mhla"]["loss"], 4),
            )
        ],
        widget=[{"text": prompt, "output": {"url": "sample.gif"}}],
    )
    text = _TEXT.format(
        prompt=prompt,
        parameters=report["variants"]["mhla"]["parameters"],
        frames=appearance.num_frames,
        size=appearance.size,
        inference_steps=options["inference_steps"],
        guidance=options["guidance"],
        blocks="×".join(str(count) for count in options["blocks"]),
        layers=converted_layers(options, recipe),
        match=recipe["match"],
        distill=recipe["distill"],
        seed=report["seed"],
        table=markdown_table(("model", "loss", "above softmax"), rows),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n{text}")
