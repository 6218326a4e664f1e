# SPDX-License-Identifier: Apache-2.0
"""Public names, commands and options that users rely on are all there; `public_names.json` lists them.

A new name or option may be added to the list. One may leave it only after a release in which its use warned.
"""

from __future__ import annotations

import importlib
import json

import pytest
from typer.main import get_command

from mhla_hf.cli.main import app
from tests import ROOT


LISTED = json.loads((ROOT / "tests" / "public_names.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", LISTED["names"])
def test_public_names_exist(module):
    found = importlib.import_module(module)
    missing = [name for name in LISTED["names"][module] if getattr(found, name, None) is None]
    assert not missing, f"{module} lacks {missing}"
    not_exported = set(LISTED["names"][module]) - set(found.__all__)
    assert not not_exported, f"{module}.__all__ lacks {sorted(not_exported)}"


@pytest.mark.parametrize("words", LISTED["commands"])
def test_commands_take_their_options(words):
    command = get_command(app)
    for name in words.split()[1:]:
        assert name in command.commands, f"there is no command {words!r}"
        command = command.commands[name]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    missing = set(LISTED["commands"][words]) - known
    assert not missing, f"{words} lacks {sorted(missing)}"
