#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""The operator by itself against softmax, linear attention and a memory copy; the same as `mhla-hf bench op`.

python benchmarks/op.py --json op.json --plot op.png
"""

from mhla_hf.cli.bench import operator_command
from mhla_hf.cli.errors import run_script


if __name__ == "__main__":
    run_script(operator_command)
