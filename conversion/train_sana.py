#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a SANA pipeline with MHLA; the same as `mhla-hf train sana`, for accelerate to launch.

    accelerate launch conversion/train_sana.py sana-mhla run --data images \
        --max-steps 2000 --batch-size 8 --learning-rate 2e-5 --mixed-precision bf16 --gradient-checkpointing

After a crash, the same command with `--resume latest` goes on where the last checkpoint was made.
"""

from mhla_hf.cli.errors import run_script
from mhla_hf.cli.recover import COMMANDS


if __name__ == "__main__":
    run_script(COMMANDS["sana"])
