#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Converts a SANA or SANA-Sprint pipeline or transformer to MHLA; the same as `mhla-hf convert`.

It draws the same images as before until it is fine-tuned; `--mixing-init linear` starts from a locality bias.

python conversion/convert_sana.py Efficient-Large-Model/Sana_600M_512px_diffusers sana-mhla --blocks 4,4
"""

import sys

from mhla_hf.cli.main import app


if __name__ == "__main__":
    app(["convert", *sys.argv[1:]], prog_name="mhla-hf")
