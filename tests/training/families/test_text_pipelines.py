# SPDX-License-Identifier: Apache-2.0
"""Pipelines from text to images or videos: what they hand to their transformer, and training from a command."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from diffusers import DiffusionPipeline, LTXPipeline
from typer.testing import CliRunner

from mhla_hf import convert
from mhla_hf.cli.main import app
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.models.registry import TRAINED
from mhla_hf.training import (
    CacheConfig,
    DiffusionTrainer,
    LatentDataset,
    TrainingConfig,
    evaluate,
    objective_for,
)
from mhla_hf.training.data.latent_cache import CachePlan, make_cache
from mhla_hf.training.data.order import stable_seed
from mhla_hf.training.data.videos import _say_rate, write_video
from mhla_hf.training.parameters import load_model
from tests.families.cases import FluxCase
from tests.families.model_case import relative_error

from ... import tiny, tiny_joint
from .test_objectives import first_call


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


def flux():
    pipeline = tiny_joint.with_encoders(tiny_joint.flux_pipeline())
    pipeline.register_modules(transformer=FluxCase().make(guidance_embeds=True))
    pipeline.vae.register_to_config(shift_factor=0.1, scaling_factor=0.4)
    return pipeline


@dataclass(frozen=True)
class Case:
    """A family: its tiny pipeline, arguments of a call, tokens of a prompt, and the latents of a call from its input.

    Attributes:
        make: Makes the pipeline.
        size: Of a sample in pixels and frames.
        length: Tokens of prompts.
        blocks: Of MHLA.
        call: Further arguments of the pipeline's call.
        shape: Of the latents of a sample.
        normalised: Latents from what the VAE makes of a sample, as the pipeline has them.
    """

    make: Any
    size: tuple[int, ...]
    length: int
    blocks: list[int]
    call: dict[str, Any]
    shape: tuple[int, ...]
    normalised: Any

    @property
    def arguments(self) -> dict[str, Any]:
        names = ("height", "width", "num_frames")
        return {**dict(zip(names, self.size)), "max_sequence_length": self.length, **self.call}


def ltx():
    pipeline = tiny.ltx_pipeline()
    for name, offset in (("latents_mean", 0.1), ("latents_std", 1.0)):
        getattr(pipeline.vae, name).copy_(offset + torch.arange(4) / 10)
    pipeline.vae.register_to_config(scaling_factor=0.5)
    return pipeline


def hunyuan_video():
    pipeline = tiny_joint.with_encoders(tiny_joint.hunyuan_video_pipeline())
    pipeline.vae.register_to_config(scaling_factor=0.5)
    return pipeline


def ltx_normalised(vae, latents):
    return LTXPipeline._normalize_latents(latents, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)


def wan_normalised(vae, latents):
    mean, deviation = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (latents - mean) / deviation


GUIDED = {"guidance_scale": 1.0}
CASES = {
    "flux": Case(flux, (64, 96), 24, [2, 2], GUIDED, (4, 8, 12), lambda vae, latents: (latents - 0.1) * 0.4),
    "ltx": Case(ltx, (32, 64, 5), 24, [1, 2, 2], GUIDED, (4, 3, 4, 8), ltx_normalised),
    "wan-vace": Case(tiny.vace_pipeline, (32, 48, 5), 24, [1, 2, 2], GUIDED, (16, 2, 4, 6), wan_normalised),
    "hunyuan-video": Case(
        hunyuan_video, (32, 48, 5), 500, [1, 2, 2], GUIDED, (4, 2, 4, 6), lambda vae, latents: latents * 0.5
    ),
}
every_family = pytest.mark.parametrize("name", CASES)
# Most of the text of HunyuanVideo is an instruction.
fast_families = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "hunyuan-video")) for name in CASES]
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A complete ordinary pipeline of each family with a cache of digits, made when first asked for."""
    made = {}

    def source(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            CASES[name].make().save_pretrained(made[name] / "source")
            side, _, *frames = CASES[name].size
            result = invoke(
                "cache", made[name] / "source", made[name] / "cache", "--data", "digits", "--samples", 12, "--sizes",
                ",".join(map(str, (side, side, *frames))), "--max-sequence-length", CASES[name].length,
            )  # fmt: skip
            assert result.exit_code == 0, result.output
        return made[name]

    return source


def invoke(*arguments):
    given = [*map(str, arguments), "--quiet", "--device", "cpu"]
    return CliRunner().invoke(app, ["train", *given], env={"COLUMNS": "200"})


@every_family
def test_models_are_called_as_their_pipeline_calls_them(name, sources):
    case, source = CASES[name], sources(name) / "source"
    pipeline = DiffusionPipeline.from_pretrained(source)
    objective = objective_for(pipeline.transformer, source)
    kept = first_call(pipeline, prompt="a seven", **case.arguments, num_inference_steps=3)
    output = kept.pop("output")
    grid = ModelDirectory.open(source).sample_size.grid(*case.size)
    noisy = objective.unpack(kept["hidden_states"][0], grid)[None]
    assert noisy.shape[1:] == case.shape
    condition = objective.encode_condition(pipeline, "a seven", case.length)
    for each in ("prompt_embeds", "prompt_attention_mask"):
        # As the cache pads them.
        if each in condition:
            missing = case.length - len(condition[each])
            condition[each] = torch.cat(
                [condition[each], condition[each].new_zeros(missing, *condition[each].shape[1:])]
            )
    batch = {each: tensor[None] for each, tensor in condition.items()}
    # Some schedulers count them in whole numbers.
    kept["timestep"] = kept["timestep"].float()
    sigma = kept["timestep"] / (1 if name == "flux" else 1000)
    inputs = objective.model_inputs(pipeline.transformer.config, noisy, sigma, batch)
    mask = kept.get("encoder_attention_mask")
    for each in kept.keys() - {"args", "attention_kwargs", "joint_attention_kwargs"}:
        mine, theirs = inputs.pop(each), kept[each]
        if isinstance(theirs, torch.Tensor):
            if each == "encoder_hidden_states" and mask is not None:
                theirs = theirs * mask[..., None]
            assert mine.dtype == theirs.dtype, each
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)
        else:
            assert mine == theirs, each
    assert not kept["args"] and not inputs
    with torch.no_grad():
        torch.testing.assert_close(objective.predict(pipeline.transformer, noisy, sigma, batch), output)


@every_family
def test_samples_are_encoded_as_their_pipeline_takes_latents(name, sources):
    case, pipeline = CASES[name], DiffusionPipeline.from_pretrained(sources(name) / "source")
    media = torch.rand(3, *case.size[2:], *case.size[:2]) * 2 - 1
    with torch.no_grad():
        expected = case.normalised(pipeline.vae, pipeline.vae.encode(media[None]).latent_dist.mode())
        latents = objective_for(pipeline.transformer).encode_media(pipeline, media)
    assert latents.shape == case.shape
    torch.testing.assert_close(latents[None], expected)


def train(name, sources, output, *arguments):
    source = sources(name)
    result = invoke(
        name, source / "source", output, "--cache", source / "cache", "--batch-size", 4, "--mhla",
        json.dumps({"blocks": CASES[name].blocks, "output_gate": True}), *arguments,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return DiffusionPipeline.from_pretrained(output / "pipeline")


@fast_families
def test_a_trained_pipeline_is_whole_and_better(name, sources, tmp_path):
    pipeline = train(
        name, sources, tmp_path, "--distill-steps", 2, "--max-steps", 30, "--learning-rate", 5e-3,
        "--validation-prompt", "the digit three", "--validation-steps", 30, "--validation-inference-steps", 1,
    )  # fmt: skip
    assert type(pipeline.transformer).__name__.startswith("MHLA")
    assert len([*(tmp_path / "validation").iterdir()]) == 1
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(prompt="the digit three", **CASES[name].arguments, num_inference_steps=1, output_type="np")[0]
    assert np.asarray(made[0]).shape == (*CASES[name].size[2:], *CASES[name].size[:2], 3) and np.isfinite(made).all()

    source, digits = sources(name) / "source", LatentDataset(sources(name) / "cache")
    start = load_model(ModelDirectory.open(source), "none")
    objective = objective_for(start, source)
    before, after = (
        evaluate(model, digits, draws_per_sample=4, objective=objective) for model in (start, pipeline.transformer)
    )
    difference, error = after.difference(before)
    assert difference < -5 * error


@every_family
def test_lora_trains_and_loads_whole(name, sources, tmp_path):
    pipeline = train(
        name, sources, tmp_path, "--train", "lora", "--lora-rank", 2, "--lora-alpha", 8, "--max-steps", 2,
        "--learning-rate", 1e-2,
    )  # fmt: skip
    kept = first_call(pipeline, prompt="a seven", **CASES[name].arguments, num_inference_steps=1)
    expected, arguments = kept.pop("output"), kept.pop("args")
    fresh = DiffusionPipeline.from_pretrained(sources(name) / "source")
    convert(fresh.transformer, {"blocks": CASES[name].blocks, "output_gate": True})
    with torch.no_grad():
        before = fresh.transformer(*arguments, **kept)[0]
        fresh.load_lora_weights(tmp_path / "lora")
        assert relative_error(before, expected) > 1e-3
        assert relative_error(fresh.transformer(*arguments, **kept)[0], expected) < 1e-4


@every_family
def test_latents_that_the_original_draws_are_those_of_its_pipeline(name, sources, tmp_path):
    case, source = CASES[name], sources(name) / "source"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a seven")
    sizes = {"sizes": ",".join(map(str, case.size)), "max_sequence_length": case.length}
    config = CacheConfig(data="generated", prompts=str(prompts), num_samples=1, **sizes)
    latents = CachePlan(ModelDirectory.open(source), config).samples[0].load()
    assert latents.shape == case.shape
    options = {name: value for name, value in case.arguments.items() if name != "guidance_scale"}
    generator = torch.Generator().manual_seed(stable_seed(0, "generated", 0))
    pipeline = DiffusionPipeline.from_pretrained(source)
    pipeline.set_progress_bar_config(disable=True)
    expected = pipeline("a seven", **options, generator=generator, output_type="latent", return_dict=False)[0]
    assert torch.equal(TRAINED[name].load_objective().pack(latents[None]), expected)


class TestFrameRates:
    """Videos are sampled at the rate of the model's family."""

    @pytest.fixture
    def videos(self, tmp_path):
        """Two clips of a second, of the same motion: the frame at time t is as bright as 200 t."""
        folder = tmp_path / "videos"
        folder.mkdir()
        for rate in (10, 30):
            levels = (np.arange(rate) * 200 // rate).astype(np.uint8)
            write_video(folder / f"{rate}.mp4", np.broadcast_to(levels[:, None, None, None], (rate, 64, 64, 3)), rate)
            (folder / f"{rate}.txt").write_text("brighter")
        return folder

    def source(self, pipeline, tmp_path, **index):
        pipeline.save_pretrained(tmp_path / "source")
        path = tmp_path / "source" / "model_index.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **index}))
        return ModelDirectory.open(tmp_path / "source")

    @pytest.mark.parametrize(
        ("make", "index", "rate"),
        [
            (tiny.wan_pipeline, {}, 16),
            (tiny.wan_pipeline, {"expand_timesteps": True}, 24),
            (tiny.vace_pipeline, {}, 16),
            (tiny.skyreels_pipeline, {}, 24),
            (tiny.ltx_pipeline, {}, 25),
            (lambda: tiny_joint.with_encoders(tiny_joint.hunyuan_video_pipeline()), {}, 24),
        ],
        ids=["wan", "wan-5b", "wan-vace", "skyreels", "ltx", "hunyuan-video"],
    )
    def test_default_of_each_family(self, make, index, rate, videos, tmp_path, caplog):
        source = self.source(make(), tmp_path, **index)

        def plan(**options):
            return CachePlan(source, CacheConfig(data=str(videos), sizes="64,64,9", **options))

        assert plan().settings()["fps"] == rate and plan(fps=12).settings()["fps"] == 12
        _say_rate.cache_clear()
        slow, fast = (
            sample.load()[0, :, 32, 32].add(1).mul(127.5) for sample in [*plan().samples, *plan().samples][:2]
        )
        expected = torch.arange(9) * 200 / rate
        # A frame is shown until the next one.
        assert (slow - expected).abs().max() < 22 and (fast - expected).abs().max() < 9
        said = [record.getMessage() for record in caplog.records if "frames per second" in record.getMessage()]
        assert len(said) == 2 and f"30 frames per second; they are sampled at {rate}" in said[1]
        if rate == 25:
            with pytest.raises(ValueError, match="fps must be above 0 for LTX-Video"):
                plan(fps=0)
        else:
            assert plan(fps=0).settings()["fps"] is None
            raw = plan(fps=0).samples[0].load()[0, :, 32, 32].add(1).mul(127.5)
            assert (raw - torch.arange(9) * 20).abs().max() < 4

    def test_ltx_is_told_the_rate(self, videos, tmp_path):
        source = self.source(tiny.ltx_pipeline(), tmp_path)
        config = TrainingConfig(model=str(source.root), cache=str(tmp_path / "cache"), device="cpu", progress=False)
        options = CacheConfig(data=str(videos), sizes="32,64,9", fps=12, max_sequence_length=24)
        make_cache(config, options, Accelerator(cpu=True), source)
        trainer = DiffusionTrainer(config.replace(output=str(tmp_path / "run"), mhla="none", max_steps=1))
        noisy, text = torch.zeros(1, 4, 3, 4, 8), {"prompt_embeds": None, "prompt_attention_mask": torch.ones(1, 2)}
        inputs = trainer.objective.model_inputs({}, noisy, torch.ones(1), text)
        factor = trainer.objective.temporal_factor
        assert inputs["rope_interpolation_scale"][0] == factor / 12
        plain = objective_for(trainer.model, source).model_inputs({}, noisy, torch.ones(1), text)
        assert plain["rope_interpolation_scale"][0] == factor / 25
        pipeline, settings = DiffusionPipeline.from_pretrained(source.root), LatentDataset(tmp_path / "cache").settings
        validated = trainer.objective.validation_inputs(
            pipeline, config.replace(validation_prompts=("a",)), settings, height=32, width=64, num_frames=9
        )
        assert validated[0]["frame_rate"] == 12
