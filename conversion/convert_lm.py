#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Converts a language model, encoder or vision model of transformers to MHLA; the same as `mhla-hf convert`.

python conversion/convert_lm.py HuggingFaceTB/SmolLM2-135M smollm2-mhla --block-size 128 --layers 2/3 --dtype bf16
"""

from mhla_hf.cli.convert import convert_command
from mhla_hf.cli.errors import run_script


if __name__ == "__main__":
    run_script(convert_command)
