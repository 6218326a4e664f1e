# SPDX-License-Identifier: Apache-2.0
"""Pages of the documentation whose tables are written by programs, between markers."""

from __future__ import annotations

import re
from collections.abc import Callable


def with_sections(text: str, kind: str, section: Callable[[str], str]) -> str:
    """Text with what is between markers, `<!-- kind: NAME -->` and `<!-- end -->`, replaced.

    Args:
        text: The page.
        kind: First word of its markers.
        section: Gives what belongs between the markers of a name.
    """
    marked = re.compile(rf"(<!-- {kind}: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return marked.sub(lambda match: f"{match[1]}\n{section(match[2])}\n\n{match[3]}", text)


def table_row(*cells: str) -> str:
    """One row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"
