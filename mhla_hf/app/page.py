# SPDX-License-Identifier: Apache-2.0
"""The layout of the page: four tabs of gradio components, and which function each of them calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import gradio as gr

from .about import facts, notice
from .generation import Field
from .handlers import CANCELLED, Handlers
from .limits import Limits


# Seconds between looks for files to delete, and their age.
_CLEANING = (600, 3600)
_PRIMARY = ("prompt", "class_label")

_SYNCHRONIZE = """
() => { for (const video of document.querySelectorAll(".answer video")) { video.currentTime = 0; video.play(); } }
"""

CSS = """
.gradio-container main { width: 100%; max-width: 1040px; }
.status { display: flex; gap: 12px; align-items: center; min-height: 40px; }
.status progress { flex: 0 1 320px; height: 10px; accent-color: #2563eb; }
#status, #speed-status { flex: 1 1 200px; min-height: 40px; }
#status .minimal, #speed-status .minimal { height: 40px; }
#status .progress-text, #speed-status .progress-text { top: 8px; left: 0; right: auto; transform: none; }
.facts thead { display: none; }
.prose td, .prose th { padding: 6px 10px; word-break: normal; overflow-wrap: anywhere; }
.prose td:first-child, .prose th { white-space: nowrap; overflow-wrap: normal; }
@media (max-width: 640px) {
  .wide .image-container > button { display: block; overflow-x: auto; }
  .wide .image-frame { width: 760px; max-width: none; }
  .prose td, .prose th { padding: 6px; font-size: 13px; }
  #status, #speed-status { min-width: 100% !important; }
}
"""


def theme() -> Any:
    """The default look in blue, with the system's fonts: nothing is fetched from elsewhere."""
    fonts = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
    return gr.themes.Default(primary_hue="blue", font=fonts, font_mono=("ui-monospace", "Consolas", "monospace"))


def build_page(handlers: Handlers, limits: Limits) -> Any:
    """Builds the page.

    Args:
        handlers: What its buttons do.
        limits: Bounds of the queue, and what the page says about them.

    Returns:
        A `gradio.Blocks`, with its queue set up.
    """
    comparison = handlers.comparison
    with gr.Blocks(title="MHLA", analytics_enabled=False, delete_cache=_CLEANING) as page:
        gr.Markdown(f"# MHLA beside {comparison.attention}\n\n`{comparison.name}`, made from `{comparison.base}`")
        if warning := notice(comparison):
            gr.Markdown(warning, elem_classes="notice")
        with gr.Tab("Generate"):
            _generate_tab(handlers)
        with gr.Tab("Mixing"):
            _mixing_tab(page, handlers)
        with gr.Tab("Speed"):
            _speed_tab(handlers)
        with gr.Tab("About"):
            gr.Markdown(facts(comparison, handlers.generator, limits), elem_classes="facts")
    page.queue(max_size=limits.queue, default_concurrency_limit=1, api_open=False)
    return page


def _generate_tab(handlers: Handlers) -> None:
    comparison, fields = handlers.comparison, handlers.generator.fields
    inputs = {field.name: _input(field) for field in fields if field.name in _PRIMARY}
    with gr.Accordion("Settings", open=False), gr.Row():
        for field in fields:
            if field.name not in _PRIMARY:
                inputs[field.name] = _input(field, min_width=220)
    run, cancel, status = _buttons("Generate", "status")
    with gr.Row():
        answers = [
            _output(comparison.kind, label, name)
            for label, name in ((f"Original: {comparison.attention}", "original"), ("MHLA", "mhla"))
        ]
    times = gr.Markdown("", elem_id="times")
    running = gr.on(
        [run.click, *(component.submit for component in inputs.values() if isinstance(component, gr.Textbox))],
        _named(handlers.compare, fields),
        [inputs[field.name] for field in fields],
        [status, *answers, times],
        api_name="generate",
        # `read_request` checks what arrives, and says more than components do.
        preprocess=False,
        concurrency_id="machine",
        concurrency_limit=1,
        show_progress="minimal",
        show_progress_on=status,
        trigger_mode="once",
    )
    # The videos arrive one after the other; from now on they show the same moment.
    running.success(None, js=_SYNCHRONIZE)
    cancel.click(lambda: CANCELLED, None, status, cancels=[running], queue=False, api_visibility="private")


def _mixing_tab(page: Any, handlers: Handlers) -> None:
    browser = handlers.browser
    first = browser.layers[0]
    least, most = browser.blocks(first)
    gr.Markdown(
        "The queries of each block of tokens read a weighted sum of the summaries of all blocks. Row i of the mixing "
        "matrix holds the weights for the queries of block i. Next to it, the row of the chosen query block "
        "(outlined) is shown on the token grid. Red weights are positive, blue ones negative."
    )
    with gr.Row():
        layer = gr.Dropdown(list(browser.layers), value=first, label="Layer", elem_id="layer", min_width=180)
        head = gr.Dropdown(browser.heads(first), label="Head", elem_id="head", min_width=180)
        block = gr.Slider(least, most, value=browser.middle(first), step=1, label="Query block", min_width=220)
    picture = _plot("Mixing weights", "mixing", elem_classes="wide")

    def choices(chosen: str) -> tuple[Any, Any]:
        layer = chosen if chosen in browser.layers else first
        least, most = browser.blocks(layer)
        heads = browser.heads(layer)
        return gr.update(choices=heads, value=heads[0]), gr.update(minimum=least, maximum=most)

    drawing: dict[str, Any] = {"fn": handlers.mixing, "inputs": [layer, head, block], "outputs": picture}
    drawing |= {"preprocess": False, "show_progress": "minimal", "concurrency_id": "pictures", "concurrency_limit": 1}
    # Of events that call the same function, the first gets its name.
    gr.on([head.input, block.release], **drawing, api_name="mixing", trigger_mode="always_last")
    changed = layer.input(choices, layer, [head, block], api_visibility="private")
    changed.then(**drawing, api_visibility="private")
    page.load(**drawing, api_visibility="private")


def _speed_tab(handlers: Handlers) -> None:
    gr.Markdown(
        "Time of one attention layer with this model's sizes on this machine, by the number of tokens. The "
        "measurement takes a few seconds, and is made once."
    )
    run, cancel, status = _buttons("Measure", "speed-status")
    plot = _plot("Time against length", "speed")
    table = gr.Markdown("", elem_id="speed-table")
    measuring = run.click(
        handlers.measure,
        None,
        [status, plot, table],
        api_name="speed",
        concurrency_id="machine",
        concurrency_limit=1,
        show_progress="minimal",
        show_progress_on=status,
    )
    cancel.click(lambda: CANCELLED, None, status, cancels=[measuring], queue=False, api_visibility="private")


def _input(field: Field, **place: Any) -> Any:
    """The component of one input of a request."""
    options: dict[str, Any] = {"label": field.label, "elem_id": f"field-{field.name}", **place}
    if field.least is None:
        return gr.Textbox(field.default, lines=1, max_lines=4, **options)
    if field.name in ("seed", "class_label"):
        return gr.Number(field.default, precision=0, **options)
    return gr.Slider(field.least, field.most, value=field.default, step=field.step, **options)


def _output(kind: str, label: str, name: str) -> Any:
    options: dict[str, Any] = {"label": label, "elem_id": name, "elem_classes": "answer", "interactive": False}
    if kind == "video":
        return gr.Video(format="mp4", autoplay=True, loop=True, buttons=["download"], height=360, **options)
    if kind == "image":
        return gr.Image(format="png", buttons=["download", "fullscreen"], height=420, **options)
    return gr.Textbox(lines=12, max_lines=24, buttons=["copy"], **options)


def _buttons(action: str, status: str) -> tuple[Any, Any, Any]:
    """A button that starts work, one that cancels it, and a place for its progress."""
    with gr.Row():
        return (
            gr.Button(action, variant="primary", scale=0, min_width=150),
            gr.Button("Cancel", scale=0, min_width=110),
            gr.HTML("", elem_id=status, min_height=40),
        )


def _plot(label: str, name: str, **options: Any) -> Any:
    # A label would cover a corner of it.
    return gr.Image(
        label=label,
        show_label=False,
        elem_id=name,
        interactive=False,
        format="png",
        buttons=["download", "fullscreen"],
        **options,
    )


def _named(function: Callable[..., Any], fields: tuple[Field, ...]) -> Callable[..., Any]:
    """A function of any values with a parameter for each field, so that programs can give them by name."""

    def call(*values: Any) -> Any:
        yield from function(*values)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(field.name, kind) for field in fields])  # type: ignore[attr-defined]
    call.__name__, call.__doc__ = "generate", "Answers a request with the original model and with MHLA."
    return call
