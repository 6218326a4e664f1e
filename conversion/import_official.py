#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Converts the authors' Wan-MHLA checkpoint to diffusers; the same as `mhla-hf import-official`.

python conversion/import_official.py checkpoint.safetensors wan-mhla --base Wan-AI/Wan2.1-T2V-1.3B-Diffusers
"""

from mhla_hf.cli.convert import import_official_command
from mhla_hf.cli.errors import run_script


if __name__ == "__main__":
    run_script(import_official_command)
