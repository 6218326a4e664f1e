# SPDX-License-Identifier: Apache-2.0
"""Distillation and fine-tuning of language models, encoders and vision models."""

import copy
import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode

import mhla_hf
from mhla_hf.conversion import convert_pretrained
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.training import TrainingConfig, TransformersTrainer
from mhla_hf.training.data.order import DataOrder
from mhla_hf.training.layers import run
from mhla_hf.training.stages.transformers import (
    TransformersObjective,
    TransformersStage,
    divergences,
    language_losses,
    model_batch,
)
from mhla_hf.training.teacher import SharedTeacher
from tests.integrations.transformers.mhla_models import UNSERVED, default_options, first_output
from tests.integrations.transformers.tiny_models import FAMILIES, inputs, softmax_model
from tests.recovery.sources import model_directory
from tests.training.cases import Interrupted, crash_at


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")

NAMES = ["llama", "bert", "vit"]


def options(**changes):
    base = {"batch_size": 2, "distill_steps": 4, "max_steps": 0, "learning_rate": 1e-3, "progress": False}
    return TrainingConfig(**{**base, "device": "cpu", **changes})


class Source:
    """Batches of one family, always of the same two samples; texts are padded."""

    fingerprint = "tiny"

    def __init__(self, name):
        self.name, self.padding = name, None if FAMILIES[name].kind == "vision" else "right"

    def __len__(self):
        return 32

    def batch(self, stage, step, batch_size, rank=0, world_size=1):
        rows = []
        for row in range(batch_size):
            number = (step * world_size + rank) * batch_size + row
            # The second row has more tokens than the first: which of them a process has matters.
            made = inputs(self.name, 2, padding=self.padding, seed=number % 2)
            rows.append({key: value[row % 2] for key, value in made.items()})
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def converted(name, softmax):
    model = mhla_hf.convert(copy.deepcopy(softmax), {**default_options(name), "feature_map": "hedgehog"})
    return model


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return output


class TestLosses:
    def test_divergence_is_that_of_softened_distributions(self):
        generator = torch.Generator().manual_seed(0)
        student, teacher = (torch.randn(5, 7, generator=generator) for _ in range(2))
        p, q = (torch.distributions.Categorical(logits=logits / 3) for logits in (teacher, student))
        expected = 9 * torch.distributions.kl_divergence(p, q)
        torch.testing.assert_close(divergences(student, teacher, temperature=3.0), expected)
        assert divergences(teacher.bfloat16(), teacher.bfloat16()).dtype == torch.float32
        # T^2 keeps gradients of one size: at high temperatures they tend to those of the centred logits' distance.
        hot = student.clone().requires_grad_()
        divergences(hot, teacher, temperature=1e3).sum().backward()
        centred = (student - teacher) - (student - teacher).mean(-1, keepdim=True)
        torch.testing.assert_close(hot.grad, centred / 7, rtol=1e-2, atol=1e-3)

    def test_chunks_change_nothing_and_bound_the_memory(self):
        temperature = 2.0
        generator = torch.Generator().manual_seed(0)
        head, teacher_head = (torch.nn.Linear(8, 64) for _ in range(2))
        states, target = (torch.randn(50, 8, generator=generator) for _ in range(2))
        labels = torch.randint(64, (50,), generator=generator)
        results, largest = [], []
        for chunk in (10**6, 7 * 64):
            inner = states.clone().requires_grad_()
            with LargestTensor() as seen:
                divergence, entropy = language_losses(
                    inner, head, labels, target_states=target, target_head=teacher_head, temperature=temperature,
                    chunk_elements=chunk,
                )  # fmt: skip
                gradients = torch.autograd.grad(divergence + entropy, [inner, head.weight, head.bias])
            results.append([divergence, entropy, *gradients])
            largest.append(seen.numbers)
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        assert largest == [50 * 64, 64 * 8]  # Nothing is larger than the head itself.
        expected = divergences(head(states), teacher_head(target), temperature).sum()
        torch.testing.assert_close(results[0][0], expected)
        torch.testing.assert_close(results[0][1], F.cross_entropy(head(states), labels, reduction="sum"))


class TestStages:
    @pytest.mark.parametrize("name", [*NAMES, *(name for name in ("dinov2", "clip_vision") if name not in UNSERVED)])
    def test_distance_of_the_stage(self, name):
        softmax = softmax_model(name)
        student = converted(name, softmax)
        source, accelerator = Source(name), Accelerator(cpu=True)

        def loss(model, teacher, **changes):
            config = options(distill_temperature=2.0, **changes)
            objective = TransformersObjective.of(model, 2.0)
            batches = partial(model_batch, source)
            stage = TransformersStage(config, model, objective, batches, lambda: teacher)
            names = stage.trainable_names()
            batch = batches(DataOrder(dataset_size=32, batch_size=2, seed=0, stage="distill"), 1, 0)
            found = stage.loss(stage.module(), batch, accelerator)
            return found, names, batch

        assert loss(softmax, softmax)[0] < 1e-9
        apart, names, batch = loss(student, softmax)
        within, _, _ = loss(student, SharedTeacher(student))
        torch.testing.assert_close(within, apart, rtol=1e-3, atol=1e-7)
        # Everything that trains gets a gradient, which other processes wait for.
        for parameter in student.parameters():
            parameter.grad = None
        apart.backward()
        missing = [key for key, value in student.named_parameters() if key in names and value.grad is None]
        assert not missing and apart > 0
        expected = self.expected(student, softmax, batch)
        torch.testing.assert_close(apart, expected, rtol=1e-4, atol=1e-6)

    @staticmethod
    @torch.no_grad()
    def expected(student, softmax, batch):
        outputs = [run(model, {**batch, "output_hidden_states": True}) for model in (student, softmax)]
        mask = batch.get("attention_mask")
        if TransformersObjective.of(softmax).target == "logits":
            mine, theirs = (output.logits[:, :-1] for output in outputs)
            where = (mask[:, 1:] & mask[:, :-1]).bool()
            return divergences(mine[where], theirs[where], 2.0).mean()
        mine, theirs = (output.hidden_states[-1] if "logits" in output else output[0] for output in outputs)
        if mask is not None:
            mine, theirs = mine[mask.bool()], theirs[mask.bool()]
        return ((mine - theirs).square().sum(-1) / theirs.square().sum(-1)).mean()


class TestTrainer:
    @pytest.mark.parametrize(
        ("name", "mode"), [pytest.param("llama", "lora", marks=pytest.mark.slow), ("bert", "full")]
    )
    def test_interrupted_runs_end_where_uninterrupted_ones_do(self, name, mode, tmp_path):
        softmax = softmax_model(name)
        student = converted(name, softmax)

        def train(output, callback=None):
            model = copy.deepcopy(student)
            config = options(
                output=output, resume="latest", train=mode, lora_rank=2, distill_steps=6, checkpointing_steps=2,
                max_steps=2 if name == "llama" else 0, learning_rate=5e-4,
            )  # fmt: skip
            return TransformersTrainer(
                config, Source(name), model, teacher=SharedTeacher(model), callback=callback
            ).run()

        whole = train(tmp_path / "whole")
        assert len(whole.losses["distill"]) == 6 and whole.losses["distill"][-1] < whole.losses["distill"][0]
        for stop in (("distill", 3), ("distill", 6)):
            with pytest.raises(Interrupted):
                train(tmp_path / "cut", crash_at(*stop))
        cut = train(tmp_path / "cut")
        assert cut.losses == whole.losses and cut.resumed_from.name == "distill-00000004"
        for key, value in whole.model.state_dict().items():
            assert torch.equal(value, cut.model.state_dict()[key]), key
        assert not [key for key in whole.model.state_dict() if "lora" in key or "base_layer" in key]


class TestFiles:
    def test_a_directory_is_distilled_and_written(self, tmp_path):
        softmax = model_directory("llama", tmp_path / "softmax")
        convert_pretrained(softmax, tmp_path / "converted", default_options("llama"), progress=False)
        config = options(model=tmp_path / "converted", output=tmp_path / "run", distill_steps=3, max_steps=1)
        source = Source("llama")
        result = TransformersTrainer(config, source).run()
        assert result.pipeline == tmp_path / "run" / "model"
        from transformers import AutoModelForCausalLM, AutoTokenizer

        again = AutoModelForCausalLM.from_pretrained(result.pipeline)
        AutoTokenizer.from_pretrained(result.pipeline)
        batch = inputs("llama")
        with torch.no_grad():
            torch.testing.assert_close(again(**batch).logits, result.model(**batch).logits)
        record = json.loads((result.pipeline / "training.json").read_text())
        assert record["objective"]["distill_target"] == "logits"
        assert ModelDirectory.open(tmp_path / "converted").original().folder == softmax
        with pytest.raises(ValueError, match="already holds"):
            TransformersTrainer(config.replace(distill_steps=4), source).run()
        # Converted on load, from the ordinary directory: the same run without a record.
        config = options(model=softmax, mhla=default_options("llama"), distill_steps=3, max_steps=1)
        fresh = TransformersTrainer(config, source).run()
        assert fresh.losses == result.losses
        (tmp_path / "converted").rename(tmp_path / "elsewhere")
        softmax.rename(tmp_path / "gone")
        with pytest.raises(ValueError, match="teacher must be given: .* comes from softmax, which is neither"):
            TransformersTrainer(options(model=tmp_path / "elsewhere"), source)
        with pytest.raises(ValueError, match="is an ordinary model; say how to convert it"):
            TransformersTrainer(options(model=tmp_path / "gone"), source)
        with pytest.raises(ValueError, match="has no softmax model for model of"):
            ModelDirectory.open(tmp_path / "elsewhere").original(tmp_path / "elsewhere", "teacher")

    @pytest.mark.parametrize("name", ["llama", "bert", "vit"])
    @pytest.mark.parametrize("start", ["softmax", "converted"])
    def test_a_trained_adapter_loads_whole(self, name, start, tmp_path):
        """By peft's call for its base, with a scale that is not the default one."""
        from peft import AutoPeftModel, AutoPeftModelForCausalLM

        softmax, mhla = model_directory(name, tmp_path / "softmax"), default_options(name)
        convert_pretrained(softmax, tmp_path / "converted", mhla, progress=False)
        asked = {"mhla": mhla} if start == "softmax" else {}
        config = options(
            model=tmp_path / start, output=tmp_path / "run", train="lora", lora_rank=2, lora_alpha=8.0,
            distill_steps=3, max_steps=0, learning_rate=1e-2, teacher=softmax if asked else None, **asked,
        )  # fmt: skip
        expected = TransformersTrainer(config, Source(name)).run().model
        auto = AutoPeftModelForCausalLM if name == "llama" else AutoPeftModel
        base = {"attn_implementation": "mhla", **asked} if asked else {}
        adapted = auto.from_pretrained(tmp_path / "run" / "lora", **base).eval()
        batch = inputs(name)
        with torch.no_grad():
            again, trained = (first_output(model, **batch) for model in (adapted, expected.eval()))
            plain = first_output(type(expected).from_pretrained(tmp_path / "converted").eval(), **batch)
        torch.testing.assert_close(again, trained, atol=1e-4, rtol=1e-4)
        assert not torch.allclose(plain, trained, atol=1e-2)
