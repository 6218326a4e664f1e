# SPDX-License-Identifier: Apache-2.0
"""GGUF files: dequantised within the error of their types, converted by command, and refused when damaged."""

import json
from collections import Counter

import pytest
import torch
from diffusers import GGUFQuantizationConfig, WanTransformer3DModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mhla_hf import MHLAWanTransformer3DModel, convert, convert_pretrained
from mhla_hf.estimate import find_candidate
from mhla_hf.utils.locations import unpacked
from mhla_hf.utils.tensor_files import read_entries
from tests import tiny
from tests.command_line import run_command
from tests.conversion.original_cases import PREFIXES, SIZES, original_weights, write_gguf
from tests.families.model_case import relative_error


gguf = pytest.importorskip("gguf")

MHLA = {"blocks": [1, 2, 2]}
WEIGHTS = "diffusion_pytorch_model.safetensors"

# Largest error of a number against the largest of its block of 32, by type: half a step, or a whole one at the end
# that types without a minimum do not reach. Scales and minima are rounded to half precision.
ERRORS = {"Q8_0": 0.5 / 127, "Q5_0": 1 / 16, "Q5_1": 1 / 31, "Q4_0": 1 / 8, "Q4_1": 1 / 15, "BF16": 2**-8, "F16": 0}
ROUNDED_SCALE = 2**-10


def softmax_model():
    return tiny.wan_transformer(**SIZES)


@pytest.fixture(scope="module")
def wan_gguf(tmp_path_factory):
    """A tiny Wan in Q8_0; tests do not change it."""
    path = tmp_path_factory.mktemp("gguf") / "wan-Q8_0.gguf"
    return write_gguf(path, original_weights(softmax_model()), "Q8_0")


@pytest.mark.parametrize("kind", ERRORS)
def test_dequantised_weights_are_within_the_error_of_the_type(kind, tmp_path):
    exact = original_weights(softmax_model())
    entries = read_entries(write_gguf(tmp_path / "wan.gguf", exact, kind))
    assert {entry.name: entry.shape for entry in entries} == {
        name: tuple(tensor.shape) for name, tensor in exact.items()
    }
    assert {entry.stored_as for entry in entries} == {kind, "F32"}
    for entry in entries:
        tensor, loaded = exact[entry.name], entry.load()
        if tensor.ndim != 2 or not entry.name.endswith(".weight"):
            assert torch.equal(loaded, tensor)
            continue
        blocks, found = tensor.reshape(-1, 32), loaded.float().reshape(-1, 32)
        bound = (ERRORS[kind] + ROUNDED_SCALE) * blocks.abs().amax(dim=1, keepdim=True)
        assert ((found - blocks).abs() <= bound).all(), entry.name
        assert kind in ("F16", "BF16") or not torch.equal(found, blocks)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_converted_model_computes_what_the_dequantised_softmax_model_becomes(kind, tmp_path):
    softmax = softmax_model()
    path = write_gguf(tmp_path / "wan.gguf", original_weights(softmax, PREFIXES[1]), kind)
    softmax.save_config(tmp_path / "config")
    stock = WanTransformer3DModel.from_single_file(
        str(path),
        config=str(tmp_path / "config"),
        quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    )
    with pytest.raises(ValueError, match="weights that are offloaded, quantised"):
        convert(stock, MHLA)
    stock.dequantize()
    expected = tiny.wan_output(convert(stock.float(), MHLA))
    run_command("convert", path, tmp_path / "mhla", "--blocks", "1,2,2", "--dtype", "float32", "--quiet")
    model = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "mhla")
    # diffusers dequantises in half precision.
    assert relative_error(tiny.wan_output(model), expected) < 2e-3
    # And it is a model of the quantised weights, not of the exact ones.
    error = relative_error(tiny.wan_output(model), tiny.wan_output(convert(softmax, MHLA)))
    assert 1e-5 < error < {"Q8_0": 0.02, "Q4_0": 0.3}[kind]


def test_types_and_record_of_a_conversion(wan_gguf, tmp_path):
    """Quantised weights become bfloat16, plain floats stay, unless a type is given."""
    report = convert_pretrained(wan_gguf, tmp_path / "mhla", MHLA, progress=False)
    stored = load_file(tmp_path / "mhla" / WEIGHTS)
    entries = read_entries(wan_gguf)
    kinds = dict(Counter(entry.stored_as for entry in entries))
    query = next(entry for entry in entries if entry.name == "blocks.0.self_attn.q.weight")
    assert stored["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16
    assert torch.equal(stored["blocks.0.attn1.to_q.weight"], query.load().bfloat16())
    assert stored["blocks.0.attn1.to_q.bias"].dtype == torch.float32
    assert report.source == {"location": "wan-Q8_0.gguf", "stored_as": kinds}
    assert json.loads((tmp_path / "mhla" / "conversion.json").read_text())["source"] == report.source


def test_truncated_files(wan_gguf, tmp_path):
    content = wan_gguf.read_bytes()
    for length in (100, content.index(b"patch_embedding"), len(content) // 2, len(content) - 1):
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(ValueError, match="cut.gguf is damaged, truncated or not a GGUF file"):
            convert_pretrained(tmp_path / "cut.gguf", tmp_path / "out", MHLA, progress=False)
    assert not (tmp_path / "out").exists()


WORDS = ["<s>", "</s>", *(chr(65 + index) for index in range(26)), "AB", "ABC"]


def write_language_model(path):
    """A tiny Llama with a tokenizer, some matrices in Q8_0, as llama.cpp names them."""
    width, heads, layers = 32, 2, 2
    generator = torch.Generator().manual_seed(0)
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {"context_length": 64, "embedding_length": width, "block_count": layers}.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.feed_forward_length", 2 * width)
    writer.add_uint32("llama.attention.head_count", heads)
    writer.add_uint32("llama.attention.head_count_kv", heads)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10_000.0)
    writer.add_uint32("llama.vocab_size", len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_merges(["A B", "AB C"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    shapes = {"token_embd": (len(WORDS), width), "output": (len(WORDS), width), "output_norm": (width,)}
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{name}": (width, width) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"blk.{layer}.{name}": (2 * width, width) for name in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{layer}.ffn_down": (width, 2 * width)}
        shapes |= {f"blk.{layer}.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator).numpy()
        packs = "ffn" in name and len(shape) == 2
        data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0) if packs else values
        kind = gguf.GGMLQuantizationType.Q8_0 if packs else None
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def test_language_models_are_converted_from_a_directory_with_a_file(tmp_path, monkeypatch):
    """With the weights and tokens that transformers reads from the file."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    source = tmp_path / "tiny-GGUF"
    source.mkdir()
    file = write_language_model(source / "tiny-Q8_0.gguf")
    run_command("convert", str(source), str(tmp_path / "mhla"), "--block-size", "8", "--layers", "1")
    original = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "mhla")
    own = dict(converted.named_parameters())
    assert all(torch.equal(own[name], value) for name, value in original.named_parameters())
    assert converted.config.mhla["layers"] == [1] and not hasattr(converted.config, "quantization_config")
    assert json.loads((tmp_path / "mhla" / "conversion.json").read_text())["source"]["location"] == "tiny-GGUF"
    tokens = AutoTokenizer.from_pretrained(tmp_path / "mhla")("ABCA")["input_ids"]
    assert tokens == AutoTokenizer.from_pretrained(source, gguf_file=file.name)("ABCA")["input_ids"]
    # The same for the estimate and for recoveries, from the cache.
    (kept,) = (tmp_path / "cache" / "mhla_hf").iterdir()
    assert unpacked(source) == kept and find_candidate(source).class_name == "LlamaForCausalLM"
    assert unpacked(kept) == kept
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="tiny-Q8_0.gguf is not read by transformers"):
        convert_pretrained(source, tmp_path / "damaged")
