# SPDX-License-Identifier: Apache-2.0
"""Metadata for model cards, read off directories."""

import pytest

from mhla_hf import convert_pretrained
from mhla_hf.hub.card import card_data
from mhla_hf.utils.model_cards import is_generated, is_own_card, mark_generated
from tests import tiny
from tests.edits import write_json


SOURCE_CARD = "---\nlicense: other\nlicense_name: digits\nlicense_link: LICENSE\n---\n# Digits\n"


def pipeline(directory, class_name, model_class, **config):
    write_json(directory / "model_index.json", {"_class_name": class_name, "transformer": ["diffusers", model_class]})
    write_json(directory / "transformer/config.json", {"_class_name": model_class, **config})


def model(directory, class_name, model_type):
    config = {"architectures": [class_name], "model_type": model_type, "mhla": {"block_size": 4}}
    write_json(directory / "config.json", config)


@pytest.mark.parametrize(
    "class_name, model_class, family, task",
    [
        ("WanPipeline", "MHLAWanTransformer3DModel", "wan", "text-to-video"),
        ("WanImageToVideoPipeline", "MHLAWanTransformer3DModel", "wan", "image-to-video"),
        ("SanaSprintImg2ImgPipeline", "MHLASanaTransformer2DModel", "sana", "image-to-image"),
        ("DiTPipeline", "MHLADiTTransformer2DModel", "dit", "unconditional-image-generation"),
    ],
)
def test_pipelines(tmp_path, class_name, model_class, family, task):
    pipeline(tmp_path, class_name, model_class)
    data = card_data(tmp_path)
    assert (data.library_name, data.pipeline_tag) == ("diffusers", task)
    assert data.tags == ["mhla", "linear-attention", family]
    assert data.base_model is None and data.license is None
    assert "base_model_relation" not in data.to_dict()


@pytest.mark.parametrize(
    "class_name, model_type, task",
    [
        ("Qwen3ForCausalLM", "qwen3", "text-generation"),
        ("ViTModel", "vit", "image-feature-extraction"),
        ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", "image-text-to-text"),
    ],
)
def test_models_of_transformers(tmp_path, class_name, model_type, task):
    model(tmp_path, class_name, model_type)
    data = card_data(tmp_path)
    assert (data.library_name, data.pipeline_tag) == ("transformers", task)
    assert data.tags == ["mhla", "linear-attention", model_type]


def test_conversions_carry_the_licence(tmp_path):
    source, converted = tmp_path / "source", tmp_path / "converted"
    tiny.wan_pipeline().save_pretrained(source)
    (source / "README.md").write_text(SOURCE_CARD)
    convert_pretrained(source, converted, {"blocks": [2, 1, 2]}, progress=False)
    readme = converted / "README.md"
    assert not readme.exists() and not is_own_card(converted)
    licence = {"license": "other", "license_name": "digits", "license_link": "LICENSE"}
    assert licence.items() <= card_data(converted).to_dict().items()
    readme.write_text("---\nlicense: mit\n---\n# Mine\n")
    assert is_own_card(converted)
    assert card_data(converted).to_dict()["license"] == "mit"
    assert "license_link" not in card_data(converted).to_dict()


def test_a_card_is_its_users_when_it_is_edited(tmp_path):
    readme = tmp_path / "README.md"
    generated = mark_generated("---\nlicense: mit\n---\n\n# A model\n")
    readme.write_text(generated)
    assert is_generated(generated) and not is_own_card(tmp_path)
    # Version control on Windows.
    readme.write_bytes(generated.replace("\n", "\r\n").encode())
    assert not is_own_card(tmp_path)
    for edited in (
        generated.replace("mit", "apache-2.0"),
        generated.replace("A model", "My model"),
        generated + "\nMore of mine.\n",
        generated[: generated.index("<!--")],
        "",
    ):
        readme.write_text(edited)
        assert is_own_card(tmp_path), edited
    readme.write_bytes(b"\xff\xfe no UTF-8")
    assert is_own_card(tmp_path)
