# SPDX-License-Identifier: Apache-2.0
"""DiT and PixArt checkpoints of older days, whose class is called `Transformer2DModel`."""

import inspect
import json
import shutil

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, Transformer2DModel
from safetensors.torch import load_file

from mhla_hf import convert_pretrained, load_pipeline
from mhla_hf.models.registry import current_class
from tests.families.image_pipeline_checks import command
from tests.families.model_case import assert_same_parameters, recorded_warnings
from tests.families.test_dit import PixArtPipelines
from tests.families.test_dit import TestDiTPipeline as DiTPipelines


WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
FAMILY_CHECKS = {"dit": (DiTPipelines(), "ada_norm_zero"), "pixart": (PixArtPipelines(), "ada_norm_single")}


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def make_legacy(folder, **changes):
    """Rewrites a pipeline directory as it was saved before each model had a class of its own."""
    edit_json(folder / "model_index.json", transformer=["diffusers", "Transformer2DModel"])
    config = json.loads((folder / "transformer/config.json").read_text())
    # The one class had the arguments of all its models, and wrote them all.
    parameters = inspect.signature(Transformer2DModel.__init__).parameters.values()
    defaults = {one.name: one.default for one in parameters if one.name != "self"}
    old = {**defaults, **config, "_class_name": "Transformer2DModel", "_diffusers_version": "0.12.0.dev0"}
    (folder / "transformer/config.json").write_text(json.dumps({**old, **changes}))


@pytest.fixture(params=FAMILY_CHECKS, scope="module")
def family(request, tmp_path_factory):
    """The family's checks, an ordinary pipeline directory and the same as a legacy one; tests do not change them."""
    checks, norm_type = FAMILY_CHECKS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    checks.make_pipeline().save_pretrained(folder / "ordinary")
    assert json.loads((folder / "ordinary/transformer/config.json").read_text())["norm_type"] == norm_type
    shutil.copytree(folder / "ordinary", folder / "legacy")
    make_legacy(folder / "legacy")
    return checks, folder / "ordinary", folder / "legacy"


def test_a_legacy_pipeline_loads_with_mhla(family, tmp_path):
    checks, ordinary, legacy = family
    with recorded_warnings() as warnings:
        pipeline = load_pipeline(legacy, mhla=checks.mhla)
    assert len(warnings) == 1 and "newly initialised" in warnings[0]
    expected = load_pipeline(ordinary, mhla=checks.mhla)
    assert type(pipeline.transformer) is checks.mhla_class
    config = {name: value for name, value in expected.transformer.config.items() if not name.startswith("_")}
    # As in diffusers' own classes, entries without a meaning stay.
    assert config.items() <= {**pipeline.transformer.config}.items()
    for actual, wanted in zip(checks.images(pipeline), checks.images(expected)):
        np.testing.assert_allclose(actual, wanted, atol=1e-5)
    pipeline.save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["transformer"] == ["mhla_hf", checks.mhla_class.__name__]
    assert_same_parameters(DiffusionPipeline.from_pretrained(tmp_path).transformer, expected.transformer)


def test_a_legacy_pipeline_converts_as_an_ordinary_one(family, tmp_path):
    checks, ordinary, legacy = family
    for source, name in ((ordinary, "new"), (legacy, "old")):
        result = command("convert", source, tmp_path / name, *checks.typed())
        assert result.exit_code == 0, result.output
    new, old = tmp_path / "new", tmp_path / "old"
    assert json.loads((old / "model_index.json").read_text()) == json.loads((new / "model_index.json").read_text())
    configs = [json.loads((folder / "transformer/config.json").read_text()) for folder in (old, new)]
    assert {**configs[0], "_diffusers_version": ""} == {**configs[1], "_diffusers_version": ""}
    weights = [load_file(folder / WEIGHTS) for folder in (old, new)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][key]) for key, tensor in weights[0].items())
    notes = json.loads((old / "conversion.json").read_text())["components"]["transformer"]
    assert notes["source_class"] == checks.mhla_class.__name__.removeprefix("MHLA")
    pipelines = [DiffusionPipeline.from_pretrained(folder) for folder in (old, new)]
    assert type(pipelines[0].transformer) is checks.mhla_class
    for actual, wanted in zip(*map(checks.images, pipelines)):
        np.testing.assert_allclose(actual, wanted, atol=1e-5)


def test_other_legacy_models_are_refused(family, tmp_path):
    _, _, legacy = family
    shutil.copytree(legacy, tmp_path / "other")
    edit_json(tmp_path / "other/transformer/config.json", norm_type="layer_norm")
    message = r"norm_type='layer_norm' .* 'ada_norm_zero' \(DiTTr.*\), 'ada_norm_single' \(PixArtTr"
    with pytest.raises(ValueError, match=message):
        load_pipeline(tmp_path / "other")
    for source in (tmp_path / "other", tmp_path / "other/transformer"):
        with pytest.raises(ValueError, match=message):
            convert_pretrained(source, tmp_path / "mhla", progress=False)
    assert not (tmp_path / "mhla").exists()
    with pytest.raises(ValueError, match="norm_type=None"):
        current_class("Transformer2DModel", {})


def test_pickled_weights_are_refused_with_a_way_out(family, tmp_path):
    """The oldest repositories have their weights as .bin files only."""
    checks, _, legacy = family
    source = tmp_path / "pickles"
    shutil.copytree(legacy, source)
    torch.save(load_file(source / WEIGHTS), source / "transformer/diffusion_pytorch_model.bin")
    (source / WEIGHTS).unlink()
    with pytest.raises(ValueError, match="only as diffusion_pytorch_model.bin; .* save_pretrained first"):
        convert_pretrained(source, tmp_path / "mhla", checks.mhla, progress=False)
    assert not (tmp_path / "mhla").exists()
    with pytest.raises(OSError, match="diffusion_pytorch_model.safetensors"):
        load_pipeline(source, mhla=checks.mhla)
    # Both ways out.
    pipeline = load_pipeline(source, mhla=checks.mhla, use_safetensors=None)
    assert type(pipeline.transformer) is checks.mhla_class
    DiffusionPipeline.from_pretrained(source).save_pretrained(tmp_path / "rewritten")
    convert_pretrained(tmp_path / "rewritten", tmp_path / "mhla", checks.mhla, progress=False)
    assert_same_parameters(load_pipeline(tmp_path / "mhla").transformer, pipeline.transformer)
