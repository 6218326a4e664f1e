# SPDX-License-Identifier: Apache-2.0
"""A converted model run with its original attention computes what the softmax model does, in every family."""

import copy

import pytest
import torch
from diffusers import QuantoConfig
from diffusers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from diffusers.quantizers.base import DiffusersQuantizer

import mhla_hf
from mhla_hf.training.layers import find_projections, mhla_layers, original_heads, record_calls, run
from tests.edits import edit_json
from tests.families.cases import DiTCase, PixArtCase, SanaCase, SanaVideoCase, WanCase, WanImageToVideoCase
from tests.integrations.transformers.mhla_models import default_options, served_names
from tests.integrations.transformers.tiny_models import FAMILIES, inputs, softmax_model


DIFFUSERS = {
    "wan": WanCase,
    "wan_image_to_video": WanImageToVideoCase,
    "dit": DiTCase,
    "pixart": PixArtCase,
    "sana": SanaCase,
    "sana_video": SanaVideoCase,
}
NAMES = [*DIFFUSERS, *served_names()]


def models(name: str):
    """A softmax model, its converted copy and a batch."""
    if name in DIFFUSERS:
        case = DIFFUSERS[name]()
        softmax, batch = case.make(case.upstream), case.inputs(case.upstream_size)
        batch["return_dict"] = False
        options = dict(case.options)
    else:
        softmax, options = softmax_model(name), default_options(name)
        batch = inputs(name)
    converted = mhla_hf.convert(copy.deepcopy(softmax), {**options, "feature_map": "relu", "mixing_init": "linear"})
    return softmax, converted.eval(), batch


def kept(tensor: torch.Tensor, batch: dict) -> torch.Tensor:
    mask = batch.get("attention_mask")
    return tensor if mask is None or mask.dim() != 2 or tensor.dim() < 3 else tensor[mask.bool()]


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_softmax_model(name):
    softmax, converted, batch = models(name)
    with torch.no_grad():
        expected = run(softmax, batch)[0]
        assert not torch.allclose(kept(run(converted, batch)[0], batch), kept(expected, batch), atol=1e-4)
        with original_heads(mhla_layers(converted)):
            got = run(converted, batch)[0]
    torch.testing.assert_close(kept(got, batch), kept(expected, batch), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_layers_called_by_themselves(name):
    _, converted, batch = models(name)
    layers = find_projections(converted, mhla_layers(converted), batch)
    assert all(layer.projection is not None for layer in layers)
    calls = record_calls(converted, layers, batch)
    assert list(calls) == [layer.name for layer in layers]
    with torch.no_grad(), original_heads(layers):
        for layer in layers:
            call = calls[layer.name]
            again = layer(call.arguments, call.hidden_states)
            valid = slice(None) if call.valid is None else call.valid
            torch.testing.assert_close(again[valid], call.output[valid])


def test_kinds_of_families():
    assert {FAMILIES[name].kind for name in served_names()} == {"causal", "encoder", "vision"}


class Scales(DiffusersQuantizer):
    """Adds what a checkpoint does not have to linear layers, as quanto does, and leaves the weights as they are."""

    def _process_model_before_weight_loading(self, model, **unused):
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_buffer("input_scale", torch.ones(()))

    def _process_model_after_weight_loading(self, model, **unused):
        return model

    def update_missing_keys(self, model, missing_keys, prefix):
        return [name for name in missing_keys if not name.endswith(".input_scale")]

    def check_if_quantized_param(self, *unused, **more):
        return False

    is_serializable, is_trainable = True, False


class TestQuantisers:
    """What a quantiser adds to a model is not missing in a checkpoint; MHLA's weights are."""

    @pytest.fixture
    def load(self, monkeypatch, tmp_path):
        monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "quanto", Scales)
        # The real configuration asks for the package.
        monkeypatch.setattr(QuantoConfig, "post_init", lambda self: None)
        case = WanCase()
        softmax = case.make(case.upstream)
        options = {**case.options, "output_gate": True}
        mhla_hf.convert(copy.deepcopy(softmax), options).save_pretrained(tmp_path / "converted")
        softmax.save_pretrained(tmp_path / "softmax")
        cls = mhla_hf.MHLAWanTransformer3DModel

        def load(name, **given):
            return cls.from_pretrained(tmp_path / name, torch_dtype=torch.float32, **given)

        load.options, load.folder = {"mhla": options}, tmp_path
        return load

    def test_scales_are_not_missing(self, load):
        expected, config = load("converted"), {"quantization_config": QuantoConfig("int8")}
        for model in (load("converted", **config), load("softmax", **load.options, **config)):
            for name, parameter in expected.named_parameters():
                torch.testing.assert_close(model.get_parameter(name), parameter, rtol=0, atol=0)

    def test_quantised_softmax_models_are_refused(self, load):
        config = QuantoConfig("int8").to_dict()
        edit_json(load.folder / "softmax" / "config.json", quantization_config=config)
        with pytest.raises(ValueError, match="softmax is quantised, and lacks MHLA weights such as blocks.0"):
            load("softmax", **load.options)


def quantised_wan(folder, config, **options):
    """A quantised Wan that computes about what the exact one does, and is not calibrated."""
    case = WanCase()
    model = mhla_hf.convert(case.make(case.upstream), {**case.options, **options})
    model.save_pretrained(folder)
    quantised = type(model).from_pretrained(folder, quantization_config=config, torch_dtype=torch.float32)
    batch = {**case.inputs(case.upstream_size), "return_dict": False}
    expected, output = model(**batch)[0], quantised(**batch)[0]
    assert 0 < (output - expected).norm() / expected.norm() < 0.05
    with pytest.raises(ValueError, match="is quantised, sharded or offloaded: calibrate the model before that"):
        mhla_hf.calibrate(quantised, [batch])
    return quantised


@pytest.mark.parametrize("kind", ["int8", "float8"])
def test_quanto(kind, tmp_path):
    pytest.importorskip("optimum.quanto")
    quantised_wan(tmp_path, QuantoConfig(kind, modules_to_not_convert=["gate"]), output_gate=True)


class TestQuantised:
    """Weights of torchao say that they are floats, and are not read as such."""

    @pytest.fixture
    def config(self):
        return pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig()

    def test_models_of_diffusers_load(self, config, tmp_path):
        from diffusers import TorchAoConfig

        case, model = WanCase(), quantised_wan(tmp_path, TorchAoConfig(config))
        model.save_pretrained(tmp_path / "again")
        softmax = case.upstream.from_pretrained
        case.make(case.upstream).save_pretrained(tmp_path / "softmax")
        softmax(tmp_path / "softmax", quantization_config=TorchAoConfig(config)).save_pretrained(tmp_path / "int8")
        with pytest.raises(ValueError, match="int8 is quantised, and lacks MHLA weights such as"):
            type(model).from_pretrained(tmp_path / "int8", mhla=dict(case.options))

    def test_models_of_transformers_load_and_convert(self, config, tmp_path):
        from transformers import AutoModelForCausalLM, TorchAoConfig

        softmax = softmax_model("llama")
        softmax.save_pretrained(tmp_path)
        options = {"quantization_config": TorchAoConfig(config)}
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="mhla", **options)
        converted = mhla_hf.convert(AutoModelForCausalLM.from_pretrained(tmp_path, **options))
        assert len(mhla_layers(loaded)) == len(mhla_layers(converted)) > 0

    def test_what_was_replaced_before_it_was_quantised_is_not_restored(self):
        quantization = pytest.importorskip("torchao.quantization")
        model, batch = mhla_hf.convert(softmax_model("llama")), inputs("llama")
        mhla_hf.calibrate(model, [batch])
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        with pytest.raises(ValueError, match="offloaded, sharded or quantised"):
            model.set_attn_implementation("sdpa")


class Packed(torch.Tensor):
    """A tensor that says that it is bfloat16, and has no values to look at, as quantised ones."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if "detach" in str(function) or "alias" in str(function):
            return args[0]
        raise NotImplementedError(f"Packed: {function}")


def test_tensors_that_are_no_plain_ones_are_not_looked_at():
    model = softmax_model("llama")
    name = "model.layers.0.mlp.up_proj"
    packed = torch.Tensor._make_wrapper_subclass(Packed, (8, 8), dtype=torch.bfloat16)
    model.get_submodule(name).weight = torch.nn.Parameter(packed, requires_grad=False)
    mhla_hf.convert(model, default_options("llama"))
    from mhla_hf.layers import weight_record

    assert weight_record.weights_state(model) == "converted"
    assert weight_record.original_values(model, "restore it") == {}
