# SPDX-License-Identifier: Apache-2.0
"""`recover`, for one tiny model of each kind: what it writes, what it refuses, and going on after a stop."""

import json
import logging
import re
import shutil
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from diffusers import DiTPipeline, WanPipeline
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves
from transformers import ViTImageProcessor
from typer.testing import CliRunner

import mhla_hf
from mhla_hf import convert, convert_pretrained
from mhla_hf.cli.main import app
from mhla_hf.estimate import find_candidate, on_meta, training_memory
from mhla_hf.hub import model_card
from mhla_hf.matching.blockwise import _Records
from mhla_hf.matching.records import Records
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.recovery import data
from mhla_hf.recovery import recover as module
from mhla_hf.recovery.calibration import calibrate_directory
from mhla_hf.recovery.data import RecoveryData, open_data
from mhla_hf.recovery.recipes import IMAGES, WITHOUT_OBJECTIVE, default_recipe
from mhla_hf.recovery.report import is_worse
from mhla_hf.recovery.selection import _Trial
from mhla_hf.recovery.stages import Quality, fitted_to
from mhla_hf.training.data.batches import BatchSource, load_calls
from mhla_hf.training.data.images import Images
from mhla_hf.training.processes import Processes
from tests import tiny, tiny_images, tiny_joint
from tests.families.cases import WanAnimateCase
from tests.integrations.transformers.tiny_models import IMAGE_SIZE, PATCH_SIZE, softmax_model

from .sources import model_directory, text_folder, tokenizer


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")

SMALL = {
    "data.samples": 12,
    "data.held_out": 4,
    "calibrate.batches": 2,
    "calibrate.batch_size": 2,
    "calibrate.fit_steps": 6,
    "match.steps": 6,
    "match.batches": 4,
    "match.batch_size": 1,
    "blockwise.steps": 4,
    "blockwise.batches": 4,
    "distill.steps": 4,
    "distill.batch_size": 2,
}
EXTRA = {
    "wan": {
        "data.height": 16,
        "data.width": 16,
        "data.num_frames": 5,
        "data.samples": 4,
        "data.held_out": 2,
        "match.batches": 2,
    },
    "llama": {"data.max_length": 32},
    "bert": {"data.max_length": 64},
}
KINDS = ["wan", "dit", "llama", "bert", "vit"]
CALLS = {
    "pixart": tiny_images.pixart_pipeline,
    "wan-vace": tiny.vace_pipeline,
    "ltx": tiny.ltx_pipeline,
    "ltx2": tiny.ltx2_pipeline,
    "hunyuan-video": tiny_joint.hunyuan_video_pipeline,
    "hunyuan-video-1.5": tiny_joint.hunyuan_video_15_pipeline,
    "qwen-image": tiny_joint.qwen_image_pipeline,
    "flux": tiny_joint.flux_pipeline,
    "chroma": tiny_joint.chroma_pipeline,
}


def make_source(kind: str, root: Path) -> tuple[Path, str]:
    """A tiny softmax model, and data for it."""
    directory = root / kind
    if kind == "wan":
        tiny.wan_pipeline().save_pretrained(directory)
    elif kind == "dit":
        tiny_images.dit_pipeline(num_embeds_ada_norm=10, sample_size=8).save_pretrained(directory)
    else:
        model_directory(kind, directory)
    return directory, str(text_folder(root / "texts")) if kind in ("llama", "bert") else "digits"


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    return {kind: make_source(kind, root) for kind in KINDS}


def recover(kind: str, sources, output: Path, changes=None, **options):
    source, data = sources[kind]
    data = options.pop("data", data)
    options = {"progress": False, "device": "cpu", **options}
    return mhla_hf.recover(
        source, output, data, changes={**SMALL, **EXTRA.get(kind, {}), **(changes or {})}, **options
    )


def load(kind: str, directory: Path):
    """The recovered model, by plain `from_pretrained`."""
    if kind == "wan":
        return WanPipeline.from_pretrained(directory).transformer
    if kind == "dit":
        return DiTPipeline.from_pretrained(directory).transformer
    auto = {"llama": "AutoModelForCausalLM", "bert": "AutoModelForMaskedLM", "vit": "AutoModel"}[kind]
    return getattr(transformers, auto).from_pretrained(directory)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    (path,) = [
        path for path in directory.rglob("*.safetensors") if "encoder" not in str(path) and "vae" not in str(path)
    ]
    return load_file(path)


@pytest.mark.parametrize("kind", KINDS)
def test_recover(kind, sources, tmp_path):
    report = recover(kind, sources, tmp_path / "out")
    stages = ["calibrate", "match", "blockwise", "distill"]
    assert list(report.figures) == ["softmax", "converted", *stages]
    main = "above_softmax_percent" if kind in ("wan", "dit", "llama") else "cosine"
    assert all(main in report.figures[name] for name in ["converted", *stages])
    if main == "cosine":
        assert report.figures["distill"]["cosine"] > report.figures["converted"]["cosine"]
    assert report.data["samples"] >= 4 and report.data["held_out"] >= 1
    # What was measured is what was written.
    out = tmp_path / "out"
    model = load(kind, out)
    assert any(name.endswith("mhla.mixing") for name, _ in model.named_parameters())
    stored = json.loads((out / "report.json").read_text())
    assert stored["figures"] == report.figures and stored["recipe"]["match"]["steps"] == 6
    # What a model card names, and no path of the data.
    assert stored["seed"] == 0 and stored["machine"]["torch"] == version("torch")
    assert stored["data"].get("origin") in (None, "digits", "generated") and str(tmp_path.parent) not in str(
        stored["data"]
    )
    if kind in ("llama", "bert", "vit"):
        # Without this package, transformers refuses it.
        assert "import mhla_hf" in json.loads((out / "config.json").read_text())["transformers_weights"]
    conversion = json.loads((out / "conversion.json").read_text())
    assert conversion["recovery"]["figures"] == report.figures and conversion["calibration"]["layers"]
    assert conversion["source"]["location"] == kind
    assert (out / "report.png").stat().st_size > 1000
    # The work folder keeps records only.
    assert {path.suffix for path in (out / "work").rglob("*") if path.is_file()} <= {".json", ""}
    again = recover(kind, sources, out, resume=True)
    assert again.figures == report.figures


def test_a_run_of_an_earlier_version_resumes(sources, tmp_path, monkeypatch):
    """A finished stage under its former name is not run again, and its figures are in the report."""

    def stop(*arguments):
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module.runs, "distill", stop)
        recover("bert", sources, out, stages=("match", "blockwise", "distill"))
    work = out / "work"
    (work / "blockwise").rename(work / "blocks")
    for path in (work / "run.json", work / "blocks" / "done.json"):
        path.write_text(path.read_text().replace("blockwise", "blocks"))
    before = json.loads((work / "blocks" / "done.json").read_text())
    assert "blocks" in before["figures"] and "blocks" in before["recipe"]
    with monkeypatch.context() as patched:
        patched.setattr(module.runs, "blockwise", stop)
        report = recover("bert", sources, out, stages=("match", "blocks", "distill"), resume=True)
    assert list(report.figures) == ["softmax", "converted", "match", "blockwise", "distill"]
    assert report.figures["blockwise"] == before["figures"]["blocks"]


@pytest.mark.parametrize("kind, worse", [("bert", "distill"), ("bert", "blockwise"), ("llama", "distill")])
def test_a_stage_that_ends_worse_is_discarded(kind, worse, sources, tmp_path, monkeypatch, caplog):
    """What is written, and what the next stage gets, is the better model, of a resumed run too."""
    stages = ("match", "distill") if worse == "distill" else ("match", "blockwise", "distill")
    ruinous = {"distill.learning_rate": 1e-5}
    ruinous |= {f"{worse}.{rate}": 5.0 for rate in ("learning_rate", "mhla_learning_rate")}
    if kind == "llama":
        # Rows as short as these are within the window that language models have by default.
        ruinous["mhla.window"] = None
    options = {"layers": "all", "stages": stages}
    if worse == "blockwise":
        # The check of single blocks would spare the stage.
        monkeypatch.setattr(module.runs.BlockwiseOptions, "held_out", 0)
    report = recover(kind, sources, tmp_path / "out", ruinous, **options)
    assert report.discarded == [worse]
    name = {"bert": "cosine", "llama": "above_softmax_percent"}[kind]
    figures = [report.figures[state][name] for state in ("match", worse)]
    assert figures[1] < figures[0] if kind == "bert" else figures[1] > figures[0]
    others = [stage for stage in stages if stage != worse]
    better = recover(kind, sources, tmp_path / "better", {**ruinous, worse: None}, **{**options, "stages": others})
    first, second = weights(tmp_path / "out"), weights(tmp_path / "better")
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    assert [report.figures[each] for each in others] == [better.figures[each] for each in others]
    assert report.kept == others[-1]
    label = {"bert": "cosine to the original", "llama": "above softmax, %"}[kind]
    note = f"{worse} ended worse ({label} {figures[1]:.4g} after {figures[0]:.4g}): its result was discarded"
    assert report.notes() == [note] and note in caplog.text
    card = model_card(tmp_path / "out").text
    assert f"The stage `{worse}` ended worse than it began: its result was discarded." in card
    assert 'The row "' + {"distill": "matched", "blockwise": "distilled"}[worse] + '" is this model' in card
    assert "Not trained since" not in card
    # A run that was stopped after the stage goes on from the better state.
    following = stages[stages.index(worse) + 1 :]
    if following:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(module.runs, following[0], lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            recover(kind, sources, tmp_path / "parts", ruinous, **options)
        again = recover(kind, sources, tmp_path / "parts", ruinous, resume=True, **options)
        assert again.figures == report.figures and again.discarded == [worse]
        found = weights(tmp_path / "parts")
        assert all(torch.equal(first[key], found[key]) for key in first)


def test_figures_are_compared_by_their_direction():
    nan = float("nan")
    assert is_worse({"cosine": 0.7}, {"cosine": 0.9}) and not is_worse({"cosine": 0.9}, {"cosine": 0.9})
    for name in ("above_softmax_percent", "loss", "bits_per_byte"):
        assert is_worse({name: 2.0}, {name: 1.0}) and not is_worse({name: 1.0}, {name: 2.0})
    assert is_worse({"cosine": nan}, {"cosine": 0.9}) and not is_worse({"cosine": 0.9}, {"cosine": nan})
    # Classifiers are judged by cosine, diffusion models by what is above softmax.
    assert is_worse({"agreement": 1.0, "cosine": 0.7}, {"agreement": 0.5, "cosine": 0.9})
    assert is_worse({"loss": 0.1, "above_softmax_percent": 3.0}, {"loss": 0.2, "above_softmax_percent": 2.0})


@pytest.mark.parametrize("name", ["dinov2", "vit"])
def test_blocks_are_made_for_the_grid_of_the_images(name, tmp_path, caplog):
    """Of the size that the image processor gives, or the one that is asked for; both sizes are said."""
    half, usual = IMAGE_SIZE // 2, IMAGE_SIZE // PATCH_SIZE
    softmax_model(name).save_pretrained(tmp_path / "source")
    ViTImageProcessor(size={"height": half, "width": half}).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="data.height and data.width: give both"):
        mhla_hf.recover(tmp_path / "source", tmp_path / "out", "digits", changes={"data.height": half})
    changes = dict(SMALL)
    # ViT reads another size than its own where it is told to.
    grid = [usual // 2, usual // 2] if name == "dinov2" else [usual, 2 * usual]
    if name == "vit":
        changes |= {"data.height": IMAGE_SIZE, "data.width": 2 * IMAGE_SIZE}
    options = {"stages": ["calibrate", "blockwise", "distill"], "device": "cpu", "progress": False}
    report = mhla_hf.recover(tmp_path / "source", tmp_path / "out", "digits", changes=changes, **options)
    assert report.recipe["mhla"]["grid"] == grid == load("vit", tmp_path / "out").config.mhla["grid"]
    said = f"images have {grid[0]} x {grid[1]} patches, and {usual} x {usual} in the model's configuration"
    assert said in caplog.text and "resampled" not in caplog.text
    assert report.figures["calibrate"]["cosine"] > 0.5


def test_resampled_weights_are_warned_of(sources, tmp_path, caplog):
    """A program's own data may have another size than the blocks were made for."""
    model = transformers.AutoModel.from_pretrained(
        sources["vit"][0], attn_implementation="mhla", mhla={"block_size": [2, 2], "resize": "block_size"}
    )
    side = IMAGE_SIZE // 2
    source = Images([lambda: np.zeros((side, side, 3), np.uint8)] * 10, ViTImageProcessor(do_resize=False), 2, "")
    module._warn_of_resampling(model, source)
    assert (
        "the mixing weights are those of 2x2 blocks" in caplog.text
        and "of 2x2 patches have 1x1: training" in caplog.text
    )


@pytest.mark.parametrize("length, expected", [(64, 16), (100, 16), (4096, 32)])
def test_rows_of_text_have_four_blocks(length, expected, tmp_path, sources, caplog):
    """The default block of a model may be as long as a row, of 128 tokens at most here: linear attention."""
    options = {"data": "generated", "hub": {}, "cache": tmp_path, "seed": 0, "progress": False, "prompts": None}
    recipe = default_recipe("causal").changed({"data.max_length": length})

    def fitted(recipe):
        return RecoveryData(
            directory=ModelDirectory.read(Path(sources["llama"][0])), recipe=recipe, **options
        ).fitted()

    assert (
        fitted(recipe).mhla["block_size"] == [expected] and f"get blocks of {expected} (--block-size)" in caplog.text
    )
    caplog.clear()
    assert fitted(recipe.changed({"mhla.block_size": [expected]})).mhla["block_size"] == [expected]
    assert not caplog.text
    longest = min(length, 128)
    assert fitted(recipe.changed({"mhla.block_size": [longest]})).mhla["block_size"] == [longest]
    assert f"rows of {longest} tokens have fewer than 4 blocks of {longest}" in caplog.text


def test_window_and_linear_attention_are_measured_beside(sources, tmp_path):
    """By models that are made of the same weights, with the window alone and with a single block."""
    report = recover(
        "llama", sources, tmp_path / "out", {"mhla.window": "adjacent"}, stages=["calibrate"], layers="all"
    )
    assert list(report.beside) == ["window", "linear_calibrated"]
    assert json.loads((tmp_path / "out" / "report.json").read_text())["beside"] == report.beside
    directory, data = sources["llama"]
    model = load("llama", tmp_path / "out")
    source = open_data(model, ModelDirectory.read(Path(directory)), data, samples=12, held_out=4, seed=0, length=32)
    quality = partial(Quality, source=source, processes=Processes(alone=True))
    original = transformers.AutoModelForCausalLM.from_pretrained(directory)
    for key, converted in (("window", convert(original, model.config.mhla)), ("linear_calibrated", model)):
        measure = quality(converted)
        with torch.no_grad():
            for name, parameter in converted.named_parameters():
                if key == "window" and name.endswith("window_bias"):
                    parameter.fill_(-torch.inf)
                if key != "window" and name.endswith("mhla.mixing"):
                    parameter.fill_(0.25)
        assert measure.measure(converted)["bits_per_byte"] == pytest.approx(
            report.beside[key]["bits_per_byte"], rel=1e-4
        )
    card = model_card(tmp_path / "out").text
    assert "| window, no MHLA |" in card and "| linear, calibrated |" in card
    # Diffusion models are measured beside where they have a window.
    plain = recover("bert", sources, tmp_path / "bert", {"distill.steps": 1}, stages=["distill"])
    assert list(plain.beside) == ["linear"] and plain.kept in plain.figures


def test_the_trial_of_layers_goes_on_where_it_was_stopped(sources, tmp_path, monkeypatch):
    whole = recover("bert", sources, tmp_path / "whole", stages=["match"])
    error, tried = _Trial.error, []

    def stop_at_the_third(self, kept):
        tried.append([*kept])
        if len(tried) == 3:
            raise KeyboardInterrupt
        return error(self, kept)

    monkeypatch.setattr(_Trial, "error", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        recover("bert", sources, tmp_path / "out", stages=["match"])
    report = recover("bert", sources, tmp_path / "out", stages=["match"], resume=True)
    # With no layer, and with each of three: the third is tried again.
    assert len(tried) == 5 and tried[2] == tried[3]
    assert report.figures == whole.figures


def test_a_calibrated_model_is_recovered_from(sources, tmp_path):
    """As from its original with the same weights after calibration; the record tells where that is."""
    directory, data = sources["bert"]
    convert_pretrained(directory, tmp_path / "mhla", layers="0,2", block_size=[8], progress=False)
    with pytest.raises(ValueError, match="is MHLA already; load its softmax original"):
        mhla_hf.recover(tmp_path / "mhla", tmp_path / "out", data)
    calibrate_directory(tmp_path / "mhla", data=data, samples=24, fit_steps=40, device="cpu")
    changes = {**SMALL, **EXTRA["bert"]}
    options = {"changes": changes, "device": "cpu", "progress": False}
    report = mhla_hf.recover(tmp_path / "mhla", tmp_path / "out", data, stages=["match"], **options)
    assert list(report.figures) == ["softmax", "converted", "calibrate", "match"]
    assert report.stages["calibrate"]["layers"] and report.stages["calibrate"]["probe"]["samples"] == 24
    assert report.figures["match"]["cosine"] > 0.5
    found, calibrated = load("bert", tmp_path / "out"), load("bert", tmp_path / "mhla")
    assert found.config.mhla == calibrated.config.mhla
    # Nothing trained: the calibrated weights.
    only = mhla_hf.recover(tmp_path / "mhla", tmp_path / "only", data, stages=["calibrate"], **options)
    first, second = weights(tmp_path / "only"), weights(tmp_path / "mhla")
    assert not only.discarded and all(torch.equal(first[name], second[name]) for name in second)
    assert load("bert", tmp_path / "only").config._mhla_state == "calibrated"
    with pytest.raises(ValueError, match="is converted already: leave recipe, layers, keep, window and blocks out"):
        mhla_hf.recover(tmp_path / "mhla", tmp_path / "other", data, layers="all")
    for given in ({"window": "block"}, {"changes": {**changes, "mhla.feature_map": "relu"}}):
        with pytest.raises(ValueError, match="is converted already: leave recipe"):
            mhla_hf.recover(tmp_path / "mhla", tmp_path / "other", data, **{**options, **given})


def test_another_original_of_a_calibrated_model_is_refused(sources, tmp_path):
    directory, data = sources["bert"]
    shutil.copytree(directory, tmp_path / "original")
    convert_pretrained(tmp_path / "original", tmp_path / "mhla", layers="0,2", block_size=[8], progress=False)
    calibrate_directory(tmp_path / "mhla", data=data, samples=24, fit_steps=0, device="cpu")
    tensors = load_file(tmp_path / "original" / "model.safetensors")
    tensors[min(tensors)] += 0.1
    save_file(tensors, tmp_path / "original" / "model.safetensors", metadata={"format": "pt"})
    options = {"changes": {**SMALL, **EXTRA["bert"]}, "device": "cpu", "progress": False, "stages": ["calibrate"]}
    with pytest.raises(ValueError, match="was not calibrated from the original that was found for it"):
        mhla_hf.recover(tmp_path / "mhla", tmp_path / "out", data, **options)


def test_matching_fits_the_number_of_samples():
    """Each sample is recorded once, in eight batches at least, and seen eight times at most."""
    options = default_recipe("vision").stages["match"]
    fitted = [fitted_to(BatchSource(0, "", range(count)), options) for count in (1437, 76, 3)]
    sizes = [(each.batch_size, each.batches, each.steps, each.held_out) for each in fitted]
    assert sizes == [(16, 64, 300, 8), (9, 8, 64, 1), (1, 3, 24, 1)]


def test_every_layer_gets_a_step(sources, tmp_path):
    report = recover("bert", sources, tmp_path / "out", {"match.steps": 1}, stages=["match"])
    assert len(report.stages["match"]["layers"]) > 1


@pytest.mark.slow
def test_results_of_stages_are_kept_where_asked_for(sources, tmp_path, monkeypatch):
    """A stage's result is deleted when the next one is finished; `keep_stages` keeps them all."""

    def look(*arguments):
        kept.append({path.parent.name for path in (tmp_path / "out" / "work").glob("*/done.json")})
        return distill(*arguments)

    distill, kept = module.runs.distill, []
    monkeypatch.setattr(module.runs, "distill", look)
    recover("bert", sources, tmp_path / "out")
    assert kept == [{"converted", "blockwise"}]
    monkeypatch.undo()
    recover("bert", sources, tmp_path / "kept", keep_stages=True)
    work = tmp_path / "kept" / "work"
    changed = {
        name: load_file(work / name / "weights.safetensors").keys() for name in ("calibrate", "match", "distill")
    }
    assert changed["match"] < changed["distill"] and any(name.endswith("mhla.mixing") for name in changed["match"])
    assert json.loads((work / "match" / "done.json").read_text())["figures"].keys() == {
        "softmax", "converted", "calibrate", "match",
    }  # fmt: skip


def test_a_run_without_a_finished_stage_gives_way(sources, tmp_path, monkeypatch, caplog):
    """Neither the corrected command nor the same one needs --resume, and the same one converts once."""

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(module.runs, "calibrate", stop)
        with pytest.raises(KeyboardInterrupt):
            recover("bert", sources, tmp_path / "out", stages=("calibrate",))
        with pytest.raises(KeyboardInterrupt):
            recover("bert", sources, tmp_path / "out", stages=("calibrate",), seed=1, layers="1")
        assert "restarted, since a run with recipe.layers 'all' (now '1'), seed 0 (now 1)" in caplog.text
        patched.setattr(module, "convert_pretrained", None)
        with pytest.raises(KeyboardInterrupt):
            recover("bert", sources, tmp_path / "out", stages=("calibrate",), seed=1, layers="1")
    report = recover("bert", sources, tmp_path / "out", stages=("calibrate",), seed=1, layers="1", resume=True)
    assert list(report.figures) == ["softmax", "converted", "calibrate"] and report.seed == 1
    assert load("bert", tmp_path / "out").config.mhla["layers"] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "dit"])
def test_stopped_between_stages(kind, sources, tmp_path, monkeypatch):
    """Each stage goes on from what the one before left, and the end is the same."""
    whole = recover(kind, sources, tmp_path / "whole")

    def one_more(stage, *arguments):
        if calls:
            raise KeyboardInterrupt
        calls.append(stage)
        return stage(*arguments)

    for _ in range(4):
        calls: list[str] = []
        with monkeypatch.context() as patched:
            for name in module.STAGES:
                patched.setattr(module.runs, name, partial(one_more, getattr(module.runs, name)))
            try:
                parts = recover(kind, sources, tmp_path / "parts", resume=True)
            except KeyboardInterrupt:
                assert len(calls) == 1
    assert parts.figures == whole.figures
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recipe": "qwen3-0.6b"}, "is for language models, not for text encoders as .*bert"),
        ({"recipe": "paper"}, "recipe paper has no setting for text encoders"),
        ({"layers": "all", "keep": "25%"}, "keep cannot be given with layers"),
        ({"keep": "all"}, "keep='all' must be a share"),
        ({"by": "error"}, "by says how keep chooses layers: give keep too"),
        ({"keep": "25%", "by": "luck"}, "by='luck' is not one of 'lookup', 'error'"),
        ({"keep": "25%", "by": "lookup"}, "by=lookup is for language models, not for text encoders"),
        ({"layers": "auto:2/3:luck"}, "must be a fraction .*, such as auto:2/3, auto:2/3:lookup or auto:2/3:error"),
        ({"budget": 0}, "budget must be a number above 0 and at most .*, got 0"),
        ({"device": "tpu"}, "device='tpu' must be cpu"),
        ({"layers": "0,9"}, "layers 0 to 2"),
        ({"layers": "auto:3/2"}, "must be a fraction above 0 and at most 1"),
        ({"blocks": [2]}, "mhla.blocks: it has no meaning for sequences of text; give mhla.block_size"),
        ({"data": "nothing"}, "data: nothing is neither a folder of"),
        ({"data": "empty"}, "data: the folder empty is empty"),
        ({"keeps": "25%"}, "Unknown recover option keeps.* Did you mean 'keep'?"),
        ({"local_file_only": True}, "Unknown recover option .* Did you mean 'local_files_only'?"),
        ({"data": ""}, "data must be given: a folder of .txt"),
        ({"prompts": "prompts.txt"}, "prompts have no effect on text encoders; leave them out"),
        ({"changes": {"data.max_length": 60_000}}, "max_length must be from 2 to 128 for this model, got 60000"),
    ],
)
def test_mistakes_before_anything_loads(options, message, sources, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "convert_pretrained", None)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        recover("bert", sources, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_language_models_are_fine_tuned_on_chats(tmp_path):
    pytest.importorskip("datasets")
    source = model_directory("llama", tmp_path / "source")
    turn = "<{{ message.role }}>{{ message.content }}|"
    prompt = "{% if add_generation_prompt %}<assistant>{% endif %}"
    tokens = tokenizer()
    tokens.chat_template = "{% for message in messages %}" + turn + "{% endfor %}" + prompt
    tokens.save_pretrained(source)
    chat = [{"from": "human", "value": "what is it?"}, {"from": "gpt", "value": "a block of the same row."}]
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps({"text": "no", "conversations": chat}) + "\n") * 20)
    changes = {"data.samples": 12, "data.held_out": 4, "data.max_length": 32, "finetune.steps": 2}
    changes |= {"finetune.batch_size": 2, "calibrate.batches": 2, "calibrate.batch_size": 2, "calibrate.fit_steps": 2}
    options = {"changes": changes, "stages": ["calibrate", "finetune"], "device": "cpu", "progress": False}
    report = mhla_hf.recover(source, tmp_path / "out", path, **options)
    assert list(report.figures) == ["softmax", "converted", "calibrate", "finetune"]
    assert report.data["samples"] + report.data["held_out"] == 16 and np.isfinite(
        report.figures["finetune"]["bits_per_byte"]
    )
    with pytest.raises(ValueError, match="'body'; its fields are conversations, text: name the one .*text-field"):
        mhla_hf.recover(source, tmp_path / "other", path, **{**options, "changes": {"data.text_field": "body"}})
    assert not (tmp_path / "other").exists()


def test_room_is_checked_before_anything_loads(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "convert_pretrained", None)
    config = json.loads((Path(sources["wan"][0]) / "transformer" / "config.json").read_text())
    width = config["num_attention_heads"] * config["attention_head_dim"]
    large = {"batches": 10**6, "steps": 10**6, "batch_size": 2**16}
    recipes = "--recipe wan-1.3b or wan-1.3b-hybrid or wan-14b needs less"
    message = f"1000000 batches of 2 tokens need (.*) GB, .* free memory, .*: use fewer batches; {recipes}"
    with pytest.raises(ValueError, match=message) as caught:
        recover("wan", sources, tmp_path / "out", {f"blocks.{name}": count for name, count in large.items()})
    # Two hidden states of two tokens, and the prompt before and after the model has embedded it.
    values = 2 * 2 * width + 512 * (width + config["text_dim"])
    needed = float(re.search(message, str(caught.value))[1])
    assert needed == pytest.approx(4 * 2**16 * 10**6 * values / 1e9, rel=0.05)
    monkeypatch.setattr(data, "free_room", lambda folder: (0, 0))
    message = rf"match.cache='disk' needs .*, more than the room on the disk of the output, 0 B: .*; {recipes}"
    with pytest.raises(ValueError, match=message):
        changes = {"blockwise": None, "match.cache": "disk", "match.batches": 10_000, "match.steps": 10_000}
        recover("wan", sources, tmp_path / "out", {**changes, "data.samples": 10_000})
    assert not (tmp_path / "out").exists()


def test_image_to_video_is_refused_before_the_data_are_read(tmp_path):
    tiny.wan_pipeline(image_to_video=True).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="this is an image-to-video model, which cannot be recovered or trained here"):
        mhla_hf.recover(tmp_path / "source", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_command(sources, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    source, data = sources["bert"]
    values = {**SMALL, **EXTRA["bert"], "match.steps": 4}
    options = [part for name, value in values.items() for part in (_option(name), str(value))]
    command = ["recover", str(source), str(tmp_path / "out"), "--data", data, "--device", "cpu", *options]
    done = CliRunner().invoke(app, [*command, "--stages", "calibrate,match", "--json", str(tmp_path / "figures.json")])
    assert done.exit_code == 0, done.output
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures == json.loads((tmp_path / "out" / "report.json").read_text())
    card = ModelCard.load(tmp_path / "out" / "README.md")
    row = next(line for line in card.text.splitlines() if line.startswith("| matched |"))
    assert f"{figures['figures']['match']['cosine']:.4g}"[:5] in row and "Seed 0." in card.text
    for text in (
        "softmax (original)",
        "converted",
        "calibrated",
        "matched",
        "cosine to the original",
        "CPU seconds",
        "unchanged",
    ):
        assert text in done.output


def _option(name: str) -> str:
    return f"--{name.removeprefix('data.').replace('.', '-').replace('_', '-')}"


@pytest.mark.slow
@pytest.mark.parametrize("family, make", CALLS.items())
def test_families_that_learn_from_calls_need_no_data(family, make, tmp_path):
    source = tmp_path / "source"
    pipeline = make()
    if pipeline.text_encoder is None:
        tiny_joint.with_encoders(pipeline)
    pipeline.save_pretrained(source)
    if family in WITHOUT_OBJECTIVE:
        with pytest.raises(ValueError, match=f"data have no effect on {family} models"):
            mhla_hf.recover(source, tmp_path / "out", "digits")
    else:
        with pytest.raises(ValueError, match="data must be given to distill or finetune: a folder of"):
            mhla_hf.recover(source, tmp_path / "out", stages=["distill"])
    changes = {
        "data.samples": 6,
        "data.held_out": 2,
        "calibrate.batches": 4,
        "calibrate.fit_steps": 6,
        "match.steps": 4,
        "match.batches": 4,
    }
    changes["blockwise.batches"] = 4
    if family in ("qwen-image", "flux", "chroma"):
        changes |= {"data.height": 64, "data.width": 96, "mhla.blocks": [2, 2]}
    elif family != "pixart":
        changes |= {"data.height": 32, "data.width": 64, "data.num_frames": 5, "mhla.blocks": [2, 2, 2]}
    report = mhla_hf.recover(source, tmp_path / "out", changes=changes, device="cpu", progress=False)
    stages = ["calibrate", "match", "blockwise"]
    assert list(report.figures) == ["softmax", "converted", *stages]
    assert report.figures[stages[-1]]["cosine"] > report.figures["converted"]["cosine"]


def different_bytes(value) -> int:
    """Bytes of the tensors in nested values, each memory once."""
    memory = {leaf.data_ptr(): leaf.nbytes for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)}
    return sum(memory.values())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "wan-vace" else pytest.mark.slow) for name in [*CALLS, *KINDS]]
)
def test_estimates_agree_with_what_stages_keep(name, sources, tmp_path, monkeypatch):
    """With the records of real runs at a tiny size, for every family and whatever matching learns from."""
    changes = {"calibrate": None, "distill": None, "match.steps": 4, "match.batches": 4, "match.cache": "memory"}
    changes |= {"data.samples": 20, "data.held_out": 2}
    if name in CALLS:
        source, samples, pipeline = tmp_path / "source", None, CALLS[name]()
        if pipeline.text_encoder is None:
            tiny_joint.with_encoders(pipeline)
        pipeline.save_pretrained(source)
        changes |= {"data.height": 128, "data.width": 192}
        changes |= {} if name == "hunyuan-video-1.5" else {"data.max_length": 16}
        changes |= {} if name in IMAGES else {"data.num_frames": 9}
    else:
        source, samples = sources[name]
        changes |= EXTRA.get(name, {}) | {"match.batches": 4, "match.batch_size": 1 if name in ("wan", "llama") else 2}
    if name not in ("llama", "bert"):
        changes |= {"blockwise.steps": 4, "blockwise.batches": 4}
    kept, samples_of = {"match": 0, "blocks": 0}, {"match": [], "blocks": []}
    put, start = Records.put, _Records.start.__func__

    def measured_put(self, number, calls):
        put(self, number, calls)
        kept["match"] += different_bytes(self.calls[number])
        samples_of["match"].append(len(next(iter(calls.values())).hidden_states))

    def measured_start(cls, *arguments):
        records = start(cls, *arguments)
        for number, hidden_states in records.student.items():
            parts = [records.arguments[number], records.added[number], records.original_added[number]]
            kept["blocks"] += different_bytes(parts) + 2 * hidden_states.nbytes
            samples_of["blocks"].append(len(hidden_states))
        return records

    monkeypatch.setattr(Records, "put", measured_put)
    monkeypatch.setattr(_Records, "start", classmethod(measured_start))
    mhla_hf.recover(source, tmp_path / "out", samples, changes=changes, device="cpu", progress=False)
    candidate = find_candidate(source)
    recipe = default_recipe(candidate.family(on_meta(candidate, candidate.options(candidate.grid()))))
    row = training_memory(candidate, recipe.changed(changes))
    if name == "ltx2":
        # Every other call is of one sample in place of two; here chance has drawn four of them.
        kept = {stage: size * 1.5 / np.mean(samples_of[stage]) for stage, size in kept.items()}
    assert [row["records"], row["block_records"]] == pytest.approx([kept["match"], kept["blocks"]], rel=0.1)
    assert all(kept.values()) or name in ("llama", "bert")


@pytest.mark.parametrize(
    "make, size",
    {
        "wan-vace": (tiny.vace_pipeline, (32, 32, 5)),
        "ltx": (tiny.ltx_pipeline, (32, 32, 5)),
        "hunyuan-video": (tiny_joint.hunyuan_video_pipeline, (32, 32, 5)),
        "flux": (tiny_joint.flux_pipeline, (64, 64)),
    }.values(),
)
def test_families_that_need_no_data_are_distilled_on_data(make, size, tmp_path):
    pipeline = make()
    if pipeline.text_encoder is None:
        tiny_joint.with_encoders(pipeline)
    pipeline.save_pretrained(tmp_path / "source")
    changes = {"data.samples": 6, "data.held_out": 2, "data.max_length": 16, "mhla.blocks": [2] * len(size)}
    changes |= {f"data.{name}": side for name, side in zip(("height", "width", "num_frames"), size)}
    changes |= {"calibrate": None, "blockwise": None, "match.steps": 4, "match.batches": 4}
    for stage in ("distill", "finetune"):
        changes |= {f"{stage}.steps": 2, f"{stage}.batch_size": 2}
    report = mhla_hf.recover(
        tmp_path / "source", tmp_path / "out", "digits", changes=changes, device="cpu", progress=False
    )
    assert list(report.figures) == ["softmax", "converted", "match", "distill", "finetune"]
    assert all(np.isfinite(figures["loss"]) for figures in report.figures.values())


def test_calls_are_recorded_once_and_a_run_goes_on_elsewhere(tmp_path, monkeypatch):
    """Samples differ a little from device to device; prompts, sizes, seed and weights do not."""
    source, out = tmp_path / "source", tmp_path / "out"
    pipeline = tiny.vace_pipeline()
    pipeline.save_pretrained(source)
    sizes = {"data.height": 32, "data.width": 64, "data.num_frames": 5, "mhla.blocks": [2, 2, 2]}
    few = {"data.samples": 6, "data.held_out": 2, "calibrate.batches": 4, "calibrate.fit_steps": 2, "match.steps": 2}
    options = {"changes": {**sizes, **few, "match.batches": 4, "blockwise": None}, "device": "cpu", "progress": False}
    record = data.probes.pipeline_batches

    def stop(*arguments):
        raise KeyboardInterrupt

    def elsewhere(*arguments, **chosen):
        calls = record(*arguments, **chosen)
        return {
            name: [{**call, "hidden_states": 1.001 * call["hidden_states"]} for call in calls[name]] for name in calls
        }

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.runs, "match", stop)
        mhla_hf.recover(source, out, **options)
    (kept,) = (out / "work" / "data").glob("*.safetensors")
    calls = load_calls(kept)
    assert len(calls) == 8 and calls[0]["control_hidden_states"].shape[2:] == calls[0]["hidden_states"].shape[2:]
    kept.unlink()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.runs, "match", stop)
        patch.setattr(data.probes, "pipeline_batches", elsewhere)
        mhla_hf.recover(source, out, resume=True, **options)
    assert torch.equal(load_calls(kept)[0]["hidden_states"], 1.001 * calls[0]["hidden_states"])
    with monkeypatch.context() as patch:
        patch.setattr(data.probes, "pipeline_batches", stop)
        report = mhla_hf.recover(source, out, resume=True, **options)
    assert list(report.figures) == ["softmax", "converted", "calibrate", "match"]


@pytest.mark.parametrize("changed", ["weights", "text encoder", "seed", "size"])
def test_calls_of_something_else_are_told_apart(changed, tmp_path):
    source = tmp_path / "source"
    pipeline = tiny.vace_pipeline()
    pipeline.save_pretrained(source)
    sizes = {"data.height": 32, "data.width": 64, "data.num_frames": 5, "data.samples": 4, "data.held_out": 1}
    recipe = default_recipe("wan-vace").changed(sizes)

    def fingerprint(recipe, seed=0):
        options = {"data": None, "prompts": None, "cache": tmp_path / "data", "progress": False}
        directory = ModelDirectory.read(source)
        opened = RecoveryData(directory=directory, recipe=recipe, hub={}, seed=seed, **options)
        return opened.open(ModelDirectory.read(tmp_path / "mhla").load()).fingerprint

    mhla_hf.convert_pretrained(source, tmp_path / "mhla", blocks=[2, 2, 2])
    before = fingerprint(recipe)
    assert fingerprint(recipe) == before
    part = {"weights": pipeline.transformer, "text encoder": pipeline.text_encoder}.get(changed)
    if part is not None:
        with torch.no_grad():
            next(part.parameters()).view(-1)[0] += 1
        pipeline.save_pretrained(source)
    other = recipe.changed({"data.width": 32}) if changed == "size" else recipe
    assert fingerprint(other, seed=int(changed == "seed")) != before


def test_animate_is_refused(tmp_path):
    case = WanAnimateCase()
    pipeline = tiny.wan_pipeline(image_to_video=True)
    pipeline.register_modules(transformer=case.make())
    pipeline.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="WanAnimateTransformer3DModel, which recover cannot make samples for yet"):
        mhla_hf.recover(tmp_path, tmp_path / "out", progress=False)
