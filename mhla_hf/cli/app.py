# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf app`."""

from pathlib import Path

from .options import DIRECTORY, DTYPES, Device, Overwrite, argument, listed, option


def app_command(
    model: str | None = argument(
        "An MHLA pipeline or language model: a directory or Hub id. Default: demo-output/mhla if it exists, else the "
        "demo's pipeline, converted and calibrated now.",
        default=None,
    ),
    *,
    original: str | None = option("The original: directory or Hub id. Default: what conversion.json names."),
    port: int | None = option("Port. Default: the first free one from 7860.", min=1, max=65535),
    host: str | None = option("Address to listen on, such as 0.0.0.0. Default: this machine only.", metavar="ADDRESS"),
    share: bool = option("Make a public link through gradio's servers.", "--share", default=False),
    device: Device = "auto",
    dtype: str | None = option(
        f"Type of the weights: {listed(DTYPES)}. Default: bfloat16 on a GPU, float32 on a CPU.", choices=DTYPES
    ),
    space: Path | None = option("Write a folder for a Space of the Hub instead.", "--export-space", metavar=DIRECTORY),
    overwrite: Overwrite = False,
) -> None:
    """Compare an MHLA model with its original in a browser.

    The page generates with both models from the same seed, and shows their times and the mixing weights. It needs
    gradio: pip install -e '.[app]' in a clone of mhla_hf.
    """
    from ..app import create_app, export_space, serve

    if space is not None:
        folder = export_space(space, model, original, overwrite=overwrite)
        print(f"{folder} is a Space: push it with `hf upload OWNER/NAME {folder} --repo-type space`")
        return
    serve(create_app(model, original, device=device, dtype=dtype), host=host, port=port, share=share)
