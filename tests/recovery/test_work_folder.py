# SPDX-License-Identifier: Apache-2.0
"""The work folder of a recovery: publication that was killed half-way is completed by the next run."""

import os

import pytest

from mhla_hf.recovery.work_folder import RESULT, WorkFolder


def test_files_that_were_published_before_are_published_again(tmp_path):
    """The second run links the same files into its result: a rename of hard links of one file does nothing."""
    work = WorkFolder(tmp_path)
    result = work.path / RESULT
    converted = work.path / "converted"
    for folder in (result / "tokenizer", converted):
        folder.mkdir(parents=True)
    for name in ("config.json", "vocab.txt"):
        (converted / name).write_text(name)
        os.link(converted / name, result / name)
    os.link(converted / "vocab.txt", tmp_path / "vocab.txt")
    (result / "tokenizer" / "merges.txt").write_text("new")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "old.txt").write_text("old")
    work.publish()
    assert not result.exists()
    found = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.*")}
    assert {name: text for name, text in found.items() if not name.startswith("work/")} == {
        "config.json": "config.json",
        "vocab.txt": "vocab.txt",
        "tokenizer/merges.txt": "new",
    }


def test_files_of_others_are_not_taken_for_a_run(tmp_path):
    own = tmp_path / "work" / "thesis.tex"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(ValueError, match="is not empty; choose another, or remove it"):
        with WorkFolder(tmp_path).claimed({"seed": 0}, resume=False):
            pass
    assert own.read_text() == "mine"


@pytest.mark.parametrize(
    "left, kept",
    [
        (["converted.json", "converted/model.safetensors", "start.json", "data/cache.json"], False),
        (["match/matching.json", "match/activations/0.safetensors"], False),
        (["match/layers/000/transfer-00000002/state.json"], True),
        (["calibrate.json"], True),
        (["result/config.json"], True),
    ],
)
def test_a_run_gives_way_until_it_has_progress(left, kept, tmp_path):
    work = WorkFolder(tmp_path)
    with work.claimed({"seed": 0}, resume=False):
        for name in left:
            path = work.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
    if kept:
        with pytest.raises(ValueError, match="holds a run already; --resume resumes it"), work.claimed({}, False):
            pass
        with pytest.raises(ValueError, match=r"holds a run with seed 0 \(now 1\)"), work.claimed({"seed": 1}, True):
            pass
    else:
        with work.claimed({"seed": 0}, resume=False):
            assert all((work.path / name).is_file() for name in left)
        with work.claimed({"seed": 1}, resume=False):
            assert not [name for name in left if (work.path / name).exists()]
    assert work.is_run_of({"seed": 0 if kept else 1})
