#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Converts the authors' Wan-MHLA checkpoint to diffusers; the same as `mhla-hf import-official`.

python conversion/import_official.py checkpoint.safetensors wan-mhla --base Wan-AI/Wan2.1-T2V-1.3B-Diffusers
"""

import sys

from mhla_hf.cli.main import app


if __name__ == "__main__":
    app(["import-official", *sys.argv[1:]], prog_name="mhla-hf")
