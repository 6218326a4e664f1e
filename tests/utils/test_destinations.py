# SPDX-License-Identifier: Apache-2.0
"""Destinations: nobody's files are lost, one process writes at a time, links and mount points are written through."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mhla_hf.conversion import convert_pretrained
from mhla_hf.conversion.writing import check_apart
from mhla_hf.utils import destinations
from mhla_hf.utils.destinations import atomic_directory, claim_destination, exchange_names, remove_leftovers
from mhla_hf.utils.files import atomic_file
from tests import tiny


MHLA = {"blocks": (1, 2, 2)}


@pytest.fixture(scope="module")
def softmax(tmp_path_factory):
    folder = tmp_path_factory.mktemp("softmax") / "transformer"
    tiny.wan_transformer(num_layers=1).save_pretrained(folder)
    return folder


@pytest.fixture(params=["exchange", "two renames"])
def renaming(request, monkeypatch):
    """With and without the system's exchange of names."""
    if request.param == "two renames":
        monkeypatch.setattr(destinations, "exchange_names", lambda *_: False)
    return request.param


def write(destination, text, *, overwrite=True, meanwhile=lambda: None):
    with claim_destination(destination, overwrite=overwrite) as claimed, claimed.staging() as folder:
        (folder / "text").write_text(text)
        (folder / "parts").mkdir()
        (folder / "parts" / "one").write_text(text)
        meanwhile()


def names(folder):
    return sorted(os.listdir(folder))


# Others' files


def test_files_that_appear_meanwhile_are_kept(tmp_path):
    def fill():
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "mine").write_text("mine")

    with pytest.raises(ValueError, match="out was filled by others meanwhile and is left as it is"):
        write(tmp_path / "out", "new", overwrite=False, meanwhile=fill)
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["mine"]
    with pytest.raises(ValueError, match="out is not empty"):
        write(tmp_path / "out", "new", overwrite=False)
    with pytest.raises(ValueError, match="file was filled by others meanwhile"):
        write(tmp_path / "file", "new", overwrite=False, meanwhile=lambda: (tmp_path / "file").write_text("mine"))
    assert (tmp_path / "file").read_text() == "mine"
    write(tmp_path / "empty", "new", overwrite=False, meanwhile=(tmp_path / "empty").mkdir)
    assert (tmp_path / "empty" / "text").read_text() == "new"


def test_files_that_appear_during_a_conversion_are_kept(softmax, tmp_path, monkeypatch):
    from mhla_hf.conversion import writing

    original = writing.write_shards

    def write_shards(*args, **options):
        (tmp_path / "mhla").mkdir()
        (tmp_path / "mhla" / "mine").write_text("mine")
        return original(*args, **options)

    monkeypatch.setattr(writing, "write_shards", write_shards)
    with pytest.raises(ValueError, match="filled by others meanwhile"):
        convert_pretrained(softmax, tmp_path / "mhla", MHLA, progress=False)
    assert names(tmp_path) == ["mhla"] and names(tmp_path / "mhla") == ["mine"]


def test_overwriting(renaming, tmp_path):
    write(tmp_path / "out", "old")
    (tmp_path / "out" / "mine").write_text("mine")
    write(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"] and names(tmp_path / "out") == ["parts", "text"]
    assert (tmp_path / "out" / "text").read_text() == "new"


def test_the_home_directory_is_not_overwritten(tmp_path, monkeypatch):
    (tmp_path / "home" / "work").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder in (tmp_path / "home", tmp_path):
        with claim_destination(folder, overwrite=True) as claimed, pytest.raises(ValueError, match="not overwritten"):
            check_apart(claimed)
    monkeypatch.chdir(tmp_path / "home" / "work")
    monkeypatch.setenv("HOME", "/nowhere")
    with claim_destination(tmp_path / "home", overwrite=True) as claimed, pytest.raises(ValueError, match="working"):
        check_apart(claimed)


# Locks


def test_one_writer_at_a_time(tmp_path):
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with claim_destination(tmp_path / "out") as claimed, claimed.staging() as folder:
            (folder / "text").write_text("first")
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    (tmp_path / "link").symlink_to(tmp_path)
    for path in (tmp_path / "out", tmp_path / "link" / "out"):
        with pytest.raises(ValueError, match="is being written by another run; wait for it or choose another one"):
            write(path, "second")
    # What a living process writes is no leftover.
    assert len([name for name in names(tmp_path) if name.endswith("-out")]) == 2
    leave.set()
    thread.join()
    assert names(tmp_path) == ["link", "out"]
    assert (tmp_path / "out" / "text").read_text() == "first"


def test_of_two_conversions_one_is_refused(softmax, tmp_path):
    with claim_destination(tmp_path / "mhla"):
        with pytest.raises(ValueError, match="mhla is being written by another run"):
            convert_pretrained(softmax, tmp_path / "mhla", MHLA, progress=False)
        assert names(tmp_path) == [".tmp-lock-mhla"]
    convert_pretrained(softmax, tmp_path / "mhla", MHLA, progress=False)
    assert names(tmp_path) == ["mhla"]


def test_refusals_leave_no_folders(tmp_path):
    with pytest.raises(RuntimeError), claim_destination(tmp_path / "a" / "b" / "c"):
        raise RuntimeError
    assert names(tmp_path) == []


# What killed runs leave


def killed(tmp_path, token, *kinds):
    """Leaves what a killed run would, under the kinds of names given; returns the paths."""
    paths = []
    for kind in kinds:
        path = tmp_path / f".tmp-{kind}{token}-out"
        path.mkdir()
        (path / "text").write_text(kind or "new")
        paths.append(path)
    return paths


def test_leftovers_are_removed_and_named(tmp_path, caplog):
    killed(tmp_path, "0123abcd", "")
    (tmp_path / ".tmp-lock-out").touch()
    other = tmp_path / ".tmp-0123abcd-other-out"
    other.mkdir()
    write(tmp_path / "out", "newer")
    assert names(tmp_path) == [other.name, "out"]
    assert [record.getMessage() for record in caplog.records] == [
        f"Removed {tmp_path}/.tmp-0123abcd-out, left over from a run that was killed."
    ]


def test_an_output_that_was_put_aside_comes_back(tmp_path, caplog):
    killed(tmp_path, "0123abcd", "", "old-")
    with pytest.raises(ValueError, match="is not empty"):
        write(tmp_path / "out", "newer", overwrite=False)
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "text").read_text() == "old-"
    assert caplog.records[0].getMessage() == (f"Restored {tmp_path}/out, which a run that was killed had put aside.")


def test_an_output_that_was_put_aside_comes_back_when_an_output_folder_is_cleaned(tmp_path):
    killed(tmp_path, "0123abcd", "", "old-")
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "text").read_text() == "old-"
    remove_leftovers(tmp_path / "nowhere")


def test_leftovers_in_an_output_folder_are_named(tmp_path, caplog):
    killed(tmp_path, "0123abcd", "")
    (tmp_path / ".tmp-0123abcd-file").touch()
    (tmp_path / ".tmp-lock-out").touch()
    for _ in range(2):
        remove_leftovers(tmp_path)
        assert names(tmp_path) == []
    assert [record.getMessage() for record in caplog.records] == [
        f"Removed 2 temporary files or folders of a killed run from {tmp_path}."
    ]


@pytest.mark.parametrize("clean", [lambda path: write(path / "out", "newer"), remove_leftovers])
def test_what_was_put_aside_is_kept_while_others_are_in_its_place(clean, tmp_path, caplog):
    paths = killed(tmp_path, "0123abcd", "", "old-")
    (tmp_path / "out").mkdir()
    clean(tmp_path)
    assert all(path.exists() for path in paths)
    assert "holds what stood at" in caplog.records[0].getMessage()


def test_what_was_replaced_is_removed(tmp_path):
    killed(tmp_path, "0123abcd", "old-")
    (tmp_path / "out").mkdir()
    write(tmp_path / "out", "newer")
    assert names(tmp_path) == ["out"]


def test_a_failing_rename_keeps_the_old(tmp_path, monkeypatch):
    monkeypatch.setattr(destinations, "exchange_names", lambda *_: False)
    write(tmp_path / "out", "old")
    rename = os.rename

    def failing(source, target):
        if str(target).endswith("/out") and "old-" not in str(source):
            raise OSError(28, "No space left on device")
        rename(source, target)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "rename", failing)
        write(tmp_path / "out", "new")
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "text").read_text() == "old"


# Links and mount points


def test_links_are_written_through(renaming, tmp_path):
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "real")
    for text in ("first", "second"):
        write(tmp_path / "out", text)
        assert (tmp_path / "out").is_symlink()
        assert (tmp_path / "disk" / "real" / "text").read_text() == text
    assert names(tmp_path) == ["disk", "out"] and names(tmp_path / "disk") == ["real"]
    with atomic_directory(tmp_path / "out" / "deeper") as folder:
        (folder / "text").write_text("third")
    assert (tmp_path / "disk" / "real" / "deeper" / "text").read_text() == "third"


def test_files_are_written_through_links(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link.txt").symlink_to("real")
    with atomic_file(tmp_path / "link.txt") as temporary:
        assert temporary.suffix == ".txt"
        temporary.write_text("new")
    assert (tmp_path / "link.txt").is_symlink() and (tmp_path / "real").read_text() == "new"
    assert names(tmp_path) == ["link.txt", "real"]


@pytest.mark.parametrize(
    "destination", ["dangling", "dangling/below", "circle", "file", "file/below", "fifo", "far/away"]
)
def test_destinations_that_cannot_be_written_are_refused_first(destination, softmax, tmp_path):
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "far").symlink_to(tmp_path / "gone" / "folder")
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "fifo")
    before = names(tmp_path)
    with pytest.raises(
        ValueError, match=f"destination {tmp_path}/{destination}.*(link to .* not exist|give a directory)"
    ):
        # The source does not exist either: the destination goes first.
        convert_pretrained(tmp_path / "no source", tmp_path / destination, MHLA, overwrite=True, progress=False)
    assert names(tmp_path) == before and (tmp_path / "file").read_text() == "mine"


def test_read_only_places_are_refused_first(tmp_path):
    with pytest.raises(OSError, match=r"destination /proc/sys/out cannot be written \(.*\)"):
        convert_pretrained(tmp_path / "no source", "/proc/sys/out", MHLA, progress=False)


def test_the_working_directory_is_written_through(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    number = os.stat(tmp_path).st_ino
    for text in ("first", "second"):
        write(Path("."), text)
        assert names(tmp_path) == ["parts", "text"] and Path("text").read_text() == text
    assert os.stat(tmp_path).st_ino == number


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
def test_mount_points_are_written_through(kind, softmax, tmp_path):
    (tmp_path / "source").mkdir()
    options = ("-t", "tmpfs", "-o", "size=8m", "tmpfs") if kind == "tmpfs" else ("--bind", str(tmp_path / "source"))
    with mounted(tmp_path / "out", *options) as out:
        (out / "lost+found").mkdir()
        convert_pretrained(softmax, out, MHLA, progress=False)
        with pytest.raises(ValueError, match="is not empty"):
            convert_pretrained(softmax, out, MHLA, progress=False)
        (out / "mine").write_text("mine")
        convert_pretrained(softmax, out, MHLA, overwrite=True, progress=False)
        assert names(out) == [
            "config.json", "conversion.json", "diffusion_pytorch_model.safetensors", "lost+found"
        ]  # fmt: skip
        for path in out.iterdir():
            if path.is_file():
                path.unlink()
        with pytest.raises(ValueError, match="filled by others meanwhile"):
            write(out, "new", overwrite=False, meanwhile=lambda: (out / "mine").write_text("mine"))
        assert names(out) == ["lost+found", "mine"]


def test_exchange_of_names(tmp_path):
    if sys.platform != "linux":
        assert not exchange_names(tmp_path / "a", tmp_path / "b")
        return
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert not exchange_names(tmp_path / "a", tmp_path / "gone")
    if not exchange_names(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system has no exchange of names")
    assert names(tmp_path / "a") == ["b"] and names(tmp_path / "b") == ["a"]
