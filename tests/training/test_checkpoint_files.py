# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and metrics of a run."""

import os

import pytest
import torch
from safetensors.torch import load_file

from mhla_hf.training.checkpoints import (
    MOMENTS,
    WEIGHTS,
    MetricsFile,
    Position,
    check_run,
    collect_moments,
    find_checkpoint,
    list_checkpoints,
    load_moments,
    load_weights,
    read_metrics,
    read_state,
    save_checkpoint,
)


class TestCheckpoints:
    def trained(self, steps=2):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        # As an expert that no token has been routed to.
        model.register_parameter("without_gradient", torch.nn.Parameter(torch.ones(1)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, [name for name, _ in model.named_parameters()]

    def save(self, directory, stage="finetune", step=2, **options):
        model, optimizer, names = self.trained()
        files = {WEIGHTS: dict(model.state_dict()), MOMENTS: collect_moments(model, optimizer)}
        return save_checkpoint(directory, Position.of(stage, step), files, {"config": {}, "inputs": {}}, **options)

    def test_weights_and_moments_come_back(self, tmp_path):
        path = self.save(tmp_path)
        model, optimizer, names = self.trained(steps=2)
        fresh, fresh_optimizer, _ = self.trained(steps=0)
        load_weights(path, fresh, names)
        load_moments(path, fresh, fresh_optimizer)
        assert fresh.without_gradient not in fresh_optimizer.state
        assert read_state(path)["step"] == 2
        inputs = torch.randn(5, 3)
        for candidate, its_optimizer in ((model, optimizer), (fresh, fresh_optimizer)):
            candidate(inputs).square().mean().backward()
            its_optimizer.step()
        for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(mine, theirs)

    def test_nothing_but_plain_files(self, tmp_path):
        path = self.save(tmp_path)
        assert sorted(os.listdir(path)) == ["model.safetensors", "optimizer.safetensors", "state.json"]
        assert "0.weight::exp_avg" in load_file(path / "optimizer.safetensors")

    def test_latest_is_the_furthest_and_complete(self, tmp_path):
        assert find_checkpoint("latest", tmp_path) is None
        assert find_checkpoint(None, tmp_path) is None
        for stage, step in (("finetune", 5), ("distill", 20), ("finetune", 10)):
            self.save(tmp_path, stage, step)
        assert find_checkpoint("previous", tmp_path).name == "finetune-00000005"
        (tmp_path / ".tmp-finetune-00000099-1").mkdir()
        (tmp_path / "notes").mkdir()
        assert find_checkpoint("latest", tmp_path).name == "finetune-00000010"
        assert find_checkpoint("distill-00000020", tmp_path).name == "distill-00000020"
        with pytest.raises(ValueError, match="already holds"):
            find_checkpoint(None, tmp_path)
        with pytest.raises(ValueError, match="one of: distill-00000020, finetune-00000005"):
            find_checkpoint("finetune-7", tmp_path)
        with pytest.raises(ValueError, match="no complete checkpoint"):
            find_checkpoint("notes", tmp_path)

    def test_the_oldest_go_first(self, tmp_path):
        for stage, step in (("distill", 1), ("distill", 2), ("finetune", 1)):
            self.save(tmp_path, stage, step, total_limit=2)
        assert [path.name for path in list_checkpoints(tmp_path)] == ["distill-00000002", "finetune-00000001"]

    def test_foreign_or_damaged_checkpoints_are_refused(self, tmp_path):
        path = self.save(tmp_path)
        model, _, names = self.trained()
        with pytest.raises(ValueError, match="of another run"):
            load_weights(path, model, names[:-1])
        model[0] = torch.nn.Linear(4, 4)
        with pytest.raises(ValueError, match=r"lacks \['0.weight \[4, 4\]'"):
            load_weights(path, model, names)
        (path / "state.json").unlink()
        with pytest.raises(ValueError, match=r"state\.json"):
            read_state(path)


def test_runs_that_were_stopped_while_they_matched_layers_are_refused(tmp_path):
    state = {"config": {"max_steps": 5}, "inputs": {}}
    matched = save_checkpoint(tmp_path, Position.of("transfer", 3), {WEIGHTS: {}}, state)
    with pytest.raises(ValueError, match="transfer-00000003 was stopped while it matched layers, .*mhla-hf recover"):
        check_run(matched, state)


def test_metrics_are_cut_to_the_resumed_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for stage, count in (("distill", 3), ("finetune", 4)):
        for step in range(1, count + 1):
            metrics.append({"stage": stage, "step": step, "loss": 1.0})
    with path.open("a") as file:
        file.write('{"stage": "fine')
    metrics = MetricsFile(path, Position.of("finetune", 2))
    metrics.append({"stage": "finetune", "step": 3, "loss": 2.0})
    expected = [("distill", 1), ("distill", 2), ("distill", 3), *(("finetune", step) for step in (1, 2, 3))]
    assert [(row["stage"], row["step"]) for row in read_metrics(path)] == expected
    MetricsFile(path)
    assert read_metrics(path) == [] == read_metrics(tmp_path / "none")
