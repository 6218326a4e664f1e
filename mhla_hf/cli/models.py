# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf models`: which architectures have an MHLA version."""

import typer


def models_command(
    json_output: bool = typer.Option(False, "--json", help="Write JSON instead of a table."),
) -> None:
    """List the supported models."""
    from ..models.registry import supported_models

    families = supported_models().values()
    if json_output:
        import dataclasses
        import json

        typer.echo(json.dumps([dataclasses.asdict(family) for family in families], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "diffusers model", "MHLA model", "pipelines")
    for family in families:
        table.add_row(family.name, family.upstream, family.mhla_class, "\n".join(family.pipelines))
    Console().print(table)
