#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a Wan-VACE pipeline with MHLA; the same as `mhla-hf train wan-vace`, for accelerate to launch.

    accelerate launch conversion/train_wan_vace.py vace-mhla run --data videos \
        --max-steps 2000 --batch-size 8 --learning-rate 2e-5 --mixed-precision bf16 --gradient-checkpointing

After a crash, the same command with `--resume latest` goes on where the last checkpoint was made.
"""

import sys

from mhla_hf.cli.main import app


if __name__ == "__main__":
    app(["train", "wan-vace", *sys.argv[1:]], prog_name="mhla-hf")
