# SPDX-License-Identifier: Apache-2.0
"""A loss or gradient that is no number: the run says which step, which samples, and where to go on."""

import math
import re

import pytest
from safetensors.torch import load_file, save_file

from mhla_hf.training.checkpoints import Position, last_good_checkpoint, list_checkpoints
from mhla_hf.training.data.order import DataOrder, file_fingerprint

from .training_process import make_trainer


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")

ORDER = DataOrder(dataset_size=5, batch_size=2, seed=0, stage="finetune")


def samples_of(step):
    return [ORDER.dataset_index(number) for number in ORDER.sample_numbers(step)]


class Poisoned:
    """Samples of which one is NaN from the time that it is told so."""

    def __init__(self, samples):
        self.samples, self.bad = samples, None

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        sample = self.samples[index]
        return {**sample, "latents": sample["latents"] * (math.nan if index == self.bad else 1)}


def poisoned_run(output, step, **options):
    """A run in whose given step a sample is NaN."""
    trainer = make_trainer(output, **options)
    trainer.dataset = Poisoned(trainer.dataset)

    def poison(stage, done, loss):
        if (stage, done) == ("finetune", step - 1):
            trainer.dataset.bad = samples_of(step - 1)[1]

    trainer.callback = poison
    return trainer


def test_step_samples_and_the_last_good_checkpoint_are_named(tmp_path):
    trainer = poisoned_run(tmp_path, 5)
    with pytest.raises(FloatingPointError) as error:
        trainer.run()
    first, second = sorted(samples_of(4))
    assert str(error.value) == (
        f"the loss is nan in finetune step 5, batch of samples {first}, {second} of the data set; --resume "
        "finetune-00000004 continues from the last good checkpoint; lower the learning rate if the samples are sound"
    )
    # The step was not taken, and the run goes on from there as it would have.
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())
    whole = make_trainer(tmp_path / "whole").run()
    assert make_trainer(tmp_path, resume="finetune-00000004").run().losses == whole.losses


def test_a_checkpoint_with_weights_that_are_no_numbers_is_not_good(tmp_path):
    make_trainer(tmp_path, checkpoints_total_limit=None).run()
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    weights = load_file(newest / "model.safetensors")
    name = min(weights)
    save_file({**weights, name: weights[name] * math.inf}, newest / "model.safetensors")
    state = newest / "state.json"
    found = file_fingerprint(newest / "model.safetensors")
    state.write_text(re.sub(r'("model.safetensors": )"[^"]*"', rf'\1"{found}"', state.read_text()))
    directory = tmp_path / "checkpoints"
    assert last_good_checkpoint(directory, Position.of("finetune", 7)).name == "finetune-00000004"
    assert last_good_checkpoint(directory, Position.of("finetune", 4)).name == "finetune-00000002"
    assert last_good_checkpoint(directory, Position.of("distill", 1)) is None
