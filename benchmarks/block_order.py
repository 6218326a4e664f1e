# SPDX-License-Identifier: Apache-2.0
"""Tokens block by block beside row by row, one block and softmax, on a CPU: the operator, and layers of a small Wan.

python -m benchmarks.block_order --json block_order.json

Contestants take turns, one call each, on one thread; a ratio is that of processor times, the median over these turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.programs import make_parser, run_program
from mhla_hf import BlockLayout, MHLAWanTransformer3DModel, mhla_attention
from mhla_hf.bench import EPS, OperatorShape, attend, make_inputs
from mhla_hf.cli.look import show_table
from mhla_hf.families.inputs import example_inputs
from mhla_hf.utils.machine import machine_facts


SHAPES = {
    "3,600 tokens, 48 blocks": OperatorShape(1, 4, 64, (9, 20, 20), (3, 4, 4)),
    "32,760 tokens, 60 blocks": OperatorShape(1, 4, 64, (21, 30, 52), (3, 5, 4)),
}
WAN = {"num_attention_heads": 4, "attention_head_dim": 64, "num_layers": 2, "ffn_dim": 1024, "text_dim": 64}
GRID, BLOCKS = (9, 20, 20), (3, 4, 4)
CPU = torch.device("cpu")

Contestants = dict[str, Callable[[], Any]]


def operators(shape: OperatorShape) -> Iterator[tuple[str, Contestants]]:
    """The operator, forward and with the backward pass."""
    inputs = make_inputs(shape, torch.float32, CPU, seed=0)
    linear = partial(attend, "linear", shape=shape, normalizer="query")
    softmax = partial(attend, "softmax", shape=shape, normalizer=None)

    def mhla(layout: BlockLayout, *given: Any) -> torch.Tensor:
        tokens, mixing = given[0][:3], given[0].mixing
        return mhla_attention(*tokens, mixing if layout.num_blocks > 1 else mixing.new_ones(1, 1), layout, eps=EPS)

    ordered = BlockLayout(shape.grid, shape.blocks, block_order=True)
    # Of longer sequences softmax takes half a minute.
    with_softmax = {"softmax": softmax} if shape.tokens < 10_000 else {}
    forms = {
        "linear": linear,
        "one block": partial(mhla, BlockLayout(shape.grid, [1] * len(shape.grid))),
        "row order": partial(mhla, shape.layout()),
        "block order": partial(mhla, ordered),
        **with_softmax,
    }
    yield "forward", {name: partial(form, inputs) for name, form in forms.items()}
    tokens = [x.requires_grad_() for x in inputs[:3]]

    def both(form: Callable[..., torch.Tensor]) -> None:
        torch.autograd.grad(form(inputs), tokens, inputs.gradient)

    yield "both directions", {name: partial(both, form) for name, form in forms.items()}


def models() -> Iterator[tuple[str, Contestants]]:
    """A small Wan at 3,600 tokens: its two MHLA layers, which attend and project, and the whole model."""
    made = {}
    for name, blocks in (("one block", (1, 1, 1)), ("row order", BLOCKS), ("block order", BLOCKS)):
        torch.manual_seed(0)
        made[name] = MHLAWanTransformer3DModel(**WAN, mhla={"blocks": blocks, "grid": GRID}).eval()
        made[name].block_order = name == "block order"
    inputs = example_inputs(made["row order"], GRID, torch.float32, CPU, text=64)
    layers = {
        name: partial(_each, _calls_of(model.blocks[0].attn1.processor, partial(model, **inputs)))
        for name, model in made.items()
    }
    yield "layers, forward", layers
    yield "model, forward", {name: partial(model, **inputs) for name, model in made.items()}


def _each(calls: list[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _calls_of(processor: Any, run: Callable[[], Any]) -> list[Callable[[], Any]]:
    """Calls of MHLA layers that a run makes. Their processors see them: hooks would keep a model from block order."""
    calls: list[Callable[[], Any]] = []

    def record(own: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(partial(original, own, *args, **kwargs))
        return original(own, *args, **kwargs)

    original = type(processor).__call__
    with patch.object(type(processor), "__call__", record), torch.no_grad():
        run()
    return calls


def measure(contestants: Contestants, seconds: float) -> dict[str, list[float]]:
    """Processor time of each call in seconds; softmax, which takes long, is called a few times alone."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    end = time.perf_counter() + seconds
    turn = -2
    while time.perf_counter() < end or turn < 3:
        for name, call in contestants.items():
            if name == "softmax" and turn > 2:
                continue
            start = time.process_time()
            call()
            if turn >= 0:
                times[name].append(time.process_time() - start)
        turn += 1
    return times


def run(*, seconds: float = 20.0, device: str | None = None, progress: Callable[[str], None] | None = None) -> Any:
    """Measure everything, and return the report."""
    torch.set_num_threads(1)
    rows = []
    cases = {name: partial(operators, shape) for name, shape in SHAPES.items()} | {"small Wan, 3,600 tokens": models}
    for case, make in cases.items():
        for kind, contestants in make():
            if progress is not None:
                progress(f"{case}, {kind}")
            with torch.set_grad_enabled(kind == "both directions"):
                times = measure(contestants, seconds)
            base = times["linear" if "linear" in times else "one block"]
            for name, own in times.items():
                ratio = statistics.median([x / y for x, y in zip(own, base)])
                milliseconds = 1000 * statistics.median(own)
                rows.append({"case": case, "kind": kind, "contestant": name, "ms": milliseconds, "ratio": ratio})
    shown = [{**row, "ms": f"{row['ms']:.1f}", "ratio": f"{row['ratio']:.2f}"} for row in rows]
    show_table(shown, title="ratio: to linear attention, for the Wan to one block")
    return {"benchmark": "block order", "machine": machine_facts(CPU), "results": rows}


def main() -> None:
    """Run the program."""
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, help="approximate time of each of six measurements (20)")
    run_program(parser, run)


if __name__ == "__main__":
    main()
