# SPDX-License-Identifier: Apache-2.0
"""A process that runs `mhla-hf` commands in forks of itself, which kill themselves at a step or are killed in time.

Reads one JSON object a line (`arguments`, `output` and what kills the command) and answers with one: the exit status
(negative for a signal), and how many steps there were. Forks save the seconds that imports take; the first command is
run without one, so that everything is imported.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from mhla_hf.cli.main import app
from mhla_hf.utils import destinations


STEPS = {
    "renames": ("rename", "replace"),
    "all": ("rename", "replace", "mkdir", "fsync", "rmdir", "unlink"),
}


class Steps:
    """Counts file system calls, and kills the process before or after one of them."""

    def __init__(self, kill_at: int | None, counter: int) -> None:
        self.number, self.kill_at, self.counter = 0, kill_at, counter

    def step(self) -> None:
        if self.number == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.number += 1
        os.pwrite(self.counter, f"{self.number:8}".encode(), 0)

    def wrap(self, function: Any) -> Any:
        def wrapped(*args: Any, **options: Any) -> Any:
            self.step()
            result = function(*args, **options)
            self.step()
            return result

        return wrapped


def run(request: dict[str, Any], counter: int) -> None:
    """Runs a command and ends the process."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    steps = Steps(request.get("kill_at"), counter)
    for name in STEPS[request.get("steps", "renames")]:
        setattr(os, name, steps.wrap(getattr(os, name)))
    exchange = steps.wrap(destinations.exchange_names) if request.get("exchange", True) else lambda *_: False
    destinations.exchange_names = exchange
    status = run_command(request["arguments"])
    sys.stderr.flush()
    sys.stdout.flush()
    os._exit(status)


def run_command(arguments: list[str]) -> int:
    sys.argv = ["mhla-hf", *arguments]
    try:
        app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def main() -> None:
    first = json.loads(sys.stdin.readline())
    print(json.dumps({"status": run_command(first["arguments"]), "steps": 0}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        counter = os.memfd_create("steps")
        pid = os.fork()
        if pid == 0:
            try:
                run(request, counter)
            finally:
                os._exit(99)
        if "seconds" in request:
            time.sleep(request["seconds"])
            os.kill(pid, getattr(signal, request.get("signal", "SIGKILL")))
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        steps = int(os.pread(counter, 8, 0) or b"0")
        os.close(counter)
        print(json.dumps({"status": status, "steps": steps}), flush=True)
    # The end of an interpreter with torch takes seconds.
    os._exit(0)


if __name__ == "__main__":
    main()
