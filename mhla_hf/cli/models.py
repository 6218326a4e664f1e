# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf models`: which architectures have an MHLA version."""

import typer


def models_command(
    json_output: bool = typer.Option(False, "--json", help="Write JSON instead of a table."),
) -> None:
    """List the supported models."""
    from ..models.registry import ModelFamily, supported_models

    families = supported_models()
    if json_output:
        import dataclasses
        import json

        typer.echo(json.dumps([dataclasses.asdict(family) for family in families.values()], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("library", "model", "kind", "note")
    for name, family in families.items():
        if isinstance(family, ModelFamily):
            note = f"as {family.mhla_class} in {', '.join(family.pipelines)}"
            table.add_row("diffusers", name, family.kind, f"{note}; {family.note}" if family.note else note)
        else:
            table.add_row("transformers", name, family.kind, family.note)
    Console().print(table)
