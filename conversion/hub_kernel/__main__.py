# SPDX-License-Identifier: Apache-2.0
"""Write MHLA as a kernel that `kernels.get_kernel` and `get_local_kernel` load without this package.

In the root of the repository:

    python -m conversion.hub_kernel mhla-kernel --repo-id you/mhla
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .folder import export_kernel


def main() -> None:
    """Writes the folder that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m conversion.hub_kernel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="folder to write; an earlier one is replaced")
    parser.add_argument("--repo-id", metavar="OWNER/NAME", help="repository on the Hub that it is written for")
    arguments = parser.parse_args()
    try:
        export_kernel(arguments.folder, repo_id=arguments.repo_id)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(f"Wrote the kernel to {arguments.folder}.")


if __name__ == "__main__":
    main()
