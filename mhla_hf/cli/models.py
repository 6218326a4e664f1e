# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf models`: which architectures have an MHLA version, and which models have a preset."""

import typer


def models_command(
    refused: bool = typer.Option(False, "--refused", help="List the models that have none, with the reasons."),
    presets: bool = typer.Option(False, "--presets", help="List the names that from_preset knows."),
    json_output: bool = typer.Option(False, "--json", help="Print JSON instead of tables."),
) -> None:
    """List the supported models."""
    if presets and refused:
        raise ValueError("presets and refused are both given; give one of them.")
    if presets:
        _list_presets(json_output)
        return
    from ..models.registry import ModelFamily, TransformersFamily, describe, refused_families, supported_models

    families = refused_families() if refused else supported_models()
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
        rows = [(name, family) for name, family in families.items() if isinstance(family, library)]
        if not rows:
            continue
        # Two tables and few lines leave room for the longest name in 80 columns.
        table = Table("model", "kind", "reason" if refused else "note", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        table.title, table.title_justify = "diffusers" if library is ModelFamily else "transformers", "left"
        for name, family in rows:
            table.add_row(name, family.kind, describe(family))
        console.print(table)


def _list_presets(json_output: bool) -> None:
    from ..presets import PRESETS

    if json_output:
        import dataclasses
        import json

        listed = [{"name": name, **dataclasses.asdict(preset)} for name, preset in PRESETS.items()]
        typer.echo(json.dumps(listed, indent=2))
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table("preset", "model", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name, preset in PRESETS.items():
        table.add_row(name, preset.description)
    Console().print(table)
