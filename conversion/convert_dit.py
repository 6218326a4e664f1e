#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Converts a DiT pipeline or transformer to MHLA; the same as `mhla-hf convert`.

python conversion/convert_dit.py my-dit dit-mhla --blocks 4,4 --lepe-kernel 3
"""

from mhla_hf.cli.convert import convert_command
from mhla_hf.cli.errors import run_script


if __name__ == "__main__":
    run_script(convert_command)
