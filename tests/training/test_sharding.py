# SPDX-License-Identifier: Apache-2.0
"""Configurations for several processes: two equal one, and checkpoints go on in another number of processes."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType

from mhla_hf.training import TrainingConfig
from mhla_hf.training.processes import check_distribution, make_accelerator

from .sharded_training import CONFIGURATIONS, OPTIONS, launch_arguments, train_together
from .training_process import make_trainer


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of six steps in one process, in two that shard, in two that do not, and from one to two and back."""
    folder = tmp_path_factory.mktemp("runs")
    trainer = make_trainer(folder / "one", **OPTIONS, batch_size=2)
    results = {"one": trainer.run()}
    shutil.copytree(folder / "one", folder / "one to two")
    shutil.rmtree(folder / "one to two" / "checkpoints" / "finetune-00000006")
    each = {"batch_size": 1}
    together = [(folder / "two", each), (folder / "one to two", each)]
    train_together("fsdp2", together)
    train_together("ddp", [(folder / "two whole", each)])
    shutil.copytree(folder / "two", folder / "two to one")
    shutil.rmtree(folder / "two to one" / "checkpoints" / "finetune-00000006")
    results["two to one"] = make_trainer(folder / "two to one", **OPTIONS, batch_size=2).run()
    found = {name: {"losses": result.losses, "weights": result.model.state_dict()} for name, result in results.items()}
    for name in ("two", "one to two", "two whole"):
        found[name] = torch.load(folder / name / "final.pt")
    assert results["two to one"].resumed_from.name == "finetune-00000004"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "two whole", "one to two", "two to one"])
def test_losses_and_weights_are_those_of_one_process(name, runs):
    expected, found = runs["one"], runs[name]
    assert found["losses"]["finetune"] == pytest.approx(expected["losses"]["finetune"], rel=1e-5)
    assert len(found["losses"]["finetune"]) == 6
    assert found["weights"].keys() == expected["weights"].keys()
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=1e-4, msg=key)


@pytest.mark.slow
def test_processes_shard_where_the_configuration_says_so(runs):
    assert [runs[name]["kind"] for name in ("two", "one to two", "two whole")] == ["FSDP", "FSDP", "MULTI_CPU"]


class TestConfigurations:
    @pytest.mark.parametrize(("name", "kind"), [("ddp", "MULTI_GPU"), ("fsdp2", "FSDP")])
    def test_accelerate_reads_them(self, name, kind):
        """Entries that it does not know are errors."""
        from accelerate.commands.config.config_args import load_config_from_file

        config = load_config_from_file(str(CONFIGURATIONS / f"{name}.yaml"))
        assert config.distributed_type == kind and config.mixed_precision == "bf16"
        arguments = launch_arguments(name, "--num_processes", "2")
        assert (arguments.num_processes, arguments.use_fsdp) == (2, kind == "FSDP")

    def test_deepspeed_is_refused_before_it_starts(self, monkeypatch):
        monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
        with pytest.raises(ValueError, match="DeepSpeed is not supported: shard with FSDP 2"):
            make_accelerator(TrainingConfig(device="cpu"))

    @pytest.mark.parametrize(
        ("kind", "options", "message"),
        [
            ("FSDP", {"train": "lora"}, "under FSDP, train='lora' cannot be used"),
            ("FSDP", {"validation_prompts": "a"}, "under FSDP, validation_prompts cannot be used"),
            ("FSDP 1", {}, "under FSDP, use one process, DDP or FSDP 2"),
            ("DEEPSPEED", {}, "DeepSpeed is not supported: shard with FSDP 2"),
            ("MEGATRON_LM", {}, "under MEGATRON_LM, use one process, DDP or FSDP 2"),
        ],
    )
    def test_what_does_not_run_sharded_is_refused(self, kind, options, message):
        distributed = SimpleNamespace(distributed_type=DistributedType(kind.split()[0]), is_fsdp2=kind == "FSDP")
        if options:
            check_distribution(distributed, TrainingConfig())
        with pytest.raises(ValueError, match=message):
            check_distribution(distributed, TrainingConfig(**options))
