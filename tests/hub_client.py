# SPDX-License-Identifier: Apache-2.0
"""Programs that talk to the Hub of `hub_server.py`, each in a process of its own that has imported everything already.

`huggingface_hub` reads the Hub's address when it is imported, and importing diffusers and transformers takes longer
than most tests: one process does it, and forks for every program. Run as a script, this file is that process.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Result:
    code: int
    output: str
    errors: str


class HubClient:
    """Runs programs against a Hub; use it as a context manager.

    Args:
        hub: The `HubServer`.
        folder: Where its cache (`home`) and the output of programs are.
    """

    def __init__(self, hub, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        root = Path(__file__).resolve().parents[1]
        timeouts = {"HF_HUB_ETAG_TIMEOUT": "5", "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
        # One thread: it forks.
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        # transformers asks in a thread of its own for conversions of pickles, whenever that comes to run.
        environment |= {**hub.environment(self.home), **timeouts, "DISABLE_SAFETENSORS_CONVERSION": "1"}
        command = [sys.executable, "-m", "tests.hub_client"]
        pipe, self.running = subprocess.PIPE, 0
        self.process = subprocess.Popen(command, cwd=root, env=environment, stdin=pipe, stdout=pipe, text=True)

    def start(self, program: str, **variables: str) -> int:
        """Starts a program and returns the id of its process.

        Args:
            program: Its `waits` lists how long the client would have waited between its attempts; it hardly does.
            **variables: Environment variables.
        """
        task = {"program": textwrap.dedent(program), "folder": str(self.folder), "variables": variables}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        self.running = self._read()
        return self.running

    def wait(self) -> Result:
        """Waits for the end of the program that was started last."""
        code = self._read()
        self.running = 0
        return Result(code, (self.folder / "output").read_text(), (self.folder / "errors").read_text())

    def run(self, program: str, **variables: str) -> Result:
        self.start(program, **variables)
        return self.wait()

    def check(self, program: str, **variables: str) -> str:
        """Runs a program that shall succeed, and returns what it printed."""
        result = self.run(program, **variables)
        assert result.code == 0, result.errors
        return result.output

    def command(self, *arguments, **variables: str) -> Result:
        """Runs `mhla-hf` with these arguments."""
        words = [str(argument) for argument in arguments]
        return self.run(f"from mhla_hf.cli.main import app; app({words!r})", **variables)

    def stop(self) -> None:
        """Ends a program that a test has left running."""
        if self.running:
            os.kill(self.running, signal.SIGKILL)
            self.wait()

    def clear_cache(self) -> None:
        shutil.rmtree(self.home / "hub", ignore_errors=True)

    def _read(self) -> int:
        line = self.process.stdout.readline()
        assert line, "the client's process has ended"
        return int(line)

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *exception) -> None:
        # It may never see the end of its input: processes that other tests forked can hold it open.
        with suppress(BrokenPipeError):
            self.process.stdin.write("null\n")
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(timeout=60)


def run_program(task: dict) -> int:
    """Runs one program in this process and returns its exit code."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(Path(task["folder"], name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(task["variables"])
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1)
    waits, sleep = [], time.sleep
    time.sleep = lambda seconds: (waits.append(seconds), sleep(min(seconds, 0.02)))
    try:
        exec(compile(task["program"], "<program>", "exec"), {"__name__": "__main__", "waits": waits})
        return 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def warm_up() -> None:
    """Imports what programs need, and does once what libraries remember for the rest of a process."""
    import mhla_hf
    from mhla_hf.cli.main import app
    from tests import hub_models, tiny

    with tempfile.TemporaryDirectory() as folder:
        tiny.wan_pipeline().save_pretrained(f"{folder}/softmax")
        options = json.dumps(hub_models.OPTIONS["wan"])
        commands = (
            ["convert", f"{folder}/softmax", f"{folder}/mhla", "--mhla", options, "--quiet"],
            ["push", f"{folder}/mhla", "user/mhla", "--dry-run", "--quiet"],
        )
        for command in commands:
            app(command, standalone_mode=False)
        mhla_hf.load_pipeline(f"{folder}/mhla")


def serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Notes of libraries that are imported are not answers.
    os.dup2(2, 1)
    warm_up()
    for line in sys.stdin:
        task = json.loads(line)
        if task is None:
            return
        process = os.fork()
        if process == 0:
            code = run_program(task)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        print(process, file=answers)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), file=answers)


if __name__ == "__main__":
    serve()
