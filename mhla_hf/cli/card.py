# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf card`, and the card that other commands write into what they make."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .options import FILE


def card_command(
    directory: Annotated[Path, typer.Argument(help="Pipeline or model, converted or trained by mhla-hf.")],
    benchmarks: Annotated[
        list[Path] | None,
        typer.Option(
            "--benchmark",
            metavar=FILE,
            help="JSON file of mhla-hf bench, or report.json of another recovery of the same model with the same "
            "data; may be repeated.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model. Default: that of the base model.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Prompt of the example.")] = None,
    license_name: Annotated[
        str | None,
        typer.Option("--license", metavar="NAME", help="Licence, such as apache-2.0, where the original states none."),
    ] = None,
    repo_id: Annotated[
        str | None, typer.Option("--repo-id", metavar="OWNER/NAME", help="Repository in the examples.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar=FILE, help="File to write; '-' is standard output. Default: DIRECTORY/README.md."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a card that was not generated, or was edited since.")
    ] = False,
) -> None:
    """Write the model card of a directory.

    Quality comes from the recovery's report, speed and memory from the files of --benchmark. What was not measured is
    left out. A README.md that someone wrote or edited is not overwritten.
    """
    from ..hub.card import CardText, model_card, write_card
    from ..utils.files import atomic_file

    text = CardText(name=name, prompt=prompt, license=license_name)
    options: dict[str, Any] = {"benchmarks": benchmarks or (), "text": text, "repo_id": repo_id}
    if output is None:
        written = write_card(directory, overwrite=overwrite, **options)
        if written is None:
            raise ValueError(
                f"{directory / 'README.md'} was written or edited by someone and is left as it is: --overwrite "
                "replaces it, --output FILE writes another file."
            )
        typer.echo(f"Wrote {written}.")
        return
    if output != Path("-") and output.exists() and not overwrite:
        raise ValueError(f"output={str(output)!r} exists; choose another file, or --overwrite.")
    card = model_card(directory, **options)
    if output == Path("-"):
        typer.echo(str(card), nl=False)
        return
    with atomic_file(output) as temporary:
        card.save(temporary)
    typer.echo(f"Wrote {output}.")


def write_first_card(directory: Path, destination: Path | None = None) -> None:
    """Writes the card of a directory that a command has made; without one the command has still succeeded."""
    from ..hub.card import write_card

    try:
        write_card(directory, destination=destination)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.echo(f"No model card was written: {error}", err=True)
