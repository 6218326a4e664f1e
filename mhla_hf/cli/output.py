# SPDX-License-Identifier: Apache-2.0
"""What commands print and write: tables, lines, progress, the file of `--json`, and cards of what they make."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer


JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures as JSON to a file.", dir_okay=False)]
"""The option `--json` of a command, for [`write_report`]."""


def write_report(file: Path | None, report: Any) -> None:
    """Write what a command reports to the file of `--json`, if it is given.

    Args:
        file: Value of the option.
        report: Plain JSON values.
    """
    from ..utils.files import write_json

    if file is not None:
        write_json(file, report)


def write_first_card(directory: Path) -> None:
    """Write the card of a directory that a command has made; the command succeeds without it, too."""
    from ..hub.card import write_card

    try:
        write_card(directory)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        typer.echo(f"No model card was written: {error}", err=True)


def say(text: str, *, style: str = "", err: bool = False) -> None:
    """Print text in long lines that the terminal wraps.

    Args:
        text: The text, which has no markup.
        style: Its colour.
        err: Whether it goes to standard error.
    """
    from rich.console import Console

    Console(stderr=err, soft_wrap=True).print(text, style=style or None, markup=False, highlight=False)


def show_table(rows: Iterable[Mapping[str, Any]], *, title: str | None = None, err: bool = False) -> None:
    """Print a table; nothing without rows.

    Args:
        rows: Cells by the title of their column, the same titles in each row; `None` leaves a cell empty. Columns of
            empty cells are left out, and those of numbers, with or without a unit, are flush right.
        title: Title of the table.
        err: Whether it goes to standard error.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = [{column: "" if cell is None else str(cell) for column, cell in row.items()} for row in rows]
    columns = [column for column in (cells[0] if cells else ()) if any(row[column] for row in cells)]
    if not columns:
        return
    # Few lines leave room for long names in 80 columns.
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left", title_style="bold")
    for column in columns:
        numeric = all(not row[column] or row[column][0] in "+-0123456789" for row in cells)
        table.add_column(column, justify="right" if numeric and column != columns[0] else "left")
    for row in cells:
        table.add_row(*(Text(row[column]) for column in columns))
    Console(stderr=err, soft_wrap=False).print(table)


@contextmanager
def progress_bars(shown: bool, waiting: str = "") -> Iterator[Callable[[str, int, int], None]]:
    """Show progress bars on standard error; the function that is yielded takes (name, done, all).

    Args:
        shown: Whether anything is printed.
        waiting: What runs before the first bar; the bars are removed in the end then.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not shown or not console.is_terminal, transient=bool(waiting)) as bars:
        tasks = {waiting: bars.add_task(waiting, total=None)} if waiting else {}

        def update(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield update
