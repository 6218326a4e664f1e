# SPDX-License-Identifier: Apache-2.0
"""Converting directories of transformers models: the same as loading them as MHLA, and what is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPModel,
    PreTrainedTokenizerFast,
)

import mhla_hf
from mhla_hf.conversion import convert_pretrained
from mhla_hf.layers.mhla import MHLA
from tests.command_line import run_command
from tests.edits import edit_json, edit_weights

from ..integrations.transformers.tiny_models import FAMILIES, clip_model, inputs, softmax_model


TEXT_OPTIONS = {"block_size": [4]}
IMAGE_OPTIONS = {"blocks": [2, 2]}


def save(name, folder, *, max_shard_size="1GB", dtype=None, **sizes):
    """A tiny softmax model on disk."""
    softmax_model(name, **sizes).to(dtype or torch.float32).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def convert(source, destination, mhla=None, **options):
    return convert_pretrained(source, destination, mhla, progress=False, **options)


def options_of(name):
    return IMAGE_OPTIONS if FAMILIES[name].kind == "vision" else TEXT_OPTIONS


def weights_of(folder):
    """Every tensor of a directory by its name in the files."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def assert_same_as_loading(source, converted, model_class, mhla, example, tmp_path):
    """The converted directory is what `from_pretrained` with MHLA and `save_pretrained` make of the source."""
    expected = model_class.from_pretrained(source, attn_implementation="mhla", mhla=mhla).eval()
    expected.save_pretrained(tmp_path / "expected")
    loaded, info = model_class.from_pretrained(converted, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state = loaded.state_dict()
    assert state.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor) and state[name].dtype == tensor.dtype, name
    assert (converted / "config.json").read_text() == (tmp_path / "expected/config.json").read_text()
    files = weights_of(tmp_path / "expected")
    assert {name: tensor.shape for name, tensor in weights_of(converted).items()} == {
        name: tensor.shape for name, tensor in files.items()
    }
    with torch.no_grad():
        # Equal weights at other addresses: BLAS may sum in another order.
        torch.testing.assert_close(loaded.eval()(**example)[0], expected(**example)[0], rtol=1e-5, atol=1e-5)
    return loaded


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory):
    """A tiny Llama with all that stands beside a model; tests do not change it."""
    folder = save("llama", tmp_path_factory.mktemp("softmax") / "llama")
    words = {f"w{index}": index for index in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    (folder / "README.md").write_text("about this model\n")
    return folder


@pytest.fixture
def damaged(llama_dir, tmp_path):
    """A copy of the tiny Llama that a test may damage."""
    return Path(shutil.copytree(llama_dir, tmp_path / "damaged"))


# The same as loading


@pytest.mark.parametrize("name", ["llama", "qwen3", "bert", "vit", "gemma3"])
def test_same_as_loading_with_mhla(name, tmp_path):
    save(name, tmp_path / "softmax")
    report = convert(tmp_path / "softmax", tmp_path / "mhla", options_of(name))
    family = FAMILIES[name]
    model = assert_same_as_loading(
        tmp_path / "softmax", tmp_path / "mhla", family.model_class, options_of(name), inputs(name), tmp_path
    )
    part = report.components["model"]
    assert part.target_class == type(model).__name__ == family.model
    assert part.mhla == model.config.mhla
    assert part.num_layers == 3
    assert part.mhla_layers == [index for index in range(3) if index not in family.softmax_layers]
    assert part.dropped == []
    written = weights_of(tmp_path / "mhla")
    new = {key for key in written if ".mhla." in key}
    assert set(part.initialised) == new
    assert part.weight_sets[0].copied_tensors == len(written) - len(new)


@pytest.mark.parametrize(("tied", "max_shard_size"), [(True, "1GB"), (False, "20KB")])
def test_embeddings_stay_tied_or_not(tied, max_shard_size, tmp_path):
    source = save("llama", tmp_path / "softmax", tie_word_embeddings=tied, max_shard_size=max_shard_size)
    convert(source, tmp_path / "mhla", TEXT_OPTIONS)
    model = assert_same_as_loading(
        source, tmp_path / "mhla", FAMILIES["llama"].model_class, TEXT_OPTIONS, inputs("llama"), tmp_path
    )
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in weights_of(tmp_path / "mhla")) != tied


def test_dtype_casts_weights_and_configuration(llama_dir, tmp_path):
    convert(llama_dir, tmp_path / "mhla", TEXT_OPTIONS, dtype="bf16")
    original = weights_of(llama_dir)
    for name, tensor in weights_of(tmp_path / "mhla").items():
        assert tensor.dtype == torch.bfloat16, name
        if name in original:
            assert torch.equal(tensor, original[name].bfloat16()), name
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "mhla").dtype == torch.bfloat16


# Which layers


def test_some_layers(llama_dir, tmp_path):
    report = convert(llama_dir, tmp_path / "mhla", TEXT_OPTIONS, layers="2/3").components["model"]
    assert report.mhla_layers == [1, 2]
    assert_same_as_loading(
        llama_dir,
        tmp_path / "mhla",
        FAMILIES["llama"].model_class,
        {**TEXT_OPTIONS, "layers": [1, 2]},
        inputs("llama"),
        tmp_path,
    )


@pytest.fixture
def clip_dir(tmp_path):
    clip_model().save_pretrained(tmp_path / "clip")
    return tmp_path / "clip"


@pytest.mark.parametrize(
    ("mhla", "layers", "expected"),
    [
        (None, None, [0, 1, 2, 3, 4, 5]),
        (None, "1/3", [2, 5]),
        ({"vision_config": IMAGE_OPTIONS}, None, [3, 4, 5]),
        ({"text_config": TEXT_OPTIONS}, "0,2", [0, 2]),
    ],
    ids=["both", "layers of both", "one", "layers of one"],
)
def test_models_of_two_towers(mhla, layers, expected, clip_dir, tmp_path):
    report = convert(clip_dir, tmp_path / "mhla", mhla, layers=layers).components["model"]
    assert report.mhla_layers == expected and report.num_layers == 6
    assert set(report.mhla) == (set(mhla) if mhla else {"text_config", "vision_config"})
    model = CLIPModel.from_pretrained(tmp_path / "mhla")
    assert sum(isinstance(module, MHLA) for module in model.modules()) == len(expected)
    in_memory = CLIPModel.from_pretrained(clip_dir)
    mhla_hf.convert(in_memory, report.mhla)
    state = model.state_dict()
    for name, tensor in in_memory.state_dict().items():
        assert torch.equal(state.pop(name), tensor), name
    assert not state


# Checkpoints whose names or tensors are not the model's own


def test_old_names(tmp_path):
    source = save("bert", tmp_path / "softmax")

    def rename(weights):
        old = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
        for new, name in old:
            weights = {key.replace(new, name): value for key, value in weights.items()}
        return weights

    edit_weights(source / "model.safetensors", rename)
    assert any(name.endswith(".gamma") for name in weights_of(source))
    convert(source, tmp_path / "mhla", TEXT_OPTIONS)
    assert_same_as_loading(
        source, tmp_path / "mhla", FAMILIES["bert"].model_class, TEXT_OPTIONS, inputs("bert"), tmp_path
    )


# Everything else


def test_everything_else_is_copied(llama_dir, tmp_path):
    report = convert(llama_dir, tmp_path / "mhla", TEXT_OPTIONS)
    assert {"generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(report.copied_files)
    for name in report.copied_files:
        assert (tmp_path / "mhla" / name).read_bytes() == (llama_dir / name).read_bytes(), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "mhla")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "mhla")
    tokens = tokenizer("w3 w4 w5", return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=4, do_sample=False).shape == (1, 7)


def test_sentence_transformers_directories(tmp_path):
    source = tmp_path / "softmax"
    transformers.BertModel(FAMILIES["bert"].config()).save_pretrained(source)
    texts = {
        "modules.json": "[]",
        "1_Pooling/config.json": '{"word_embedding_dimension": 32}',
        "config_sentence_transformers.json": "{}",
        "vocab.txt": "[PAD]",
    }
    others = {"2_Dense/pytorch_model.bin": "dense", "2_Dense/model.safetensors": "dense"}
    names = ("pytorch_model.bin", "onnx/model.onnx", "openvino/openvino_model.xml", "tf_model.h5")
    old_weights = dict.fromkeys(names, "old weights")
    for name, text in {**texts, **others, **old_weights}.items():
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(text)
    save_file({"linear.weight": torch.ones(2, 2)}, source / "2_Dense/model.safetensors")
    report = convert(source, tmp_path / "mhla", TEXT_OPTIONS)
    assert set(report.copied_files) == {*texts, *others}
    written = {path.relative_to(tmp_path / "mhla").as_posix() for path in (tmp_path / "mhla").rglob("*.*")}
    assert written == {*texts, *others, "config.json", "conversion.json", "model.safetensors"}


# Refusals: one line each, and nothing left behind


def refused(source, tmp_path, message, mhla=None, **options):
    with pytest.raises(ValueError, match=message) as caught:
        convert(source, tmp_path / "mhla", mhla, **options)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "damaged") == []


def test_refuses_other_architectures_with_the_reason(tmp_path):
    """Loading gives the same reasons, which its tests have."""
    config = transformers.T5Config(d_model=32, num_layers=1, architectures=["T5Model"])
    config.save_pretrained(tmp_path / "damaged")
    save_file({"weight": torch.zeros(1)}, tmp_path / "damaged/model.safetensors")
    refused(tmp_path / "damaged", tmp_path, "T5.* cannot use attn_implementation='mhla'")


def test_refuses_quantised_configurations(damaged, tmp_path):
    edit_json(damaged / "config.json", quantization_config={"quant_method": "gptq"})
    refused(damaged, tmp_path, r"is quantised \(gptq\) and cannot be converted")
    text = {"quantization_config": {"quant_method": "awq"}}
    edit_json(damaged / "config.json", quantization_config=..., text_config=text)
    refused(damaged, tmp_path, r"is quantised \(awq\)")


def test_names_missing_tensors_and_other_shapes(damaged, tmp_path):
    def change(weights):
        del weights["model.layers.1.self_attn.q_proj.weight"]
        weights["model.norm.weight"] = torch.zeros(3)

    edit_weights(damaged / "model.safetensors", change)
    refused(
        damaged,
        tmp_path,
        r"lacks model.layers.1.self_attn.q_proj.weight; "
        r"has tensors of another shape: model.norm.weight \(3,\) instead of \(32,\)",
    )


def test_refuses_wrong_options(llama_dir, tmp_path):
    refused(llama_dir, tmp_path, "Layer 7 of LlamaModel cannot be MHLA: the model has layers 0 to 2", layers="1,7")
    refused(llama_dir, tmp_path, "Language models take block_size, not blocks", {"blocks": [2]})
    refused(llama_dir, tmp_path, "(a sequence has one|one entry per axis)", {"block_size": [4, 4]})
    refused(llama_dir, tmp_path, "Unknown mhla option", {"block": 4})
    refused(llama_dir, tmp_path, "dtype='int4' is not one of", dtype="int4")


# Commands and the other public names


def test_command(llama_dir, tmp_path):
    """`test_every_option` of the command line has the other options."""
    options = "--block-size", "8", "--layers", "2/3", "--feature-map", "relu", "--dtype", "bf16"
    output = run_command("convert", llama_dir, tmp_path / "mhla", *options).output
    assert "2 of 3" in output and "of 8 tokens" in output and "mhla-hf recover" in " ".join(output.split())
    expected = {"block_size": [8], "layers": [1, 2], "feature_map": "relu", "causal": True}
    assert expected.items() <= config_of(tmp_path / "mhla")["mhla"].items()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "mhla").dtype == torch.bfloat16
