# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf serve`: the server of transformers, in a process that knows MHLA."""

from typing import Any

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
    from transformers.cli.serve import Serve

    app = typer.Typer(add_completion=False)
    app.command()(Serve)
    # Not called as a program of its own, which would end otherwise than ours on Ctrl-C and on mistakes.
    parsed: Any = typer.main.get_command(app).make_context("mhla-hf serve", list(context.args))
    _check_model(parsed.params["force_model"], parsed.params["trust_remote_code"])
    with parsed:
        parsed.command.invoke(parsed)


def _check_model(model: str | None, trust_remote_code: bool) -> None:
    """Refuses what the server would start with, and then have no answer to any request."""
    import transformers

    if model is None:
        raise ValueError("a model must be given, directory or Hub id: mhla-hf serve MODEL")
    if model.endswith(".gguf"):
        # These files hold their configuration themselves, and are never MHLA.
        return
    location, _, revision = model.partition("@")
    config = transformers.AutoConfig.from_pretrained(
        location, revision=revision or None, trust_remote_code=trust_remote_code
    )
    names = config.architectures or [config.model_type]
    model_class = getattr(transformers, names[0], None)
    # Classes of a repository's own code are for the server to load.
    if model_class is not None and not model_class.can_generate():
        raise ValueError(f"{model} is a {names[0]}, which generates no text; serve a language model")
