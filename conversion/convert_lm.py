#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Converts a language model, encoder or vision model of transformers to MHLA; the same as `mhla-hf convert`.

python conversion/convert_lm.py HuggingFaceTB/SmolLM2-135M smollm2-mhla --block-size 128 --layers 2/3 --dtype bf16
"""

import sys

from mhla_hf.cli.main import app


if __name__ == "__main__":
    app(["convert", *sys.argv[1:]], prog_name="mhla-hf")
