# SPDX-License-Identifier: Apache-2.0
"""A web page that compares an MHLA model with its original: samples side by side, times, and mixing weights."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jinja2
import numpy as np
import torch
from diffusers.utils import export_to_video
from torch import nn

from . import __version__
from .analysis import mixing_summary, reference_layout
from .analysis.plots import mixing_parts
from .analysis.statistics import middle_block
from .conversion import convert_pretrained
from .demo.config import BLOCKS, GRID, DemoConfig, base_pipeline_directory
from .demo.config import PROMPTS as DEMO_PROMPTS
from .hub.card import Records
from .models.directory import ModelDirectory
from .models.registry import MHLA_CLASSES
from .models.stub import TAGS
from .pipelines import load_pipeline
from .recovery.calibration import calibrate_directory
from .recovery.recipes import default_recipe
from .training.data.probes import PROMPTS, pipeline_size, sample_size
from .training.layers import mhla_layers
from .utils.destinations import claim_destination
from .utils.figures import figure_svg
from .utils.locations import PIPELINE_INDEX, local_directory
from .utils.machine import choose_device, parse_dtype, synchronize
from .utils.messages import how_to_install, shorten_text


# gradio reads these when it is imported; the page reports nothing and keeps no history.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
os.environ.setdefault("GRADIO_RUN_HISTORY", "False")
try:
    import gradio as gr
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"gradio is not installed: {how_to_install('app')}") from error


__all__ = ["create_app", "export_space", "serve"]

DEMO_OUTPUT = Path("demo-output") / "mhla"
"""The pipeline that `mhla-hf demo` recovers, opened when no model is named."""

_TITLES = {"original": "Original", "mhla": "MHLA"}
_ALL_HEADS = "mean of all heads"
_LICENSE = "apache-2.0"
_TEMPLATES = Path(__file__).parent / "assets" / "space"
# Bounds of the sliders.
_MOST_STEPS, _MOST_NEW_TOKENS, _LONGEST_PROMPT, _WAITING = 50, 256, 1000, 8
# Models made for smaller samples may be tried at these sizes.
_USUAL_SIDE, _USUAL_FRAMES = 256, 33
_SHOWN_PIXELS, _FRAMES_PER_SECOND = 320, 8

_INTRODUCTION = """# MHLA beside {attention}

**Multi-Head Linear Attention (MHLA)** keeps one summary per block of tokens and learns how to mix them, so its cost
grows linearly with the number of tokens; that of softmax attention grows with the square.

*Generate* makes {output} with the original model and one with MHLA, from the same prompt and seed. The more alike they
are, the better MHLA stands in for {attention}.

`{name}`, converted from `{original}`{warning}
"""
_OUTPUTS = {"video": "a video", "image": "an image", "text": "a text"}
_NOT_RECOVERED = """

**Not recovered.** This model was converted but not trained afterwards; a recovered model (`mhla-hf recover`) is closer
to its original.
"""
_MIXING = """The queries of each block read a weighted sum of the summaries of all blocks. Row *i* of the matrix has
the weights for block *i*; beside it, the row of the outlined block is drawn on the token grid. Red is positive, blue
negative."""
_CSS = """
.gradio-container main { width: 100%; max-width: 1040px; margin: 0 auto !important; }
#mixing .mixing { display: flex; flex-wrap: wrap; gap: 16px; padding: 12px; border-radius: 6px; background: #fff; }
#mixing .mixing div { flex: 1 1 280px; }
#mixing .mixing div + div { flex: 2 1 280px; }
#mixing svg { display: block; width: 100%; height: auto; }
"""
_TIMES = (
    "At **{tokens:,} tokens**, a forward pass takes **{original:,.0f} ms** with {attention} and **{mhla:,.0f} ms** "
    "with MHLA: {ratio}."
)
BREAK_EVEN = {
    ("cpu", "pixels"): "at a length between 256 and 1,024 tokens (measured on one core of an AMD EPYC)",
    ("cpu", "text"): "at a length between 2,048 and 8,192 tokens (measured with a dynamic cache on one core of an AMD "
    "EPYC)",
    ("cuda", "pixels"): "at a length between 1,024 and 31,500 tokens (measured on an H100)",
}
"""Where attention with MHLA becomes faster than softmax, by device and output; from `benchmarks/README.md`."""
_BREAK_EVEN = "By itself, {what} becomes faster than with softmax {length}; `mhla-hf bench op` measures it here."
# The videos arrive one after the other; restart them together, and let the second one follow the first.
_SYNCHRONIZE = """() => {
  const [first, ...others] = document.querySelectorAll('#original video, #mhla video');
  if (!first) return;
  const follow = () => others.forEach(video => {
    if (Math.abs(video.currentTime - first.currentTime) > 0.1) video.currentTime = first.currentTime;
  });
  first.ontimeupdate = first.onseeked = follow;
  first.onpause = () => others.forEach(video => video.pause());
  first.onplay = () => others.forEach(video => video.play());
  [first, ...others].forEach(video => { video.loop = true; video.currentTime = 0; video.play(); });
}"""


class Output(NamedTuple):
    """What a model answers to a request.

    Attributes:
        value: Pixels `[(F,) H, W, 3]` uint8, or a text.
        seconds: Median time of a forward pass.
        tokens: Tokens that attention layers see: of the sample, or of the prompt and the answer.
    """

    value: Any
    seconds: float
    tokens: int


@dataclass(frozen=True)
class Comparison:
    """An MHLA model and its original, ready to generate.

    Attributes:
        name: The model as the user named it.
        location: Where the original comes from.
        kind: What they generate: `"video"`, `"image"` or `"text"`.
        attention: Attention of the original, in words.
        recovered: Whether a record says that the model was trained after its conversion.
        models: The MHLA models by component.
        sides: Pipelines of diffusers or models of transformers, under `original` and `mhla`. Pipelines share all
            components but their denoisers and schedulers.
        tokenizer: Tokenizer of language models.
        lock: Held by the request that generates.
    """

    name: str
    location: str
    kind: str
    attention: str
    recovered: bool
    models: Mapping[str, nn.Module]
    sides: Mapping[str, Any]
    tokenizer: Any = None
    lock: Any = field(default_factory=threading.Lock)


class _Stopped(Exception):
    """Ends work that its visitor has cancelled."""


def open_comparison(
    model: str | Path, original: str | Path | None = None, *, device: str | None = None, dtype: str | None = None
) -> Comparison:
    """Load an MHLA model and its original; see [`create_app`][mhla_hf.app.create_app] for arguments and errors."""
    place = choose_device(device)
    weights: Any = parse_dtype(dtype or ("float32" if place.type == "cpu" else "bfloat16"))
    directory = ModelDirectory.open(model)
    parts = {part.component: part for part in directory.select_mhla()}
    originals = {name: part.original(original) for name, part in parts.items()}
    first, part = next(iter(parts.items()))
    softmax = {name: found.load(dtype=weights).to(place).eval() for name, found in originals.items()}
    facts: dict[str, Any] = {
        "name": _shown(model),
        "location": _shown(originals[first].origin["location"]),
        "attention": f"{part.original_attention} attention",
        "recovered": Records.read(directory.root).is_trained,
    }
    if part.is_transformers:
        from transformers import AutoTokenizer, GenerationMixin

        if not issubclass(part.load_class(), GenerationMixin):
            raise ValueError(f"{model} is a {part.class_name}, which generates nothing; try mhla-hf inspect.")
        models = {first: part.load(dtype=weights).to(place).eval()}
        tokenizer = AutoTokenizer.from_pretrained(directory.root, trust_remote_code=False)
        sides = {"original": softmax[first], "mhla": models[first]}
        return Comparison(kind="text", models=models, sides=sides, tokenizer=tokenizer, **facts)
    pipeline = load_pipeline(directory.root, attn_implementation=None, torch_dtype=weights).to(place)
    scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
    # Not `from_pipe`, which casts all weights to one dtype. A setting is the noise level at which experts change.
    settings = set(inspect.signature(type(pipeline).__init__).parameters) - set(pipeline.components)
    components = {**pipeline.components, **softmax, "scheduler": scheduler}
    components |= {name: value for name, value in pipeline.config.items() if name in settings}
    pipelines: dict[str, Any] = {"original": type(pipeline)(**components), "mhla": pipeline}
    for name, side in pipelines.items():
        side.set_progress_bar_config(desc=_TITLES[name])
    models = {name: getattr(pipeline, name) for name in parts}
    return Comparison(kind=MHLA_CLASSES[part.class_name].kind, models=models, sides=pipelines, **facts)


def _shown(location: str | Path) -> str:
    """A location for the page: of a directory its name alone, since paths are private."""
    return Path(location).resolve().name if Path(location).is_dir() else str(location)


@contextmanager
def demo_model() -> Iterator[tuple[Path, Path]]:
    """The demo's pipeline and its original: the recovered one, else one that is calibrated now, in some seconds."""
    base = base_pipeline_directory()
    if (DEMO_OUTPUT / PIPELINE_INDEX).is_file():
        yield DEMO_OUTPUT, base
        return
    with TemporaryDirectory(prefix="mhla-hf-app-") as folder:
        directory = Path(folder) / "digits-mhla"
        options = {**default_recipe("wan").mhla, "grid": GRID, "blocks": BLOCKS}
        convert_pretrained(base, directory, options, layers=DemoConfig.layers, progress=False)
        calibrate_directory(directory, prompts=list(DEMO_PROMPTS), samples=16, steps=4)
        yield directory, base


def _slider(label: str, least: float, most: float, value: float, step: float = 1) -> Any:
    precision = 0 if isinstance(step, int) else None
    return gr.Slider(least, most, value, step=step, precision=precision, label=label, min_width=220)


def request_inputs(comparison: Comparison) -> dict[str, Any]:
    """Build the components of a request, whose bounds gradio checks, by the name of the pipeline's argument.

    Raises:
        ValueError: If the pipeline needs more than a prompt or a class.
    """
    whole: dict[str, Any] = {"minimum": 0, "precision": 0, "min_width": 220}
    text: dict[str, Any] = {"lines": 1, "max_lines": 4, "max_length": _LONGEST_PROMPT, "label": "Prompt"}
    if comparison.kind == "text":
        tokens = _slider("New tokens", 1, _MOST_NEW_TOKENS, 64)
        return {"prompt": gr.Textbox("Once upon a time", **text), "new_tokens": tokens}
    pipeline = comparison.sides["mhla"]
    known = set(inspect.signature(type(pipeline).__call__).parameters)
    if known & {"image", "video"} or not known & {"prompt", "class_labels"}:
        raise ValueError(f"{comparison.name} is a {type(pipeline).__name__}, which needs more than a prompt or class.")
    model: Any = next(iter(comparison.models.values()))
    size, scale = sample_size(pipeline, comparison.models), pipeline_size(pipeline, model)
    inputs: dict[str, Any] = {}
    if "prompt" in known:
        is_demo = comparison.location == base_pipeline_directory().name
        inputs["prompt"] = gr.Textbox(DEMO_PROMPTS[0] if is_demo else PROMPTS[2], **text)
    else:
        inputs["class_labels"] = gr.Number(0, maximum=model.config.num_embeds_ada_norm - 1, label="Class", **whole)
    inputs["num_inference_steps"] = _slider("Denoising steps", 1, _MOST_STEPS, 20)
    inputs["seed"] = gr.Number(0, maximum=2**32 - 1, label="Seed", **whole)
    if "guidance_scale" in known:
        inputs["guidance_scale"] = _slider("Guidance", 0, 30, 4, 0.1)
    if "height" in known:
        unit = math.lcm(16, *(scale.token if scale else ()))
        for name in ("height", "width"):
            side = size.get(name, _USUAL_SIDE)
            inputs[name] = _slider(name.capitalize(), unit, max(side, _USUAL_SIDE), side, unit)
    for name in {"num_frames", "frames"} & known:
        frames, every = size.get("num_frames", _USUAL_FRAMES), scale.vae[0] if scale else 1
        inputs[name] = _slider("Frames", 1, max(frames, _USUAL_FRAMES), frames, every)
    return inputs


def generate(comparison: Comparison, side: str, request: Mapping[str, Any], stop: threading.Event) -> Output:
    """Answer a request with one of the two models.

    Args:
        comparison: The models.
        side: `"original"` or `"mhla"`.
        request: Values of [`request_inputs`] by name.
        stop: Set to end the work before the next step or token.
    """
    work = _generate_text if comparison.kind == "text" else _generate_pixels
    request = dict(request)
    if "prompt" in request:
        request["prompt"] = request["prompt"][:_LONGEST_PROMPT]
    ticks: list[float] = []

    def tick(device: torch.device) -> bool:
        synchronize(device)
        ticks.append(time.perf_counter())
        return stop.is_set()

    # The work of a visitor who cancelled ends with its current step.
    with comparison.lock, torch.no_grad():
        ticks.append(time.perf_counter())
        value, tokens = work(comparison, comparison.sides[side], request, tick)
    # The median leaves out the time to read the prompt and to warm up.
    return Output(value, float(np.median(np.diff(ticks))), tokens)


def _generate_pixels(
    comparison: Comparison, pipeline: Any, request: dict[str, Any], tick: Any
) -> tuple[np.ndarray, int]:
    generator = torch.Generator().manual_seed(request.pop("seed"))
    if "class_labels" in request:
        request["class_labels"] = [request["class_labels"]]
    if "use_resolution_binning" in inspect.signature(type(pipeline).__call__).parameters:
        # Otherwise the pipeline changes the size.
        request["use_resolution_binning"] = False

    def check(*_: Any) -> None:
        if tick(pipeline.device):
            raise _Stopped

    seen: list[int] = []
    hooks = [getattr(pipeline, name).register_forward_pre_hook(check) for name in comparison.models]
    # Both models have the same layers, by name.
    for name, model in comparison.models.items():
        attention = getattr(pipeline, name).get_submodule(mhla_layers(model)[0].name)
        hook = partial(_count_tokens, seen)
        hooks.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        output = pipeline(**request, generator=generator, output_type="np")
    finally:
        for hook in hooks:
            hook.remove()
    values = output.frames[0] if comparison.kind == "video" else output.images[0]
    pixels = np.rint(np.asarray(values, dtype=np.float32) * 255).clip(0, 255).astype(np.uint8)
    scale = max(1, _SHOWN_PIXELS // max(pixels.shape[-3:-1]))
    return pixels.repeat(scale, axis=-3).repeat(scale, axis=-2), seen[-1]


def _count_tokens(seen: list[int], module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    hidden_states = args[0] if args else kwargs["hidden_states"]
    seen.append(hidden_states.shape[1])


def _generate_text(comparison: Comparison, model: Any, request: dict[str, Any], tick: Any) -> tuple[str, int]:
    tokenizer = comparison.tokenizer
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": request["prompt"]}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(request["prompt"], return_tensors="pt", return_token_type_ids=False)

    def stops(tokens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.full((len(tokens),), tick(tokens.device), device=tokens.device)

    # Without samples, and without a warning of settings that only these have.
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    inputs = inputs.to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=request["new_tokens"], stopping_criteria=[stops], **options)
    answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer, tokens.shape[1]


def describe_times(comparison: Comparison, original: Output, mhla: Output) -> str:
    """Say how long both models took, and from which length attention with MHLA is faster."""
    ratio = mhla.seconds / original.seconds
    words = f"{ratio:.1f} times as long" if ratio >= 1 else f"{1 / ratio:.1f} times as fast"
    words = "about the same" if words.startswith("1.0") else words
    milliseconds = {"original": 1e3 * original.seconds, "mhla": 1e3 * mhla.seconds}
    text = _TIMES.format(tokens=mhla.tokens, attention=comparison.attention, ratio=words, **milliseconds)
    output = "text" if comparison.kind == "text" else "pixels"
    device = next(iter(next(iter(comparison.models.values())).parameters())).device.type
    length = BREAK_EVEN.get((device, output))
    if length is None or comparison.attention.startswith("linear"):
        return text
    what = "decoding with MHLA" if output == "text" else "attention with MHLA"
    return f"{text} {_BREAK_EVEN.format(what=what, length=length)}"


def _output(kind: str, side: str, label: str) -> Any:
    options: dict[str, Any] = {"label": label, "elem_id": side, "interactive": False}
    if kind == "video":
        return gr.Video(format="mp4", autoplay=True, loop=True, buttons=["download"], height=360, **options)
    if kind == "image":
        return gr.Image(format="png", buttons=["download", "fullscreen"], height=420, **options)
    return gr.Textbox(lines=12, max_lines=24, buttons=["copy"], **options)


def _generate_tab(comparison: Comparison, inputs: Mapping[str, Any]) -> None:
    first, *others = inputs.values()
    first.render()
    with gr.Accordion("Settings", open=False), gr.Row():
        for component in others:
            component.render()
    with gr.Row():
        run = gr.Button("Generate", variant="primary", scale=0, min_width=150)
        cancel = gr.Button("Cancel", scale=0, min_width=110)
    with gr.Row():
        original = _output(comparison.kind, "original", f"Original: {comparison.attention}")
        outputs = [original, _output(comparison.kind, "mhla", "MHLA")]
    times = gr.Markdown(elem_id="times")

    async def compare(progress: Any = gr.Progress(track_tqdm=True), *values: Any) -> AsyncIterator[tuple[Any, ...]]:
        request, stop = dict(zip(inputs, values, strict=True)), threading.Event()
        outputs: dict[str, Output] = {}
        shown: dict[str, Any] = dict.fromkeys(_TITLES)
        try:
            with TemporaryDirectory(prefix="mhla-hf-app-") as folder:
                for side in _TITLES:
                    outputs[side] = await asyncio.to_thread(generate, comparison, side, request, stop)
                    shown[side] = value = outputs[side].value
                    if comparison.kind == "video":
                        frames, path = list(value.astype(np.float32) / 255), str(Path(folder) / f"{side}.mp4")
                        shown[side] = export_to_video(frames, path, fps=_FRAMES_PER_SECOND)
                    text = describe_times(comparison, **outputs) if len(outputs) > 1 else ""
                    yield shown["original"], shown["mhla"], text
        except (ValueError, torch.OutOfMemoryError) as error:
            raise gr.Error(shorten_text(str(error), 300), print_exception=False) from None
        finally:
            # Also when the visitor cancels: gradio then cancels this coroutine.
            stop.set()

    running = gr.on(
        [run.click, first.submit],
        compare,
        list(inputs.values()),
        [*outputs, times],
        api_name="generate",
        show_progress_on=outputs,
        trigger_mode="once",
    )
    running.success(None, js=_SYNCHRONIZE)
    cancel.click(None, cancels=[running], api_visibility="private")


def _mixing_tab(page: Any, comparison: Comparison) -> None:
    layers = {
        f"{component}.{layer.name}" if len(comparison.models) > 1 else layer.name: layer.mhla
        for component, model in comparison.models.items()
        for layer in mhla_layers(model)
    }
    names = list(layers)
    layout = reference_layout(layers[names[0]])
    heads = max(mhla.num_heads if mhla.config.mixing_heads == "per_head" else 0 for mhla in layers.values())
    gr.Markdown(_MIXING)
    with gr.Row():
        layer = gr.Dropdown(names, label="Layer", elem_id="layer", min_width=180)
        head = gr.Dropdown([_ALL_HEADS, *map(str, range(heads))], label="Head", elem_id="head", min_width=180)
        first, last = layout.num_prefix_blocks, layout.num_blocks - 1
        block = gr.Slider(first, last, middle_block(layout), step=1, precision=0, label="Query block", min_width=220)
    picture = gr.HTML(elem_id="mixing")

    def mixing(layer: str, head: str, block: int) -> str:
        mhla = layers[layer]
        layout = reference_layout(mhla)
        # Without the weights of later blocks, which causal layers do not use.
        matrix = mixing_summary(mhla).matrix
        if head != _ALL_HEADS and matrix.dim() == 3:
            matrix = matrix[int(head)]
        parts = mixing_parts(matrix, layout, block=min(block, layout.num_blocks - 1))
        return f'<div class="mixing">{"".join(f"<div>{figure_svg(part)}</div>" for part in parts)}</div>'

    drawing: dict[str, Any] = {"fn": mixing, "inputs": [layer, head, block], "outputs": picture}
    gr.on([layer.input, head.input, block.release], **drawing, api_name="mixing", trigger_mode="always_last")
    page.load(**drawing, api_visibility="private")


def build_page(comparison: Comparison) -> Any:
    """Build the page of a comparison, a `gradio.Blocks` with its queue set up."""
    warning = "" if comparison.recovered or comparison.attention.startswith("linear") else _NOT_RECOVERED
    inputs = request_inputs(comparison)
    with gr.Blocks(title="MHLA", analytics_enabled=False, delete_cache=(600, 3600)) as page:
        names = {"name": comparison.name, "original": comparison.location, "attention": comparison.attention}
        names["output"] = _OUTPUTS[comparison.kind]
        gr.Markdown(_INTRODUCTION.format(warning=warning, **names), elem_id="introduction")
        with gr.Tab("Generate"):
            _generate_tab(comparison, inputs)
        with gr.Tab("Mixing"):
            _mixing_tab(page, comparison)
    return page.queue(max_size=_WAITING, default_concurrency_limit=1, api_open=False)


def create_app(
    model: str | Path | None = None,
    original: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> Any:
    """Load an MHLA model and its original, and build the page that compares them.

    Args:
        model: A converted pipeline or language model; a directory or Hub id. `None` for the demo's pipeline:
            `demo-output/mhla` if it exists, else one that is converted and calibrated in some seconds.
        original: Its original; by default the one that the model's records name.
        device: Device of both models; by default a GPU if there is one.
        dtype: Type of the weights; by default bfloat16 on a GPU and float32 on a CPU.

    Returns:
        A `gradio.Blocks`; start it with [`serve`][mhla_hf.app.serve].

    Raises:
        ValueError: If the model is not MHLA, generates nothing, its original is not found, or files are damaged.
        OSError: If files are missing.
    """
    with demo_model() if model is None else nullcontext((model, None)) as (model, base):
        return build_page(open_comparison(model, original or base, device=device, dtype=dtype))


def serve(page: Any, *, host: str | None = None, port: int | None = None, share: bool = False, **options: Any) -> Any:
    """Start the server of a page from [`create_app`][mhla_hf.app.create_app].

    It serves the page and what it generates, no other files, and the page loads nothing from elsewhere.

    Args:
        page: The page.
        host: Address to listen on, such as 0.0.0.0 for everybody who can reach it. By default the environment variable
            `GRADIO_SERVER_NAME`, which Spaces set, else 127.0.0.1, this machine only.
        port: Port; by default the first free one from 7860.
        share: Make a public link through gradio's servers.
        **options: Other arguments of `gradio.Blocks.launch`, such as `prevent_thread_lock` and `auth`.

    Returns:
        What `gradio.Blocks.launch` returns.

    Raises:
        OSError: If the port is taken.
    """
    fonts = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
    return page.launch(
        server_name=host,
        server_port=port,
        share=share,
        theme=gr.themes.Default(primary_hue="blue", font=fonts, font_mono=("ui-monospace", "monospace")),
        css=_CSS,
        allowed_paths=[],
        max_file_size="1kb",  # The page takes no files.
        enable_monitoring=False,
        footer_links=[],
        show_error=False,
        **options,
    )


def export_space(
    destination: str | Path, model: str | None = None, original: str | None = None, *, overwrite: bool = False
) -> Path:
    """Write a folder that is a Space of the Hub: the page of one model.

    Args:
        destination: The folder to make.
        model: Hub id of an MHLA model; `None` for the demo's pipeline, calibrated when the Space starts.
        original: Hub id of its original; by default the one that its records name.
        overwrite: Replace `destination`.

    Raises:
        ValueError: If the destination has content, or a model is a directory or no Hub id.
        OSError: If a file cannot be written.
    """
    target = Path(destination).expanduser()
    for name, location in (("model", model), ("original", original)):
        if location is not None and local_directory(location, name) is not None:
            raise ValueError(f"{name}={location} is a directory; push it to the Hub first, and give its id.")
    facts: dict[str, Any] = {
        "title": f"MHLA: {'moving digits' if model is None else Path(model).name}",
        "license": _LICENSE,
        "tags": list(TAGS),
        "gradio": version("gradio"),
        "model": repr(model),
        "original": repr(original),
        "models": sorted(location for location in (model, original) if location is not None),
    }
    with claim_destination(target, overwrite=overwrite) as claimed, claimed.staging() as staging:
        (staging / "requirements.txt").write_text(f"mhla-hf[app]=={__version__}\n", encoding="utf-8")
        for template in _TEMPLATES.glob("*.jinja"):
            text = jinja2.Template(template.read_text(encoding="utf-8"), keep_trailing_newline=True).render(facts)
            (staging / template.stem).write_text(text, encoding="utf-8")
    return target
