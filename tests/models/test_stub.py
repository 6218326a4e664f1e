# SPDX-License-Identifier: Apache-2.0
"""The file by which repositories load with `trust_remote_code=True`; `tests/hub/test_push.py` loads them so."""

import importlib.util
import json
import subprocess
import sys
import textwrap

import pytest
from huggingface_hub import ModelCard
from transformers import AutoConfig, BertConfig, BertModel, CLIPConfig, CLIPModel, LlamaForCausalLM

from mhla_hf import MHLAWanTransformer3DModel, convert, convert_pretrained
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.models.stub import LIBRARY, STUB, add_stub, stub_files
from mhla_hf.models.weight_files import STUB_MODULE as MODULE
from mhla_hf.recovery.calibration import calibrate_directory
from tests import tiny
from tests.integrations.transformers.shrinking import tiny_config
from tests.recovery.sources import model_directory, text_folder


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
    files = stub_files(ModelDirectory.read(pipeline))
    index = json.loads(files.pop("model_index.json"))
    assert index["transformer"] == [LIBRARY, "MHLAWanTransformer3DModel"]
    assert {**index, "transformer": None} == {
        **json.loads((pipeline / "model_index.json").read_text()),
        "transformer": None,
    }
    assert files == {f"transformer/{LIBRARY}.py": STUB}


def test_models_alone_name_the_stub_in_their_configuration(pipeline):
    files = stub_files(ModelDirectory.read(pipeline / "transformer"))
    config = json.loads(files["config.json"])
    assert config["auto_map"] == {"AutoModel": f"{MODULE}.MHLAWanTransformer3DModel"}
    assert config == json.loads((pipeline / "transformer/config.json").read_text())
    # As they are saved.
    assert files[f"{MODULE}.py"] == STUB == (pipeline / f"transformer/{MODULE}.py").read_text()


def test_softmax_models_get_no_stub(tmp_path):
    tiny.wan_pipeline().save_pretrained(tmp_path)
    assert stub_files(ModelDirectory.read(tmp_path)) == {}
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
    assert "trust_remote_code" in named
    saved = json.loads((tmp_path / "saved/config.json").read_text())["transformers_weights"]
    assert saved == named


@pytest.mark.slow
def test_saved_models_are_refused_where_the_package_is_not_imported(encoder, tmp_path):
    softmax = model_directory("llama", tmp_path / "softmax")
    convert_pretrained(softmax, tmp_path / "converted", {"block_size": 4}, progress=False)
    path = tmp_path / "converted/config.json"
    written = json.loads(path.read_text())
    # As an earlier version wrote it.
    path.write_text(json.dumps({name: value for name, value in written.items() if name != "transformers_weights"}))
    texts = text_folder(tmp_path / "texts", files=1)
    calibrate_directory(tmp_path / "converted", output=tmp_path / "calibrated", data=str(texts), samples=2)
    assert "transformers_weights" not in json.loads(path.read_text())
    path.write_text(json.dumps(written))
    CLIPModel._from_config(tiny_config(CLIPConfig), attn_implementation="mhla").save_pretrained(tmp_path / "towers")
    cases = [("AutoModel", str(encoder)), ("AutoModel", str(tmp_path / "towers"))]
    cases += [("CLIPVisionModel", str(tmp_path / "towers")), ("CLIPTextModel", str(tmp_path / "towers"))]
    cases += [("AutoModelForCausalLM", str(tmp_path / name)) for name in ("converted", "calibrated")]
    program = """
        import json, sys
        # As on a machine without the package: importing it fails.
        sys.modules["mhla_hf"] = None
        import transformers

        for name, folder in json.loads(sys.argv[1]):
            for options in ({}, {"attn_implementation": "sdpa"}, {"attn_implementation": "eager"}):
                try:
                    getattr(transformers, name).from_pretrained(folder, **options)
                except ValueError as error:
                    assert "install mhla_hf from a clone, then import mhla_hf first" in str(error), error
                else:
                    raise AssertionError(f"{name} loads {folder} with {options}")
    """
    command = [sys.executable, "-c", textwrap.dedent(program), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # With it they are what they were.
    assert LlamaForCausalLM.from_pretrained(tmp_path / "calibrated").config._attn_implementation == "mhla"
    assert CLIPModel.from_pretrained(tmp_path / "towers").config.vision_config._attn_implementation == "mhla"
    read = CLIPConfig.from_json_file(tmp_path / "towers/config.json")
    assert not any(hasattr(one, "transformers_weights") for one in (read, read.text_config, read.vision_config))


def test_softmax_models_and_towers_are_saved_without_a_refusal(encoder, tmp_path):
    def entries(model):
        model.save_pretrained(tmp_path / "saved")
        config = json.loads((tmp_path / "saved/config.json").read_text())
        towers = {name: value for name, value in config.items() if name.endswith("_config")}
        return ["transformers_weights" in one for one in (config, *towers.values())]

    towers = CLIPModel(tiny_config(CLIPConfig))
    assert entries(towers) == [False, False, False]
    assert entries(convert(towers, {"vision_config": {}})) == [True, False, True]
    model = BertModel.from_pretrained(encoder)
    assert entries(model) == [True]
    model.config.mhla = None
    assert entries(model) == [False]


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
