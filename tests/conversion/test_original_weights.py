# SPDX-License-Identifier: Apache-2.0
"""Original Wan weights in one file, loaded by `from_single_file` and converted by command; SANA's loaded."""

import json

import pytest
import torch
from accelerate import init_empty_weights
from diffusers import (
    DiffusionPipeline,
    FluxTransformer2DModel,
    HunyuanVideoTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from safetensors.torch import save_file

from mhla_hf import (
    MHLAHunyuanVideoTransformer3DModel,
    MHLASanaTransformer2DModel,
    MHLAWanTransformer3DModel,
    convert,
    convert_pretrained,
)
from mhla_hf.models.registry import mhla_class_for
from mhla_hf.models.weight_files import check_layer_count
from mhla_hf.utils.compat.diffusers import single_file_names
from tests import tiny
from tests.command_line import run_command
from tests.conversion.original_cases import MODELS, PREFIXES, SIZES, original_weights, write_original
from tests.edits import edit_weights
from tests.families.cases import FluxCase, HunyuanVideoCase, LTXCase, QwenImageCase, SanaCase, WanCase, WanVACECase
from tests.families.model_case import assert_same_parameters
from tests.tiny import wan_video


MHLA = {"blocks": [1, 2, 2]}


def sizes_of(model):
    """What a configuration says about sizes."""
    config = {name: model.config[name] for name in model.config if not name.startswith("_") and name != "mhla"}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in config.items()}


@torch.no_grad()
def output_of(model, channels=None):
    return model(**tiny.wan_inputs(), return_dict=False)[0]


def converted(path, folder):
    convert_pretrained(path, folder, MHLA, progress=False)
    return MHLAWanTransformer3DModel.from_pretrained(folder)


@pytest.mark.parametrize("kind", MODELS)
def test_weights_tell_the_configuration(kind, tmp_path):
    softmax = write_original(tmp_path / "wan.safetensors", tiny.wan_transformer(**MODELS[kind]))
    model = converted(tmp_path / "wan.safetensors", tmp_path / "mhla")
    assert sizes_of(model) == sizes_of(softmax) and model.mhla_config.blocks == (1, 2, 2)
    assert_same_parameters(model, softmax, only_common=True)


@pytest.mark.parametrize("prefix", [*PREFIXES[1:], None])
def test_names_and_prefixes(prefix, tmp_path):
    """The names of Wan's authors, ComfyUI's, and those of diffusers, as the stock class takes them."""
    if prefix is None:
        softmax = tiny.wan_transformer(**SIZES)
        save_file(softmax.state_dict(), tmp_path / "wan.safetensors")
    else:
        softmax = write_original(tmp_path / "wan.safetensors", prefix=prefix)
    softmax.save_config(tmp_path / "config")
    path, config = tmp_path / "wan.safetensors", str(tmp_path / "config")
    model = converted(path, tmp_path / "mhla")
    assert_same_parameters(model, softmax, only_common=True)
    if prefix != "diffusion_model.":
        # The last prefix is ComfyUI's for adapters, and unknown to the stock class.
        loaded = MHLAWanTransformer3DModel.from_single_file(path, config=config, mhla=MHLA)
        assert type(loaded) is MHLAWanTransformer3DModel and not loaded.training
        assert_same_parameters(loaded, model)
        torch.testing.assert_close(output_of(loaded), output_of(convert(softmax, MHLA)))


def test_configuration_given(tmp_path):
    """Heads of another width than usual, fewer layers than the file has, and the options of an MHLA directory."""
    path = tmp_path / "wan.safetensors"
    softmax = write_original(path, tiny.wan_transformer())
    with pytest.raises(ValueError, match="its width 24 is not a multiple of 128.* give config") as caught:
        converted(path, tmp_path / "mhla")
    assert "\n" not in str(caught.value)
    softmax.save_config(tmp_path / "pipeline" / "transformer")
    given = {"config": str(tmp_path / "pipeline"), "subfolder": "transformer"}
    model = MHLAWanTransformer3DModel.from_single_file(path, mhla=MHLA, **given)
    assert sizes_of(model) == sizes_of(softmax)
    tiny.wan_transformer(num_layers=1).save_config(tmp_path / "shallow")
    with pytest.raises(ValueError, match="describes 1 layers, but the weights have 2"):
        MHLAWanTransformer3DModel.from_single_file(path, config=str(tmp_path / "shallow"))
    model.save_config(tmp_path / "other")
    with pytest.raises(ValueError, match="no MHLA weights|of the softmax model"):
        MHLAWanTransformer3DModel.from_single_file(path, config=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="quantise the saved MHLA directory"):
        MHLAWanTransformer3DModel.from_single_file(path, quantization_config={}, **given)
    softmax.register_to_config(rope_max_seq_len=10**9)
    softmax.save_config(tmp_path / "large")
    with pytest.raises(ValueError, match="large: rope_max_seq_len=1000000000 must be .*, of at most 65,536"):
        MHLAWanTransformer3DModel.from_single_file(path, config=tmp_path / "large")
    for case, message in (("vace", "safetensors: it has .*Wan-VACE"), ("8 bits", "quantised")):
        edit_weights(path, MISTAKES[case][0])
        with pytest.raises(ValueError, match=message):
            MHLAWanTransformer3DModel.from_single_file(path, **given)


MISTAKES = {
    "missing weight": (
        lambda weights: weights.pop("head.modulation"),
        "(lacks|Missing key).*(scale_shift_table|head.modulation)",
    ),
    "shape": (lambda weights: weights.update({"head.head.bias": torch.zeros(3)}), "shape"),
    "mhla": (
        lambda weights: weights.update({"blocks.0.self_attn.block_attn.conv.weight": torch.zeros(4, 4, 1, 1)}),
        "holds MHLA weights already.*import-official",
    ),
    "vace": (lambda weights: weights.update({"vace_blocks.0.x.weight": torch.zeros(1)}), "Wan-VACE"),
    "8 bits": (
        lambda weights: weights.update({"head.head.weight": weights["head.head.weight"].to(torch.float8_e4m3fn)}),
        "holds (torch.float8_e4m3fn|float8_e4m3fn) .*quantised",
    ),
    "empty": (lambda weights: weights.update({"text_embedding.0.bias": torch.zeros(0)}), "without elements|shape"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_damaged_weights_are_named_in_one_line(case, tmp_path):
    change, message = MISTAKES[case]
    write_original(tmp_path / "wan.safetensors")
    edit_weights(tmp_path / "wan.safetensors", change)
    with pytest.raises(ValueError, match=message) as caught:
        convert_pretrained(tmp_path / "wan.safetensors", tmp_path / "mhla", MHLA, progress=False)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500 and "wan.safetensors" in text
    assert not (tmp_path / "mhla").exists()


# The command


def test_command_writes_what_from_single_file_loads(tmp_path):
    softmax = write_original(tmp_path / "wan.safetensors", prefix="model.diffusion_model.")
    softmax.save_config(tmp_path / "config")
    options = "--blocks", "1,2,2", "--output-gate"
    result = run_command("convert", tmp_path / "wan.safetensors", tmp_path / "mhla", *options)
    model = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "mhla")
    expected = MHLAWanTransformer3DModel.from_single_file(
        tmp_path / "wan.safetensors", config=str(tmp_path / "config"), mhla={**MHLA, "output_gate": True}
    )
    assert sizes_of(model) == sizes_of(expected) and model.mhla_config == expected.mhla_config
    assert_same_parameters(model, expected)
    record = json.loads((tmp_path / "mhla" / "conversion.json").read_text())
    assert record["source"] == {"location": "wan.safetensors"}
    assert "mhla-hf recover MODEL OUTPUT" in " ".join(result.output.split())


def test_authors_shards_and_their_configuration(tmp_path):
    weights = {name: tensor.contiguous() for name, tensor in original_weights(tiny.wan_transformer(**SIZES)).items()}
    folder = tmp_path / "low_noise_model"
    folder.mkdir()
    names = sorted(weights)
    for index, part in enumerate((names[:20], names[20:]), start=1):
        save_file({name: weights[name] for name in part}, folder / f"model-{index:05d}-of-00002.safetensors")
    weight_map = {name: f"model-{1 + (name in names[20:]):05d}-of-00002.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"_class_name": "WanModel", "dim": 128, "num_heads": 1}))
    convert_pretrained(folder, tmp_path / "mhla", MHLA, layers="1/2", progress=False)
    model = MHLAWanTransformer3DModel.from_pretrained(tmp_path / "mhla")
    assert_same_parameters(model, tiny.wan_transformer(**SIZES), only_common=True)
    assert model.mhla_layers == [1]


@pytest.fixture(scope="module")
def wan22(tmp_path_factory):
    """Files of both experts (heads 12 wide, so that they need a configuration), and a pipeline they belong to."""
    folder = tmp_path_factory.mktemp("wan22")
    for seed, name in enumerate(("high", "low")):
        write_original(folder / f"{name}.safetensors", tiny.wan_transformer(seed=10 + seed))
    tiny.wan_pipeline(second_transformer=True).save_pretrained(folder / "base")
    return folder


def test_experts_go_into_a_pipeline_one_after_the_other(wan22, tmp_path):
    options = ["--blocks", "2,1,2", "--quiet"]
    run_command("convert", wan22 / "high.safetensors", tmp_path / "one", "--base", wan22 / "base", *options)
    options = ["--base", tmp_path / "one", "--component", "transformer_2", "--blocks", "1,2,2", "--quiet"]
    run_command("convert", wan22 / "low.safetensors", tmp_path / "two", *options)
    one, two = (DiffusionPipeline.from_pretrained(tmp_path / name) for name in ("one", "two"))
    base = DiffusionPipeline.from_pretrained(wan22 / "base")
    assert_same_parameters(one.transformer, tiny.wan_transformer(seed=10), only_common=True)
    assert type(one.transformer_2) is WanTransformer3DModel
    assert_same_parameters(one.transformer_2, base.transformer_2)
    assert_same_parameters(two.transformer, one.transformer)
    assert_same_parameters(two.transformer_2, tiny.wan_transformer(seed=11), only_common=True)
    assert two.transformer.mhla_config.blocks == (2, 1, 2) and two.transformer_2.mhla_config.blocks == (1, 2, 2)
    wan_video(two)
    # An expert that is MHLA already gives way to the new one, with its options.
    convert_pretrained(
        wan22 / "low.safetensors", tmp_path / "anew", {"blocks": [1, 1, 2]}, base=tmp_path / "two", progress=False
    )
    anew = DiffusionPipeline.from_pretrained(tmp_path / "anew")
    assert anew.transformer.mhla_config.blocks == (1, 1, 2)
    assert_same_parameters(anew.transformer, tiny.wan_transformer(seed=11), only_common=True)
    assert_same_parameters(anew.transformer_2, two.transformer_2)


# SANA, by the conversion of diffusers


def sana_original(model):
    """The weights of a tiny SANA under the names of its authors."""
    stored = model.state_dict()
    simple = {
        "patch_embed.proj": "x_embedder.proj",
        "time_embed.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_embed.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_embed.linear": "t_block.1",
        "caption_projection.linear_1": "y_embedder.y_proj.fc1",
        "caption_projection.linear_2": "y_embedder.y_proj.fc2",
        "caption_norm": "attention_y_norm",
        "proj_out": "final_layer.linear",
        "scale_shift_table": "final_layer.scale_shift_table",
    }
    inside = {
        "scale_shift_table": "scale_shift_table",
        "attn1.to_out.0": "attn.proj",
        "attn2.to_q": "cross_attn.q_linear",
        "attn2.to_out.0": "cross_attn.proj",
        "ff.conv_inverted": "mlp.inverted_conv.conv",
        "ff.conv_depth": "mlp.depth_conv.conv",
        "ff.conv_point": "mlp.point_conv.conv",
    }
    for index in range(model.config.num_layers):
        block = f"transformer_blocks.{index}."
        simple |= {block + name: f"blocks.{index}.{original}" for name, original in inside.items()}
    weights = {"pos_embed": torch.zeros(1), "y_embedder.y_embedding": torch.zeros(1)}
    for name, original in simple.items():
        weights |= {
            original + key[len(name) :]: stored[key]
            for key in stored
            if key == name or key[len(name) :] in (".weight", ".bias") and key.startswith(name)
        }
    for index in range(model.config.num_layers):
        block, original = f"transformer_blocks.{index}.", f"blocks.{index}."
        joined = [stored[f"{block}attn1.to_{part}.weight"] for part in "qkv"]
        weights[f"{original}attn.qkv.weight"] = torch.cat(joined)
        for kind in ("weight", "bias"):
            pair = [stored[f"{block}attn2.to_{part}.{kind}"] for part in "kv"]
            weights[f"{original}cross_attn.kv_linear.{kind}"] = torch.cat(pair)
    return {name: tensor.contiguous() for name, tensor in weights.items()}


def test_sana(tmp_path):
    softmax = SanaCase().make()
    softmax.save_config(tmp_path / "config")
    save_file(sana_original(softmax), tmp_path / "sana.safetensors")
    model = MHLASanaTransformer2DModel.from_single_file(
        tmp_path / "sana.safetensors", config=str(tmp_path / "config"), mhla={"blocks": [2, 2]}
    )
    assert type(model) is MHLASanaTransformer2DModel
    assert_same_parameters(model, softmax, only_common=True)
    with pytest.raises(ValueError, match="sana.safetensors"):
        convert_pretrained(tmp_path / "sana.safetensors", tmp_path / "out", progress=False)
    edit_weights(tmp_path / "sana.safetensors", lambda weights: weights.pop("t_block.1.weight"))
    with pytest.raises(ValueError, match="files are damaged or of another model .*t_block.1.weight"):
        MHLASanaTransformer2DModel.from_single_file(tmp_path / "sana.safetensors", config=str(tmp_path / "config"))


def flux_shapes(layers):
    """Shapes of Flux at its real width, as its authors name the weights."""
    width = 3072
    shapes = {"img_in": (width, 64), "txt_in": (width, 4096), "final_layer.linear": (64, width)}
    shapes |= {"time_in.in_layer": (width, 256), "time_in.out_layer": (width, width)}
    shapes |= {"vector_in.in_layer": (width, 768), "vector_in.out_layer": (width, width)}
    shapes["final_layer.adaLN_modulation.1"] = (2 * width, width)
    scales = []
    for block in (f"double_blocks.{index}" for index in range(layers)):
        for kind in ("img", "txt"):
            shapes |= {f"{block}.{kind}_mod.lin": (6 * width, width), f"{block}.{kind}_attn.qkv": (3 * width, width)}
            shapes |= {f"{block}.{kind}_mlp.0": (4 * width, width), f"{block}.{kind}_mlp.2": (width, 4 * width)}
            shapes[f"{block}.{kind}_attn.proj"] = (width, width)
            scales += [f"{block}.{kind}_attn.norm.{each}_norm.scale" for each in ("query", "key")]
    for block in (f"single_blocks.{index}" for index in range(2)):
        shapes |= {f"{block}.linear1": (7 * width, width), f"{block}.linear2": (width, 5 * width)}
        shapes[f"{block}.modulation.lin"] = (3 * width, width)
        scales += [f"{block}.norm.{each}_norm.scale" for each in ("query", "key")]
    found = {f"{name}.weight": shape for name, shape in shapes.items()}
    found |= {f"{name}.bias": shape[:1] for name, shape in shapes.items()}
    return {**found, **dict.fromkeys(scales, (128,))}


class TestOtherFamilies:
    """Layers and weights are counted by the names of diffusers, whatever the names in the file."""

    def test_layers_of_hunyuan_video(self):
        """By the names of diffusers, and by those of the authors."""
        shapes = {f"double_blocks.{index}.img_attn_qkv.weight": (9216, 3072) for index in range(20)}
        shapes |= {f"single_blocks.{index}.linear1.weight": (21504, 3072) for index in range(40)}
        shapes |= {f"txt_in.individual_token_refiner.blocks.{index}.norm1.weight": (3072,) for index in range(2)}
        with init_empty_weights():
            model = HunyuanVideoTransformer3DModel()
        found = single_file_names(model, shapes)
        assert "single_transformer_blocks.39.proj_mlp.weight" in found and {*found} <= {*model.state_dict()}
        check_layer_count(60, found, "the configuration")
        check_layer_count(60, shapes, "the configuration")
        for names in (found, [f"model.diffusion_model.{name}" for name in shapes]):
            with pytest.raises(ValueError, match="describes 59 layers, but the weights have 60"):
                check_layer_count(59, names, "the configuration")

    def test_layers_of_flux(self):
        with init_empty_weights():
            model = FluxTransformer2DModel(num_layers=2, num_single_layers=2)
        found = single_file_names(model, flux_shapes(2))
        assert {*found} == {*model.state_dict()}
        check_layer_count(4, found, "the configuration")
        with pytest.raises(ValueError, match="describes 3 layers, but the weights have 4"):
            check_layer_count(3, found, "the configuration")

    def load_behind_the_prefix(self, case, tmp_path, **more):
        """The model of weights that ComfyUI's prefix precedes, and the softmax model."""
        softmax, path = case.make(), tmp_path / "model.safetensors"
        softmax.save_config(tmp_path)
        save_file({**{PREFIXES[1] + name: tensor for name, tensor in softmax.state_dict().items()}, **more}, path)
        return mhla_class_for(type(softmax).__name__).from_single_file(path, config=str(tmp_path)), softmax

    @pytest.mark.parametrize(
        "case",
        [WanVACECase(), WanCase(), LTXCase(), HunyuanVideoCase(), QwenImageCase(), FluxCase()],
        ids=lambda case: type(case).__name__,
    )
    def test_names_of_diffusers_behind_the_prefix_of_comfyui(self, case, tmp_path):
        other = {"vae.decoder.conv_in.weight": torch.ones(1)}
        assert_same_parameters(*self.load_behind_the_prefix(case, tmp_path, **other), only_common=True)

    def test_weights_behind_the_prefix_have_a_place(self, tmp_path):
        with pytest.raises(ValueError, match="weights that QwenImageTransformer2DModel has no place for: more.weight"):
            self.load_behind_the_prefix(QwenImageCase(), tmp_path, **{f"{PREFIXES[1]}more.weight": torch.ones(1)})

    def test_advice_holds_for_the_model(self, tmp_path):
        save_file({"double_blocks.0.img_attn_qkv.weight": torch.ones(2, 2)}, tmp_path / "hunyuan.safetensors")
        (tmp_path / "hunyuan.gguf").write_bytes(b"GGUF")
        with pytest.raises(ValueError, match="Take a diffusers directory of HunyuanVideoTransformer3DModel in place"):
            MHLAHunyuanVideoTransformer3DModel.from_single_file(tmp_path / "hunyuan.gguf")
        # No word of a configuration, which would be refused as well.
        with pytest.raises(
            ValueError, match=r"Of other models than Wan directories are converted; .* with that file alone\.$"
        ):
            convert_pretrained(tmp_path / "hunyuan.safetensors", tmp_path / "out", MHLA, progress=False)
        HunyuanVideoTransformer3DModel.save_config(HunyuanVideoCase().make(), tmp_path)
        with pytest.raises(ValueError, match="is of a HunyuanVideoTransformer3DModel: of that class only"):
            convert_pretrained(
                tmp_path / "hunyuan.safetensors", tmp_path / "out", MHLA, config=tmp_path, progress=False
            )

    @pytest.mark.parametrize(
        "name",
        [
            "HunyuanVideo15Transformer3DModel",
            "SanaVideoTransformer3DModel",
            "DiTTransformer2DModel",
            "PixArtTransformer2DModel",
        ],
    )
    @pytest.mark.parametrize("file", ["model.safetensors", "model.gguf"])
    def test_classes_without_single_files(self, name, file, tmp_path):
        save_file({"weight": torch.ones(1)}, tmp_path / file)
        with pytest.raises(ValueError, match=f"no single files of this class. Take a diffusers directory of {name}: "):
            mhla_class_for(name).from_single_file(tmp_path / file)

    def test_command_refuses_vace_by_the_names_of_diffusers(self, tmp_path):
        softmax = tiny.wan_transformer(WanVACETransformer3DModel, vace_layers=[0])
        save_file(softmax.state_dict(), tmp_path / "vace.safetensors")
        with pytest.raises(ValueError, match="vace_.*: of Wan-VACE only diffusers directories are converted"):
            convert_pretrained(tmp_path / "vace.safetensors", tmp_path / "out", MHLA, progress=False)

    @pytest.mark.parametrize("name", ["ref_conv.weight", "blocks.0.self_attn.q.alpha"])
    def test_weights_without_a_place(self, name, tmp_path):
        softmax = write_original(tmp_path / "wan.safetensors")
        softmax.save_config(tmp_path / "config")
        edit_weights(tmp_path / "wan.safetensors", lambda weights: weights.update({name: torch.ones(1)}))
        with pytest.raises(ValueError, match="weights that WanTransformer3DModel has no place for"):
            MHLAWanTransformer3DModel.from_single_file(
                tmp_path / "wan.safetensors", config=str(tmp_path / "config"), mhla=MHLA
            )
