#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a HunyuanVideo pipeline with MHLA; the same as `mhla-hf train hunyuan-video`, for accelerate to launch.

    accelerate launch conversion/train_hunyuan_video.py hunyuan-mhla run --data videos \
        --max-steps 2000 --batch-size 8 --learning-rate 2e-5 --mixed-precision bf16 --gradient-checkpointing

After a crash, the same command with `--resume latest` goes on where the last checkpoint was made.
"""

import sys

from mhla_hf.cli.main import app


if __name__ == "__main__":
    app(["train", "hunyuan-video", *sys.argv[1:]], prog_name="mhla-hf")
