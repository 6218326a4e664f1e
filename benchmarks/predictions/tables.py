# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/kernels.md: what is predicted for the shapes with a target, stage by stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages import table_row, with_sections
from mhla_hf.benchmarks.shapes import SHAPES

from .choosing import choices_table, parts_table, recovery_summary
from .stages import (
    MEMORY_RATE,
    Problem,
    Stage,
    block_backward,
    block_forward,
    causal_forward,
    fused_backward,
    fused_forward,
    hedgehog_backward,
    hedgehog_forward,
)


MEASURED = Path(__file__).resolve().parents[1] / "results" / "kernels.json"
"""Report of `python -m benchmarks.kernels time`, where a GPU has been measured."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Something with a time to predict.

    Attributes:
        problem: Sizes and options.
        forward: Stages of the forward pass.
        backward: Stages of the backward pass, if it is wanted.
        target: Milliseconds aimed for.
        grouped: Whether it runs for one group of lines after the other.
    """

    problem: Problem
    forward: Callable[[Problem], list[Stage]] = block_forward
    backward: Callable[[Problem], list[Stage]] | None = None
    target: float | None = None
    grouped: bool = True

    def passes(self) -> list[tuple[str, list[Stage], bool]]:
        """Name, stages, and whether summaries are float32, of each pass."""
        found = [("forward", self.forward(self.problem), False)]
        return found if self.backward is None else [*found, ("backward", self.backward(self.problem), True)]

    def seconds(self, cached: bool) -> float:
        """Least time of all stages one after the other, with summaries in L2 if they are `cached` and can be."""
        passes, cached = self.passes(), cached and self.grouped
        return sum(self.problem.seconds(stage, full, cached) for _, stages, full in passes for stage in stages)


def _case(shape: str, normalizer: str, target: float | None = None, features: int = 1, **options: Any) -> Case:
    problem = Problem(shape=SHAPES[shape], normalizer=normalizer, features=features, per_head=features > 1)
    return Case(problem=problem, target=target, **options)


_TRAIN: dict[str, Any] = {"backward": block_backward}
_FUSED: dict[str, Any] = {"forward": fused_forward}
_FUSED_TRAIN: dict[str, Any] = {"forward": fused_forward, "backward": fused_backward}
_HEDGEHOG: dict[str, Any] = {"features": 2, "forward": hedgehog_forward}
_HEDGEHOG_TRAIN: dict[str, Any] = {**_HEDGEHOG, "backward": hedgehog_backward}
_CAUSAL: dict[str, Any] = {"forward": causal_forward, "grouped": False}

CASES: dict[str, Case] = {
    "wan none": _case("wan", "none", 0.16),
    "wan query": _case("wan", "query", 0.20),
    "wan none train": _case("wan", "none", 0.9, **_TRAIN),
    "wan query train": _case("wan", "query", 0.9, **_TRAIN),
    "wan fused": _case("wan", "query", 0.28, **_FUSED),
    "wan fused train": _case("wan", "query", **_FUSED_TRAIN),
    "wan hedgehog": _case("wan", "query", **_HEDGEHOG),
    "wan hedgehog train": _case("wan", "query", **_HEDGEHOG_TRAIN),
    "wan-720p-h24 none": _case("wan-720p-h24", "none", 0.7),
    "wan-720p-h24 none train": _case("wan-720p-h24", "none", **_TRAIN),
    "dit-512 query": _case("dit-512", "query", 0.09),
    "dit-512 query train": _case("dit-512", "query", 0.40, **_TRAIN),
    "causal-2k query": _case("causal-2k", "query", 0.15, **_CAUSAL),
    "causal-32k query": _case("causal-32k", "query", 0.35, **_CAUSAL),
    "causal-128k query": _case("causal-128k", "query", **_CAUSAL),
}
"""What has a target, or is worth knowing beside it."""


def stage_table(case: Case) -> str:
    """A table of all stages of a case, in Markdown."""
    ways = (False, True) if case.grouped else (False,)
    titles = ["stage", "reads", "writes", "MB", "MB, in L2", "GFLOP", "through memory", "in L2"]
    if not case.grouped:
        titles = ["stage", "reads", "writes", "MB", "GFLOP", "predicted"]
    lines = [table_row(*titles), "|---" * len(titles) + "|"]
    problem = case.problem
    for name, stages, full in case.passes():
        for stage in stages:
            lines.append(
                table_row(
                    stage.name, _listed(stage.reads), _listed(stage.writes), *_figures(problem, [stage], full, ways)
                )
            )
        lines.append(table_row(f"**{name}**", "", "", *_figures(problem, stages, full, ways)))
    if case.backward is not None:
        seconds = [_time(case.seconds(cached)) for cached in ways]
        lines.append(table_row("**forward and backward**", *[""] * (len(titles) - 1 - len(ways)), *seconds))
    return "\n".join(lines)


def _figures(problem: Problem, stages: Sequence[Stage], full: bool, ways: Sequence[bool]) -> list[str]:
    moved = (sum(problem.memory(stage, full, cached) for stage in stages) for cached in ways)
    seconds = (sum(problem.seconds(stage, full, cached) for stage in stages) for cached in ways)
    operations = sum(sum(stage.products.values()) for stage in stages)
    products = f"{operations / 1e9:.1f}" if operations else ""
    return [*(f"{count / 1e6:,.0f}" for count in moved), products, *(_time(value) for value in seconds)]


def _listed(names: Sequence[str]) -> str:
    """Names of tensors, without those that hardly count where there are others."""
    names = list(dict.fromkeys(names))
    return ", ".join([name for name in names if name not in ("z", "d", "m", "1/rms")] or names)


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def target_table(measured: Mapping[str, float]) -> str:
    """A table of all cases with what is aimed for and, in milliseconds, what was measured."""
    lines = ["| case | blocks | through memory | in L2 | target | measured |", "|---|---|---|---|---|---|"]
    for name, case in CASES.items():
        seconds = (_time(case.seconds(False)), _time(case.seconds(True)) if case.grouped else "")
        target = "" if case.target is None else _time(case.target / 1e3)
        found = _time(measured[name] / 1e3) if name in measured else "not yet"
        lines.append(table_row(name, str(case.problem.shape.layout().num_blocks), *seconds, target, found))
    return "\n".join(lines)


def decode_table() -> str:
    """A table of the recurrent state: storing a prompt in it, and a token after contexts of two lengths."""
    case = CASES["causal-32k query"]
    shape = case.problem.shape
    # Summaries have the sums of keys as a further column, and one matrix for each head.
    matrix = shape.heads * shape.width * (shape.width + 1)
    # The current block's summary, its prefix and the next one's are read and written in float32.
    running, finished = 6 * 4 * matrix, 2 * matrix
    attention = _time(case.seconds(False))
    blocks = shape.layout().num_blocks
    lines = [
        "| step | reads | writes | MB | predicted |",
        "|---|---|---|---|---|",
        table_row(f"prompt of {shape.tokens:,} tokens: causal attention, as above", "", "", "", attention),
        table_row("storing it in the state", "S", "S, prefixes", *_moved(2 * blocks * finished + running / 2)),
    ]
    for context in (2048, 131072):
        # Blocks are spread over the tokens of one.
        share = context // shape.chunk // shape.chunk or 1
        reads = f"prefixes, current block, {share} of {context // shape.chunk:,} blocks"
        moved = _moved(running + share * finished)
        lines.append(table_row(f"a token after {context:,}", reads, "prefixes, current block", *moved))
    return "\n".join(lines)


def _moved(count: float) -> tuple[str, str]:
    return f"{count / 1e6:,.{0 if count > 1e7 else 1}f}", f"{1e6 * count / MEMORY_RATE:.{0 if count > 1e7 else 1}f} µs"


def measured_times(path: Path = MEASURED) -> dict[str, float]:
    """Milliseconds by case from a report of `python -m benchmarks.kernels time`; empty where there is none."""
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["results"]
    return {row["case"]: row["milliseconds"] for row in rows if row.get("milliseconds") is not None}


SECTIONS: dict[str, Callable[[], str]] = {
    "targets": lambda: target_table(measured_times()),
    "wan": lambda: stage_table(CASES["wan none train"]),
    "dit": lambda: stage_table(CASES["dit-512 query train"]),
    "fused": lambda: stage_table(CASES["wan fused train"]),
    "hedgehog": lambda: stage_table(CASES["wan hedgehog train"]),
    "causal-2k": lambda: stage_table(CASES["causal-2k query"]),
    "causal-32k": lambda: stage_table(CASES["causal-32k query"]),
    "decode": decode_table,
    "parts": parts_table,
    "choices": lambda: choices_table(recovery_summary()),
}
"""Tables of the pages, by the name in their markers."""


def with_tables(text: str, sections: Mapping[str, Callable[[], str]] = SECTIONS) -> str:
    """Text with what is between markers, `<!-- predictions: NAME -->` and `<!-- end -->`, replaced by tables."""
    return with_sections(text, "predictions", lambda name: sections[name]())
