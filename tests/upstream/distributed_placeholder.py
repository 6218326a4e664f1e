# SPDX-License-Identifier: Apache-2.0
"""Stand-in for `tests/distributed_testing_utils.py`, which transformers' source distribution leaves out."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def run_distributed(world_size: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a function `f(rank, *arguments)` in processes of a gloo group; an error in one is raised."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*arguments: Any) -> None:
            with tempfile.TemporaryDirectory() as folder:
                store = str(Path(folder) / "store")
                multiprocessing.spawn(_work, (world_size, store, function, arguments), nprocs=world_size)

        return run

    return decorate


def _work(rank: int, world_size: int, store: str, function: Callable[..., None], arguments: tuple) -> None:
    options = {"rank": rank, "world_size": world_size, "timeout": timedelta(minutes=5)}
    dist.init_process_group("gloo", init_method=f"file://{store}", **options)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()
