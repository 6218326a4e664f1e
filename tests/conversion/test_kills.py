# SPDX-License-Identifier: Apache-2.0
"""`mhla-hf convert` killed at any moment: the destination is absent, as it was or complete, and the next run heals."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT, tiny


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the runner of these tests needs Linux")


@pytest.fixture(scope="module")
def softmax(tmp_path_factory):
    folder = tmp_path_factory.mktemp("softmax") / "pipeline"
    tiny.wan_pipeline(num_layers=1).save_pretrained(folder)
    return folder


class Runner:
    """Runs commands in another process, see `kill_conversion`."""

    def __init__(self, output):
        self.output = output
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "tests.conversion.kill_conversion"]
        options = {"text": True, "cwd": ROOT, "env": environment}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)

    def __call__(self, *arguments, **request):
        request |= {"arguments": list(map(str, arguments)), "output": str(self.output)}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["status"], answer["steps"], self.output.read_text() if self.output.exists() else ""


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    runner = Runner(tmp_path_factory.mktemp("runner") / "output")
    yield runner
    runner.process.stdin.close()
    runner.process.wait()
    runner.process.stdout.close()


def content(folder):
    """Every file with its bytes; of the record, what does not depend on the time."""
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    record = json.loads(files.pop(Path("conversion.json"), b"{}"))
    return files, record.get("source"), record.get("copied_files")


@pytest.fixture(scope="module")
def complete(softmax, runner, tmp_path_factory):
    """What a conversion gives that nobody kills."""
    folder = tmp_path_factory.mktemp("complete") / "mhla"
    assert runner(*arguments(softmax, folder))[0] == 0
    return content(folder)


def arguments(source, destination, *more):
    return ["convert", source, destination, "--blocks", "1,2,2", "--quiet", *more]


def make_old(folder):
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer" / "weights").write_text("old")
    (folder / "mine.txt").write_text("mine")
    return content(folder)


class Trial:
    """A destination, empty or with old content, and the command that writes it."""

    def __init__(self, folder, softmax, runner, complete, *, overwrite, whole=True, **request):
        self.folder, self.runner, self.complete, self.whole, self.request = folder, runner, complete, whole, request
        self.destination = folder / "mhla"
        self.overwrite = overwrite
        self.before = make_old(self.destination) if overwrite else None
        self.command = arguments(softmax, self.destination, *(["--overwrite"] if overwrite else []))

    def killed(self, **how):
        """Runs the command with what kills it, checks what it leaves, and what the next one makes of it.

        Returns:
            Whether it was killed, and how many steps it took.
        """
        status, steps, output = self.runner(*self.command, **self.request, **how)
        assert status in (0, -signal.SIGKILL, -signal.SIGTERM), output
        is_complete = self.destination.exists() and content(self.destination) == self.complete
        is_hidden = not self.destination.exists() and any(
            path.name.startswith(".tmp-old-") and content(path) == self.before for path in self.folder.iterdir()
        )
        if self.whole:
            untouched = (
                not self.destination.exists()
                if self.before is None
                else (self.destination.exists() and content(self.destination) == self.before)
            )
            # Without the exchange of names there is a moment between two renames.
            assert untouched or is_complete or (is_hidden and not self.request.get("exchange", True))
        left = [path.name for path in self.temporaries() if "lock" not in path.name]
        again, _, output = self.runner(*self.command, **self.request)
        if is_complete and not self.overwrite:
            assert again == 1 and "is not empty" in output
        else:
            assert again == 0, output
        assert content(self.destination) == self.complete
        assert self.temporaries() == []
        assert bool(left) == ("a run that was killed" in output), (left, output)
        assert ("Restored" in output) == is_hidden or not self.whole
        return status != 0, steps

    def temporaries(self):
        return sorted(path for folder in (self.folder, self.destination) for path in folder.glob(".tmp-*"))

    def reset(self):
        for path in self.destination.iterdir() if self.destination.exists() else []:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if self.destination.exists() and self.whole:
            self.destination.rmdir()
        if self.overwrite:
            if self.whole:
                make_old(self.destination)
            else:
                (self.destination / "mine.txt").write_text("mine")


WAYS = {
    "new": {"overwrite": False},
    "exchange": {"overwrite": True},
    "two renames": {"overwrite": True, "exchange": False},
}


@pytest.mark.parametrize("way", WAYS)
def test_kills_at_each_rename(way, softmax, runner, complete, tmp_path):
    trial = Trial(tmp_path, softmax, runner, complete, **WAYS[way])
    kills = 0
    while trial.killed(kill_at=kills)[0]:
        trial.reset()
        kills += 1
    # Before and after each of them; the first is the model card's.
    assert kills == {"new": 4, "exchange": 4, "two renames": 8}[way]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_kills_at_each_step(way, softmax, runner, complete, tmp_path):
    trial = Trial(tmp_path, softmax, runner, complete, **WAYS[way], steps="all")
    kills = 0
    while trial.killed(kill_at=kills)[0]:
        trial.reset()
        kills += 1
    assert kills > 50


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("way", WAYS)
def test_kills_at_random_moments(way, kind, softmax, runner, complete, tmp_path):
    trial = Trial(tmp_path, softmax, runner, complete, **WAYS[way])
    started = time.monotonic()
    trial.killed()
    # Two runs.
    seconds = (time.monotonic() - started) / 2
    times = random.Random(f"{way} {kind}")
    kills = 0
    for _ in range(25):
        trial.reset()
        kills += trial.killed(seconds=times.uniform(0, seconds), signal=kind)[0]
    assert kills > 5


@pytest.mark.slow
def test_kills_in_a_mount_point(softmax, runner, complete, tmp_path):
    (tmp_path / "mhla").mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", tmp_path / "mhla"], capture_output=True)
    if made.returncode:
        pytest.skip(f"mounting is not allowed here: {made.stderr.decode().strip()}")
    try:
        trial = Trial(tmp_path, softmax, runner, complete, overwrite=False, whole=False)
        trial.command.append("--overwrite")
        trial.overwrite = True
        kills = 0
        while trial.killed(kill_at=kills)[0]:
            trial.reset()
            kills += 1
        assert kills > 15
    finally:
        subprocess.run(["umount", tmp_path / "mhla"], check=True)


@pytest.mark.slow
def test_the_installed_command(softmax, complete, tmp_path):
    """Nothing but processes: SIGKILL at random moments, and two at once."""
    command = [sys.executable, "-m", "mhla_hf", *map(str, arguments(softmax, tmp_path / "mhla"))]
    options = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    started = time.monotonic()
    both = [subprocess.Popen(command, **options) for _ in range(2)]
    errors = [process.communicate()[1] for process in both]
    seconds = time.monotonic() - started
    assert sorted(process.returncode for process in both) == [0, 1], errors
    assert "is being written by another run" in "".join(errors) or "is not empty" in "".join(errors)
    assert content(tmp_path / "mhla") == complete
    for share in (0.5, 0.8, 0.9):
        shutil.rmtree(tmp_path / "mhla", ignore_errors=True)
        process = subprocess.Popen(command, **options)
        time.sleep(share * seconds)
        process.kill()
        process.communicate()
        assert not (tmp_path / "mhla").exists() or content(tmp_path / "mhla") == complete
    shutil.rmtree(tmp_path / "mhla", ignore_errors=True)
    assert subprocess.run(command, **options).returncode == 0
    assert os.listdir(tmp_path) == ["mhla"] and content(tmp_path / "mhla") == complete
