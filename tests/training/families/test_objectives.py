# SPDX-License-Identifier: Apache-2.0
"""What each family is trained on: what its pipeline feeds, what its scheduler does, and what is refused."""

import dataclasses
import json
from contextlib import nullcontext

import pytest
import torch
from diffusers.models.embeddings import LabelEmbedding

from mhla_hf.families.noise_prediction import no_label_dropout
from mhla_hf.matching.layer_training import layer_loss
from mhla_hf.recovery.sources import find_model
from mhla_hf.training import (
    DiffusionTrainer,
    DiTObjective,
    SanaObjective,
    TrainingConfig,
    WanObjective,
    objective_for,
)
from mhla_hf.training.data.batches import make_batch
from mhla_hf.training.data.order import DataOrder
from mhla_hf.training.layers import find_projections, mhla_layers, original_heads
from mhla_hf.training.libraries import open_pipeline
from mhla_hf.training.teacher import SharedTeacher
from mhla_hf.utils.files import write_json
from tests.families.cases import FluxCase, HunyuanVideoCase, LTX2Case, PixArtCase, SkyReelsCase, WanVACECase
from tests.families.test_sana import SanaSprintCase

from ... import tiny, tiny_images, tiny_joint
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

    def test_skyreels_is_called_as_its_pipeline_calls_it(self):
        pipeline = tiny.skyreels_pipeline()
        kept = first_call(
            pipeline, prompt="a seven", height=32, width=32, num_frames=5, guidance_scale=1.0, num_inference_steps=3,
            max_sequence_length=16, output_type="latent",
        )  # fmt: skip
        objective = objective_for(pipeline.transformer)
        assert type(objective) is WanObjective
        condition = {"prompt_embeds": kept["encoder_hidden_states"]}
        with torch.no_grad():
            mine = objective.predict(pipeline.transformer, kept["hidden_states"], kept["timestep"] / 1000, condition)
        torch.testing.assert_close(mine, kept["output"])

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


class TestLosses:
    @every_family
    def test_every_parameter_learns_and_checkpointing_changes_nothing(self, case):
        model, batch = case.student(case.make_teacher()), one_batch(case)
        gradients = []
        for checkpointing in (False, True):
            model.zero_grad()
            if checkpointing:
                model.enable_gradient_checkpointing()
            with no_label_dropout(model):
                losses = case.objective.losses(model.train(), batch)
            losses.mean().backward()
            assert losses.shape == (3,) and losses.dtype == torch.float32
            gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        for name, gradient in gradients[0].items():
            assert gradient.isfinite().all() and torch.allclose(gradient, gradients[1][name], atol=1e-5), name

    def test_classes_are_dropped_by_the_seed_of_the_sample_alone(self):
        case, losses = CASES["dit"], []
        labels = one_batch(case, size=400, dropout=0.25).condition["class_label"]
        assert (labels == CLASSES).float().mean().item() == pytest.approx(0.25, abs=0.06)
        for seed in (1, 2):
            torch.manual_seed(seed)
            config = TrainingConfig(max_steps=3, batch_size=4, progress=False, device="cpu", condition_dropout=0.5)
            model = case.student(case.make_teacher())
            trainer = DiffusionTrainer(config, model, case.dataset(), null_condition=case.null_condition)
            losses.append(trainer.run().losses["finetune"])
            assert {module.dropout_prob for module in model.modules() if isinstance(module, LabelEmbedding)} == {0.1}
        assert losses[0] == losses[1]


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
        with original_heads(layers) if name == "dit" else nullcontext():
            assert all(layer_loss(layer, records[layer.name]) < 1e-9 for layer in layers)
        for layer in layers:
            torch.nn.init.normal_(layer.attention.to_q.weight)
        assert all(layer_loss(layer, records[layer.name]) > 1e-3 for layer in layers)


class TestRefusals:
    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (SanaSprintCase().make, "SANA-Sprint"),
            (PixArtCase().make, "PixArtTransformer2DModel, which cannot be trained here yet; supported"),
            (LTX2Case().make, "LTX2VideoTransformer3DModel, which cannot be trained here yet; supported: Wan"),
            (lambda: FluxCase().make(in_channels=20, out_channels=16), "an image-to-image model"),
            (lambda: HunyuanVideoCase().make(image_condition_type="token_replace"), "an image-to-video model"),
            (lambda: SkyReelsCase().make(inject_sample_info=True), "diffusion-forcing model, .* trained here yet"),
        ],
        ids=["sprint", "pixart", "ltx2", "flux-fill", "hunyuan-image", "forcing"],
    )
    def test_models_that_need_another_objective(self, make, message):
        with pytest.raises(ValueError, match=message):
            objective_for(make())

    @pytest.mark.parametrize(
        ("make", "class_name"),
        [(tiny.ltx_pipeline, "LTXConditionPipeline"), (tiny_joint.flux_pipeline, "FluxKontextPipeline")],
    )
    def test_pipelines_that_call_their_model_in_another_way(self, make, class_name, tmp_path):
        make().save_pretrained(tmp_path)
        assert open_pipeline(str(tmp_path)).component == "transformer"
        index = tmp_path / "model_index.json"
        write_json(index, {**json.loads(index.read_text()), "_class_name": class_name})
        for opened in (open_pipeline, find_model):
            with pytest.raises(ValueError, match=f"a {class_name} calls its transformer with more than a text"):
                opened(str(tmp_path))

    def test_vace_without_its_pipeline(self):
        model, inputs = WanVACECase().make(), tiny.wan_inputs()
        batch = inputs["hidden_states"], torch.ones(1), {"prompt_embeds": inputs["encoder_hidden_states"]}
        with pytest.raises(ValueError, match="Wan-VACE needs the VAE of its pipeline"):
            objective_for(model).predict(model, *batch)
