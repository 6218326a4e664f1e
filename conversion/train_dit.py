#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a DiT pipeline with MHLA; the same as `mhla-hf train dit`, for accelerate to launch.

    accelerate launch conversion/train_dit.py dit-mhla run --data classes \
        --match-steps 500 --max-steps 2000 --batch-size 8 --learning-rate 5e-5 \
        --mixed-precision bf16 --gradient-checkpointing

After a crash, the same command with `--resume latest` goes on where the last checkpoint was made.
"""

import sys

from mhla_hf.cli.main import app


if __name__ == "__main__":
    app(["train", "dit", *sys.argv[1:]], prog_name="mhla-hf")
