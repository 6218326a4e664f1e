# SPDX-License-Identifier: Apache-2.0
"""Tiny models for the application, and a server of it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

VIDEO = {"prompt": "a cat", "steps": 2, "seed": 3, "guidance_scale": 2.0, "height": 32, "width": 64, "num_frames": 9}
"""A small request of the tiny pipeline: values of its fields by name."""


def wait_until(condition: Callable[[], Any]) -> None:
    """Waits, a minute at most, until something holds."""
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("waited a minute in vain")


@dataclass(frozen=True)
class Saved:
    """Directories of an MHLA model and its original."""

    model: Path
    base: Path


@dataclass(frozen=True)
class Server:
    """A running application."""

    url: str
    handlers: Any
    page: Any
    connections: list[str]

    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self.page._queue)


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


@contextmanager
def running(saved: Saved, limits: Any = None, **options: Any):
    """A server of an application on a free port of this machine, which connects to nothing else."""
    from mhla_hf.app import serve
    from mhla_hf.app.diffusion import DiffusionGenerator
    from mhla_hf.app.handlers import Handlers
    from mhla_hf.app.limits import Limits
    from mhla_hf.app.mixing import MixingBrowser
    from mhla_hf.app.models import open_comparison
    from mhla_hf.app.page import build_page
    from mhla_hf.app.speed import SpeedMeter
    from mhla_hf.app.texts import TextGenerator

    limits = limits or Limits()
    connections: list[str] = []
    connect = socket.socket.connect

    def watched(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            connections.append(str(address[0]))
        return connect(self, address)

    comparison = open_comparison(saved.model, device="cpu")
    generator = (TextGenerator if comparison.kind == "text" else DiffusionGenerator)(comparison, limits)
    meter = SpeedMeter(comparison, most_tokens=512, seconds=0.1)
    handlers = Handlers(comparison, generator, MixingBrowser(comparison), meter)
    page = build_page(handlers, limits)
    socket.socket.connect = watched
    try:
        _, url, _ = serve(page, prevent_thread_lock=True, quiet=True, **options)
        yield Server(url, handlers, page, connections)
    finally:
        socket.socket.connect = connect
        page.close()
