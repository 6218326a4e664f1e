# SPDX-License-Identifier: Apache-2.0
"""The work folder of a recovery: publication that was killed half-way is completed by the next run."""

import os

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
