# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf card`, `push`, `check-lora` and `serve`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..utils.locations import check_source, local_directory
from .options import HUB, Component, Quiet, argument, given, option, options_of, with_options
from .output import JsonFile, say, show_table, write_report


if TYPE_CHECKING:
    from ..lora_check import LoraReport

_BENCHMARKS = option(
    "JSON file of mhla-hf bench op or model, for speed and memory; may be repeated.", "--benchmark", metavar="FILE"
)


def card_command(
    model: Path = argument("MODEL", "Pipeline or model, converted or trained by mhla-hf."),
    *,
    benchmarks: list[Path] | None = _BENCHMARKS,
    name: str | None = option("Name of the model. Default: that of the base model."),
    prompt: str | None = option("Prompt of the example."),
    license_name: str | None = option("Licence, such as apache-2.0, where the original states none.", "--license"),
    repo_id: str | None = option("Repository in the examples."),
    output: Path | None = option("File to write; '-' is standard output. Default: MODEL/README.md.", "--output", "-o"),
    overwrite: bool = option(
        "Replace a card that was not generated, or was edited since.", "--overwrite", default=False
    ),
) -> None:
    """Write the model card of a directory.

    Quality comes from the recovery's report, speed and memory from the files of --benchmark. A README.md that someone
    wrote or edited is not overwritten.

    Examples:

        mhla-hf card wan-mhla
        mhla-hf card wan-mhla --benchmark op.json --output -
    """
    if output not in (None, Path("-")) and output.exists() and not overwrite:
        raise ValueError(f"output={output} exists; choose another file, or pass --overwrite.")

    from ..hub.card import CardText, model_card, write_card

    text = CardText(name=name, prompt=prompt, license=license_name)
    options: dict[str, Any] = {"text": text, "repo_id": repo_id, "benchmarks": benchmarks or ()}
    if output == Path("-"):
        typer.echo(str(model_card(model, **options)), nl=False)
        return
    written = write_card(model, output=output, overwrite=overwrite or output is not None, **options)
    if written is None:
        raise ValueError(
            f"{model / 'README.md'} was written or edited by someone and is kept: --overwrite replaces it, --output "
            "FILE writes another file."
        )
    typer.echo(f"Wrote {written}.")


class _Push:
    benchmarks: list[Path] | None = _BENCHMARKS
    private: bool | None = option("Make a new repository private.", "--private")
    revision: str | None = option("Branch; created if absent. Default: the main one.")
    create_pr: bool = option("Open a pull request instead of committing.", "--create-pr", default=False)
    commit_message: str | None = option("First line of the commit's message.", "--message")
    token: str | None = option("Access token. Default: that of hf auth login.")


_PUSH = options_of(_Push)


@with_options(_PUSH)
def push_command(
    model: Path = argument("MODEL", "Pipeline or model with MHLA."),
    repository: str = argument("REPOSITORY", "Repository on the Hub, owner/name; created if absent."),
    *,
    dry_run: bool = option("Check and list the files, and upload nothing.", "--dry-run", default=False),
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Push a converted pipeline or model to the Hub.

    The directory is checked first (files, shapes, NaN), and is not changed. The repository gets a model card, unless
    you wrote one, and a file by which trust_remote_code=True loads it. All files arrive in one commit; after an
    interruption, run the same command again: large files that arrived are not sent twice.

    Examples:

        mhla-hf push wan-mhla you/wan-mhla --private
        mhla-hf push qwen3-mhla you/qwen3-mhla --create-pr
    """
    from ..hub.push import prepare_push, push_directory

    if dry_run:
        reports = options["benchmarks"] or ()
        contents, warnings = prepare_push(model, repository, benchmarks=reports, progress=not quiet)
        write_report(json_file, {"repository": repository, "files": contents.sizes, "warnings": warnings})
        if not quiet:
            _show_files(contents.sizes, contents.left_out, warnings)
        return
    commit = push_directory(model, repository, progress=not quiet, **given(options, _PUSH))
    url = commit.pr_url or commit.repo_url.url
    write_report(
        json_file, {"repository": repository, "url": url, "commit": commit.oid, "pull_request": commit.pr_url}
    )
    if not quiet:
        typer.echo(url)


def _show_files(sizes: dict[str, int], left_out: list[str], warnings: list[str]) -> None:
    from ..utils.messages import format_bytes, shorten_list

    for name, size in sizes.items():
        say(f"{format_bytes(size):>10}  {name}")
    say(f"{format_bytes(sum(sizes.values())):>10}  in {len(sizes)} files")
    if left_out:
        say(f"left out: {shorten_list(left_out)}")
    for warning in warnings:
        say(f"warning: {warning}", style="yellow")


@with_options(HUB)
def check_lora_command(
    model: str = argument("MODEL", "Directory or Hub id of an MHLA pipeline or model."),
    lora: Path = argument("LORA", "LoRA: a directory or .safetensors file of peft, diffusers or kohya."),
    *,
    component: Component = None,
    json_file: JsonFile = None,
    quiet: Quiet = False,
    **options: Any,
) -> None:
    """Check which weights of a LoRA apply to an MHLA model.

    The LoRA was made for the softmax original.

    Examples:

        mhla-hf check-lora wan-mhla my-lora.safetensors
    """
    from ..lora_check import check_lora

    report = check_lora(model, lora, component=component, **given(options, HUB))
    write_report(json_file, report.to_dict())
    if not quiet:
        _show_lora(report)


def _show_lora(report: "LoraReport") -> None:
    from ..utils.messages import shorten_text

    total, lost = len(report.weights), report.counts["nothing"]
    applied = "all" if not lost else f"{total - lost} of"
    say(f"{report.lora}: {applied} {total} weights apply to {report.component}, loaded by {report.loader}.")
    counts = {kind if kind == "nothing" else f"{kind}s": count for kind, count in report.counts.items()}
    counts["other models of the pipeline"] = len(report.others)
    show_table([{"weights for": kind, "count": count} for kind, count in counts.items() if count])
    examples = {target.reason: name for name, target in report.weights.items() if target.reason}
    for reason, name in list(examples.items())[:3]:
        say(f"  {shorten_text(name)}: {reason}")


SERVE: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
    "options_metavar": "MODEL [OPTIONS]",
}
"""Settings of `serve`, whose options are those of `transformers serve` in the installed version."""


def serve_command(context: typer.Context) -> None:
    """Serve a language model through an API like OpenAI's.

    This is `transformers serve` with MHLA, and takes its arguments: a model (directory or Hub id), and options such as
    --port, --device and --dtype, which `transformers serve --help` lists. Continuous batching does not work with MHLA.

    Examples:

        mhla-hf serve qwen3-mhla
        mhla-hf serve qwen3-mhla --port 8001 --dtype bfloat16
    """
    if context.args and not context.args[0].startswith("-"):
        check_source(context.args[0].partition("@")[0], "model")

    import transformers
    from transformers.cli.serve import Serve

    if "--continuous-batching" in context.args:
        raise ValueError(
            "--continuous-batching keeps keys and values in pages, and MHLA caches summaries of blocks: leave it out, "
            "and requests are answered one after the other."
        )
    server = typer.Typer(add_completion=False)
    server.command()(Serve)
    # As a program, it would handle Ctrl-C and mistakes in its own way.
    parsed: Any = typer.main.get_command(server).make_context("mhla-hf serve", list(context.args))
    model = parsed.params["force_model"]
    if model is None:
        raise ValueError("a model must be given, directory or Hub id: mhla-hf serve MODEL")
    # GGUF files are never MHLA. With an encoder the server would start, and then fail on every request.
    if not model.endswith(".gguf"):
        location, _, revision = model.partition("@")
        local_directory(location, "model")
        options = {"revision": revision or None, "trust_remote_code": parsed.params["trust_remote_code"]}
        config = transformers.AutoConfig.from_pretrained(location, **options)
        name = (config.architectures or [config.model_type])[0]
        model_class = getattr(transformers, name, None)
        if model_class is not None and not model_class.can_generate():
            raise ValueError(f"{model} is a {name}, which generates no text; serve a language model")
    with parsed:
        parsed.command.invoke(parsed)
