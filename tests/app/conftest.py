# SPDX-License-Identifier: Apache-2.0
"""Tiny models for the application."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Saved:
    """Directories of an MHLA model and its original."""

    model: Path
    original: Path


@pytest.fixture(scope="session")
def saved_pipeline(tmp_path_factory) -> Saved:
    """A tiny Wan pipeline, for 9 frames of 32 × 64 pixels."""
    from mhla_hf import convert_pretrained
    from tests.tiny import wan_pipeline

    folder = tmp_path_factory.mktemp("pipeline")
    wan_pipeline().save_pretrained(folder / "tiny-wan")
    options = {"blocks": [3, 2, 2], "grid": [3, 2, 4], "mixing_heads": "per_head"}
    convert_pretrained(folder / "tiny-wan", folder / "tiny-mhla", options, progress=False)
    return Saved(folder / "tiny-mhla", folder / "tiny-wan")


@pytest.fixture(scope="session")
def saved_language_model(tmp_path_factory) -> Saved:
    """A tiny Llama with a tokenizer of characters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from mhla_hf import convert_pretrained
    from tests.tiny import character_tokenizer

    folder = tmp_path_factory.mktemp("language_model")
    tokenizer = character_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "tiny-llama")
    tokenizer.save_pretrained(folder / "tiny-llama")
    convert_pretrained(folder / "tiny-llama", folder / "tiny-mhla", {"block_size": [16]}, progress=False)
    return Saved(folder / "tiny-mhla", folder / "tiny-llama")


@dataclass(frozen=True)
class Server:
    """A running application."""

    url: str
    comparison: Any


@contextmanager
def running(saved: Saved):
    """A server of an application on a free port of this machine."""
    from mhla_hf.app import build_page, open_comparison, serve

    comparison = open_comparison(saved.model, device="cpu")
    page = build_page(comparison)
    try:
        _, url, _ = serve(page, prevent_thread_lock=True, quiet=True)
        yield Server(url, comparison)
    finally:
        page.close()
