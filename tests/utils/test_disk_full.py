# SPDX-License-Identifier: Apache-2.0
"""A full disk: one line that names the path, and everything that was complete before is whole."""

import os
import shutil
import subprocess
from contextlib import contextmanager

import pytest
import torch
import typer
from safetensors.torch import save_file

from mhla_hf.cli.main import friendly_errors
from mhla_hf.training.checkpoints import find_checkpoint, list_checkpoints, read_state
from mhla_hf.utils.destinations import atomic_directory

from ..training.training_process import make_trainer


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")

BLOCK = 4096


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    """A file system of eight megabytes."""
    directory = tmp_path_factory.mktemp("disk")
    mounted = shutil.which("mount") is not None and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(directory)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.fixture
def disk(small_disk):
    yield small_disk
    for path in small_disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def fill(disk, leave=0):
    """Leaves so many bytes."""
    free = shutil.disk_usage(disk).free
    (disk / "filling").write_bytes(b"\1" * max(0, free - leave))


@contextmanager
def one_line(capsys, *parts):
    with pytest.raises(typer.Exit) as stop, friendly_errors():
        yield
    assert stop.value.exit_code == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) < 500
    for part in (*parts, "cannot be written", "Make room and run the same command again"):
        assert str(part) in lines[0]


WRITERS = {
    "safetensors": lambda path: save_file({"values": torch.zeros(100_000)}, path),
    "torch": lambda path: torch.save(torch.zeros(100_000), path),
    "python": lambda path: path.write_bytes(b"x" * 400_000),
}


@pytest.mark.parametrize("writer", list(WRITERS))
def test_whatever_writes_it_is_one_line(writer, disk, capsys):
    (disk / "source").mkdir()
    (disk / "source" / "large").write_bytes(b"x" * 400_000)
    (disk / "kept").mkdir()
    (disk / "kept" / "old").write_text("old")
    fill(disk, leave=20 * BLOCK)
    with one_line(capsys, disk / "kept", "no space is left"):
        with atomic_directory(disk / "kept") as temporary:
            WRITERS[writer](temporary / "file")
    assert sorted(os.listdir(disk)) == ["filling", "kept", "source"] and os.listdir(disk / "kept") == ["old"]


@pytest.mark.slow
def test_the_checkpoint_before_is_whole_and_the_run_goes_on(disk, tmp_path, capsys):
    output = disk / "run"
    whole = make_trainer(tmp_path / "whole").run()

    def fill_at(stage, step, loss):
        if (stage, step) == ("finetune", 4):
            fill(disk, leave=20 * BLOCK)

    with one_line(capsys, output / "checkpoints" / "finetune-00000004", "no space is left"):
        make_trainer(output, fill_at).run()
    checkpoints = list_checkpoints(output / "checkpoints")
    assert [path.name for path in checkpoints] == ["transfer-00000002", "finetune-00000002"]
    assert read_state(find_checkpoint("latest", output / "checkpoints"))["step"] == 2
    (disk / "filling").unlink()
    resumed = make_trainer(output).run()
    assert resumed.losses == whole.losses
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
