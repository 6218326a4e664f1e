# SPDX-License-Identifier: Apache-2.0
"""Starting the application."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.messages import how_to_install
from .limits import Limits


if TYPE_CHECKING:
    from .models import Comparison


def create_app(
    model: str | Path | None = None,
    base: str | Path | None = None,
    *,
    limits: Limits | None = None,
    device: str | None = None,
    dtype: str | None = None,
    text_length: int | None = None,
) -> Any:
    """Loads an MHLA model and its original, and builds the page that compares them.

    Args:
        model: A pipeline or language model that was converted; a directory or a Hub id. `None` for the demo's
            pipeline: `demo-output/mhla` if it is there, else converted and calibrated now, which takes some seconds.
        base: The original; by default the one that the model's records name.
        limits: Bounds of what visitors may ask for.
        device: Device of both, a GPU if there is one.
        dtype: Type of the weights: bfloat16 on a GPU and float32 on a CPU if not given.
        text_length: Tokens that prompts of a pipeline are padded to, where that is not the pipeline's own number.

    Returns:
        A `gradio.Blocks`; start it with [`serve`][mhla_hf.app.serve].

    Raises:
        ValueError: If the model is not MHLA, generates nothing, or its original is not found; or for damaged files.
        OSError: If files are missing.
        ModuleNotFoundError: Without gradio.
    """
    _check_gradio()
    from ..demo.progress import quiet_libraries
    from .models import demo_model, open_comparison

    if model is None and base is not None:
        raise ValueError("base is given without a model; give the MHLA model too.")
    options: dict[str, Any] = {"device": device, "dtype": dtype, "text_length": text_length}
    with quiet_libraries(), demo_model() if model is None else nullcontext((model, base)) as (model, base):
        comparison = open_comparison(model, base, **options)
        return _page(comparison, limits or Limits())


def serve(page: Any, *, host: str | None = None, port: int | None = None, share: bool = False, **options: Any) -> Any:
    """Starts the server of a page from [`create_app`][mhla_hf.app.create_app].

    Nothing of this machine is served but the page and what it generates, nothing is reported to anybody, and the page
    needs no network of its own.

    Args:
        page: The page.
        host: Address to listen on: 0.0.0.0 for everybody who can reach it. By default that of the environment
            variable `GRADIO_SERVER_NAME`, which Spaces set, else 127.0.0.1, this machine alone.
        port: Port; the first free one from 7860 if not given.
        share: Make a public link through gradio's servers, for a week at most.
        **options: Other arguments of `gradio.Blocks.launch`, such as `prevent_thread_lock` and `auth`.

    Returns:
        What `gradio.Blocks.launch` returns.

    Raises:
        OSError: If the port is taken.
    """
    _check_gradio()
    from .page import CSS, theme

    if port is not None:
        _check_port(host, port)
    return page.launch(
        server_name=host,
        server_port=port,
        share=share,
        theme=theme(),
        css=CSS,
        allowed_paths=[],
        # The page takes no files.
        max_file_size="1kb",
        enable_monitoring=False,
        footer_links=[],
        show_error=False,
        **options,
    )


def _check_port(host: str | None, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host or "127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise OSError(f"port {port} cannot be used on {host or '127.0.0.1'} ({error}); choose another.") from None


def _page(comparison: Comparison, limits: Limits) -> Any:
    from .diffusion import DiffusionGenerator
    from .handlers import Handlers
    from .mixing import MixingBrowser
    from .page import build_page
    from .speed import SpeedMeter
    from .texts import TextGenerator

    kind = TextGenerator if comparison.kind == "text" else DiffusionGenerator
    handlers = Handlers(comparison, kind(comparison, limits), MixingBrowser(comparison), SpeedMeter(comparison))
    return build_page(handlers, limits)


def _check_gradio() -> None:
    """Keeps gradio from reporting its use, and says how to install it.

    Raises:
        ModuleNotFoundError: If it is missing.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ.setdefault("GRADIO_RUN_HISTORY", "False")
    try:
        import gradio  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"gradio is not installed: {how_to_install('app')}") from error
