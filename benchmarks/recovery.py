#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Quality and time of recoveries of converted models of several families.

    python -m benchmarks.recovery --jobs 2

MHLA, MHLA with a softmax window beside it, and linear attention (MHLA with one block) go through the default recipe
of their family, alike in everything else, with several seeds. `--variants` names others for the demo's Wan, with ReLU,
shared mixing weights or a window of blocks, which docs/models.md compares. Of the classifier the accuracy is
measured before and after, and of the encoder similarity and retrieval by its embeddings. Figures and a plot go to
`benchmarks/results/`. Each job runs on one thread; CPU seconds are those of all its stages. Earlier results are kept,
so an interrupted run resumes; with `--work` it resumes from that directory, and measures again what it does not hold.
Models that do not come with a package are pretrained first, once, by `pretrained.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from mhla_hf.utils.files import write_json


RESULTS = Path(__file__).parent / "results"
STAGES = ("calibrate", "match", "blockwise", "distill")
"""A recipe may leave some out."""

TITLES = {"mhla": "MHLA", "window": "MHLA + window", "linear": "linear"}
"""Variants of every model."""

COLORS = {"mhla": "#1f77b4", "window": "#2ca02c", "linear": "#d95f02"}
_RELU = {"mhla.feature_map": "relu", "mhla.rope": "after_feature_map"}
_SHARED = {"mhla.mixing_heads": "shared"}
_BLOCK = {"mhla.window": "block"}
_BARE = {"mhla.lepe_kernel": None}
OPTIONS: dict[str, tuple[bool, dict[str, Any]]] = {
    "relu": (False, _RELU),
    "relu_window": (True, _RELU),
    "relu_block": (True, _RELU | _BLOCK),
    "relu_shared": (False, _RELU | _SHARED),
    "relu_shared_window": (True, _RELU | _SHARED),
    "relu_shared_block": (True, _RELU | _SHARED | _BLOCK),
    "exp": (False, _RELU | {"mhla.feature_map": "exp"}),
    "relu_shared_bare": (False, _RELU | _SHARED | _BARE),
    "relu_bare": (False, _RELU | _BARE),
    "mhla_bare": (False, _BARE),
    "mhla_block": (True, _BLOCK),
    "mhla_shared_bare": (False, _SHARED | _BARE),
    "mhla_shared": (False, _SHARED),
    "mhla_shared_window": (True, _SHARED),
    "mhla_shared_block": (True, _SHARED | _BLOCK),
}
"""Variants of the demo's Wan: whether there is a window, and changes to the default recipe."""

MODELS = {
    "digits": "Wan of the demo, two thirds of the layers",
    "digits_all": "Wan of the demo, all layers",
    "dit": "DiT on digits",
    "vit": "ViT on digits",
    "language": "language model on Python source",
    "minilm": "all-MiniLM-L6-v2",
}
PREPARED = ("dit", "vit", "language", "minilm")
"""Models that `pretrained.py` makes, or collects texts for."""

COSINE = ("vit", "minilm")
"""Models whose main figure is the cosine to the original; of others it is the loss above softmax."""

_GRID_LINEAR = {"mhla.blocks": [1, 1], "mhla.mixing_init": "uniform"}
LINEAR: dict[str, dict[str, Any]] = {
    "dit": _GRID_LINEAR,
    "vit": _GRID_LINEAR,
    "language": {"mhla.block_size": [1024], "mhla.grid": [1024], "mhla.mixing_init": "uniform", "mhla.window": None},
    "minilm": {"mhla.block_size": [512], "mhla.grid": [512], "mhla.mixing_init": "uniform"},
}
"""Changes to the recipe that make linear attention: one block for all positions."""

SIZES: dict[str, dict[str, Any]] = {"language": {"data.max_length": 256}}
"""Changes for all variants of a model: the language model has been trained on rows of 256 tokens."""


@dataclass(frozen=True)
class Case:
    """One recovery.

    Attributes:
        model: A key of `MODELS`.
        variant: A key of `TITLES`, or of `OPTIONS` for the demo's Wan.
        seed: Of data order and noise.
    """

    model: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        """Name in the results."""
        return f"{self.model}/{self.variant}/{self.seed}"


def run_case(case: Case, folder: Path, source: Path | None = None, **options: Any) -> dict[str, Any]:
    """Recovers one copy and returns its figures and seconds by stage; runs in a process of its own.

    Args:
        case: What to recover.
        folder: An empty folder to work in.
        source: Directory of the model, or for the encoder of its texts; none for the demo's Wan.
        **options: Further arguments of `mhla_hf.recover`, of all models but the demo's Wan.
    """
    import torch

    torch.set_num_threads(1)
    recovered = folder / "recovered"
    if source is None:
        report, found = _digits(case, folder), {}
    else:
        report = _recover(case, source, folder, recovered, options)
        found = _downstream(case.model, source, recovered)
    return {name: report[name] for name in ("figures", "discarded", "seconds", "recipe")} | found


def _digits(case: Case, folder: Path) -> dict[str, Any]:
    from mhla_hf.demo import DemoConfig
    from mhla_hf.demo.run import digit_latents, recover_variant

    layers = "all" if case.model == "digits_all" else "2/3"
    config = DemoConfig(output=str(folder), seed=case.seed, layers=layers)
    train, held_out = digit_latents(config)
    window, changes = OPTIONS.get(case.variant, (case.variant == "window", {}))
    variant = "mhla_window" if window else "linear" if case.variant == "linear" else "mhla"
    return recover_variant(config, variant, train, held_out, changes)


def _recover(case: Case, source: Path, folder: Path, output: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    import mhla_hf
    from benchmarks import minilm, pretrained

    model, layers, data = source, None, "digits"
    if case.model == "minilm":
        model, data = minilm.packaged_model(), str(source / minilm.TEXTS)
    elif case.model == "vit":
        data = str(source / pretrained.IMAGES)
    elif case.model == "language":
        # What the model has not been trained on, so that softmax and MHLA are compared on new text.
        data = str(folder / "texts")
        (folder / "texts").mkdir()
        shutil.copy(source / "held_out.txt", data)
        # A quarter of the layers stays softmax, or none and every layer has a window.
        layers = "all" if case.variant == "window" else None
    chosen: dict[str, Any] = {"layers": layers, "seed": case.seed, "device": "cpu", "progress": False, **options}
    changes = SIZES.get(case.model, {}) | (LINEAR[case.model] if case.variant == "linear" else {})
    chosen["changes"] = changes | chosen.get("changes", {})
    window = "adjacent" if case.variant == "window" else None
    return mhla_hf.recover(model, output, data, window=window, **chosen).to_dict()


def _downstream(model: str, source: Path, recovered: Path) -> dict[str, Any]:
    """What the recovered model is worth in its use, as the entry `downstream` of the results."""
    from benchmarks import minilm, pretrained

    if model == "minilm":
        return {"downstream": minilm.downstream(recovered, source)}
    if model == "vit":
        accuracies = {
            name: pretrained.vit_accuracy(at) for name, at in (("original", source), ("recovered", recovered))
        }
        return {"downstream": {"held-out scans": accuracies}}
    return {}


def points(result: Mapping[str, Any]) -> list[tuple[float, float]]:
    """CPU seconds so far, and the main figure, after the conversion and each stage."""
    from mhla_hf.recovery.report import kept_figures

    seconds, found, kept = 0.0, [], kept_figures(result)
    for stage in ("converted", *STAGES):
        if stage in result["figures"]:
            seconds += result["seconds"][stage]["cpu_seconds"] if stage in STAGES else 0.0
            figures = kept[stage]
            found.append((seconds, figures.get("above_softmax_percent", figures.get("cosine"))))
    return found


def stages_of(result: Mapping[str, Any]) -> list[str]:
    """Names of the stages in the order of [`points`][]."""
    return [stage for stage in ("converted", *STAGES) if stage in result["figures"]]


def summary(results: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean over the seeds of the main figure after each stage, its range in the end, and CPU seconds."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for model in MODELS:
        for variant in (*TITLES, *OPTIONS):
            found = [value for name, value in results.items() if name.startswith(f"{model}/{variant}/")]
            if not found:
                continue
            runs, stages = [points(value) for value in found], stages_of(found[0])
            row = {stage: statistics.mean(run[index][1] for run in runs) for index, stage in enumerate(stages)}
            last = [run[-1][1] for run in runs]
            row |= {"lowest": min(last), "highest": max(last), "seeds": len(runs)}
            row["cpu_seconds"] = statistics.mean(run[-1][0] for run in runs)
            table.setdefault(model, {})[variant] = row
    return table


def downstream_means(results: Mapping[str, Any]) -> dict[tuple[str, str, str], dict[str, float]]:
    """Means over the seeds of what is measured downstream, by model, variant and kind of data."""
    found: dict[tuple[str, str, str], list[dict[str, float]]] = {}
    for name, result in results.items():
        model, variant, _ = name.split("/")
        for kind, figures in result.get("downstream", {}).items():
            found.setdefault((model, variant, kind), []).append(figures)
    return {key: {name: statistics.mean(row[name] for row in rows) for name in rows[0]} for key, rows in found.items()}


def plot(results: Mapping[str, Any], path: Path) -> None:
    """Quality against CPU seconds: a panel for each model, a line for each seed."""
    from matplotlib.ticker import LogFormatter

    from mhla_hf.utils.figures import new_figure, save_figure

    shown = [model for model in MODELS if any(name.startswith(f"{model}/") for name in results)]
    columns = min(len(shown), 3)
    rows = -(-len(shown) // columns)
    figure = new_figure(5.2 * columns, 4.2 * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[len(shown) :]:
        axis.set_axis_off()
    for axis, model in zip(axes, shown):
        for variant, title in TITLES.items():
            runs = [points(value) for name, value in results.items() if name.startswith(f"{model}/{variant}/")]
            for number, run in enumerate(runs):
                seconds, quality = zip(*run, strict=True)
                if model in COSINE:
                    quality = tuple(1 - value for value in quality)
                label = title if number == 0 else None
                axis.plot(seconds, quality, color=COLORS[variant], marker="o", alpha=0.8, label=label)
        quality_name = "1 - cosine to the original" if model in COSINE else "above softmax, %"
        axis.set(title=MODELS[model], xlabel="CPU seconds", ylabel=quality_name, yscale="log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(1.1, 0.3)))
        axis.grid(alpha=0.3, which="both")
        axis.legend(frameon=False)
    save_figure(figure, path)


def main() -> None:
    """Runs what is not measured yet, and writes figures and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--variants", nargs="+", default=list(TITLES), choices=[*TITLES, *OPTIONS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="recoveries at a time")
    parser.add_argument("--language-model", type=Path, help="directory of another language model and its held_out.txt")
    parser.add_argument("--pretrained", type=Path, help="folder of pretrained models; default: in --work, or runs/")
    parser.add_argument("--work", type=Path, help="directory of finished recoveries; default: those in --json")
    parser.add_argument("--json", type=Path, default=RESULTS / "recovery.json")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        model, variant, seed = arguments.case.split("/")
        with tempfile.TemporaryDirectory() as folder:
            result = run_case(Case(model, variant, int(seed)), Path(folder), arguments.source)
        print("RESULT " + json.dumps(result))
        return
    stored = json.loads(arguments.json.read_text()) if arguments.json.is_file() else {"results": {}}
    results: dict[str, Any] = stored["results"]
    cases = [
        Case(model, variant, seed)
        for seed in range(arguments.seeds)
        for model in arguments.models
        for variant in arguments.variants
        if variant in TITLES or model.startswith("digits")
    ]
    finished = {case.name: _finished_file(arguments.work, case) for case in cases} if arguments.work else {}
    results |= {name: json.loads(file.read_text()) for name, file in finished.items() if file.is_file()}
    pending = [case for case in cases if not (finished[case.name].is_file() if finished else case.name in results)]

    folder = (arguments.pretrained or (arguments.work or Path("runs")) / "pretrained").resolve()
    sources: dict[str, Path] = {}
    for model in dict.fromkeys(case.model for case in pending if case.model in PREPARED):
        sources[model] = folder / model
        if model == "language" and arguments.language_model is not None:
            sources[model] = arguments.language_model.resolve()
        else:
            _python("benchmarks.pretrained", model, str(folder), output=None)

    def measure(case: Case) -> None:
        source = ["--source", str(sources[case.model])] if case.model in sources else []
        done = _python("benchmarks.recovery", "--case", case.name, *source, output=subprocess.PIPE)
        lines = [line for line in done.splitlines() if line.startswith("RESULT ")]
        results[case.name] = json.loads(lines[-1].removeprefix("RESULT "))
        if finished:
            write_json(finished[case.name], results[case.name])
        write(arguments.json, results)
        last = points(results[case.name])[-1]
        print(f"{case.name}: {last[1]:.4g} in {last[0]:.0f} CPU s", flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(measure, pending))
    write(arguments.json, results)
    plot(results, arguments.json.with_suffix(".png"))
    show(results)


def _python(module: str, *arguments: str, output: int | None) -> str:
    """Runs a module in a process of its own, and returns what it printed if `output` is a pipe."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, stdout=output, stderr=output, text=True, cwd=RESULTS.parents[1])
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)} failed: {(done.stderr or '')[-2000:]}")
    return done.stdout or ""


def _finished_file(work: Path, case: Case) -> Path:
    return work / f"{case.name.replace('/', '-')}.json"


def write(path: Path, results: Mapping[str, Any]) -> None:
    """Writes the figures with the machine that they were measured on."""
    import torch
    import transformers

    import mhla_hf
    from mhla_hf.utils.machine import processor_name

    facts = {
        "date": date.today().isoformat(),
        "machine": f"{processor_name()}, 1 CPU thread a recovery",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "mhla_hf": mhla_hf.__version__,
        },
        "summary": summary(results),
        "downstream": {"/".join(key): row for key, row in sorted(downstream_means(results).items())},
        "results": dict(sorted(results.items())),
    }
    write_json(path, facts)


def show(results: Mapping[str, Any]) -> None:
    """Prints the means."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Above softmax in %, or cosine to the original")
    names: Sequence[str] = ("converted", *STAGES, "lowest", "highest", "cpu_seconds")
    for column in ("model", "variant", *names):
        table.add_column(column)
    for model, rows in summary(results).items():
        for variant, row in rows.items():
            table.add_row(model, variant, *(f"{row[name]:.4g}" if name in row else "" for name in names))
    Console().print(table)
    uses = Table("model", "variant", "data", "figures", title="Downstream")
    for key, figures in downstream_means(results).items():
        uses.add_row(*key, ", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    Console().print(uses)


if __name__ == "__main__":
    main()
