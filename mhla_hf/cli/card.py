# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf card`."""

from pathlib import Path
from typing import Annotated, Any

import typer


def card_command(
    directory: Annotated[Path, typer.Argument(help="Pipeline or model, converted or trained by mhla-hf.")],
    benchmarks: Annotated[
        list[Path] | None,
        typer.Option(
            "--benchmark",
            help="JSON file of mhla-hf bench, or report.json of another recovery with the same data; repeat it for "
            "several.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model; that of the base model if left out.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Prompt of the example.")] = None,
    repo_id: Annotated[str | None, typer.Option("--repo-id", help="Repository in the examples, user/name.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write, - to print; DIRECTORY/README.md if left out."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a README.md that was not generated, or was edited since.")
    ] = False,
) -> None:
    """Write the model card of a directory, from what was recorded and measured.

    Quality comes from the recovery's report, speed and memory from the files given. What was not measured is left out.
    """
    from ..hub.card import CardText, model_card, write_card
    from ..utils.files import atomic_file

    text = CardText(name=name, prompt=prompt)
    options: dict[str, Any] = {
        "benchmarks": benchmarks or (),
        "text": text,
        "repo_id": repo_id,
    }
    if output is None:
        written = write_card(directory, overwrite=overwrite, **options)
        if written is None:
            raise ValueError(
                f"{directory / 'README.md'} was written or edited by someone and is left as it is: --overwrite "
                "replaces it, --output FILE writes another file."
            )
        typer.echo(f"Wrote {written}.")
        return
    card = model_card(directory, **options)
    if str(output) == "-":
        typer.echo(str(card), nl=False)
        return
    if output.exists() and not overwrite:
        raise ValueError(f"output={str(output)!r} exists; choose another file, or --overwrite.")
    with atomic_file(output) as temporary:
        card.save(temporary)
    typer.echo(f"Wrote {output}.")


def write_first_card(directory: Path) -> None:
    """Writes the card of a directory that a command has made; without one the command has still succeeded."""
    from ..hub.card import write_card

    try:
        write_card(directory)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.echo(f"No model card was written: {error}", err=True)
