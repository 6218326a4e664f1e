# SPDX-License-Identifier: Apache-2.0
"""Waiting for the other processes of a run, for minutes and not for as long as a collective may take."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

from .launch import ended_process


_ADDRESS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_SECONDS = 0.1


def wait_for_processes(minutes: float) -> Any:
    """Waits until every process of the run has come this far; does nothing where there is one, or under MPI.

    Args:
        minutes: How long to wait.

    Returns:
        What they met at. Keep it until the process group is made, which is then made by way of the same server.

    Raises:
        TimeoutError: If some did not come; the message says which.
        OSError: If the first process could not be reached, cannot listen, or has seen another one end.
    """
    from torch import distributed

    if not distributed.is_available() or distributed.is_initialized():
        return None
    if any(name not in os.environ for name in _ADDRESS) or int(os.environ["WORLD_SIZE"]) < 2:
        return None
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _open_store(rank, count, minutes)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    keys = [f"mhla_hf/{attempt}/{number}" for number in range(count)]
    deadline = time.monotonic() + 60 * minutes
    try:
        store.set(keys[rank], "here")
        while not store.check(keys):
            ended = ended_process()
            if ended is not None:
                raise ChildProcessError(
                    f"process {ended[0]} of {count} ended with exit code {ended[1]} before the run began; its own "
                    "error says why"
                )
            if time.monotonic() > deadline:
                missing = [str(number) for number, key in enumerate(keys) if not store.check([key])]
                raise TimeoutError(
                    f"process {', '.join(missing[:8])} of {count} did not start within {minutes:g} minutes "
                    "(startup_timeout); see what it printed, and start all processes again"
                )
            time.sleep(_POLL_SECONDS)
    except distributed.DistError as error:
        raise ConnectionError(f"process {rank} lost the first process before the run began ({error})") from error
    return store


def _open_store(rank: int, count: int, minutes: float) -> Any:
    from torch import distributed

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Under torchrun its agent listens; several stores of one process can share one server.
    listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    try:
        return distributed.TCPStore(
            host, port, count, listens, timedelta(minutes=minutes), wait_for_workers=False, multi_tenant=True
        )
    except distributed.DistError as error:
        if listens:
            raise OSError(f"port {port} of {host} cannot be used by the run ({error}); choose another one") from error
        raise TimeoutError(
            f"process {rank} of {count} did not reach the first one at {host}:{port} within {minutes:g} minutes "
            "(startup_timeout); see what that one printed, and start all processes again"
        ) from error
