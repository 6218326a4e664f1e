# SPDX-License-Identifier: Apache-2.0
"""What each family is trained on: what its pipeline feeds, what its scheduler does, and what is refused."""

import copy
import dataclasses
import json
from contextlib import nullcontext

import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler
from diffusers.models.embeddings import LabelEmbedding

from mhla_hf.training import DiffusionTrainer, DiTObjective, SanaObjective, TrainingConfig, WanObjective, objective_for
from mhla_hf.training.data.batches import DataOrder, make_batch
from mhla_hf.training.matching.layers import find_projections, mhla_layers, original_heads
from mhla_hf.training.matching.teacher import SharedTeacher
from mhla_hf.training.stages.matching import LayerMatching

from ... import tiny_images
from ..cases import CASES, CLASSES


every_family = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def one_batch(case, size=3, dropout=0.0):
    order = DataOrder(dataset_size=5, batch_size=size, seed=0, stage="finetune")
    return make_batch(case.dataset(), order, 0, 0, case.objective, dropout, case.null_condition)


class Captured(Exception):
    """Ends a pipeline's run with what it handed to its transformer."""


def first_call(pipeline, **arguments):
    """What a pipeline hands to its transformer at the first step, and the transformer's output for it."""
    kept = {}

    def keep(module, args, kwargs, output):
        kept.update(kwargs, args=args, output=output[0] if isinstance(output, tuple) else output.sample)
        raise Captured

    handle = pipeline.transformer.register_forward_hook(keep, with_kwargs=True)
    with pytest.raises(Captured):
        pipeline(**arguments)
    handle.remove()
    return kept


class TestFeeding:
    def test_sana_is_called_as_its_pipeline_calls_it(self):
        pipeline = tiny_images.sana_pipeline(timestep_scale=0.5)
        kept = first_call(
            pipeline, prompt="a seven", height=128, width=192, guidance_scale=1.0, num_inference_steps=3,
            use_resolution_binning=False, complex_human_instruction=None, output_type="latent",
        )  # fmt: skip
        condition = {
            "prompt_embeds": kept["encoder_hidden_states"],
            "prompt_attention_mask": kept["encoder_attention_mask"],
        }
        sigma = kept["timestep"] / 0.5 / 1000
        with torch.no_grad():
            mine = SanaObjective().predict(pipeline.transformer, kept["args"][0], sigma, condition)
        assert torch.equal(mine, kept["output"])

    def test_dit_is_called_as_its_pipeline_calls_it(self):
        pipeline = tiny_images.dit_pipeline()
        kept = first_call(pipeline, class_labels=[3, 7], guidance_scale=4.0, num_inference_steps=3)
        # The pipeline's label for no class is the model's last.
        assert kept["class_labels"].tolist() == [3, 7, 1000, 1000]
        condition = {"class_label": kept["class_labels"]}
        with torch.no_grad():
            mine = DiTObjective().predict(pipeline.transformer, kept["args"][0], kept["timestep"], condition)
        assert torch.equal(mine, kept["output"])


class TestNoise:
    def test_an_exact_direction_leads_sanas_scheduler_back_to_the_data(self):
        scheduler = tiny_images.sana_pipeline().scheduler
        scheduler.set_timesteps(4)
        objective = SanaObjective(flow_shift=3.0)
        clean, noise = torch.randn(2, 1, 4, 4, 6)
        for index, sigma in enumerate(scheduler.sigmas[:-1]):
            scheduler._step_index = index
            noisy = objective.add_noise(clean, noise, sigma.reshape(1))
            found = scheduler.convert_model_output(noise - clean, sample=noisy)
            assert torch.allclose(found, clean, atol=1e-5)
            assert scheduler.timesteps[index] == int(1000 * sigma)

    def test_dits_noise_is_that_of_its_scheduler(self):
        scheduler = DDIMScheduler(beta_schedule="scaled_linear", beta_end=0.012, num_train_timesteps=50)
        objective = DiTObjective(scheduler=scheduler.config)
        uniform = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
        levels = objective.noise_levels(uniform)
        assert levels.dtype == torch.int64 and levels.bincount().tolist() == [4] * 50
        clean, noise = torch.randn(2, 200, 4, 2, 2)
        expected = scheduler.add_noise(clean, noise, levels)
        assert torch.allclose(objective.add_noise(clean, noise, levels), expected, atol=1e-4)

    def test_the_pipelines_scheduler_is_followed(self, tmp_path):
        sana, dit = tiny_images.sana_transformer(), tiny_images.dit_transformer()
        flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 2.0}
        DPMSolverMultistepScheduler(**flow).save_pretrained(tmp_path / "sana" / "scheduler")
        DDIMScheduler(num_train_timesteps=40).save_pretrained(tmp_path / "dit" / "scheduler")
        assert objective_for(sana, tmp_path / "sana") == SanaObjective(flow_shift=2.0)
        assert objective_for(sana, tmp_path / "sana", TrainingConfig(flow_shift=4.0, logit_std=0.5)) == SanaObjective(
            flow_shift=4.0, logit_std=0.5
        )
        assert objective_for(sana) == SanaObjective(flow_shift=3.0)
        assert objective_for(dit, tmp_path / "dit").schedule.num_timesteps == 40
        assert objective_for(dit) == objective_for(dit, tmp_path) == DiTObjective()
        # What is recorded of a run tells schedulers apart.
        records = [json.dumps(objective_for(dit, folder).to_dict()) for folder in (tmp_path, tmp_path / "dit")]
        assert records[0] != records[1]


class TestLosses:
    @every_family
    def test_every_parameter_learns_and_checkpointing_changes_nothing(self, case):
        model, batch = case.student(case.make_teacher()), one_batch(case)
        gradients = []
        for checkpointing in (False, True):
            model.zero_grad()
            if checkpointing:
                model.enable_gradient_checkpointing()
            with case.objective.fine_tuning(model):
                losses = case.objective.losses(model.train(), batch)
            losses.mean().backward()
            assert losses.shape == (3,) and losses.dtype == torch.float32
            gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        for name, gradient in gradients[0].items():
            assert gradient.isfinite().all() and torch.allclose(gradient, gradients[1][name], atol=1e-5), name

    def test_padding_of_sanas_captions_does_not_matter(self):
        case = CASES["sana"]
        model, batch = case.make_teacher(), one_batch(case)
        changed = copy.deepcopy(batch)
        changed.condition["prompt_embeds"][:, 4:] += 5.0
        with torch.no_grad():
            assert torch.equal(case.objective.losses(model, batch), case.objective.losses(model, changed))
            changed.condition["prompt_embeds"][:, :4] += 5.0
            assert not torch.allclose(case.objective.losses(model, batch), case.objective.losses(model, changed))

    def test_classes_are_dropped_by_the_seed_of_the_sample_alone(self):
        case = CASES["dit"]
        batch = one_batch(case, size=400, dropout=0.25)
        share = (batch.condition["class_label"] == CLASSES).float().mean().item()
        assert share == pytest.approx(0.25, abs=0.06)
        assert batch.condition["class_label"].dtype == torch.int64

        def train(global_seed):
            torch.manual_seed(global_seed)
            config = TrainingConfig(max_steps=3, batch_size=4, progress=False, device="cpu", condition_dropout=0.5)
            model = case.student(case.make_teacher())
            trainer = DiffusionTrainer(config, model, case.dataset(), null_condition=case.null_condition)
            losses = trainer.run().losses["finetune"]
            kept = {module.dropout_prob for module in model.modules() if isinstance(module, LabelEmbedding)}
            assert kept == {0.1}
            return losses

        assert train(1) == train(2)


class TestTransfer:
    @pytest.mark.parametrize("name", ["sana", "dit"])
    def test_a_layer_that_computes_the_same_has_no_loss(self, name):
        """Of SANA that is every converted layer; of DiT layers with softmax in place of MHLA."""
        case = CASES[name]
        teacher, batch = case.make_teacher(), one_batch(case)
        if name == "sana":
            student = dataclasses.replace(case, mhla={"blocks": (2, 2)}).student(teacher)
        else:
            student = case.student(teacher)
        inputs = case.objective.inputs_of(student, batch)
        layers = find_projections(student, mhla_layers(student), inputs)
        records = SharedTeacher(student).record(layers, inputs)
        with original_heads(student, layers) if name == "dit" else nullcontext():
            assert LayerMatching(layers)([records]).max() < 1e-9
        for layer in layers:
            torch.nn.init.normal_(layer.attention.to_q.weight)
        assert LayerMatching(layers)([records]).min() > 1e-3

    def test_dits_teacher_takes_images_that_are_not_square(self):
        case = CASES["dit"]
        teacher, student = case.make_teacher(), case.student(case.make_teacher())
        sample = {"latents": torch.randn(4, 8, 12), "class_label": torch.tensor(3)}
        config = TrainingConfig(transfer_steps=2, max_steps=2, progress=False, device="cpu", condition_dropout=0.0)
        result = DiffusionTrainer(config, student, [sample], teacher=teacher).run()
        assert len(result.losses["transfer"]) == len(result.losses["finetune"]) == 2
        with pytest.raises(ValueError, match="must be square"):
            DiffusionTrainer(config.replace(transfer_steps=0), teacher, [sample])


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: tiny_images.sana_transformer(sprint=True), "SANA-Sprint"),
            (lambda: tiny_images.sana_transformer(out_channels=8), "out_channels must be in_channels"),
            (lambda: tiny_images.dit_transformer(out_channels=6), "twice that with learned variances"),
            (tiny_images.pixart_transformer, "PixArtTransformer2DModel, which cannot be trained here; supported: Wan"),
        ],
        ids=["sprint", "sana-channels", "dit-channels", "pixart"],
    )
    def test_models_that_need_another_objective(self, make, message):
        with pytest.raises(ValueError, match=message):
            objective_for(make())

    @pytest.mark.parametrize(
        ("name", "changes", "message"),
        [
            ("wan", {"prompt_embeds": None}, "wan training must have latents, prompt_embeds; it lacks prompt_embeds"),
            ("wan", {"prompt_embeds": torch.zeros(6, 7)}, "text embeddings of width 7, the model takes 32"),
            ("wan", {"latents": torch.zeros(16, 2, 4, 4).long()}, "of type torch.int64, the model takes 16 of"),
            ("sana", {"latents": torch.zeros(3, 4, 4)}, "have 3 latent channels .*, the model takes 4 of"),
            ("sana", {"prompt_attention_mask": torch.ones(5)}, "one entry for each of the 6 tokens"),
            ("dit", {"latents": torch.zeros(4, 7, 7)}, r"latents of \[7, 7\], not multiples"),
            ("dit", {"class_label": torch.tensor(11)}, "whole number from 0 to 10"),
        ],
    )
    def test_samples_that_do_not_fit(self, name, changes, message):
        case = CASES[name]
        sample = {key: value for key, value in {**case.dataset(1)[0], **changes}.items() if value is not None}
        with pytest.raises(ValueError, match=message):
            case.objective.check_data(case.make_teacher(), sample)


class TestWanConfigurations:
    @pytest.mark.parametrize("config", [{"in_channels": 16, "out_channels": None}, {"in_channels": 16}, {}])
    def test_text_to_video_is_trained(self, config):
        WanObjective.check_config(config)

    def test_image_to_video_is_refused(self):
        with pytest.raises(ValueError, match="model: this is an image-to-video model, which cannot be trained here"):
            WanObjective.check_config({"in_channels": 36, "out_channels": 16})
