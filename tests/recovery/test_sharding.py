# SPDX-License-Identifier: Apache-2.0
"""Configurations for several processes: two equal one, and checkpoints go on in another number of processes."""

import shutil

import pytest
import torch

from ..reliability.training_process import make_trainer
from .sharded_training import OPTIONS, train_together


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of six steps in one process, in two that shard, in two that do not, and from one to two and back."""
    folder = tmp_path_factory.mktemp("runs")
    results = {"one": make_trainer(folder / "one", **OPTIONS, batch_size=2).run()}
    shutil.copytree(folder / "one", folder / "one to two")
    shutil.rmtree(folder / "one to two" / "checkpoints" / "finetune-00000006")
    each = {"batch_size": 1}
    train_together("fsdp2", [(folder / "two", each), (folder / "one to two", each)])
    train_together("ddp", [(folder / "two whole", each)])
    shutil.copytree(folder / "two", folder / "two to one")
    shutil.rmtree(folder / "two to one" / "checkpoints" / "finetune-00000006")
    results["two to one"] = make_trainer(folder / "two to one", **OPTIONS, batch_size=2).run()
    found = {name: {"losses": result.losses, "weights": result.model.state_dict()} for name, result in results.items()}
    for name in ("two", "one to two", "two whole"):
        found[name] = torch.load(folder / name / "final.pt")
    assert results["two to one"].resumed_from.name == "finetune-00000004"
    return found


@pytest.mark.parametrize("name", ["two", "two whole", "one to two", "two to one"])
def test_losses_and_weights_are_those_of_one_process(name, runs):
    expected, found = runs["one"], runs[name]
    assert found["losses"]["finetune"] == pytest.approx(expected["losses"]["finetune"], rel=1e-5)
    assert len(found["losses"]["finetune"]) == 6
    assert found["weights"].keys() == expected["weights"].keys()
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=1e-4, msg=key)


def test_processes_shard_where_the_configuration_says_so(runs):
    assert [runs[name]["kind"] for name in ("two", "one to two", "two whole")] == ["FSDP", "FSDP", "MULTI_CPU"]
