# SPDX-License-Identifier: Apache-2.0
"""The file by which repositories load with `trust_remote_code=True`; `tests/hub/test_push.py` loads them so."""

import importlib.util
import json
import sys

import pytest
from huggingface_hub import ModelCard
from transformers import AutoConfig, BertConfig, BertModel

from mhla_hf import MHLAWanTransformer3DModel
from mhla_hf.models.source import read_source
from mhla_hf.models.stub import LIBRARY, MODULE, STUB, add_stub, stub_files
from tests import tiny


@pytest.fixture
def pipeline(tmp_path):
    tiny.wan_pipeline(MHLAWanTransformer3DModel, mhla={"blocks": [2, 1, 2]}).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def encoder(tmp_path):
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertModel._from_config(config, attn_implementation="mhla").save_pretrained(tmp_path)
    return tmp_path


def test_pipelines_name_the_package_as_library(pipeline):
    files = stub_files(read_source(pipeline))
    index = json.loads(files.pop("model_index.json"))
    assert index["transformer"] == [LIBRARY, "MHLAWanTransformer3DModel"]
    assert {**index, "transformer": None} == {
        **json.loads((pipeline / "model_index.json").read_text()),
        "transformer": None,
    }
    assert files == {f"transformer/{LIBRARY}.py": STUB}


def test_models_alone_name_the_stub_in_their_configuration(pipeline):
    files = stub_files(read_source(pipeline / "transformer"))
    config = json.loads(files["config.json"])
    assert config.pop("auto_map") == {"AutoModel": f"{MODULE}.MHLAWanTransformer3DModel"}
    assert config == json.loads((pipeline / "transformer/config.json").read_text())
    assert files[f"{MODULE}.py"] == STUB


def test_softmax_models_get_no_stub(tmp_path):
    tiny.wan_pipeline().save_pretrained(tmp_path)
    assert stub_files(read_source(tmp_path)) == {}
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    add_stub(tmp_path)
    add_stub(tmp_path / "tokenizer")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_adding_a_stub_twice_changes_nothing_and_keeps_the_card(encoder):
    card = "---\nlicense: mit\ntags:\n- bert\n---\n# Mine\n"
    (encoder / "README.md").write_text(card)
    add_stub(encoder)
    first = {path: path.read_bytes() for path in encoder.iterdir()}
    add_stub(encoder)
    assert {path: path.read_bytes() for path in encoder.iterdir()} == first
    written = ModelCard.load(encoder / "README.md")
    assert written.data.tags == ["bert", "mhla", "linear-attention"]
    assert written.data.license == "mit" and "# Mine" in written.text


def test_a_card_with_damaged_metadata_is_left_alone(encoder):
    (encoder / "README.md").write_text("---\nlicense: [\n---\n# Mine\n")
    add_stub(encoder)
    assert (encoder / "README.md").read_text() == "---\nlicense: [\n---\n# Mine\n"


def test_models_are_saved_without_the_entry_for_the_stub(encoder, tmp_path):
    add_stub(encoder)
    config = AutoConfig.from_pretrained(encoder)
    assert config.auto_map == {"AutoConfig": f"{MODULE}.Configuration"}
    model = BertModel.from_pretrained(encoder, config=config)
    model.save_pretrained(tmp_path / "saved")
    assert "auto_map" not in json.loads((tmp_path / "saved/config.json").read_text())


def test_only_this_package_reads_the_configuration_of_a_pushed_model(encoder, tmp_path):
    add_stub(encoder)
    named = json.loads((encoder / "config.json").read_text())["transformers_weights"]
    assert "install mhla_hf from a clone" in named and not named.endswith((".safetensors", ".safetensors.index.json"))
    config = AutoConfig.from_pretrained(encoder)
    assert not hasattr(config, "transformers_weights")
    # Files that others name are theirs.
    config.transformers_weights = "model.safetensors"
    assert BertConfig.from_dict(config.to_dict()).transformers_weights == "model.safetensors"
    BertModel.from_pretrained(encoder, config=config).save_pretrained(tmp_path / "saved")
    assert "transformers_weights" not in json.loads((tmp_path / "saved/config.json").read_text())


def test_auto_maps_of_others_are_kept(encoder, tmp_path):
    path, others = encoder / "config.json", {"AutoTokenizer": ["tokens.Tokens", None]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": others}))
    add_stub(encoder)
    assert json.loads(path.read_text())["auto_map"] == {**others, "AutoConfig": f"{MODULE}.Configuration"}
    BertModel.from_pretrained(encoder).save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["auto_map"] == others


def test_the_stub_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "modeling_mhla.py"
    path.write_text(STUB)
    spec = importlib.util.spec_from_file_location("stub_without_package", path)
    monkeypatch.setitem(sys.modules, "mhla_hf", None)
    with pytest.raises(ImportError, match="^This model needs .*: pip install . in a clone of its repository$"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
