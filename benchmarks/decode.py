#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Memory and time of decoding, MHLA cache against KV cache; the same as `mhla-hf bench decode`.

python benchmarks/decode.py --contexts 2048,8192,32768 --json decode.json
"""

from mhla_hf.cli.bench import decode_command
from mhla_hf.cli.errors import run_script


if __name__ == "__main__":
    run_script(decode_command)
