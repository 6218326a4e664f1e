#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Converts a DiT pipeline or transformer to MHLA; the same as `mhla-hf convert`.

python conversion/convert_dit.py my-dit dit-mhla --blocks 4,4 --lepe-kernel 3
"""

import sys

from mhla_hf.cli.main import app


if __name__ == "__main__":
    app(["convert", *sys.argv[1:]], prog_name="mhla-hf")
