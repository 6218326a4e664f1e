# SPDX-License-Identifier: Apache-2.0
"""The work folder of a recovery: publication that was killed half-way is completed by the next run."""

import pytest

from mhla_hf.recovery.recover import WorkFolder


def test_files_of_others_are_not_taken_for_a_run(tmp_path):
    own = tmp_path / "work" / "thesis.tex"
    own.parent.mkdir()
    own.write_text("mine")
    with pytest.raises(ValueError, match="is not empty; choose another, or remove it"):
        with WorkFolder(tmp_path).claimed({"seed": 0}, resume=False):
            pass
    assert own.read_text() == "mine"
