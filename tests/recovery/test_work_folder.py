# SPDX-License-Identifier: Apache-2.0
"""The work folder of a recovery: publication that was killed half-way is completed by the next run."""

import json

import pytest

from mhla_hf.recovery.recover import WorkFolder
from mhla_hf.utils.files import temporary_sibling


def test_files_of_others_are_not_taken_for_a_run(tmp_path):
    own = tmp_path / "work" / "thesis.tex"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(ValueError, match="is not empty; choose another, or remove it"):
        with WorkFolder(tmp_path).claimed({"seed": 0}, resume=False):
            pass
    assert own.read_text() == "mine"


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_killed_while_it_first_writes_its_record_is_started_again(tmp_path, resume):
    work = WorkFolder(tmp_path)
    work.path.mkdir()
    (work.path / ".lock").touch()
    left = temporary_sibling(work.path / "run.json")
    left.write_text('{"seed"')
    with work.claimed({"seed": 0}, resume):
        assert json.loads((work.path / "run.json").read_text()) == {"seed": 0}
    assert not left.exists()
