# SPDX-License-Identifier: Apache-2.0
"""Pretrain the demo's base model: a small Wan pipeline with softmax attention on moving handwritten digits.

Nothing is downloaded. An interrupted run resumes from its work directory. In the root of the repository:

    python -m conversion.digits digits_wan --minutes 60
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import HfArgumentParser

from . import PretrainingConfig, pretrain


def main() -> None:
    """Runs the pretraining with the options of the command line."""
    parser = HfArgumentParser(
        PretrainingConfig,
        prog="python -m conversion.digits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("destination", type=Path, help="directory of the finished pipeline")
    parser.add_argument("--work", type=Path, help="directory for checkpoints (default: DESTINATION.work)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.set_defaults(device="cuda" if torch.cuda.is_available() else "cpu")
    config, arguments = parser.parse_args_into_dataclasses()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    work = arguments.work or arguments.destination.with_name(arguments.destination.name + ".work")
    pretrain(config, arguments.destination, work, log=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
