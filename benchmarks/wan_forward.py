#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one Wan transformer forward, softmax against MHLA; `mhla-hf bench model` with Wan alone.

On a GPU this is Wan2.1-T2V-1.3B with random weights at 31,500 tokens in bfloat16, on a CPU a small model, which shows
that the program works and nothing about speed at the real size:

    python benchmarks/wan_forward.py --json wan_forward.json
"""

import sys

import torch

from mhla_hf.cli.bench import model_command
from mhla_hf.cli.errors import run_script


if __name__ == "__main__":
    sys.argv[1:1] = ["--models", "wan" if torch.cuda.is_available() else "wan-small"]
    run_script(model_command)
