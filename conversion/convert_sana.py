#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Converts a SANA or SANA-Sprint pipeline or transformer to MHLA; the same as `mhla-hf convert`.

It draws the same images as before until it is fine-tuned; `--mixing-init linear` starts from a locality bias.

python conversion/convert_sana.py Efficient-Large-Model/Sana_600M_512px_diffusers sana-mhla --blocks 4,4
"""

from mhla_hf.cli.convert import convert_command
from mhla_hf.cli.errors import run_script


if __name__ == "__main__":
    run_script(convert_command)
