#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Quality of small DiTs with softmax, linear attention and MHLA; the same as `mhla-hf bench quality`.

pip install "mhla-hf[demo]"
python benchmarks/quality_dit.py --setting small --output benchmarks/results
"""

from mhla_hf.cli.bench_quality import quality_command
from mhla_hf.cli.errors import run_script


if __name__ == "__main__":
    run_script(quality_command)
