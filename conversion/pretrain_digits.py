#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Make the demo's base model: a small Wan pipeline with softmax attention, trained on moving handwritten digits.

Nothing is downloaded. An interrupted run continues from its work directory:

    python conversion/pretrain_digits.py digits_wan --minutes 60
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("destination", type=Path, help="directory of the finished pipeline")
    parser.add_argument("--work", type=Path, help="directory for checkpoints (default: DESTINATION.work)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    parser.add_argument("--workers", type=int, default=2, help="processes that encode videos")
    parser.add_argument("--pool", type=int, default=3250, help="training videos, encoded once")
    parser.add_argument("--vae-steps", type=int, default=600)
    parser.add_argument("--vae-full-steps", type=int, default=30)
    parser.add_argument("--steps", type=int, default=3550, help="steps of the transformer")
    parser.add_argument("--minutes", type=float, help="stop the transformer's training after this long")
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--matrix-learning-rate", type=float, default=3e-3, help="Muon's")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3, help="AdamW's")
    parser.add_argument("--decay-fraction", type=float, default=0.35, help="part of the steps in which both fall")
    parser.add_argument("--base", help="finished pipeline to start from, whose VAE is kept")
    parser.add_argument("--compile", action="store_true", help="compile the transformer first")
    parser.add_argument("--snapshot-minutes", type=float, default=10.0)
    return parser.parse_args()


def main() -> None:
    """Run the pretraining."""
    arguments = parse_arguments()
    from mhla_hf.demo.pretraining import PretrainingConfig, pretrain

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    config = PretrainingConfig(
        seed=arguments.seed,
        device=arguments.device,
        vae_crop_steps=arguments.vae_steps,
        vae_full_steps=arguments.vae_full_steps,
        pool_size=arguments.pool,
        workers=arguments.workers,
        steps=arguments.steps,
        minutes=arguments.minutes,
        batch_size=arguments.batch_size,
        matrix_learning_rate=arguments.matrix_learning_rate,
        learning_rate=arguments.learning_rate,
        decay_fraction=arguments.decay_fraction,
        base=arguments.base,
        compile=arguments.compile,
        snapshot_minutes=arguments.snapshot_minutes,
    )
    work = arguments.work or arguments.destination.with_name(arguments.destination.name + ".work")
    pretrain(config, arguments.destination, work, log=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
