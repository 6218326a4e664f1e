# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf models`: which architectures have an MHLA version."""

import typer


def models_command(
    json_output: bool = typer.Option(False, "--json", help="Write JSON instead of a table."),
) -> None:
    """List the supported models."""
    from ..integrations.transformers.families import TransformersFamily
    from ..models.registry import ModelFamily, describe, supported_models

    families = supported_models()
    if json_output:
        import dataclasses
        import json

        typer.echo(json.dumps([dataclasses.asdict(family) for family in families.values()], indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for library in (ModelFamily, TransformersFamily):
        # Two tables and few lines leave room for the longest name in 80 columns.
        table = Table("model", "kind", "note", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
        table.title = "diffusers" if library is ModelFamily else "transformers"
        for name, family in families.items():
            if isinstance(family, library):
                table.add_row(name, family.kind, describe(family))
        console.print(table)
