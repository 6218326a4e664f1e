# SPDX-License-Identifier: Apache-2.0
"""The moving average of the weights: its values, in checkpoints, in validation samples and in what a run exports."""

import copy

import pytest
import torch
from safetensors.torch import load_file

from mhla_hf.training import DiffusionTrainer, TrainingConfig
from mhla_hf.training.checkpoints import list_checkpoints
from mhla_hf.training.parameters import WeightAverage
from mhla_hf.training.processes import full_tensor

from .. import tiny
from .cases import CASES
from .training_process import make_trainer


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")

EMA = {"ema_decay": 0.9}


def test_the_average_is_what_the_formula_says():
    model = torch.nn.Linear(3, 2)
    average = WeightAverage(model, ["weight"], 0.9)
    expected = model.weight.detach().clone()
    for step in range(5):
        with torch.no_grad():
            model.weight.add_(1.0)
        average.step()
        decay = min(0.9, (1 + step) / (10 + step)) if step else 0.0
        expected = decay * expected + (1 - decay) * model.weight.detach()
    with average.applied():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert not torch.allclose(model.weight, expected)


def same(first, second):
    return all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_sharded_model_has_a_sharded_average(one_process):
    from torch.distributed.fsdp import fully_shard

    plain = torch.nn.Linear(3, 2)
    model = copy.deepcopy(plain)
    fully_shard(model, mesh=one_process)
    averages = [WeightAverage(each, ["weight", "bias"], 0.9) for each in (plain, model)]
    for _ in range(3):
        for each, average in zip((plain, model), averages):
            with torch.no_grad():
                each.weight.mul_(1.5)
            average.step()
    assert all(hasattr(value, "full_tensor") for value in averages[1].ema.shadow_params)
    mine, theirs = ({name: full_tensor(each) for name, each in average.tensors.items()} for average in averages[::-1])
    assert averages[1].ema.optimization_step == 3 and same(mine, theirs)
    with averages[1].applied():
        assert torch.equal(model.weight.full_tensor(), theirs["weight"])
    assert torch.equal(model.weight.full_tensor(), plain.weight)


def test_interrupted_runs_keep_the_same_average(tmp_path):
    options = {**EMA, "train": "full"}
    whole = make_trainer(tmp_path / "whole", **options).run()

    def crash(stage, step, loss):
        if (stage, step) == ("finetune", 5):
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        make_trainer(tmp_path / "cut", crash, **options).run()
    cut = make_trainer(tmp_path / "cut", **options).run()
    assert cut.resumed_from.name == "finetune-00000004" and cut.losses == whole.losses
    assert same(whole.model.state_dict(), cut.model.state_dict())
    # A finished run gives its average again.
    again = make_trainer(tmp_path / "cut", **options).run()
    assert same(whole.model.state_dict(), again.model.state_dict())


def test_validation_and_export_have_the_average(tmp_path, monkeypatch):
    from mhla_hf.training import evaluation

    case = CASES["wan"]
    teacher = case.make_teacher()
    student = case.student(teacher)
    source = tmp_path / "source"
    pipeline = tiny.wan_pipeline(num_layers=3)
    pipeline.transformer = student
    pipeline.save_pretrained(source)
    from mhla_hf.models.directory import ModelDirectory
    from mhla_hf.training import CacheConfig
    from mhla_hf.training.data.latent_cache import make_cache
    from mhla_hf.training.processes import make_accelerator

    config = TrainingConfig(
        model=str(source), output=str(tmp_path / "run"), train="full", max_steps=3, learning_rate=1e-2,
        validation_prompts="a", validation_steps=2, validation_inference_steps=1, validation_guidance=1.0,
        progress=False, device="cpu", **EMA,
    )  # fmt: skip
    cache = CacheConfig(data="digits", sizes="16,16,5", max_sequence_length=8, num_samples=2)

    accelerator = make_accelerator(config)
    make_cache(config, cache, accelerator, ModelDirectory.open(source))
    seen = {}

    def write(self, transformer, folder, step):
        seen[step] = {name: value.clone() for name, value in transformer.state_dict().items()}
        return []

    monkeypatch.setattr(evaluation.Validator, "write", write)
    result = DiffusionTrainer(config, accelerator=accelerator).run()
    exported = load_file(result.pipeline / "transformer" / "diffusion_pytorch_model.safetensors")
    assert sorted(seen) == [2, 3] and same(exported, seen[3]) and not same(exported, seen[2])
    weights = load_file(list_checkpoints(tmp_path / "run" / "checkpoints")[-1] / "model.safetensors")
    assert not same(weights, exported)
