#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""How well MHLA replaces the softmax of real pretrained language models, calibrated in minutes and not trained.

    python -m benchmarks.real_models WORK --json benchmarks/results/real_models.json      # hours on two CPU cores

The models and texts come in packages ([`packaged_models`][benchmarks.packaged_models]). Every variant is calibrated on
rows of one book and measured on others of it and on Python source, at the length of those rows and at four times it:

- bits per byte of prose and of code;
- recall: bits per token of a passage of 128 tokens, the second time it occurs, 512 others after the first;
- how a paragraph goes on;
- with `--decode` bytes of the cache and milliseconds for a token at 2,048 and 8,192 tokens.

`window` is the default: MHLA, a window and a sink. `trivial` is what costs nothing: the same without MHLA and without
calibration. `quarter` and `tenth` keep so many groups of heads softmax, by look-up, in place of layers, and `all`
none. Cases in the report are not measured again.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mhla_hf
from benchmarks.decode import DecodeOptions, measure_decoding
from benchmarks.packaged_models import make
from benchmarks.programs import names
from mhla_hf.layers.mhla import MHLA
from mhla_hf.recovery.lookup import BETWEEN, PASSAGE, lookup_scores, recall
from mhla_hf.training.layers import swapped_parameters
from mhla_hf.utils.files import read_json, write_json
from mhla_hf.utils.machine import machine_facts


ROW = 512
LONG = 4 * ROW
CALIBRATION_ROWS, FIT_STEPS = {"prose": 8, "code": 4}, 30
CODE = {
    "calibration": ("calendar.py", "configparser.py", "difflib.py", "mailbox.py", "statistics.py", "threading.py"),
    "held out": ("argparse.py", "ast.py", "datetime.py", "inspect.py", "pathlib.py", "tarfile.py", "typing.py"),
}
"""Modules of the standard library."""
CONTEXTS = (2048, 8192)
BLOCK = 64

_WINDOW = {"block_size": [BLOCK], "window": "adjacent", "window_size": [BLOCK], "sink_tokens": 1}
_ALONE = {"window": None, "sink_tokens": 0}


@dataclass(frozen=True)
class Variant:
    """One way to convert a model.

    Attributes:
        options: Options of the conversion; `None` for the original.
        kept: Share of the groups of heads that stay softmax, by look-up; `None` for whole layers of `LAYERS`.
        is_calibrated: Whether it is calibrated.
        has_mhla: Whether MHLA is part of the output, or the window alone.
    """

    options: dict[str, Any] | None
    kept: float | None = None
    is_calibrated: bool = True
    has_mhla: bool = True


VARIANTS = {
    "softmax": Variant(None, is_calibrated=False),
    "trivial": Variant(_WINDOW, is_calibrated=False, has_mhla=False),
    "window": Variant(_WINDOW),
    "mhla": Variant({"block_size": [128], **_ALONE}),
    "linear": Variant({"block_size": [8192], "grid": [8192], "mixing_init": "uniform", **_ALONE}),
    "quarter": Variant(_WINDOW, kept=0.25),
    "quarter trivial": Variant(_WINDOW, kept=0.25, is_calibrated=False, has_mhla=False),
    "tenth": Variant(_WINDOW, kept=0.1),
    "all": Variant(_WINDOW, kept=0.0),
}
LAYERS = {"smollm2": "3/4", "gemma": "all"}
"""Of SmolLM2 every fourth layer stays softmax; of Gemma 3 those with a window of their own do."""


class Texts:
    """Rows of tokens of a book and of Python source, by a model's tokenizer.

    Args:
        tokenizer: The tokenizer.
        folder: A folder of chapters.
    """

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self.tokenizer = tokenizer
        chapters, library = sorted(folder.glob("*.txt")), Path(sysconfig.get_path("stdlib"))
        prose = {"calibration": chapters[::2], "held out": chapters[1::2]}
        code = {use: [library / name for name in modules] for use, modules in CODE.items()}
        self.streams = {
            (kind, use): self._tokens(files)
            for kind, of_kind in (("prose", prose), ("code", code))
            for use, files in of_kind.items()
        }

    def _tokens(self, files: Sequence[Path]) -> list[int]:
        """Tokens of files, one after the other, without special ones."""
        texts = [file.read_text(encoding="utf-8") for file in files]
        return [token for text in texts for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def calibration(self, seed: int) -> torch.Tensor:
        """Rows of even chapters and of source in an order of the seed, `[N, ROW]`."""
        rows = [self._rows((kind, "calibration"), count, ROW, seed) for kind, count in CALIBRATION_ROWS.items()]
        order = torch.Generator().manual_seed(seed)
        found = torch.cat(rows)
        return found[torch.randperm(len(found), generator=order)]

    def held_out(self) -> dict[str, torch.Tensor]:
        """Rows of odd chapters and of other source, short ones and long ones."""
        return {
            f"{kind}_{length}": self._rows((kind, "held out"), count, length, 0)
            for kind in CALIBRATION_ROWS
            for count, length in ((4, ROW), (2, LONG))
        }

    def passages(self, count: int = 3) -> torch.Tensor:
        """A passage, others, and the passage again, `[count, 2 · PASSAGE + BETWEEN]`."""
        rows = self._rows(("prose", "held out"), 2 * count, max(PASSAGE, BETWEEN), 1)
        first, between = rows[:count, :PASSAGE], rows[count:, :BETWEEN]
        return torch.cat([first, between, first], dim=1)

    def _rows(self, of: tuple[str, str], count: int, length: int, seed: int) -> torch.Tensor:
        """Rows from as many places of a stream, spread over it evenly, `[count, length]`."""
        stream = self.streams[of]
        room = len(stream) - length
        starts = [(room * (2 * row + 1) // (2 * count) + 977 * seed) % room for row in range(count)]
        return torch.tensor([stream[start : start + length] for start in starts])

    def bytes_of(self, row: torch.Tensor) -> int:
        """UTF-8 bytes of a row but for its first token."""
        return len(self.tokenizer.decode(row[1:]).encode())


@torch.no_grad()
def bits(model: nn.Module, row: torch.Tensor) -> float:
    """Bits of the tokens of a row but the first one."""
    logits = model(input_ids=row[None]).logits[0, :-1].float()
    found = logits.log_softmax(-1).gather(1, row[1:, None])
    return -float(found.double().sum()) / math.log(2)


def measure(model: nn.Module, texts: Texts) -> dict[str, Any]:
    """Figures of a language model."""
    per_byte = {
        kind: sum(bits(model, row) for row in rows) / sum(map(texts.bytes_of, rows))
        for kind, rows in texts.held_out().items()
    }
    first, second = recall(model, list(texts.passages()))
    return {
        "bits_per_byte": per_byte,
        "recall": {"first": first, "second": second},
        "text": _go_on(model, texts),
    }


def _go_on(model: Any, texts: Texts) -> str:
    prompt = texts.held_out()["prose_512"][:1, :128]
    tokens = model.generate(prompt, max_new_tokens=48, do_sample=False, pad_token_id=0)
    return texts.tokenizer.decode(tokens[0, 128:])


def without_mhla(model: nn.Module) -> AbstractContextManager[None]:
    """Has the windows of a model stand alone."""
    biases = [module.window_bias for module in model.modules() if isinstance(module, MHLA)]
    return swapped_parameters({bias: torch.full_like(bias, -math.inf) for bias in biases if bias is not None})


def _by_lookup(model: nn.Module, batches: list[dict[str, torch.Tensor]], kept: float) -> list[int | str]:
    """Layers and groups of heads that become MHLA, where a share of the groups that look up most stays softmax."""
    scores = lookup_scores(model, batches)
    places = [(layer, group) for layer, own in enumerate(scores) for group in range(len(own))]
    places.sort(key=lambda place: -scores[place[0]][place[1]])
    softmax = set(places[: round(kept * len(places))])
    chosen: list[int | str] = []
    for layer, own in enumerate(scores):
        groups = [group for group in range(len(own)) if (layer, group) not in softmax]
        chosen += [layer] if len(groups) == len(own) else [f"{layer}.{group}" for group in groups]
    return chosen


def run_case(name: str, variant: str, seed: int, work: Path, decode: bool) -> dict[str, Any]:
    """Converts, calibrates and measures one variant of a model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(seed)
    directory = make(name, work)
    texts = Texts(AutoTokenizer.from_pretrained(directory), make("prose", work))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    chosen, found = VARIANTS[variant], {}
    batches = [{"input_ids": row[None]} for row in texts.calibration(seed)]
    if chosen.options is not None:
        layers: Any = LAYERS[name]
        if chosen.kept is not None:
            layers = _by_lookup(mhla_hf.convert(copy.deepcopy(model), **chosen.options), batches, chosen.kept)
        model = mhla_hf.convert(model, layers=layers, **chosen.options)
        found["layers"] = model.config.mhla["layers"]
    if chosen.is_calibrated:
        started = time.process_time()
        report = mhla_hf.calibrate(model, batches, fit_steps=FIT_STEPS)
        found["calibration"] = {
            "cpu_seconds": time.process_time() - started,
            "error_before": report.error_before,
            "error_after": report.error_after,
        }
    with nullcontext() if chosen.has_mhla else without_mhla(model):
        found |= measure(model, texts)
    if decode and variant == "window":
        converted = work / "decode" / name
        model.save_pretrained(converted)
        report = measure_decoding(DecodeOptions(model=str(converted), contexts=CONTEXTS, tokens=2 * BLOCK))
        found["decode"] = report["results"]
    return found


def measure_all(
    work: Path,
    file: Path,
    models: Sequence[str],
    variants: Sequence[str],
    seeds: int,
    decode: bool,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measures what the report in `file` does not have yet, on one thread, and writes it after each case."""
    torch.set_num_threads(1)
    report: dict[str, Any] = {"benchmark": "real_models", "machine": {}, "cases": {}}
    if file.is_file():
        report = read_json(file, "the report")
    report["machine"] = machine_facts(torch.device("cpu"))
    for name in models:
        for seed in range(seeds):
            for variant in variants:
                case = f"{name}/{variant}/{seed}"
                if case in report["cases"] or (seed and not VARIANTS[variant].is_calibrated):
                    continue
                progress(case)
                report["cases"][case] = run_case(name, variant, seed, work, decode and seed == 0)
                write_json(file, report)
    return report


def show(report: dict[str, Any]) -> None:
    """Prints a table in Markdown: means over the seeds, bits per byte above softmax in percent."""
    by_model: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for case, found in report["cases"].items():
        name, variant, _ = case.split("/")
        by_model.setdefault(name, {}).setdefault(variant, []).append(found)
    for name, variants in by_model.items():
        if "softmax" not in variants:
            continue
        (original,) = variants["softmax"]
        kinds = list(original["bits_per_byte"])
        print(f"\n| {name} | {' | '.join(kinds)} | recall, first | second | CPU s |")
        print("|---" * (len(kinds) + 4) + "|")
        for variant, cases in variants.items():
            cells = []
            for kind in kinds:
                values = [case["bits_per_byte"][kind] for case in cases]
                base = original["bits_per_byte"][kind]
                above = [100 * (value / base - 1) for value in values]
                cells.append(f"{base:.3f}" if variant == "softmax" else _spread(above, "+.1f") + " %")
            cells += [_spread([case["recall"][part] for case in cases], ".2f") for part in ("first", "second")]
            seconds = [case["calibration"]["cpu_seconds"] for case in cases if "calibration" in case]
            cells.append(_spread(seconds, ".0f") if seconds else "–")
            print(f"| {variant} | {' | '.join(cells)} |")


def _spread(values: Sequence[float], form: str) -> str:
    mean = sum(values) / len(values)
    return f"{mean:{form}}" if len(values) == 1 else f"{mean:{form}} ± {(max(values) - min(values)) / 2:.1f}"


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder for packages, models and what is under way")
    parser.add_argument("--json", type=Path, default=Path("real_models.json"), help="the report, which is resumed")
    parser.add_argument("--models", type=names, default=tuple(LAYERS), help=f"some of {', '.join(LAYERS)}")
    parser.add_argument("--variants", type=names, default=tuple(VARIANTS), help=f"some of {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", type=int, default=2, help="calibrations of each variant (2)")
    parser.add_argument("--decode", action="store_true", help="measure decoding too")
    given = parser.parse_args()
    for kind, known in (("models", LAYERS), ("variants", VARIANTS)):
        if unknown := set(getattr(given, kind)) - set(known):
            sys.exit(f"error: --{kind}: {', '.join(sorted(unknown))} is none of {', '.join(known)}")

    def say(case: str) -> None:
        print(f"measuring {case}", file=sys.stderr, flush=True)

    try:
        report = measure_all(given.work, given.json, given.models, given.variants, given.seeds, given.decode, say)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    show(report)


if __name__ == "__main__":
    main()
