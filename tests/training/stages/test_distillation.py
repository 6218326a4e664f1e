# SPDX-License-Identifier: Apache-2.0
"""Distillation of diffusion models: the teacher within the student, the losses, and the stage of a run."""

import copy
from functools import partial

import pytest
import torch
from accelerate import Accelerator

from mhla_hf.conversion import convert_pretrained
from mhla_hf.families.noise_prediction import NoiseSchedule, noise_distillation_losses
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.training import DiffusionTrainer, DiTObjective, TrainingConfig
from mhla_hf.training.data.batches import make_batch
from mhla_hf.training.data.order import DataOrder
from mhla_hf.training.layers import run
from mhla_hf.training.parameters import export_model, is_mhla_parameter, load_model
from mhla_hf.training.stages.diffusion import DiffusionStage
from mhla_hf.training.teacher import SharedTeacher
from tests import tiny
from tests.layers.test_original import kept, models
from tests.training.cases import CASES, Interrupted, crash_at, video_samples


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")

every_family = pytest.mark.parametrize("name", list(CASES))


def options(**changes):
    base = {"batch_size": 2, "distill_steps": 4, "max_steps": 0, "learning_rate": 1e-3, "progress": False}
    return TrainingConfig(**{**base, "device": "cpu", "condition_dropout": 0.0, **changes})


@torch.no_grad()
def shake(model, scale=0.05):
    """Changes every parameter, as training would."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)


class TestSharedTeacher:
    @pytest.mark.parametrize("name", ["wan", "sana", "dit", "llama", "bert", "vit"])
    def test_gives_what_the_original_gives(self, name):
        softmax, converted, batch = models(name)
        teacher = SharedTeacher(converted)
        teacher.keep()
        shake(converted)
        converted.train()
        with torch.no_grad():
            expected = kept(run(softmax, batch)[0], batch)
        changed = [parameter.clone() for parameter in converted.parameters()]
        got = run(_Runnable(teacher), batch)[0]
        torch.testing.assert_close(kept(got, batch), expected, atol=2e-5, rtol=1e-4)
        assert converted.training and not got.requires_grad
        assert all(map(torch.equal, converted.parameters(), changed))

    def test_stores_only_what_differs(self):
        case = CASES["wan"]
        original = case.make_teacher()
        student = case.student(original)
        weights = dict(original.named_parameters())
        teacher = SharedTeacher(student, weights)
        assert not teacher.weights
        projection = "blocks.1.attn1.to_out.0.weight"
        teacher.keep([projection, "blocks.1.attn1.mhla.mixing"])
        assert list(teacher.weights) == [projection]
        with torch.no_grad():
            student.get_parameter(projection).zero_()
            student.get_parameter("blocks.2.attn1.to_q.bias").add_(1)
        # What is kept already is not overwritten.
        teacher.keep([projection])
        assert torch.equal(teacher.weights[projection], weights[projection])
        again = SharedTeacher(student, weights)
        assert sorted(again.weights) == [projection, "blocks.2.attn1.to_q.bias"]
        with pytest.raises(ValueError, match="the model has no to_nowhere of shape"):
            SharedTeacher(student, {"to_nowhere": torch.zeros(1)})


class _Runnable:
    """Called by `run`, which looks at the class of a model for its arguments."""

    def __init__(self, teacher):
        self.teacher, self.config = teacher, teacher.config

    def forward(self, use_cache=None): ...

    def __call__(self, use_cache=None, **batch):
        takes = "use_cache" in type(self.teacher.model).forward.__code__.co_varnames
        cached = {"use_cache": use_cache} if takes or hasattr(self.config, "use_cache") else {}
        return self.teacher(**batch, **cached)


class TestLosses:
    def test_of_learned_variances(self):
        schedule = NoiseSchedule.from_config(DiTObjective().scheduler)
        generator = torch.Generator().manual_seed(0)
        output, target = (torch.randn(3, 8, 4, 4, generator=generator).requires_grad_() for _ in range(2))
        noisy, steps = torch.randn(3, 4, 4, 4, generator=generator), torch.tensor([0, 40, 999])
        assert noise_distillation_losses(target, target, noisy, steps, schedule).abs().max() == 0
        losses = noise_distillation_losses(output, target, noisy, steps, schedule)

        def step_distribution(values):
            at = steps.reshape(-1, 1, 1, 1)
            noise, share = values[:, :4], (values[:, 4:] + 1) / 2
            share_of_data = schedule.alphas_cumprod[at]
            clean = (noisy - (1 - share_of_data).sqrt() * noise) / share_of_data.sqrt()
            mean = schedule.posterior_clean[at] * clean + schedule.posterior_noisy[at] * noisy
            log_variance = share * schedule.betas[at].log() + (1 - share) * schedule.posterior_log_variance[at]
            return torch.distributions.Normal(mean, (0.5 * log_variance).exp())

        divergence = torch.distributions.kl_divergence(step_distribution(target), step_distribution(output))
        expected = (output[:, :4] - target[:, :4]).square().mean((1, 2, 3))
        expected = expected + divergence.mean((1, 2, 3)) / torch.tensor(2.0).log()
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        # The mean of a step is trained by the squared error alone, as in L_hybrid.
        gradient = torch.autograd.grad(losses.sum(), output)[0]
        plain = torch.autograd.grad((output[:, :4] - target[:, :4]).square().mean((1, 2, 3)).sum(), output)[0]
        torch.testing.assert_close(gradient[:, :4], plain[:, :4])
        assert gradient[:, 4:].abs().sum() > 0
        without = noise_distillation_losses(output[:, :4], target[:, :4], noisy, steps, schedule)
        torch.testing.assert_close(without, (output[:, :4] - target[:, :4]).square().mean((1, 2, 3)))

    @every_family
    def test_of_the_stage(self, name):
        case = CASES[name]
        original = case.make_teacher()
        student = case.student(original)
        data = partial(make_batch, case.dataset(), objective=case.objective)
        batch = data(DataOrder(dataset_size=5, batch_size=2, seed=0, stage="distill"), 0, 0)
        accelerator = Accelerator(cpu=True)

        def loss(model, teacher, **changes):
            stage = DiffusionStage(options(**changes), model, case.objective, data, lambda: teacher)
            with stage.context():
                return stage.loss(stage.module(), batch, accelerator)

        # The family's context keeps classes from being dropped at random.
        assert loss(original.eval(), original) == 0
        alone, own = loss(student, original), case.objective.losses(student, batch).mean()
        assert alone > 0
        mixed = loss(student, original, distill_ratio=0.25)
        torch.testing.assert_close(mixed, 0.25 * alone + 0.75 * own)
        torch.testing.assert_close(loss(student, SharedTeacher(student)), alone, rtol=1e-4, atol=1e-7)


class TestStage:
    @pytest.mark.parametrize(
        ("name", "mode"),
        [
            ("sana", "lora"),
            *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("wan", "full"), ("dit", "mhla"))),
        ],
    )
    def test_a_shared_teacher_trains_as_one_of_its_own(self, mode, name):
        case = CASES[name]
        original = case.make_teacher()
        results = []
        for shared in (False, True):
            student = case.student(original)
            teacher = SharedTeacher(student) if shared else original
            config = options(train=mode, lora_rank=2, distill_learning_rate=3e-3, distill_steps=6)
            results.append(DiffusionTrainer(config, student, case.dataset(), teacher=teacher).run())
        apart, within = results
        assert within.losses["distill"] == pytest.approx(apart.losses["distill"], rel=2e-3)
        # Only what trains is stored beside the model.
        assert sorted(teacher.weights) == (sorted(dict(original.named_parameters())) if mode == "full" else [])

    @pytest.mark.parametrize(("name", "mode"), [("wan", "full")])
    def test_interrupted_runs_end_where_uninterrupted_ones_do(self, name, mode, tmp_path):
        case = CASES[name]
        original = case.make_teacher()
        student = case.student(original)

        def train(output, callback=None):
            config = options(
                output=output, resume="latest", train=mode, lora_rank=2, distill_steps=5,
                max_steps=3, checkpointing_steps=2, learning_rate=3e-3,
            )  # fmt: skip
            return DiffusionTrainer(
                config, copy.deepcopy(student), case.dataset(), teacher=original, callback=callback
            ).run()

        whole = train(tmp_path / "whole")
        assert [len(losses) for losses in whole.losses.values()] == [5, 3]
        for stop in (("distill", 3), ("distill", 5), ("finetune", 1)):
            with pytest.raises(Interrupted):
                train(tmp_path / "cut", crash_at(*stop))
        cut = train(tmp_path / "cut")
        assert cut.losses == whole.losses and cut.resumed_from.name == "distill-00000005"
        for key, value in whole.model.state_dict().items():
            assert torch.equal(value, cut.model.state_dict()[key]), key


class TestFiles:
    @pytest.fixture(scope="class")
    @staticmethod
    def softmax(tmp_path_factory):
        directory = tmp_path_factory.mktemp("files") / "softmax"
        tiny.wan_pipeline(num_layers=2).save_pretrained(directory)
        return directory

    @pytest.fixture(scope="class")
    @staticmethod
    def changed(softmax):
        """A converted pipeline whose output projections are not the original's, as after a calibration."""
        converted = softmax.parent / "converted"
        convert_pretrained(softmax, converted, {"blocks": (1, 2, 2)}, progress=False)
        model = load_model(ModelDirectory.open(converted))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "attn1.to_out.0" in name or is_mhla_parameter(name):
                    parameter.add_(0.02)
        destination = softmax.parent / "changed"
        export_model(ModelDirectory.open(converted), destination, model, {"source": {"location": str(converted)}})
        return destination

    def test_weights_that_were_changed_come_from_the_source(self, softmax, changed):
        config = options(model=changed, train="mhla", distill_steps=3)
        within = DiffusionTrainer(config, dataset=video_samples(4)).run()
        apart = load_model(ModelDirectory.open(softmax), "none")
        expected = DiffusionTrainer(config, dataset=video_samples(4), teacher=apart).run()
        assert within.losses["distill"] == pytest.approx(expected.losses["distill"], rel=1e-3)
