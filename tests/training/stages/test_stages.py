# SPDX-License-Identifier: Apache-2.0
"""The training loop with a stage whose batches and model are of no family that it knows."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from mhla_hf.training import TrainingConfig
from mhla_hf.training.checkpoints import STAGES, Position, checkpoint_position, list_checkpoints
from mhla_hf.training.data.batches import stable_seed
from mhla_hf.training.loop import StageLoop
from mhla_hf.training.metrics import MetricsFile
from mhla_hf.training.processes import StopSignals, make_accelerator
from mhla_hf.training.run import Run


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


def test_the_order_of_stages():
    assert STAGES == ("transfer", "distill", "finetune")
    places = [Position.of("transfer", 9), Position.of("distill", 1), Position.of("finetune", 0)]
    assert sorted([places[2], places[0], places[1]]) == places
    assert places[1].name == "distill-00000001"


@dataclass(frozen=True)
class Tokens:
    """Numbers of tokens `[B, T]`, and nothing that is noised."""

    input_ids: torch.Tensor
    indices: tuple[int, ...]

    def to(self, device):
        return Tokens(self.input_ids.to(device), self.indices)


class NextToken:
    """A stage of a language model."""

    name, validates = "distill", False
    learning_rate = mhla_learning_rate = 1e-2

    def __init__(self, model, documents, steps):
        self.model, self.documents, self.steps = model, documents, steps
        self.seen = []

    def make_batch(self, order, step, micro_step):
        numbers = order.sample_numbers(step, micro_step)
        indices = tuple(order.dataset_index(number) for number in numbers)
        self.seen.append((step, micro_step, indices))
        # Each sample has a seed of its own, for crops and the like.
        assert len({stable_seed(order.seed, order.stage, number) for number in numbers}) == len(numbers)
        return Tokens(torch.stack([self.documents[index] for index in indices]), indices)

    def trainable_names(self):
        return [name for name, _ in self.model.named_parameters()]

    def module(self):
        return self.model

    def loss(self, module, batch, accelerator):
        logits = module(batch.input_ids[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch.input_ids[:, 1:].flatten())

    def context(self):
        return nullcontext()

    def close(self):
        pass


def run_stage(output, steps, position=None, checkpoint=None):
    torch.manual_seed(0)
    documents = torch.randint(11, (6, 8))
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    config = TrainingConfig(
        output=str(output), batch_size=2, gradient_accumulation_steps=2, checkpointing_steps=2, progress=False,
        device="cpu",
    )  # fmt: skip
    output.mkdir(exist_ok=True)
    stage = NextToken(model, documents, steps)
    run = Run(
        config=config,
        accelerator=make_accelerator(config),
        model=model,
        dataset=documents,
        state=lambda: {"note": "ours"},
        output=output,
        callback=None,
        metrics=MetricsFile(output / "metrics.jsonl", position),
        signals=StopSignals(),
        validator=None,
    )
    losses, _ = StageLoop(run, stage).run(position, checkpoint)
    run.metrics.close()
    return losses, stage, model


def test_a_stage_makes_its_own_batches_and_resumes(tmp_path):
    whole, stage, model = run_stage(tmp_path / "whole", 6)
    assert stage.seen[:3] == [(0, 0, stage.seen[0][2]), (0, 1, stage.seen[1][2]), (1, 0, stage.seen[2][2])]
    # An epoch of six samples has every one of them once.
    assert sorted(index for _, _, indices in stage.seen[:3] for index in indices) == list(range(6))
    assert whole[-1] < whole[0]
    checkpoint = list_checkpoints(tmp_path / "whole" / "checkpoints")[1]
    assert checkpoint.name == "distill-00000004"
    again, _, other = run_stage(tmp_path / "whole", 6, checkpoint_position(checkpoint), checkpoint)
    assert again == whole
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
