# SPDX-License-Identifier: Apache-2.0
"""Kills recoveries with SIGKILL and resumes them: `python -m tests.recovery.kill_recovery FOLDER KIND COUNT`.

Each of `COUNT` runs is killed at a random moment and again after it was resumed, until one gets through; it must end
with the weights and figures of a run that nobody killed. The runs are forks of this process, so that nothing is
imported more than once.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from pathlib import Path

# What a run imports on its way, so that it is there for all forks.
import matplotlib.figure  # noqa: F401
import torch
import torch._dynamo
import tqdm.auto  # noqa: F401

import mhla_hf
from mhla_hf.training import trainer  # noqa: F401
from tests.training.kill_training import forked

from .test_recover import EXTRA, SMALL, make_source, weights


def main() -> None:
    folder, kind, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    source, data = make_source(kind, folder / "source")

    def run(output: Path) -> None:
        changes = {**SMALL, **EXTRA.get(kind, {})}
        options = {"changes": changes, "progress": False, "device": "cpu", "resume": True, "save_every": 2}
        mhla_hf.recover(source, output, data, **options)

    whole = folder / "whole"
    began = time.monotonic()
    forked(lambda: run(whole))
    duration = time.monotonic() - began
    expected, figures = weights(whole), json.loads((whole / "report.json").read_text())["figures"]
    draw, kills = random.Random(0), 0
    for number in range(count):
        output = folder / f"killed-{number}"
        while forked(lambda output=output: run(output), kill_after=draw.uniform(0.1, 1.2) * duration):
            kills += 1
        found = weights(output)
        assert all(torch.equal(found[name], expected[name]) for name in expected), f"{output} ended elsewhere"
        assert json.loads((output / "report.json").read_text())["figures"] == figures
        assert not [path for path in output.rglob(".tmp-*") if path.is_dir()]
        shutil.rmtree(output)
    print(kills, "kills")


if __name__ == "__main__":
    main()
