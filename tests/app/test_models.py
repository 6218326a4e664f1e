# SPDX-License-Identifier: Apache-2.0
"""Opening what is compared: where the original is found, and what is refused."""

import json
import shutil

import pytest
import torch

from mhla_hf.app import create_app
from mhla_hf.app.diffusion import DiffusionGenerator
from mhla_hf.app.limits import Limits
from mhla_hf.app.mixing import ALL_HEADS, MixingBrowser
from mhla_hf.app.models import open_comparison
from mhla_hf.demo import base_pipeline_directory
from tests import forget_path


@pytest.fixture
def moved(saved_pipeline, tmp_path):
    """The MHLA pipeline in a folder without its original."""
    return shutil.copytree(saved_pipeline.model, tmp_path / "moved")


def test_pipelines_share_all_but_denoisers_and_schedulers(saved_pipeline):
    comparison = open_comparison(saved_pipeline.model, device="cpu")
    assert (comparison.name, comparison.base, comparison.kind) == ("tiny-mhla", "tiny-wan", "video")
    assert type(comparison.original.transformer).__name__ == "WanTransformer3DModel"
    assert comparison.original.vae is comparison.mhla.vae
    assert comparison.original.text_encoder is comparison.mhla.text_encoder
    assert comparison.original.scheduler is not comparison.mhla.scheduler
    assert not comparison.is_recovered


def test_a_record_of_training_counts_as_recovered(moved, saved_pipeline):
    record = json.loads((moved / "conversion.json").read_text())
    for stages, expected in [({"calibrate": {}}, False), ({"calibrate": {}, "distill": {}}, True)]:
        (moved / "conversion.json").write_text(json.dumps({**record, "recovery": {"stages": stages}}))
        assert open_comparison(moved, saved_pipeline.base, device="cpu").is_recovered == expected
    # Whatever stands in a record of others.
    for damaged in ({"recovery": 7}, {"recovery": {"stages": [1]}}, {"calibration": [], "source": 3}):
        (moved / "conversion.json").write_text(json.dumps(damaged))
        assert not open_comparison(moved, saved_pipeline.base, device="cpu").is_recovered


def test_the_original_is_found_where_the_user_says(moved, saved_pipeline):
    forget_path(moved)
    with pytest.raises(ValueError, match="the original of .*moved is not found .*tiny-wan.*--base"):
        open_comparison(moved, device="cpu")
    assert open_comparison(moved, saved_pipeline.base, device="cpu").base == "tiny-wan"


def test_the_packaged_original_is_found_by_the_checksum_of_its_weights(tmp_path):
    from mhla_hf import convert_pretrained

    convert_pretrained(base_pipeline_directory(), tmp_path / "digits", {"blocks": [5, 4, 4]}, progress=False)
    forget_path(tmp_path / "digits")
    comparison = open_comparison(tmp_path / "digits", device="cpu")
    assert comparison.base == base_pipeline_directory().name and comparison.is_demo
    path = tmp_path / "digits" / "conversion.json"
    record = json.loads(path.read_text())
    for weights in record["components"]["transformer"]["weight_sets"][0]["source_files"].values():
        weights["sha256"] = "0" * 64
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match="is not found"):
        open_comparison(tmp_path / "digits", device="cpu")


def test_what_cannot_be_compared_is_refused(saved_pipeline, saved_language_model, tmp_path):
    with pytest.raises(ValueError, match="is no MHLA model: convert it first"):
        open_comparison(saved_pipeline.base)
    with pytest.raises(ValueError, match="it has no softmax version of transformer"):
        open_comparison(saved_pipeline.model, saved_language_model.base)
    with pytest.raises(ValueError, match="transformer alone"):
        open_comparison(saved_pipeline.model / "transformer", saved_pipeline.base / "transformer")
    with pytest.raises(ValueError, match="neither a directory nor a Hub id"):
        open_comparison(tmp_path / "missing")
    with pytest.raises(ValueError, match="base is given without a model"):
        create_app(None, saved_pipeline.base)


def test_encoders_are_refused(tmp_path):
    from transformers import BertConfig, BertModel

    from mhla_hf import convert_pretrained

    torch.manual_seed(0)
    config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    BertModel(config).save_pretrained(tmp_path / "bert")
    convert_pretrained(tmp_path / "bert", tmp_path / "mhla", {"block_size": [16]}, progress=False)
    with pytest.raises(ValueError, match="BertModel, which generates nothing; look at it with mhla-hf inspect"):
        open_comparison(tmp_path / "mhla")


def test_weights_of_language_models_lie_on_their_tokens(saved_language_model):
    browser = MixingBrowser(open_comparison(saved_language_model.model, device="cpu"))
    layer = browser.layers[0]
    first, last = browser.blocks(layer)
    assert browser._layout(layer).grid == (16 * (last - first + 1),)
    assert browser.picture(layer, ALL_HEADS, last).width > 300


def test_sizes_and_bounds_are_the_models(saved_pipeline):
    comparison = open_comparison(saved_pipeline.model, device="cpu")
    fields = {field.name: field for field in DiffusionGenerator(comparison, Limits(pixels=32 * 64, frames=11)).fields}
    sizes = {name: (fields[name].default, fields[name].most) for name in ("height", "width", "num_frames")}
    assert sizes == {"height": (32, 128), "width": (64, 128), "num_frames": (9, 9)}
