# SPDX-License-Identifier: Apache-2.0
"""GGUF files: dequantised within the error of their types, converted by command, and refused when damaged."""

import json
import struct
import sys
import time

import numpy as np
import pytest
import torch
from diffusers import GGUFQuantizationConfig, WanTransformer3DModel
from safetensors.torch import load_file
from typer.testing import CliRunner

from mhla_hf import MHLAWanTransformer3DModel, convert, convert_pretrained
from mhla_hf.cli.main import app
from mhla_hf.utils.gguf_file import GGUFFile
from tests import tiny
from tests.conversion.original_cases import PREFIXES, SIZES, original_weights, write_gguf
from tests.models.model_case import assert_same_parameters, relative_error


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


def output_of(model):
    with torch.no_grad():
        return model(**tiny.wan_inputs(), return_dict=False)[0]


@pytest.mark.parametrize("kind", ERRORS)
def test_dequantised_weights_are_within_the_error_of_the_type(kind, tmp_path):
    exact = original_weights(softmax_model())
    file = GGUFFile(write_gguf(tmp_path / "wan.gguf", exact, kind))
    assert file.shapes == {name: tuple(tensor.shape) for name, tensor in exact.items()}
    assert set(file.kinds) == {kind, "F32"}
    for name, tensor in exact.items():
        loaded = file.load(name)
        if tensor.ndim != 2 or not name.endswith(".weight"):
            assert torch.equal(loaded, tensor)
            continue
        blocks, found = tensor.reshape(-1, 32), loaded.float().reshape(-1, 32)
        bound = (ERRORS[kind] + ROUNDED_SCALE) * blocks.abs().amax(dim=1, keepdim=True)
        assert ((found - blocks).abs() <= bound).all(), name
        assert kind in ("F16", "BF16") or not torch.equal(found, blocks)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"])
def test_types_that_only_llama_cpp_writes(kind, tmp_path):
    """Blocks of random bytes, against the functions of diffusers, told to compute in float32."""
    from diffusers.quantizers.gguf.utils import dequantize_functions

    kind = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    content = np.random.default_rng(0).integers(0, 256, (4, 2 * block_bytes), dtype=np.uint8)
    # Scales in half precision, wherever they are in a block: without the bits that make them huge.
    content &= 0x3B
    writer = gguf.GGUFWriter(tmp_path / "random.gguf", "wan")
    writer.add_tensor("weight", content, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = GGUFFile(tmp_path / "random.gguf").load("weight")
    blocks = torch.from_numpy(content.reshape(-1, block_bytes))
    expected = dequantize_functions[kind](blocks, block, block_bytes, dtype=torch.float32)
    assert found.shape == (4, 2 * block) and found.abs().max() > 0
    assert torch.equal(found, expected.reshape(found.shape))


@pytest.mark.parametrize("prefix", PREFIXES[:2])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_converted_model_computes_what_the_dequantised_softmax_model_becomes(kind, prefix, tmp_path):
    softmax = softmax_model()
    path = write_gguf(tmp_path / "wan.gguf", original_weights(softmax, prefix), kind)
    softmax.save_config(tmp_path / "config")
    stock = WanTransformer3DModel.from_single_file(
        str(path),
        config=str(tmp_path / "config"),
        quantization_config=GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
    )
    with pytest.raises(ValueError, match="weights that are quantised"):
        convert(stock, MHLA)
    stock.dequantize()
    expected = output_of(convert(stock.float(), MHLA))
    arguments = ["convert", path, tmp_path / "mhla", "--blocks", "1,2,2", "--dtype", "float32", "--quiet"]
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    model = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "mhla")
    # diffusers dequantises in half precision.
    assert relative_error(output_of(model), expected) < 2e-3
    loaded = MHLAWanTransformer3DModel.from_single_file(path, mhla=MHLA)
    assert_same_parameters(loaded, model)
    # And it is a model of the quantised weights, not of the exact ones.
    error = relative_error(output_of(model), output_of(convert(softmax, MHLA)))
    assert 1e-5 < error < {"Q8_0": 0.02, "Q4_0": 0.3}[kind]


def test_types_and_record_of_a_conversion(wan_gguf, tmp_path):
    """Quantised weights become bfloat16, plain floats stay, unless a type is given."""
    report = convert_pretrained(wan_gguf, tmp_path / "mhla", MHLA, progress=False)
    stored = load_file(tmp_path / "mhla" / WEIGHTS)
    file = GGUFFile(wan_gguf)
    assert stored["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16
    assert torch.equal(stored["blocks.0.attn1.to_q.weight"], file.load("blocks.0.self_attn.q.weight").bfloat16())
    assert stored["blocks.0.attn1.to_q.bias"].dtype == torch.float32
    assert report.source == {"location": "wan-Q8_0.gguf", "stored_as": file.kinds}
    assert json.loads((tmp_path / "mhla" / "conversion.json").read_text())["source"] == report.source
    half = MHLAWanTransformer3DModel.from_single_file(wan_gguf, mhla=MHLA, torch_dtype=torch.bfloat16)
    expected = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "mhla", torch_dtype=torch.bfloat16)
    assert {name: parameter.dtype for name, parameter in half.named_parameters()} == {
        name: parameter.dtype for name, parameter in expected.named_parameters()
    }


def test_one_tensor_at_a_time(wan_gguf, tmp_path, monkeypatch):
    alive, most = 0, 0
    load = GGUFFile.load

    class Counted(torch.Tensor):
        def __del__(self):
            nonlocal alive
            alive -= 1

    def counting(self, name):
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return load(self, name).as_subclass(Counted)

    monkeypatch.setattr(GGUFFile, "load", counting)
    convert_pretrained(wan_gguf, tmp_path / "mhla", MHLA, dtype="float32", progress=False)
    assert 1 <= most <= 3


def test_missing_package(wan_gguf, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    result = CliRunner().invoke(app, ["convert", str(wan_gguf), str(tmp_path / "out")])
    assert result.exit_code == 1 and "pip install -e '.[gguf]' in a clone" in " ".join(result.output.split())
    with pytest.raises(ValueError, match="need the gguf package"):
        MHLAWanTransformer3DModel.from_single_file(wan_gguf)


# Damaged and hostile files


def refused(path, content, destination):
    """Opens a damaged file, which must be refused in one line and in no time; a file that opens is converted."""
    path.write_bytes(content)
    started = time.monotonic()
    try:
        convert_pretrained(path, destination, MHLA, overwrite=True, progress=False)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 700, str(error)
        return str(error)
    finally:
        assert time.monotonic() - started < 10
    return None


def test_truncated_files(wan_gguf, tmp_path):
    content = wan_gguf.read_bytes()
    header = content.index(b"patch_embedding")
    lengths = [0, 3, 4, 12, 23, 24, 30, 100, header, header + 7, len(content) // 2, len(content) - 1]
    for length in lengths:
        message = refused(tmp_path / "cut.gguf", content[:length], tmp_path / "out")
        assert message is not None and "cut.gguf is damaged, truncated or not a GGUF file" in message
    assert not (tmp_path / "out").exists()


def test_another_type_for_a_tensor(wan_gguf, tmp_path):
    """Weights that were read as another type would fit the model, and be wrong."""
    content = bytearray(wan_gguf.read_bytes())
    name = b"blocks.0.self_attn.q.weight"
    kind = content.index(name) + len(name) + 4 + 2 * 8
    assert content[kind] == gguf.GGMLQuantizationType.Q8_0
    content[kind] = gguf.GGMLQuantizationType.Q4_0
    message = refused(tmp_path / "other.gguf", bytes(content), tmp_path / "out")
    assert message is not None and "begins at" in message


def test_flipped_bytes_of_the_header(wan_gguf, tmp_path):
    """Any byte of the header may be wrong: refused in one line, or harmless."""
    content = wan_gguf.read_bytes()
    end = content.index(b"blocks.1.")
    random = np.random.default_rng(0)
    messages = set()
    for position in random.choice(end, 150, replace=False):
        damaged = bytearray(content)
        damaged[position] = random.integers(256)
        (tmp_path / "flipped.gguf").write_bytes(damaged)
        try:
            GGUFFile(tmp_path / "flipped.gguf")
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 700
            messages.add(str(error))
    assert len(messages) > 5


def header(num_tensors=0, num_entries=0, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)


def entry(kind, value):
    return struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind) + value


def tensor(sizes, kind=0, offset=0, name=b"w"):
    return (
        struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
        + struct.pack("<IQ", kind, offset)
    )  # fmt: skip


HOSTILE = {
    "tensors": (header(num_tensors=2**62), "too short for the 4611686018427387904 entries"),
    "entries": (header(num_entries=2**62), "too short for the 4611686018427387904 entries"),
    "array": (header(0, 1) + entry(9, struct.pack("<IQ", 0, 2**62)), "ends too early"),
    "array of strings": (header(0, 1) + entry(9, struct.pack("<IQ", 8, 2**62)), "too short for"),
    "nested arrays": (header(0, 1) + entry(9, struct.pack("<IQ", 9, 1) * 5000), "nested too deeply"),
    "string": (header(0, 1) + entry(8, struct.pack("<Q", 2**63)), "ends too early"),
    "kind of entry": (header(0, 1) + entry(77, b""), "metadata of type 77"),
    "name": (header(1) + struct.pack("<Q", 2**40), "too short|a name has"),
    "axes": (header(1) + struct.pack("<Q", 1) + b"w" + struct.pack("<I", 2**31) + bytes(64), "axes"),
    "size": (header(1) + tensor([2**40, 2**40]) + bytes(64), "w reaches past its end"),
    "offset": (header(1) + tensor([4], offset=2**60) + bytes(64), "w begins at 1152921504606846976 and not at 0"),
    "overlap": (header(2) + tensor([16]) + tensor([16], name=b"v") + bytes(256), "v begins at 0 and not at 64"),
    "alignment": (
        header(0, 1) + struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 0),
        "its alignment is 0",
    ),
    "no elements": (header(1) + tensor([0, 2**60]) + bytes(64), "axis of no elements"),
    "half a block": (header(1) + tensor([33], kind=8) + bytes(640), "not whole blocks of Q8_0"),
    "kind of tensor": (header(1) + tensor([4], kind=999) + bytes(64), "999"),
    "integers": (header(1) + tensor([4], kind=26) + bytes(128), "I32 under w"),
    "twice": (header(2) + tensor([4]) + tensor([4]) + bytes(64), "w occurs twice"),
    "utf-8": (header(1) + tensor([4], name=b"\xff\xfe") + bytes(64), "can't decode"),
    "version": (header(version=9), "version 9"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
    "text": (b"version https://git-lfs.github.com/spec/v1\n", "does not begin with GGUF"),
    "no tensors": (header(), "lacks patch_embedding.weight"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case, tmp_path):
    content, message = HOSTILE[case]
    found = refused(tmp_path / "hostile.gguf", content, tmp_path / "out")
    assert found is not None and "hostile.gguf" in found
    with pytest.raises(ValueError, match=message):
        raise ValueError(found)


def test_not_a_file(tmp_path):
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ValueError, match="neither model_index.json .* nor config.json"):
        convert_pretrained(tmp_path / "folder.gguf", tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match="not a regular file"):
        GGUFFile(tmp_path / "absent.gguf")
