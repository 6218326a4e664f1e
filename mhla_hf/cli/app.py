# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf app`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..app.limits import Limits
from .options import DIRECTORY, DTYPES, Device, Overwrite, completion, listed


_LIMITS = "Limits of one visitor"
_SPACE = "Space"
_USUAL = Limits()


def app_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="An MHLA pipeline or language model: a directory or Hub id. Without it, demo-output/mhla if it is "
            "there, or else the demo's pipeline, converted and calibrated now."
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(help="Its softmax original: directory or Hub id. Default: what conversion.json names."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Port. Default: the first free one from 7860.")] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Address to listen on, such as 0.0.0.0. Default: this machine alone.", metavar="ADDRESS"),
    ] = None,
    share: Annotated[bool, typer.Option("--share", help="Make a public link through gradio's servers.")] = False,
    device: Device = "auto",
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Type of the weights: {listed(DTYPES)}. Default: bfloat16 on a GPU, float32 on a CPU.",
            metavar="NAME",
            autocompletion=completion(DTYPES),
        ),
    ] = None,
    text_length: Annotated[
        int | None, typer.Option(help="Tokens that prompts are padded to. Default: the pipeline's own number.")
    ] = None,
    max_steps: Annotated[int, typer.Option(help="Denoising steps.", rich_help_panel=_LIMITS)] = _USUAL.steps,
    max_pixels: Annotated[
        int | None, typer.Option(help="Height × width in pixels. Default: the model's own.", rich_help_panel=_LIMITS)
    ] = None,
    max_frames: Annotated[
        int | None, typer.Option(help="Frames of a video. Default: the model's own.", rich_help_panel=_LIMITS)
    ] = None,
    max_prompt: Annotated[int, typer.Option(help="Characters of a prompt.", rich_help_panel=_LIMITS)] = _USUAL.prompt,
    max_new_tokens: Annotated[
        int, typer.Option(help="Tokens of a language model.", rich_help_panel=_LIMITS)
    ] = _USUAL.new_tokens,
    max_seconds: Annotated[
        float, typer.Option(help="Seconds that each of the two models may take.", rich_help_panel=_LIMITS)
    ] = _USUAL.seconds,
    max_queue: Annotated[int, typer.Option(help="Requests that wait.", rich_help_panel=_LIMITS)] = _USUAL.queue,
    space: Annotated[
        Path | None,
        typer.Option(
            "--export-space",
            help="Write a folder for a Space of the Hub instead.",
            metavar=DIRECTORY,
            rich_help_panel=_SPACE,
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Compare an MHLA model with its original in a browser.

    The page generates with both from the same seed, and shows their times, the mixing weights, and the speed of
    attention by length on this machine. It needs gradio: pip install -e '.[app]' in a clone of mhla_hf.
    """
    from ..app import create_app, export_space, serve

    limits = Limits(
        steps=max_steps,
        pixels=max_pixels,
        frames=max_frames,
        prompt=max_prompt,
        new_tokens=max_new_tokens,
        seconds=max_seconds,
        queue=max_queue,
    )
    if space is not None:
        folder = export_space(space, model, base, limits=limits, overwrite=overwrite)
        typer.echo(f"{folder} is a Space: push it with `hf upload OWNER/NAME {folder} --repo-type space`")
        return
    options: dict[str, Any] = {"device": device, "dtype": dtype, "text_length": text_length}
    serve(create_app(model, base, limits=limits, **options), host=host, port=port, share=share)
