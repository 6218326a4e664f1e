# SPDX-License-Identifier: Apache-2.0
"""Destinations: nobody's files are lost, one process writes at a time, links and mount points are written through."""

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mhla_hf.conversion.writing import check_apart
from mhla_hf.utils.destinations import (
    LOCK,
    RunFolder,
    claim_destination,
    differences,
    lock_output,
    remove_leftovers,
)


def write(destination, text, *, overwrite=True, meanwhile=lambda: None):
    with claim_destination(destination, overwrite=overwrite) as claimed, claimed.staging() as folder:
        (folder / "config.json").write_text(text)
        (folder / "parts").mkdir()
        (folder / "parts" / "one").write_text(text)
        meanwhile()


def content(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def complete(text):
    return {"config.json": text, "parts/one": text}


def names(folder):
    return sorted(os.listdir(folder))


# Others' files


def test_files_of_others_are_kept(tmp_path):
    def fill():
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "mine").write_text("mine")

    with pytest.raises(ValueError, match="out is not empty"):
        write(tmp_path / "out", "new", overwrite=False, meanwhile=fill)
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["mine"]
    with pytest.raises(ValueError, match="out is not empty"):
        write(tmp_path / "out", "new", overwrite=False)
    with pytest.raises(ValueError, match="file is not empty"):
        write(tmp_path / "file", "new", overwrite=False, meanwhile=lambda: (tmp_path / "file").write_text("mine"))
    with pytest.raises(ValueError, match="is not a directory"):
        write(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "mine"
    write(tmp_path / "empty", "new", overwrite=False, meanwhile=(tmp_path / "empty").mkdir)
    assert content(tmp_path / "empty") == complete("new")


def test_overwriting(tmp_path):
    write(tmp_path / "out", "old")
    (tmp_path / "out" / "mine").write_text("mine")
    write(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"] and content(tmp_path / "out") == complete("new")


def test_temporary_names_inside_are_content(tmp_path, monkeypatch):
    """What a run killed elsewhere left inside a destination is neither taken for nothing nor in the way."""
    leftover = tmp_path / "out" / ".tmp-0123abcd-out"
    leftover.mkdir(parents=True)
    with pytest.raises(ValueError, match="out is not empty"), claim_destination(tmp_path / "out"):
        pass
    write(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"] and content(tmp_path / "out") == complete("new")
    monkeypatch.chdir(tmp_path / "out")
    with claim_destination(Path("."), overwrite=True) as claimed, claimed.staging() as folder:
        (folder / ".tmp-of-others").write_text("copied")
    assert content(tmp_path / "out") == {".tmp-of-others": "copied"}


def test_the_home_directory_is_not_overwritten(tmp_path, monkeypatch):
    (tmp_path / "home" / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in (tmp_path / "home", tmp_path):
        with claim_destination(folder, overwrite=True) as claimed, pytest.raises(ValueError, match="not overwritten"):
            check_apart(claimed)


# Locks


def test_of_two_writers_one_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with claim_destination(tmp_path / "out") as claimed, claimed.staging() as folder:
        (folder / "config.json").write_text("first")
        for path in (tmp_path / "out", tmp_path / "link" / "out"):
            with pytest.raises(ValueError, match="is being written by another run; wait for it or choose another one"):
                write(path, "second")
        # What a living process writes is no leftover.
        assert folder.exists()
    assert names(tmp_path) == ["link", "out"] and content(tmp_path / "out") == {"config.json": "first"}


HOLDER = """
import sys, pathlib
from mhla_hf.utils.destinations import lock_output
lock = lock_output(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_dies_with_its_process(tmp_path):
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], **options) as process:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="in use by another run"):
            lock_output(tmp_path, patience=0)
        process.kill()
    assert names(tmp_path) == [LOCK]
    lock_output(tmp_path, patience=0).lock.release()


def test_differences_have_both_values_of_what_differs():
    assert differences({"seed": 0, "grid": [1, 2], "old": 1}, {"seed": 1, "grid": (1, 2)}) == (
        "old 1 (now None), seed 0 (now 1)"
    )
    assert differences({"grid": [1, 2]}, {"grid": (1, 2)}) == differences({}, {}) == ""


def test_a_run_claims_its_folder_and_no_other_run_does(tmp_path):
    folder = RunFolder(tmp_path, "run.json")
    with folder.claimed({"seed": 0, "grid": (1, 2)}):
        assert folder.identity() == {"seed": 0, "grid": [1, 2]}
        with pytest.raises(ValueError, match="in use by another run"):
            lock_output(tmp_path, patience=0)
    (leftover,) = leave(tmp_path, "")
    with folder.claimed({"seed": 0, "grid": (1, 2)}):
        assert not leftover.exists()
    with pytest.raises(ValueError, match="holds a run already; --resume resumes it"):
        with folder.claimed({"seed": 0, "grid": (1, 2)}, resume=False):
            pass
    with pytest.raises(ValueError, match=r"holds a run with seed 0 \(now 1\); give the same options"):
        with folder.claimed({"seed": 1, "grid": (1, 2)}):
            pass
    assert folder.identity()["seed"] == 0


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_works(number, tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(number, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    (leftover,) = leave(tmp_path, "")
    assert isinstance(lock_output(tmp_path), contextlib.nullcontext)
    write(tmp_path / "out", "new")
    # Without a lock, leftovers could be a living process's.
    assert names(tmp_path) == [LOCK, leftover.name, "out"] and content(tmp_path / "out") == complete("new")


# Killed processes


def killed_at(step, action):
    """Run an action in a fork that kills itself before or after a file system call; return whether it did."""
    pid = os.fork()
    if pid == 0:
        count = iter(range(10_000))

        def wrap(function):
            def wrapped(*args, **options):
                for last in (False, True):
                    if next(count) == step:
                        os.kill(os.getpid(), signal.SIGKILL)
                    result = None if last else function(*args, **options)
                    if not last:
                        kept = result
                return kept

            return wrapped

        for name in ("rename", "replace", "mkdir", "fsync", "rmdir", "unlink"):
            setattr(os, name, wrap(getattr(os, name)))
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("has_old", [pytest.param(False, marks=pytest.mark.slow), True])
def test_kills_at_each_step(has_old, tmp_path):
    step, restored = 0, 0
    while True:
        folder = tmp_path / str(step)
        out = folder / "out"
        folder.mkdir()
        if has_old:
            write(out, "old")
        if not killed_at(step, lambda out=out: write(out, "new")):
            break
        found = content(out) if out.exists() else None
        assert found in ((complete("old"), complete("new"), None) if has_old else (None, complete("new"))), step
        if found is None and has_old:
            assert [content(path) for path in folder.glob(".tmp-old-*")] == [complete("old")]
            with pytest.raises(ValueError, match="is not empty"):
                write(out, "newer", overwrite=False)
            assert content(out) == complete("old")
            restored += 1
        write(out, "newer")
        assert names(folder) == ["out"] and content(out) == complete("newer")
        step += 1
    assert step > 15 and bool(restored) == has_old


@pytest.mark.slow
def test_kills_in_a_destination_that_cannot_be_renamed(tmp_path, monkeypatch):
    step = 0
    while True:
        folder = tmp_path / str(step)
        folder.mkdir()
        monkeypatch.chdir(folder)
        write(Path("."), "old")
        if not killed_at(step, lambda: write(Path("."), "new")):
            break
        if Path("config.json").exists():
            assert content(folder)["config.json"] == content(folder)["parts/one"]
        with contextlib.suppress(ValueError):
            write(Path("."), "newer", overwrite=False)
        assert content(folder) in (complete("old"), complete("new")) and names(folder) == ["config.json", "parts"]
        step += 1
    assert step > 20


def leave(tmp_path, *kinds):
    """Leave what a killed run would, under the kinds of names given; return the paths."""
    paths = [tmp_path / f".tmp-{kind}0123abcd-out" for kind in kinds]
    for kind, path in zip(kinds, paths):
        path.mkdir()
        (path / "text").write_text(kind or "new")
    return paths


def test_leftovers_are_removed_and_logged(tmp_path, caplog):
    leave(tmp_path, "")
    (tmp_path / ".tmp-lock-out").touch()
    other = tmp_path / ".tmp-0123abcd-other-out"
    other.mkdir()
    write(tmp_path / "out", "newer")
    assert names(tmp_path) == [other.name, "out"]
    assert [record.getMessage() for record in caplog.records] == [
        f"Removed {tmp_path}/.tmp-0123abcd-out, left over from a run that was killed."
    ]


@pytest.mark.parametrize("clean", [lambda path: write(path / "out", "newer"), remove_leftovers])
def test_what_was_put_aside_is_kept_while_others_are_in_its_place(clean, tmp_path, caplog):
    paths = leave(tmp_path, "", "old-")
    (tmp_path / "out").mkdir()
    clean(tmp_path)
    assert all(path.exists() for path in paths)
    assert "holds what stood at" in caplog.records[0].getMessage()


def test_a_failing_rename_keeps_the_old(tmp_path, monkeypatch):
    write(tmp_path / "out", "old")
    rename = os.rename

    def failing(source, target):
        if str(target).endswith("/out") and "old-" not in str(source):
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "rename", failing)
        write(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"] and content(tmp_path / "out") == complete("old")


# Links and mount points


@contextlib.contextmanager
def mounted(folder, *options):
    """A mount point, or a skipped test where making one is not allowed."""
    folder.mkdir(exist_ok=True)
    made = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"mounting is not allowed here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
def test_mount_points_are_written_through(kind, tmp_path):
    (tmp_path / "source").mkdir()
    options = ("-t", "tmpfs", "-o", "size=8m", "tmpfs") if kind == "tmpfs" else ("--bind", str(tmp_path / "source"))
    with mounted(tmp_path / "out", *options) as out:
        (out / "lost+found").mkdir()
        write(out, "old", overwrite=False)
        with pytest.raises(ValueError, match="is not empty"):
            write(out, "new", overwrite=False)
        (out / "mine").write_text("mine")
        write(out, "new")
        assert names(out) == ["config.json", "lost+found", "parts"] and content(out) == complete("new")
