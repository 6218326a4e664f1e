# SPDX-License-Identifier: Apache-2.0
"""Tables of model cards: options, training, quality and speed."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

from huggingface_hub import EvalResult

from ..config import MHLAConfig
from ..layouts.windows import default_window_size
from ..ops.feature_maps import FEATURE_MAPS
from ..ops.normalizers import NORMALIZERS
from ..recovery.report import TITLES
from ..utils.json_files import read_json
from ..utils.locations import is_hub_id
from ..utils.messages import one_line, pluralize
from .records import BENCHMARK, LONGEST, RECOVERY, ModelPart, Records, Tower, is_recovery, known


_AXES = {1: "tokens", 2: "rows × columns", 3: "frames × rows × columns"}
_WINDOWS = {
    "block": "within its block",
    "adjacent": "within its block and the adjacent ones",
    "cross": "in the blocks around it in its frames, and at its place in all frames",
}
_MATCHING = "matching: each layer alone learns the output of the layer it replaced"
_STAGES = {
    "calibrate": "calibration: closed-form fits on a small probe, no training",
    "match": _MATCHING,
    "transfer": _MATCHING,
    "distill": "distillation: the whole model learns the original's prediction",
    "finetune": "fine-tuning: the whole model trains on its own objective",
}
_STEPS = {"transfer": "transfer_steps", "distill": "distill_steps", "finetune": "max_steps"}
_DATA = {
    "latents": "latents",
    "text in packed rows": "rows of text",
    "passages of text": "passages of text",
    "images": "images",
    "calls of the pipeline's model": "recorded calls of the model while its pipeline generated samples",
}
_ORIGINS = {"generated": " that the original generated", "digits": " of scikit-learn's handwritten digits"}
# Headings, formats and the Hub's metrics of the figures of quality; the first that is known is explained in the text.
_FIGURES: dict[str, tuple[str, str, str | None]] = {
    "loss": ("loss", "{:.4f}", "loss"),
    "bits_per_byte": ("bits per byte", "{:.4f}", "bits_per_byte"),
    "cosine": ("cosine to the original", "{:.4f}", "cosine_similarity"),
    "agreement": ("same class as the original", "{:.1%}", "agreement"),
    "above_softmax_percent": ("above the original", "{:+.2f} %", None),
}
_OUTPUTS = {
    "causal": "mean-pooled last hidden states",
    "encoder": "mean-pooled last hidden states",
    "vision": "outputs (logits of classifiers, else mean-pooled last hidden states)",
}
# Figures of the original on the same data agree to rounding.
_SAME = 1e-4
# Families whose sizes carry another family's name in benchmarks.
_SIZES_OF = {"pixart": "dit", "sana-video": "sana"}

# Characters that begin markup. For those that Markdown has no backslash for, HTML does.
_SPECIAL = re.compile(r"[\\`*\[\]#!]|(?<![^\W_])_|_(?![^\W_])|[&<>|$~@]|(?<=:)//|(?<=www)\.", re.IGNORECASE)
_BACKSLASHED = set("\\`*[]#!_")
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1))


def options_table(part: ModelPart, tower: Tower, original: str) -> str:
    """Return the table of a tower's options."""
    options, layers, total = tower.options, tower.layers, tower.num_layers
    which: str | None = None
    if layers:
        counted = f"{ranges(layers)}{'' if total is None else f' of {total} (counted from 0)'}"
        which = f"all {total}" if len(layers) == total else f"{counted}; the others keep {original} attention"
    rotary = "before φ" if options.rope == "before_feature_map" else "after φ"
    heads = "one matrix for each head" if options.mixing_heads == "per_head" else "one matrix for all heads of a layer"
    constraint = ", kept positive" if options.mixing_constraint == "nonnegative" else ""
    values = {
        "MHLA layers": which,
        "blocks": _blocks(options),
        "attention": "causal" if options.causal else None,
        "feature map φ": f"{code(options.feature_map)}: {plain(FEATURE_MAPS[options.feature_map].formula)}",
        "rotary embedding": rotary if tower.has_rotary else None,
        "normaliser": f"{code(options.normalizer)}: {plain(NORMALIZERS[options.normalizer].formula)}",
        "mixing weights": f"{heads}{constraint}, initialised as {code(options.mixing_init)}",
        "softmax window": _window(options),
        "output gate": "SiLU of a linear map of the hidden states" if options.output_gate else None,
        "output norm": "RMSNorm over each head" if options.output_norm else None,
        "depthwise convolution of the values (LePE)": f"kernel {options.lepe_kernel}" if options.lepe_kernel else None,
    }
    return table([{"option": name, "value": value} for name, value in values.items()])


def _blocks(options: MHLAConfig) -> str | None:
    blocks, size, grid = options.blocks, options.block_size, options.grid
    if options.is_sequence and size is not None:
        length = f"; mixing weights for {pluralize(grid[0], 'token')}" if grid is not None else ""
        return f"{pluralize(size[0], 'token')} each{length}, continued by distance for longer sequences"
    if blocks is None and size is not None and grid is not None:
        blocks = tuple(-(-length // step) for length, step in zip(grid, size))
    if blocks is None:
        return f"{sizes(size)} tokens each" if size else None
    total = f", {math.prod(blocks):,} in all" if len(blocks) > 1 else ""
    where = f", on a grid of {sizes(grid)} tokens" if grid is not None else ""
    return f"{sizes(blocks)} ({_AXES.get(len(blocks), 'axes')}){total}{where}"


def _window(options: MHLAConfig) -> str | None:
    if options.window is None:
        return None
    axes = 1 if options.is_sequence else len(options.blocks or options.block_size or options.grid or ())
    size = options.window_size
    if size is None and axes and not options.is_sequence:
        size = default_window_size(options.window, axes)
    extent = "" if size is None else f", blocks of {sizes(size)} tokens"
    gains = "head" if options.window_gains == "per_head" else "channel"
    return f"exact softmax of each token {_WINDOWS[options.window]}{extent}; a pair of gains for each {gains}"


# Training and quality


def recovery_tables(report: dict[str, Any]) -> dict[str, Any] | None:
    rows = []
    for name in ("calibrate", "match", "distill", "finetune"):
        options, seconds = report["recipe"][name], report["seconds"].get(name, {})
        steps = options["steps"] or report["stages"].get(name, {}).get("steps")
        rate, added = options["learning_rate"], options["mhla_learning_rate"]
        row = {
            "stage": _STAGES[name],
            "steps": _shown(steps or None, "{:,}"),
            "samples per step": _shown(options["batch_size"] if steps else None, "{:,}"),
            "learning rate": _rate(rate),
            "learning rate, MHLA": None if added == rate else _rate(added),
            "time": _duration(seconds.get("seconds")),
            "CPU time": _duration(seconds.get("cpu_seconds")),
        }
        rows += [row] if name in report["figures"] else []
    if not rows:
        return None
    stages = table(rows, list(rows[0])[1:]) or "\n".join(f"- {row['stage']}" for row in rows)
    data = report["data"]
    what, samples = _DATA.get(data["kind"]), data["samples"]
    details = [f"{what} of {sizes(data['shape'])}" if what == "latents" and data["shape"] else what] if what else []
    if data["length"]:
        exactly = "" if data["kind"] == "text in packed rows" else "at most "
        details.append(f"of {exactly}{pluralize(data['length'], 'token')}")
    origin = _ORIGINS.get(data["origin"]) or (data["origin"] and f" of {code(data['origin'])}")
    explained = f" ({' '.join(details)})" if details else ""
    clause = f"{pluralize(samples, 'sample')}{origin}{explained}" if samples else None
    return {"stages": stages, "data": clause, "where": _machine(report["machine"])}


def training_tables(record: dict[str, Any]) -> dict[str, Any] | None:
    config = record["config"]
    rows = [
        {
            "stage": _STAGES[name],
            "steps": f"{config[steps]:,}",
            "learning rate": _rate(config[f"{name}_learning_rate"] or config["learning_rate"]),
            "training loss of the last step": _shown(record["final_losses"].get(name), "{:.4g}"),
        }
        for name, steps in _STEPS.items()
        if config[steps]
    ]
    if not rows:
        return None
    factors = (config["batch_size"], config["gradient_accumulation_steps"], record["world_size"])
    added, precision = config["mhla_learning_rate"], config["mixed_precision"]
    trained = {"mhla": "the parameters that MHLA adds", "lora": "LoRA and the parameters that MHLA adds"}
    distilled = config["transfer_steps"] or config["distill_steps"]
    facts = [
        f"{pluralize(math.prod(factors), 'sample')} a step" if all(factors) else None,
        f"learning rate {_rate(added)} for MHLA's parameters" if added and added != config["learning_rate"] else None,
        "teacher: the model before its conversion" if distilled and not config["teacher"] else None,
        f"{trained[config['train']]} trained" if config["train"] in trained else None,
        f"mixed precision {code(precision)}" if precision not in ("", "no") else None,
        _shown(config["seed"], "seed {}"),
    ]
    samples = record["dataset_size"]
    return {
        "stages": table(rows, list(rows[0])[1:]),
        "facts": "; ".join(filter(None, facts)),
        "data": pluralize(samples, "sample") if samples else None,
    }


def _machine(machine: dict[str, Any]) -> str:
    """Return machine, version of torch and date of a measurement."""
    threads = machine["threads"] if machine["threads"] and not machine["cuda"] else 0
    torch = machine["torch"] and f"torch {machine['torch']}"
    parts = (machine["device"], threads and pluralize(threads, "CPU thread"), torch, machine["date"])
    return ", ".join(plain(part) for part in parts if part)


def quality_table(records: Records, others: Mapping[str, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the table of held-out quality and a sentence about it; `None` without a figure.

    Raises:
        ValueError: If another recovery was measured on other data.
    """
    report = records.recovery
    states = _states(report)
    if not states:
        return None
    titles = {**TITLES, "converted": "converted, before recovery"}
    titles["softmax"] = f"original, {records.parts[0].component.original_attention} attention"
    *_, last = states
    rows = [
        {"model": f"**this model**, {titles[name]}" if name == last else titles[name], **_cells(state)}
        for name, state in states.items()
    ]
    for title, other in others.items():
        mine, theirs = (each["figures"].get("softmax", {}) for each in (report, other))
        same = all((each["data"], each["family"]) == (report["data"], report["family"]) for each in (other,))
        if not same or not all(_close(value, theirs.get(key)) for key, value in mine.items()):
            raise ValueError(
                f"{one_line(title, LONGEST)} was measured on other data than this model and cannot stand beside it: "
                "give the report of a recovery of the same original, with the same data."
            )
        if figures := list(_states(other).values()):
            rows.append({"model": plain(title), **_cells(figures[-1])})
    return {"table": table(rows, list(rows[0])[1:]), "sentence": _quality_sentence(report, states)}


def eval_results(records: Records, task: str | None, dataset: str | None) -> list[EvalResult]:
    """Return the model's figures of quality as the Hub lists them."""
    states, data = _states(records.recovery), records.recovery["data"]
    if task is None or not states or list(states)[-1] in ("softmax", "converted"):
        return []
    identifier = data["origin"].partition(":")[0]
    listed = is_hub_id(identifier)
    final = list(states.values())[-1]
    return [
        EvalResult(
            task_type=task,
            dataset_type=identifier if listed else "held-out",
            dataset_name=dataset or (data["origin"] if listed else f"Held-out {data['kind'] or 'samples'}"),
            metric_type=metric,
            metric_name=(_loss_name(records.recovery) if key == "loss" else heading).capitalize(),
            metric_value=float(f"{final[key]:.5g}"),
        )
        for key, (heading, _, metric) in _FIGURES.items()
        if metric is not None and final.get(key) is not None
    ]


def _states(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of the states of a model that have any, in order."""
    figures = {name: report["figures"].get(name, {}) for name in TITLES}
    return {name: state for name, state in figures.items() if any(state.get(key) is not None for key in _FIGURES)}


def _cells(state: dict[str, Any]) -> dict[str, str | None]:
    return {heading: _shown(state.get(key), form) for key, (heading, form, _) in _FIGURES.items()}


def _close(first: float | None, second: float | None) -> bool:
    return first is None or (second is not None and math.isclose(first, second, rel_tol=_SAME))


def _quality_sentence(report: dict[str, Any], states: dict[str, dict[str, Any]]) -> str:
    data = report["data"]
    key = next(key for key in _FIGURES if any(state.get(key) is not None for state in states.values()))
    what, best = {
        "loss": (_loss_name(report).capitalize(), "; lower is better"),
        "bits_per_byte": ("Bits per byte of text", "; lower is better"),
        "cosine": ("Cosine similarity to the original's output", "; 1 is best"),
    }.get(key, ("Quality", ""))
    if key == "cosine" and report["family"] in _OUTPUTS:
        what = f"Mean cosine similarity of {_OUTPUTS[report['family']]} to the original's"
    where = pluralize(data["held_out"], "held-out sample") if data["held_out"] else "held-out samples"
    if data["draws"] and data["held_out"]:
        where += f" with {pluralize(data['draws'], 'noise draw')} each, the same for all models"
    run = "" if report["seed"] is None else f" One run, seed {report['seed']}."
    return f"{what}, on {where}{best}.{run}"


def _loss_name(report: dict[str, Any]) -> str:
    losses = {"wan": "flow-matching loss", "sana": "flow-matching loss", "dit": "noise-prediction loss"}
    return losses.get(report["family"], "loss")


# Speed


def read_benchmarks(
    benchmarks: Sequence[str | Path | Mapping[str, Any]], own: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Read reports of speed, and recoveries by the titles of their rows."""
    measured: list[dict[str, Any]] = []
    recoveries: dict[str, dict[str, Any]] = {}
    for given in benchmarks:
        content = given if isinstance(given, Mapping) else read_json(Path(given).expanduser(), "the report")
        report, recovery = known(content, BENCHMARK), known(content, RECOVERY)
        if report["benchmark"] in ("decode", "model", "train", "op", "generation") and "results" in content:
            measured.append(report)
        elif is_recovery(recovery):
            title = first = _comparison_title(recovery, own)
            while title in recoveries:
                title = f"{first} ({len(recoveries) + 1})"
            recoveries[title] = recovery
        else:
            where = "a benchmark" if isinstance(given, Mapping) else str(given)
            raise ValueError(
                f"{where} is neither a report of mhla-hf bench (--json) nor report.json of mhla-hf recover."
            )
    return measured, recoveries


def _comparison_title(report: dict[str, Any], own: dict[str, Any]) -> str:
    """Return the title of another recovery, by its recipe."""
    options = report["recipe"]["mhla"]
    blocks = options["blocks"]
    title = "MHLA" + (f", {sizes(blocks)} blocks" if blocks else "")
    if blocks and set(blocks) == {1}:
        title = "linear attention (one block)"
    if options["window"]:
        title += f" and a softmax window ({options['window']})"
    # Recipes list everything that they set.
    alike = {**report["recipe"], "mhla": None} == {**own["recipe"], "mhla": None}
    return f"{title}, recovered {'alike' if alike else 'with other settings'}"


def speed_table(report: dict[str, Any], part: ModelPart) -> dict[str, Any]:
    """Return a section on speed and memory: `title`, `what` was measured, `where`, `table`, whether it `is_own`."""
    kind, options = report["benchmark"], report["options"]
    rows = [row for row in report["results"] if not row["reason"]]
    if kind == "decode":
        what = f"Measured with {code(public_location(options['model']))}."
        if not options["model"]:
            layers, width = options["layers"], options["hidden_size"]
            extent = f" of {pluralize(layers, 'layer')} and width {width}" if layers and width else ""
            what = f"Measured with a Llama{extent} with random weights, not with this model."
        what += f" The KV cache is {code(options['cache'])}." if options["cache"] else ""
        title, names, cells = "Decoding", 1, [_decoding(row) for row in rows]
    elif kind == "generation":
        title, names, what = "Generation", 1, plain(report["task"])
        cells = [
            {
                "model": plain(row["model"]),
                "parameters": _shown(row["parameters"], "{:,}"),
                "time": _duration(row["seconds"]),
            }
            for row in rows
        ]
    elif kind == "op":
        title, names, cells = "Operator", 3, _operator(_of_family(rows, "shape", part), part)
        what = "The attention operator alone at the sizes of models, each by its fastest implementation."
    else:
        title, names = "Training step" if kind == "train" else "Forward pass", 2
        what = "Measured with models of the sizes named and random weights, not with this model."
        cells = [
            {
                "model": code(row["model"]),
                "attention": plain(row["contestant"].replace("mhla-", "MHLA, "))
                if row["contestant"] != "ordinary"
                else f"original ({plain(row['attention'])})",
                "tokens": _shown(row["tokens"], "{:,}"),
                "time": _duration(row["milliseconds"] and row["milliseconds"] / 1e3),
                "memory beyond weights": _size(row["peak_memory_bytes"]),
                "against the original": _shown(row["speedup_over_ordinary"], "{:.2f}×"),
            }
            for row in _of_family(rows, "model", part)
        ]
    place = ", ".join(filter(None, (_machine(report["machine"]), code(options["dtype"]))))
    # Sizes name rows as well.
    always = names + (kind != "generation")
    shown = table(cells, list(cells[0])[names:] if cells else [], always)
    return {
        "title": title,
        "what": what,
        "where": place,
        "table": shown,
        "is_own": kind == "generation" or bool(options["model"]),
    }


def _decoding(row: dict[str, Any]) -> dict[str, str | None]:
    return {
        "type": code(row["dtype"]),
        "tokens in the cache": _shown(row["context"], "{:,}"),
        "MHLA cache": _size(row["mhla"]["cache_bytes"]),
        "KV cache": _size(row["softmax"]["cache_bytes"]),
        "time per token, MHLA": _duration(row["mhla"]["seconds_per_token"]),
        "time per token, softmax": _duration(row["softmax"]["seconds_per_token"]),
    }


def _of_family(rows: list[dict[str, Any]], key: str, part: ModelPart) -> list[dict[str, Any]]:
    """Return the rows of sizes named after the family of a model; all of them where there are none."""
    name = "causal" if part.towers[0].options.causal else _SIZES_OF.get(part.family, part.family)
    return [row for row in rows if row[key] == name or row[key].startswith(f"{name}-")] or rows


def _operator(rows: list[dict[str, Any]], part: ModelPart) -> list[dict[str, str | None]]:
    best: dict[tuple[str, int | None, str], dict[str, float]] = {}
    # Reports have no figures of the authors' other normaliser.
    normalizer = part.towers[0].options.normalizer
    allowed = ("", normalizer if normalizer == "query" else "none")
    for row in rows:
        name = row["contestant"].removeprefix("fla-")
        kind = name.split("-")[0]
        milliseconds = row["milliseconds"]
        if (
            kind in ("mhla", "softmax", "linear")
            and "path" not in name
            and row["normalizer"] in allowed
            and milliseconds
        ):
            times = best.setdefault((row["shape"], row["tokens"], row["direction"]), {})
            times[kind] = min(milliseconds / 1e3, times.get(kind, math.inf))
    return [
        {
            "size": code(shape),
            "tokens": _shown(tokens, "{:,}"),
            "direction": plain(direction),
            "MHLA": _duration(times["mhla"]),
            "softmax": _duration(times.get("softmax")),
            "linear": _duration(times.get("linear")),
            "softmax / MHLA": f"{times['softmax'] / times['mhla']:.2f}×" if "softmax" in times else None,
        }
        for (shape, tokens, direction), times in best.items()
        if "mhla" in times
    ]


# Markdown


def plain(text: object) -> str:
    """Escape untrusted text, so that Markdown shows it literally, addresses included."""

    def escape(found: re.Match[str]) -> str:
        first, rest = found[0][0], found[0][1:]
        return (f"\\{first}" if first in _BACKSLASHED else f"&#{ord(first)};") + rest

    return _SPECIAL.sub(escape, one_line(text, LONGEST))


def code(text: object) -> str:
    """Return a code span, which may stand in a table; empty for an empty text."""
    text = one_line(text, LONGEST).replace("`", "'").replace("|", "¦").strip()
    return f"`{text}`" if text else ""


def public_location(location: str) -> str:
    """Return a Hub id, or the last part of a path: the rest is private."""
    return location if is_hub_id(location) else PureWindowsPath(location).name


def sizes(values: Iterable[int]) -> str:
    """Format lengths along axes: `5×4×4`."""
    return "×".join(map(str, values))


def ranges(indices: Iterable[int]) -> str:
    """Format whole numbers: `0–4, 6 and 8`."""
    parts: list[list[int]] = []
    for index in sorted(set(indices)):
        if parts and index == parts[-1][-1] + 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    words: list[str] = []
    for part in parts:
        words += [f"{part[0]}–{part[-1]}"] if len(part) > 2 else map(str, part)
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def table(rows: Sequence[Mapping[str, str | None]], right: Iterable[str] = (), names: int = 1) -> str:
    """Format a table, without the rows and columns that are empty.

    Args:
        rows: Cells by the heading of their column, the same headings in every row.
        right: Headings of columns of figures.
        names: Number of first columns that only name a row.

    Returns:
        The table; empty if nothing is left of it.
    """
    headings = list(rows[0]) if rows else []
    rows = [row for row in rows if any(row[name] for name in headings[names:])]
    shown = [name for name in headings if any(row[name] for row in rows)]
    rulers = ["---:" if name in right else "---" for name in shown]
    lines = [shown, rulers, *([row[name] or "" for name in shown] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) if rows else ""


def _shown(value: Any, form: str) -> str | None:
    return None if value is None else form.format(value)


def _rate(value: float | None) -> str | None:
    """Format a learning rate: `2e-5`."""
    return f"{value:g}".replace("e-0", "e-") if value and value > 0 else None


def _size(value: float | None) -> str | None:
    """Format bytes in decimal units."""
    if value is None or value < 0:
        return None
    unit, factor = next((unit for unit in _UNITS if value >= unit[1]), _UNITS[-1])
    return f"{value / factor:.3g} {unit}" if value < 1000 * factor else f"{value / factor:,.0f} {unit}"


def _duration(seconds: float | None) -> str | None:
    """Format seconds in a unit that is easy to read."""
    if seconds is None or seconds < 0:
        return None
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
