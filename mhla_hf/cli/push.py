# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf push`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import FILE, Quiet
from .output import JsonFile, write_report


def push_command(
    directory: Annotated[Path, typer.Argument(help="Pipeline or model with MHLA.")],
    repository: Annotated[str, typer.Argument(help="Repository on the Hub, owner/name; created if absent.")],
    *,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch; created if absent. Default: the main one.", metavar="NAME")
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")] = False,
    message: Annotated[str | None, typer.Option(help="First line of the commit's message.", metavar="TEXT")] = None,
    token: Annotated[
        str | None, typer.Option(help="Access token. Default: that of hf auth login.", metavar="TEXT")
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(help="Largest weight file, such as 5GB. Default: that of the model's library.", metavar="SIZE"),
    ] = None,
    benchmark: Annotated[
        list[Path] | None,
        typer.Option(help="Report of mhla-hf bench for the model card; repeat it for several.", metavar=FILE),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the files, and upload nothing.")] = False,
    json_file: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Push a converted pipeline or model to the Hub.

    The directory is checked first (files, shapes, NaN), and is not changed. The repository gets a model card, unless
    you wrote one, and a file by which trust_remote_code=True loads it. All files arrive in one commit; after an
    interruption, the same command resumes where it stopped.
    """
    from ..hub.push import check_repository, prepare_push, push_directory

    options: dict[str, Any] = {"max_shard_size": max_shard_size, "benchmarks": benchmark or []}
    if dry_run:
        check_repository(repository)
        contents, warnings = prepare_push(directory.expanduser(), repository, progress=not quiet, **options)
        write_report(json_file, {"repository": repository, "files": contents.sizes, "warnings": warnings})
        if not quiet:
            _show_files(contents.sizes, contents.left_out, warnings)
        return
    commit = push_directory(
        directory,
        repository,
        private=private or None,
        revision=revision,
        create_pr=create_pr,
        token=token,
        commit_message=message,
        progress=not quiet,
        **options,
    )
    url = commit.pr_url or commit.repo_url.url
    write_report(
        json_file,
        {"repository": repository, "url": url, "commit": commit.oid, "pull_request": commit.pr_url},
    )
    if not quiet:
        typer.echo(url)


def _show_files(sizes: dict[str, int], left_out: list[str], warnings: list[str]) -> None:
    from rich.console import Console
    from rich.markup import escape

    from ..conversion.options import format_bytes
    from ..utils.messages import shorten_list

    console = Console(soft_wrap=True)
    for name, size in sizes.items():
        console.print(f"{format_bytes(size):>10}  {escape(name)}", highlight=False)
    console.print(f"{format_bytes(sum(sizes.values())):>10}  in {len(sizes)} files", highlight=False)
    if left_out:
        console.print(f"left out: {escape(shorten_list(left_out))}", highlight=False)
    for warning in warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False)
