# SPDX-License-Identifier: Apache-2.0
"""Draws the images of the documentation into `docs/images`.

python docs/scripts/make_images.py                     # those that need the package only
python docs/scripts/make_images.py --demo demo-output  # also those of a finished `make demo`

With `--demo` it keeps the demo's report as `benchmarks/results/demo.json`, from which `python -m benchmarks.overview`
then draws the overview: all figures of the demo in README and pictures come from one run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from PIL import Image

from mhla_hf import BlockLayout, MHLAConfig, convert
from mhla_hf.analysis import LayerTokens, effective_rank, layer_tokens, numerical_rank, singular_values
from mhla_hf.demo import base_pipeline_directory
from mhla_hf.layers import initial_mixing
from mhla_hf.training.data.probes import pipeline_batches
from mhla_hf.utils.files import read_json, write_json


ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT))
from benchmarks import overview  # noqa: E402


PALETTE = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2"]
INK = "#333333"
DPI = 110
LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
TITLES = {
    "softmax": "softmax (original)",
    "mhla": "MHLA",
    "mhla_window": "MHLA + window",
    "linear": "linear attention",
}
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_WAYS = ("down", "right", "up", "left")
CAPTIONS = [
    f"a {digit} moves {_WAYS[(number + turn) % 4]}" for turn in range(3) for number, digit in enumerate(_DIGITS)
]
"""Every digit, moving three ways."""
SHOWN = (2, 20, 26)
"""Captions whose original is easy to recognise: two that linear attention fails, and one that all copies fail."""


def new_figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, name: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    figure.savefig(IMAGES / name, dpi=DPI, facecolor="white")
    # A palette keeps the files small.
    Image.open(IMAGES / name).convert("RGB").quantize(256).save(IMAGES / name, optimize=True)


def hide_ticks(*all_axes: Axes) -> None:
    for axes in all_axes:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)


ROOMS = [
    ("cli", "commands and their options"),
    ("app", "side by side in the browser"),
    ("bench  demo", "timings; the built-in example"),
    ("hub", "checks, model card, push"),
    ("recovery  analysis  lora_check", "stages of recover; what layers learned"),
    ("training", "trainer, objectives, data, matching"),
    ("conversion", "plan, write, report; foreign formats"),
    ("pipelines", "load_pipeline, convert in memory"),
    ("integrations", "how other libraries learn of MHLA"),
    ("presets", "models of the paper by name"),
    ("families", "a file for each family of diffusion models"),
    ("models", "shared parts, registry, model directories"),
    ("layers", "MHLA, which owns the new parameters"),
    ("config", "MHLAConfig"),
    ("ops", "mhla_attention and its kernels"),
    ("layouts", "how tokens form blocks"),
    ("utils", "files, options, other libraries' internals"),
]
"""Packages from the top down: each imports those below it alone, and those of one row do not import each other."""

ROUTES = {
    "Generate": {
        "pipelines": "load_pipeline",
        "integrations": "from_pretrained",
        "models": "build, load weights",
        "layers": "MHLA.forward",
        "ops": "block summaries, mixed",
    },
    "Convert": {
        "cli": "mhla-hf convert",
        "conversion": "plan, copy, initialise",
        "models": "open the original",
        "layers": "initial mixing",
        "utils": "write beside, move",
    },
    "Recover": {
        "cli": "mhla-hf recover",
        "hub": "card, push",
        "recovery  analysis  lora_check": "convert, calibrate",
        "training": "match, distil, fine-tune",
        "models": "model and its original",
        "ops": "forward and backward",
    },
}


def draw_architecture(name: str) -> None:
    """Draw the packages by level, and the ways of data through them."""
    figure = new_figure(11.0, 7.8)
    axes = figure.subplots()
    rows = {room: row for row, (room, _) in enumerate(ROOMS)}
    for room, row in rows.items():
        axes.add_patch(Rectangle((0, row + 0.06), 5.0, 0.88, color="#e9edf2", linewidth=0))
        axes.text(0.12, row + 0.32, room, va="center", family="monospace", fontsize=9.5, color=INK, weight="bold")
        axes.text(0.12, row + 0.7, ROOMS[row][1], va="center", fontsize=8, color=INK)
        axes.axhline(row + 0.5, xmin=0.43, color="#eeeeee", linewidth=0.8, zorder=0)
    for column, (route, steps) in enumerate(ROUTES.items()):
        x, colour = 5.4 + 2.5 * column, PALETTE[column]
        places = sorted(rows[room] for room in steps)
        axes.plot([x, x], [places[0] + 0.5, places[-1] + 0.5], color=colour, linewidth=3, alpha=0.5)
        axes.text(x - 0.12, -0.25, route, fontsize=11, color=colour, weight="bold")
        for room, step in steps.items():
            axes.plot(x, rows[room] + 0.5, "o", color=colour, markersize=8)
            axes.text(x + 0.18, rows[room] + 0.5, step, va="center", fontsize=9, color=INK, bbox=LABEL_BOX)
    axes.annotate("", (-0.25, 16.9), (-0.25, 0.1), arrowprops={"arrowstyle": "->", "color": INK})
    axes.text(-0.5, 8.5, "imports go down only", rotation=90, ha="center", va="center", fontsize=9, color=INK)
    axes.set(xlim=(-0.7, 12.6), ylim=(17.1, -0.7))
    hide_ticks(axes)
    save(figure, name)


def draw_blocks(name: str) -> None:
    """Token grids cut into blocks: one that the blocks divide, and one that they do not."""
    figure = new_figure(8.4, 3.0)
    cases = [
        ((9, 15), (3, 5), "9 × 15 tokens in 3 × 5 blocks"),
        ((9, 17), (3, 5), "9 × 17 tokens: blocks of 3 or 4 columns"),
    ]
    for axes, (grid, blocks, title) in zip(figure.subplots(1, 2, width_ratios=[15, 17]), cases):
        layout = BlockLayout(grid=grid, blocks=blocks)
        block = layout.block_of_token.reshape(grid).numpy()
        for row, column in np.ndindex(grid):
            place = np.unravel_index(block[row, column], blocks)
            shade = PALETTE[(place[0] * 2 + place[1]) % len(PALETTE)]
            axes.add_patch(Rectangle((column + 0.06, row + 0.06), 0.88, 0.88, color=shade, alpha=0.75, linewidth=0))
        axes.set(xlim=(0, grid[1]), ylim=(grid[0], 0), aspect="equal")
        axes.set_title(title, fontsize=10, color=INK)
        hide_ticks(axes)
    save(figure, name)


def draw_summaries(name: str) -> None:
    """The path of a query: keys and values into summaries of blocks, mixed for the query's block."""
    figure = new_figure(9.0, 3.5)
    axes = figure.subplots()
    weights = initial_mixing(MHLAConfig(mixing_range=3.0), (6,))[2].numpy()
    for block in range(6):
        top = block * 1.1
        for token in range(4):
            axes.add_patch(Rectangle((token * 0.5, top), 0.44, 0.8, color=PALETTE[block], alpha=0.75, linewidth=0))
        axes.add_patch(
            FancyArrowPatch((2.15, top + 0.4), (3.3, top + 0.4), arrowstyle="->", mutation_scale=10, color=INK)
        )
        axes.add_patch(Rectangle((3.4, top), 0.8, 0.8, color=PALETTE[block], linewidth=0))
        axes.text(3.8, top + 0.4, f"$S_{block + 1}$", ha="center", va="center", color="white", fontsize=11)
        width = 0.4 + 9 * weights[block]
        axes.add_patch(
            FancyArrowPatch(
                (4.3, top + 0.4), (7.0, 2.6), arrowstyle="-", linewidth=width, color=PALETTE[block], alpha=0.8
            )
        )
        axes.text(
            4.75,
            top + 0.5 + 0.18 * (2 - block),
            f"$m_{{3,{block + 1}}}$ = {weights[block]:.2f}",
            fontsize=9.5,
            color=INK,
            bbox=LABEL_BOX,
        )
    axes.add_patch(Rectangle((7.0, 2.1), 1.0, 1.0, color=PALETTE[2], linewidth=0))
    axes.text(7.5, 2.6, r"$\tilde{S}_3$", ha="center", va="center", color="white", fontsize=13)
    axes.add_patch(FancyArrowPatch((8.1, 2.6), (9.4, 2.6), arrowstyle="->", mutation_scale=12, color=INK))
    axes.text(8.75, 2.35, r"$\varphi(q_t)^\top \tilde{S}_3$", ha="center", fontsize=10, color=INK)
    for token in range(4):
        axes.add_patch(Rectangle((9.5 + token * 0.5, 2.2), 0.44, 0.8, color=PALETTE[2], alpha=0.75, linewidth=0))
    for x, text in (
        (1.0, "keys and values\nin 6 blocks"),
        (3.8, "summaries"),
        (5.6, "mixing weights\nof block 3"),
        (7.5, "its mixture"),
        (10.5, "outputs of the\nqueries in block 3"),
    ):
        axes.text(x, -0.35, text, ha="center", va="bottom", fontsize=10.5, color=INK)
    axes.set(xlim=(-0.2, 11.8), ylim=(6.6, -1.4))
    hide_ticks(axes)
    save(figure, name)


def draw_initial_mixing(name: str) -> None:
    """The values of `mixing_init`: the row of one block of a line, and the whole matrix of a grid for the default."""
    figure = new_figure(9.0, 3.2)
    left, right = figure.subplots(1, 2, width_ratios=[2, 1])
    for kind in ("linear", "cos", "exp", "gaussian", "local", "uniform"):
        weights = initial_mixing(MHLAConfig(mixing_init=kind), (15,))[5].numpy()
        left.plot(range(1, 16), weights, marker="o", markersize=3, label=kind)
    left.set(xlabel="block b", ylabel="weight for the queries of block 6", xticks=range(1, 16, 2))
    left.legend(frameon=False, fontsize=8)
    left.spines[["top", "right"]].set_visible(False)
    right.imshow(initial_mixing(MHLAConfig(), (4, 4)).numpy(), cmap="Blues", vmin=0)
    right.set_title('"linear" on 4 × 4 blocks', fontsize=10, color=INK)
    right.set(xlabel="block b", ylabel="block i of the query", xticks=[], yticks=[])
    save(figure, name)


def draw_attention(name: str, layer: int = 1, head: int = 1) -> None:
    """Attention matrices of softmax, linear attention and MHLA, for queries and keys of the demo's original model."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(base_pipeline_directory())
    convert(pipe, MHLAConfig(blocks=(5, 4, 4)))
    probe = pipeline_batches(
        pipe, samples=4, steps=8, prompts=["a zero moves down"], height=64, width=64, num_frames=17
    )
    found: list[LayerTokens] = []
    hook = pipe.transformer.mhla_modules()[layer].register_forward_hook(
        lambda module, args, kwargs, output: found.extend(layer_tokens(module, *args, **kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        pipe.transformer(**probe["transformer"][0])
    hook.remove()
    (tokens, *_), frame, scale = found, 64, 3
    # Each weight is a square of `scale` pixels: matrices shrunk to fit would show patterns that are not there.
    width, height = 1040, 790
    figure = Figure(figsize=(width / DPI, height / DPI))
    FigureCanvasAgg(figure)
    queries = slice(2 * frame, 3 * frame)
    size = (scale * tokens.num_tokens / width, scale * frame / height)
    titles = (("original", "softmax"), ("mhla", "MHLA"), ("linear", "linear"))
    for row, (kind, title) in enumerate(titles):
        matrix = tokens.matrix(kind, head=head)
        singular = singular_values(matrix)
        rank, effective = numerical_rank(singular), effective_rank(singular)
        axes = figure.add_axes((30 / width, 1 - (30 + row * 232 + scale * frame) / height, *size))
        weights = matrix[queries].clamp_min(1e-5).log10()
        image = axes.imshow(weights, vmin=-5, vmax=-1, cmap="magma", interpolation="nearest", aspect="auto")
        words = f"{title}: rank {rank}, effective rank {effective:.0f} of {tokens.num_tokens}"
        axes.set_title(words, fontsize=11, color=INK, loc="left")
        for edge in range(frame, tokens.num_tokens, frame):
            axes.axvline(edge - 0.5, color="white", linewidth=1)
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel("queries", fontsize=9)
    places = [frame * (number + 0.5) for number in range(tokens.num_tokens // frame)]
    axes.set_xticks(places, [f"keys of frame {number}" for number in range(len(places))])
    axes.tick_params(length=0, labelsize=9)
    bar = figure.colorbar(
        image, cax=figure.add_axes((590 / width, 46 / height, 400 / width, 14 / height)), orientation="horizontal"
    )
    bar.set_label("weight", fontsize=9)
    bar.set_ticks([-5, -4, -3, -2, -1], labels=["≤ 0.00001", "0.0001", "0.001", "0.01", "≥ 0.1"], fontsize=9)
    figure.text(
        30 / width, 48 / height, "Queries of frame 2 of a video of 5 frames of 8 × 8 tokens", fontsize=9, color=INK
    )
    save(figure, name)


def draw_token_weights(name: str) -> None:
    """The mixing weight of every pair of tokens, in both directions and causal."""
    figure = new_figure(8.0, 3.6)
    panels = figure.subplots(1, 2)
    weights = initial_mixing(MHLAConfig(mixing_range=3.0), (6,))
    tokens = weights.repeat_interleave(4, 0).repeat_interleave(4, 1).numpy()
    causal = np.where(np.tri(24, dtype=bool), tokens, np.nan)
    for axes, matrix, title in ((panels[0], tokens, "both directions"), (panels[1], causal, "causal")):
        image = axes.imshow(matrix, cmap="Blues", vmin=0)
        axes.set_title(title, fontsize=10, color=INK)
        for edge in range(4, 24, 4):
            axes.axhline(edge - 0.5, color="white", linewidth=1.5)
            axes.axvline(edge - 0.5, color="white", linewidth=1.5)
        places = [1.5 + 4 * block for block in range(6)]
        axes.set_xticks(places, [f"{block + 1}" for block in range(6)])
        axes.set_yticks(places, [f"{block + 1}" for block in range(6)])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("key token j, by block b")
    panels[0].set_ylabel("query token t, by block i")
    figure.colorbar(image, ax=list(panels), label="$m_{ib}$", fraction=0.03)
    save(figure, name)


def draw_learned_mixing(demo: Path, name: str) -> None:
    """Heat maps of what the layers of the demo's MHLA model learned for the queries of the block in the middle."""
    from diffusers import DiffusionPipeline

    model = DiffusionPipeline.from_pretrained(demo / "mhla").transformer
    grid = model.mhla_config.grid
    modules = model.mhla_modules()
    figure = new_figure(8.4, 1.75 * len(modules) + 0.3)
    panels = figure.subplots(len(modules), grid[0], squeeze=False)
    for index, (layer, module) in enumerate(modules.items()):
        row = panels[index]
        layout = module.layout_for(grid)
        mixing = module.mixing_matrix(layout).detach().float()
        mixing = mixing.mean(dim=0) if mixing.dim() == 3 else mixing
        block = int(np.ravel_multi_index([count // 2 for count in layout.blocks], layout.blocks))
        block_of_token = layout.block_of_token.reshape(grid).numpy()
        tokens = mixing[block].numpy()[block_of_token]
        limit = np.abs(tokens).max()
        for frame, axes in enumerate(row):
            image = axes.imshow(tokens[frame], cmap="RdBu_r", vmin=-limit, vmax=limit)
            own = np.argwhere(block_of_token[frame] == block)
            if len(own):
                (top, start), (bottom, end) = own.min(axis=0), own.max(axis=0)
                outline = Rectangle((start - 0.5, top - 0.5), end - start + 1, bottom - top + 1)
                outline.set(fill=False, edgecolor="black", linewidth=2)
                axes.add_patch(outline)
            if index == 0:
                axes.set_title(f"latent frame {frame}", fontsize=9, color=INK)
        hide_ticks(*row)
        row[0].set_ylabel(f"layer {layer}", fontsize=9, color=INK)
        figure.colorbar(image, ax=list(row), fraction=0.02)
    save(figure, name)


def generate_videos(demo: Path, model: str) -> np.ndarray:
    """Videos `[30, F, H, W, 3]` uint8 for `CAPTIONS`, by the demo's base (`softmax`) or one of its copies."""
    from diffusers import DiffusionPipeline

    folder = base_pipeline_directory() if model == "softmax" else demo / model
    pipe = DiffusionPipeline.from_pretrained(folder, use_safetensors=True)
    pipe.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 20, "guidance_scale": 4.0, "height": 64, "width": 64, "num_frames": 17}
    videos = []
    for first in range(0, len(CAPTIONS), 5):
        # A seed for each digit, others for each turn.
        seeds = [100 * (number // 10) + number % 10 for number in range(first, first + 5)]
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        captions = CAPTIONS[first : first + 5]
        videos.append(pipe(captions, generator=generators, max_sequence_length=32, **options).frames)
    return np.rint(np.concatenate(videos) * 255.0).clip(0, 255).astype(np.uint8)


def draw_side_by_side(demo: Path, name: str, frames: tuple[int, ...] = (8, 16), scale: int = 3) -> None:
    """Frames of videos by the demo's models, a row for each; takes five minutes on one core.

    Under them stands for how many of all captions a copy comes closer to softmax's video than linear attention.
    """
    from PIL import ImageDraw, ImageFont

    report = read_json(demo / "report.json", "the demo's report:")
    losses = overview.final_losses(report)
    videos = {model: generate_videos(demo, model) for model in TITLES}
    exact = videos["softmax"].astype(np.float32)
    errors = {model: ((video - exact) ** 2).mean(axis=(1, 2, 3, 4)) for model, video in videos.items()}
    closer = {model: int((errors[model] < errors["linear"]).sum()) for model in ("mhla", "mhla_window")}
    side, label, gap, header, footer = 64 * scale, 250, 18, 40, 76
    text, small = ImageFont.load_default(size=25), ImageFont.load_default(size=21)
    band = len(frames) * (side + 4) + gap
    canvas = Image.new("RGB", (label + len(SHOWN) * band, header + len(videos) * (side + 4) + footer), "white")
    draw = ImageDraw.Draw(canvas)
    for row, (model, title) in enumerate(TITLES.items()):
        top = header + row * (side + 4)
        draw.text((label - 16, top + side / 2 - 16), title, INK, text, anchor="rm")
        if model != "softmax":
            above = f"loss {losses[model]} %"
            draw.text((label - 16, top + side / 2 + 18), above, INK, small, anchor="rm")
        for number, caption in enumerate(SHOWN):
            for column, frame in enumerate(frames):
                picture = Image.fromarray(videos[model][caption, frame]).resize((side, side), Image.Resampling.BICUBIC)
                canvas.paste(picture, (label + number * band + column * (side + 4), top))
    for number, caption in enumerate(SHOWN):
        draw.text((label + number * band, header / 2 - 2), f"“{CAPTIONS[caption]}”", INK, text, anchor="lm")
    lines = (
        f"Frames {frames[0]} and {frames[1]} of 17. Left and middle: linear attention goes astray. "
        "Right: no copy follows softmax.",
        f"Of {len(CAPTIONS)} captions, MHLA comes closer to softmax than linear attention for {closer['mhla']}, "
        f"MHLA + window for {closer['mhla_window']} (mean squared error).",
    )
    for number, line in enumerate(lines):
        draw.text((16, canvas.height - footer + 22 + 28 * number), line, INK, small, anchor="lm")
    print(f"closer to softmax than linear attention: {closer}")
    canvas.quantize(64).save(IMAGES / name, optimize=True)
    overview.with_losses(IMAGES / name, report)
    # Where the run was written is of no interest.
    report["options"].pop("output")
    write_json(overview.RESULTS / "demo.json", report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--demo", type=Path, help="Output directory of a finished demo.")
    demo = parser.parse_args().demo
    torch.manual_seed(0)
    draw_architecture("architecture.png")
    draw_blocks("blocks.png")
    draw_summaries("summaries.png")
    draw_initial_mixing("initial_mixing.png")
    draw_token_weights("token_weights.png")
    draw_attention("attention_matrices.png")
    if demo is not None:
        draw_side_by_side(demo, "side_by_side.png")
        draw_learned_mixing(demo, "learned_mixing.png")


if __name__ == "__main__":
    main()
