# SPDX-License-Identifier: Apache-2.0
"""A training step of diffusion transformers with random weights, with their own attention and with MHLA.

python -m benchmarks.training --models wan-small --json train.json --plot train.png
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.programs import make_parser, names, run_program
from mhla_hf.bench import BenchOptions, measure_models
from mhla_hf.cli.look import show_times


def make_step(
    model: Any, inputs: Iterator[dict[str, torch.Tensor]], *, checkpointing: bool, optimizer: bool
) -> Callable[[], None]:
    """Return a training step: forward, backward, and with `optimizer` a step of AdamW.

    It frees its gradients, so that those of one contestant are in memory only while it runs.
    """
    model.train()
    if checkpointing:
        model.enable_gradient_checkpointing()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-6) if optimizer else None

    def step() -> None:
        model(**next(inputs), return_dict=False)[0].float().square().mean().backward()
        if adamw is not None:
            adamw.step()
        model.zero_grad(set_to_none=True)

    return step


def measure_training(
    options: BenchOptions, *, checkpointing: bool = True, optimizer: bool = False, **choices: Any
) -> dict[str, Any]:
    """Measure time and memory of a training step.

    Args:
        options: Options of the measurement.
        checkpointing: Checkpoint gradients: keep the inputs of transformer blocks only.
        optimizer: End each step with one of AdamW.
        **choices: `models`, `contestants`, `compile_backend` and `progress` of
            [`measure_models`][mhla_hf.bench.measure_models].
    """
    make_run = partial(make_step, checkpointing=checkpointing, optimizer=optimizer)
    report = measure_models(options, make_run=make_run, **choices)
    report["options"] |= {"checkpointing": checkpointing, "optimizer": optimizer}
    return {**report, "benchmark": "train"}


def main() -> None:
    """Run the program."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=names, help="models, such as wan,dit-512; those that suit the device")
    parser.add_argument("--contestants", type=names, help="ordinary, mhla-torch, mhla-triton; all by default")
    parser.add_argument("--dtype", help="bfloat16 by default on a GPU, float32 on a CPU")
    parser.add_argument("--compile", action="store_true", help="compile the transformer blocks")
    parser.add_argument("--no-checkpointing", action="store_false", dest="checkpointing", help="keep all activations")
    parser.add_argument("--checkpointing", action="store_true", default=True, help="the default")
    parser.add_argument("--optimizer", action="store_true", help="end each step with one of AdamW")
    parser.add_argument("--seconds", type=float, default=15.0, help="approximate time for each model (15)")
    parser.add_argument("--quick", action="store_true", help="measure one model in a tenth of the time")

    def work(**given: Any) -> dict[str, Any]:
        shared = {name: given.pop(name) for name in ("dtype", "device", "seconds", "quick") if name in given}
        backend = "inductor" if given.pop("compile") else None
        report = measure_training(BenchOptions(**shared), compile_backend=backend, **given)
        show_times(report)
        return report

    run_program(parser, work)


if __name__ == "__main__":
    main()
