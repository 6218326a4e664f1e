# SPDX-License-Identifier: Apache-2.0
"""The training loop on tiny models: both stages, all modes, resuming."""

import copy
import json
import re
import shutil

import pytest
import torch
from accelerate.state import AcceleratorState

from mhla_hf import MHLAWanTransformer3DModel, convert
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.training import DiffusionTrainer, TrainingConfig, evaluate
from mhla_hf.training.checkpoints import list_checkpoints, read_metrics
from mhla_hf.training.layers import find_projections, mhla_layers
from mhla_hf.training.parameters import (
    add_lora,
    is_lora_parameter,
    is_mhla_parameter,
    load_model,
    merge_lora,
    set_trainable,
    trainable_names,
)
from mhla_hf.training.processes import unsharded
from mhla_hf.training.teacher import shared_teacher

from .. import tiny
from .cases import CASES, Interrupted, crash_at, write_cache


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


MHLA = {"blocks": (1, 2, 2), "output_gate": True}


@pytest.fixture(scope="module")
def case(request):
    """Wan, unless a test is parametrised with other families."""
    return CASES[getattr(request, "param", "wan")]


@pytest.fixture(scope="module")
def dataset(case):
    return case.dataset()


@pytest.fixture(scope="module")
def teacher(case):
    return case.make_teacher()


@pytest.fixture
def student(case, teacher):
    return case.student(teacher)


@pytest.fixture(scope="module")
def cache_directory(tmp_path_factory, softmax_dir):
    from mhla_hf.training.config import CacheConfig
    from mhla_hf.training.data.latent_cache import CachePlan

    directory = tmp_path_factory.mktemp("cache") / "wan"
    config = CacheConfig(data="digits", sizes="32,32,5", max_sequence_length=8)
    write_cache(directory, CachePlan(ModelDirectory.open(softmax_dir), config).settings(), 4)
    return directory


def options(**changes):
    return TrainingConfig(
        **{"batch_size": 2, "max_steps": 4, "learning_rate": 1e-2, "progress": False, "device": "cpu", **changes}
    )


@pytest.fixture
def train(case, teacher, dataset):
    """Train a model of the case beside its teacher."""

    def run(config, model, **more):
        more = {"teacher": teacher, "null_condition": case.null_condition, **more}
        return DiffusionTrainer(config, model, dataset, **more).run()

    return run


class TestParameters:
    def test_names_by_mode(self, student):
        assert all(is_mhla_parameter(name) for name in trainable_names(student, "mhla"))
        assert len(trainable_names(student, "full")) == len(list(student.parameters()))
        add_lora(student, 2, None, seed=0)
        names = trainable_names(student, "lora")
        assert all(is_mhla_parameter(name) or is_lora_parameter(name) for name in names)
        lora = {name.split(".lora_")[0].split("blocks.0.")[1] for name in names if name.startswith("blocks.0.")}
        assert lora == {
            f"{kind}.{part}" for kind in ("attn1", "attn2") for part in ("to_q", "to_k", "to_v", "to_out.0")
        }
        set_trainable(student, names)
        assert [name for name, parameter in student.named_parameters() if parameter.requires_grad] == names

    def test_lora_is_seeded_and_merges_exactly(self, student):
        inputs = tiny.wan_inputs()
        twins = [copy.deepcopy(student) for _ in range(2)]
        for twin in twins:
            torch.rand(1)
            add_lora(twin, 2, 4.0, seed=3)
        for (name, mine), theirs in zip(twins[0].named_parameters(), twins[1].parameters(), strict=True):
            assert torch.equal(mine, theirs), name
            if ".lora_B." in name:
                torch.nn.init.normal_(mine, std=0.1)
        with torch.no_grad():
            expected = twins[0](**inputs).sample
            merge_lora(twins[0])
            assert torch.allclose(twins[0](**inputs).sample, expected, atol=1e-5)
            assert not torch.allclose(student(**inputs).sample, expected, atol=1e-3)
        assert twins[0].state_dict().keys() == student.state_dict().keys()


def wan_records(student, teacher, inputs):
    """The student's layers, and what the self-attention of the teacher saw in a forward pass."""
    layers = find_projections(student, mhla_layers(student), inputs)
    return layers, shared_teacher(student, teacher).record(layers, inputs)


class TestTransfer:
    def test_records_are_what_the_layers_saw(self, teacher, student):
        inputs, seen = tiny.wan_inputs(batch=2), {}
        for layer in (1, 2):

            def keep(module, args, kwargs, output, layer=layer):
                seen[f"blocks.{layer}.attn1"] = (args[0] if args else kwargs["hidden_states"]), output

            teacher.blocks[layer].attn1.register_forward_hook(keep, with_kwargs=True)
        with torch.no_grad():
            teacher(**inputs)
            # A student that has learnt is not its own teacher any more.
            for parameter in student.parameters():
                parameter.normal_()
        before = copy.deepcopy(student.state_dict())
        layers, records = wan_records(student, teacher, inputs)
        assert list(records) == list(seen) == [layer.name for layer in layers]
        for name, (hidden_states, output) in seen.items():
            torch.testing.assert_close(records[name].hidden_states, hidden_states)
            torch.testing.assert_close(records[name].output, output, atol=1e-5, rtol=1e-4)
        assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
        assert not student.blocks[1].attn1._forward_hooks and "forward" not in vars(student.blocks[1].attn1.mhla)


class TestInProcess:
    @pytest.mark.parametrize(("case", "mode"), [("wan", "mhla"), ("sana", "lora"), ("dit", "full")], indirect=["case"])
    def test_only_what_the_mode_says_changes(self, mode, student, train):
        before = copy.deepcopy(student.state_dict())
        seen = []
        config = options(train=mode, distill_steps=2, max_steps=2, lora_rank=2)
        result = train(config, student, callback=lambda *step: seen.append(step[:2]))
        assert seen == [("distill", 1), ("distill", 2), ("finetune", 1), ("finetune", 2)]
        assert {stage: len(losses) for stage, losses in result.losses.items()} == {"distill": 2, "finetune": 2}
        assert result.pipeline is None and result.resumed_from is None
        after = result.model.state_dict()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert after.keys() == before.keys()
        projections = (".to_q.weight", ".to_k.weight", ".to_v.weight", ".to_out.0.weight")
        if mode == "full":
            assert len(changed) == len(before)
        else:
            expected = {name for name in before if is_mhla_parameter(name)}
            if mode == "lora":
                expected |= {name for name in before if name.endswith(projections)}
            assert changed == expected
        assert all(parameter.requires_grad for parameter in result.model.parameters())

    def test_training_lowers_the_losses(self, student, dataset, train):
        before = evaluate(student, dataset, draws_per_sample=4)
        schedule = {"warmup_steps": 3, "lr_schedule": "cosine"}
        result = train(options(max_steps=25, learning_rate=3e-3, **schedule), student)
        difference, error = evaluate(result.model, dataset, draws_per_sample=4).difference(before)
        assert difference < -5 * error

    def test_accumulation_is_a_larger_batch(self, student, dataset):
        losses = []
        for sizes in ({"batch_size": 4}, {"batch_size": 1, "gradient_accumulation_steps": 4}):
            config = options(condition_dropout=0.0, weight_decay=0.0, **sizes)
            losses.append(DiffusionTrainer(config, copy.deepcopy(student), dataset).run().losses["finetune"])
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)

    def test_checkpointing_and_bf16_train_alike(self, student, dataset, train):
        plain = train(options(distill_steps=1, max_steps=2), copy.deepcopy(student))
        AcceleratorState._reset_state(True)
        lean = train(
            options(distill_steps=1, max_steps=2, gradient_checkpointing=True, mixed_precision="bf16"), student
        )
        for stage in ("distill", "finetune"):
            assert lean.losses[stage] == pytest.approx(plain.losses[stage], rel=0.05)
        assert {parameter.dtype for parameter in lean.model.parameters()} == {torch.float32}
        assert evaluate(lean.model, dataset).loss > 0

    def test_what_is_missing_is_named(self, teacher, student, dataset):
        for changes, models, message in (
            ({}, (), "model must be given"),
            ({}, (student,), "does not exist or is unfinished: run the cache step first"),
            ({}, (student, dataset), "null_condition"),
            ({"report_to": "tensorboard"}, (student, dataset), "needs output"),
        ):
            with pytest.raises(ValueError, match=message):
                DiffusionTrainer(options(**changes), *models)
        for changes, model, message in (
            ({"distill_steps": 1}, student, "needs teacher"),
            ({"train": "mhla"}, teacher, "no MHLA layers"),
            ({"validation_prompts": "a"}, student, "validation_prompts need"),
        ):
            trainer = DiffusionTrainer(options(condition_dropout=0.0, **changes), model, dataset)
            with pytest.raises(ValueError, match=message):
                trainer.run()


class TestResuming:
    @pytest.mark.parametrize(
        ("case", "mode"),
        [
            ("dit", "full"),
            *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (("wan", "mhla"), ("sana", "lora"))),
        ],
        indirect=["case"],
    )
    def test_interrupted_runs_end_where_uninterrupted_ones_do(self, mode, student, train, tmp_path):
        shared = {
            "train": mode,
            "distill_steps": 2,
            "max_steps": 5,
            "lora_rank": 2,
            "checkpointing_steps": 2,
            "checkpoints_total_limit": 2,
            "lr_schedule": "cosine",
            "warmup_steps": 2,
        }

        def run(output, callback=None):
            config = options(output=output, resume="latest", **shared)
            return train(config, copy.deepcopy(student), callback=callback)

        whole = run(tmp_path / "whole")
        # In the first stage, at its very end, right after a checkpoint, and before the end.
        for stage, step in (("distill", 1), ("distill", 2), ("finetune", 2), ("finetune", 5)):
            with pytest.raises(Interrupted):
                run(tmp_path / "cut", crash_at(stage, step))
        cut = run(tmp_path / "cut")
        assert cut.resumed_from.name == "finetune-00000004"
        assert cut.losses == whole.losses
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, cut.model.state_dict()[name]), name
        rows = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "cut")]
        assert len(rows[0]) == 7
        for mine, theirs in zip(*rows, strict=True):
            assert {**mine, "seconds": 0} == {**theirs, "seconds": 0}
        kept = [path.name for path in list_checkpoints(tmp_path / "cut" / "checkpoints")]
        assert kept == ["finetune-00000004", "finetune-00000005"]
        again = run(tmp_path / "cut")
        assert again.losses == whole.losses
        for name, value in whole.model.state_dict().items():
            assert torch.equal(value, again.model.state_dict()[name]), name

    def test_other_runs_are_refused(self, student, dataset, tmp_path):
        def trainer(**changes):
            config = options(output=tmp_path, condition_dropout=0.0, checkpointing_steps=2, **changes)
            return DiffusionTrainer(config, copy.deepcopy(student), dataset)

        trainer().run()
        with pytest.raises(ValueError, match="already holds the run"):
            trainer().run()
        for change in ({"train": "mhla"}, {"max_steps": 0, "distill_steps": 1}):
            with pytest.raises(ValueError, match=f"was made with {next(iter(change))} "):
                trainer(resume="latest", **change).run()
        result = trainer(resume="finetune-00000002", max_steps=6).run()
        assert len(result.losses["finetune"]) == 6


def test_a_sharded_model_is_exported_unsharded(teacher, one_process):
    from torch.distributed.fsdp import fully_shard

    assert unsharded(teacher) is teacher
    model, expected = copy.deepcopy(teacher), teacher.state_dict()
    fully_shard(model, mesh=one_process)
    exported = unsharded(model)
    assert type(exported) is type(teacher) and exported.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in exported.state_dict().items())


class TestFiles:
    def test_one_expert_is_trained_and_the_other_stays(self, cache_directory, tmp_path):
        """Of a pipeline whose experts differ in kind, by way of files."""
        source, weights = tmp_path / "source", "diffusion_pytorch_model.safetensors"
        pipeline = tiny.wan_pipeline(num_layers=1, second_transformer=True)
        convert(pipeline, {"transformer_2": MHLA}).save_pretrained(source)
        config = options(
            model=source, cache=str(cache_directory), output=tmp_path / "run", component="transformer_2", max_steps=1,
            checkpointing_steps=0,
        )  # fmt: skip
        result = DiffusionTrainer(config).run()
        index = json.loads((result.pipeline / "model_index.json").read_text())
        names = ("transformer", "transformer_2")
        assert [index[name][1] for name in names] == ["WanTransformer3DModel", "MHLAWanTransformer3DModel"]
        kept, trained = ((result.pipeline / name / weights).read_bytes() for name in names)
        assert kept == (source / "transformer" / weights).read_bytes()
        assert trained != (source / "transformer_2" / weights).read_bytes()

    def test_the_adapter_of_the_second_expert_loads_into_it(self, cache_directory, tmp_path):
        """By the usual call, whole, and with a scale that is not the default one."""
        from diffusers import DiffusionPipeline

        pipeline = tiny.wan_pipeline(num_layers=1, second_transformer=True)
        convert(pipeline, {"transformer_2": MHLA}).save_pretrained(tmp_path / "source")
        config = options(
            model=tmp_path / "source", cache=str(cache_directory), output=tmp_path / "run", component="transformer_2",
            train="lora", lora_rank=2, lora_alpha=8.0, max_steps=3, learning_rate=1e-2, checkpointing_steps=0,
        )  # fmt: skip
        expected = DiffusionTrainer(config).run().model
        fresh = DiffusionPipeline.from_pretrained(tmp_path / "source")
        inputs = tiny.wan_inputs()
        with torch.no_grad():
            before = [expert(**inputs).sample for expert in (fresh.transformer, fresh.transformer_2)]
            fresh.load_lora_weights(tmp_path / "run" / "lora", load_into_transformer_2=True)
            assert torch.equal(fresh.transformer(**inputs).sample, before[0])
            trained = expected(**inputs).sample
            assert not torch.allclose(before[1], trained, atol=1e-2)
            assert torch.allclose(fresh.transformer_2(**inputs).sample, trained, atol=1e-4)

    def test_a_run_from_files_writes_a_pipeline(self, softmax_dir, cache_directory, tmp_path):
        config = options(
            model=softmax_dir,
            cache=str(cache_directory),
            output=tmp_path,
            mhla=MHLA,
            train="lora",
            lora_rank=2,
            distill_steps=2,
            max_steps=2,
            report_to="tensorboard",
            validation_prompts=("a three moves left",),
            validation_inference_steps=1,
            validation_guidance=1.0,
        )
        result = DiffusionTrainer(config).run()
        assert result.pipeline == tmp_path / "pipeline"

        from diffusers import DiffusionPipeline

        pipeline = DiffusionPipeline.from_pretrained(result.pipeline)
        assert isinstance(pipeline.transformer, MHLAWanTransformer3DModel)
        for name, value in result.model.state_dict().items():
            assert torch.equal(value, pipeline.transformer.state_dict()[name]), name
        record = json.loads((result.pipeline / "training.json").read_text())
        assert record["final_losses"]["finetune"] == result.losses["finetune"][-1]
        assert list((tmp_path / "validation").glob("step-00000002-prompt-0.*"))
        assert list((tmp_path / "logs").rglob("events.out.tfevents.*"))
        assert [row["stage"] for row in read_metrics(tmp_path / "metrics.jsonl")] == ["distill"] * 2 + ["finetune"] * 2

        # The adapter, which holds the MHLA parameters, makes the same model of a fresh conversion.
        assert [path.name for path in (tmp_path / "lora").iterdir()] == ["pytorch_lora_weights.safetensors"]
        fresh = DiffusionPipeline.from_pretrained(softmax_dir)
        convert(fresh, MHLA)
        fresh.load_lora_weights(tmp_path / "lora")
        inputs = tiny.wan_inputs()
        with torch.no_grad():
            expected = result.model(**inputs).sample
            assert torch.allclose(fresh.transformer(**inputs).sample, expected, atol=1e-5)

        # The softmax model behind the result is recorded, and found on this machine, but no path of others is read.
        record = json.loads((result.pipeline / "training.json").read_text())
        assert record["source"]["location"] == record["source"].pop("path") == str(softmax_dir.resolve())
        assert ModelDirectory.open(result.pipeline).original().folder.parent == softmax_dir.resolve()
        (result.pipeline / "training.json").write_text(json.dumps(record))
        with pytest.raises(ValueError, match=re.escape(f"comes from {softmax_dir.resolve()}, which")):
            ModelDirectory.open(result.pipeline).original(argument="teacher")
        with pytest.raises(ValueError, match="teacher"):
            ModelDirectory.open(softmax_dir).original(result.pipeline, "teacher")
        with pytest.raises(ValueError, match="MHLA already"):
            load_model(ModelDirectory.open(result.pipeline), MHLA)
        assert type(load_model(ModelDirectory.open(result.pipeline))) is MHLAWanTransformer3DModel

    def test_the_teacher_is_found_beside_what_was_converted(self, softmax_dir, tmp_path):
        from mhla_hf.conversion import convert_pretrained

        shutil.copytree(softmax_dir, tmp_path / "softmax")
        convert_pretrained(tmp_path / "softmax", tmp_path / "converted", MHLA, progress=False)
        assert ModelDirectory.open(tmp_path / "converted").original().folder.parent == tmp_path / "softmax"
        # A trained copy has the conversion's record too, but finds the directory through its own.
        trained = tmp_path / "trained"
        shutil.copytree(tmp_path / "converted", trained)
        (trained / "training.json").write_text(json.dumps({"source": {"location": str(tmp_path / "converted")}}))
        assert ModelDirectory.open(trained).original().folder.parent == tmp_path / "softmax"
        # A directory that is called like its source is not its own source.
        (tmp_path / "converted").rename(tmp_path / "other")
        shutil.rmtree(tmp_path / "softmax")
        (tmp_path / "other").rename(tmp_path / "softmax")
        with pytest.raises(ValueError, match="comes from softmax, which is neither on the Hub"):
            ModelDirectory.open(tmp_path / "softmax").original(argument="teacher")
