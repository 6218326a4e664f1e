# SPDX-License-Identifier: Apache-2.0
"""Prints the tables of predictions, or writes them into the documentation.

python -m benchmarks.predictions            # prints all tables
python -m benchmarks.predictions --write    # replaces those of the documentation
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .tables import SECTIONS, with_tables


_DOCUMENTATION = Path(__file__).resolve().parents[2] / "docs"
PAGES = [_DOCUMENTATION / "kernels.md", _DOCUMENTATION / "choosing.md"]


def main() -> None:
    """Prints or writes all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the tables of the documentation")
    if parser.parse_args().write:
        for page in PAGES:
            page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for name, table in SECTIONS.items():
        print(f"\n{name}\n\n{table()}")


if __name__ == "__main__":
    main()
