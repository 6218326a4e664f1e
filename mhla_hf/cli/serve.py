# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf serve`: the server of transformers, in a process that knows MHLA."""

import typer

from ..utils.messages import how_to_install


# Options are those of `transformers serve`, in whatever version is installed.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def serve_command(context: typer.Context) -> None:
    """Serve a language model through an API like OpenAI's.

    This is `transformers serve` with MHLA, and takes its arguments: a model first (directory or Hub id), then options
    such as --port, --device and --dtype, which `transformers serve --help` lists. Continuous batching does not work
    with MHLA.
    """
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise ModuleNotFoundError(f"the server needs packages that are missing: {how_to_install('serve')}")
    if "--continuous-batching" in context.args:
        raise ValueError(
            "--continuous-batching keeps keys and values in pages, and MHLA caches summaries of blocks: leave it out, "
            "and requests are answered one after the other."
        )
    from transformers.cli.transformers import app

    app(["serve", *context.args], prog_name="transformers")
