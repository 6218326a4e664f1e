#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Converts a Wan pipeline or transformer to MHLA; the same as `mhla-hf convert`.

python conversion/convert_wan.py Wan-AI/Wan2.1-T2V-1.3B-Diffusers wan-mhla --blocks 3,5,10 --layers 2/3 --dtype bf16
"""

import sys

from mhla_hf.cli.main import app


if __name__ == "__main__":
    app(["convert", *sys.argv[1:]], prog_name="mhla-hf")
