# SPDX-License-Identifier: Apache-2.0
"""LTX-Video and LTX-2: rotary tables of every head against the dense definition, refusals, and the shared checks."""

import copy

import numpy as np
import pytest
import torch
from diffusers import ContextParallelConfig, LTX2ImageToVideoPipeline, LTX2Pipeline, LTXImageToVideoPipeline
from diffusers.models.transformers import transformer_ltx, transformer_ltx2
from peft import LoraConfig
from PIL import Image

from mhla_hf import (
    BlockLayout,
    MHLALTX2VideoTransformer3DModel,
    MHLALTXVideoTransformer3DModel,
    convert,
    load_pipeline,
    unconvert,
)
from mhla_hf.conversion import convert_pretrained
from mhla_hf.hub.card import describe_model
from mhla_hf.models.attention import MHLAAttnProcessor
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.training.layers import mhla_layers, original_heads
from tests import tiny
from tests.families.adapter_checks import AdapterChecks
from tests.families.checks import ModelChecks
from tests.families.compile_checks import CompileChecks
from tests.families.model_case import ModelCase, assert_same_parameters, attention_inputs, captured, relative_error
from tests.families.training_checks import TrainingChecks


class LTXCase(ModelCase):
    """Every latent of a video is a token."""

    config = tiny.LTX
    masks = {"encoder_attention_mask": torch.float32}
    block_class = "LTXVideoTransformerBlock"
    mhla_class = MHLALTXVideoTransformer3DModel
    options = {"blocks": [3, 1, 2], "grid": [3, 2, 4]}
    block_list = "transformer_blocks"
    # Frames, height and width of the latents.
    sizes = ((3, 2, 4), (1, 4, 6), (5, 3, 7))

    def inputs(self, size=0, **options):
        return {**super().inputs(size, **options), "rope_interpolation_scale": (8 / 25, 32, 32)}


class LTX2Case(LTXCase):
    """Video with audio; predictions are those of both."""

    config = tiny.LTX2
    masks = dict.fromkeys(("encoder_attention_mask", "audio_encoder_attention_mask"), torch.float32)
    block_class = "LTX2VideoTransformerBlock"
    mhla_class = MHLALTX2VideoTransformer3DModel

    def predict(self, model, **inputs):
        # Hooks of accelerate fail on the output object, of the stock model too.
        video, audio = model(**inputs, return_dict=False)
        return torch.cat([video.flatten(1), audio.flatten(1)], dim=1)

    def inputs(self, size=0, **options):
        inputs = ModelCase.inputs(self, size, **options)
        return {**inputs, "sigma": inputs["timestep"]}


class LTX23Case(LTX2Case):
    """With rotary halves, gates of heads and perturbed attention."""

    config = tiny.LTX23


CASES = [LTXCase(), LTX2Case(), LTX23Case()]


def named(case):
    return type(case).__name__


def rotate(case, tokens, size):
    """Upstream's own rotary embedding of tokens `[B, T, H, K]`."""
    stock, inputs = case.make(), case.inputs(size, batch=len(tokens))
    if type(case) is LTXCase:
        tables = stock.rope(inputs["hidden_states"], *size, inputs["rope_interpolation_scale"])
        turned = transformer_ltx.apply_rotary_emb(tokens.flatten(2), tables)
    else:
        tables = stock.rope(stock.rope.prepare_video_coords(len(tokens), *size, torch.device("cpu")))
        kind = "split" if isinstance(case, LTX23Case) else "interleaved"
        turned = getattr(transformer_ltx2, f"apply_{kind}_rotary_emb")(tokens.flatten(2), tables)
    return turned.unflatten(2, tokens.shape[2:])


@pytest.mark.parametrize("case", CASES, ids=named)
@pytest.mark.parametrize("size", [(3, 2, 4), (1, 1, 1), (5, 3, 7), (2, 8, 2), (1, 4, 6)], ids=str)
@pytest.mark.parametrize("rope", ["after_feature_map", "before_feature_map"])
def test_every_layer_matches_the_dense_definition(rope, size, case):
    model, inputs = case.make_mhla(resize="blocks", rope=rope), case.inputs(size, batch=2)
    layout = BlockLayout(grid=size, blocks=[min(pair) for pair in zip(model.mhla_config.blocks, size)])
    block = layout.block_of_token
    for module in model.mhla_modules().values():
        with captured(module) as calls, torch.no_grad():
            model(**inputs)
        assert tuple(calls[0].keywords["grid"]) == size
        query, key, value = attention_inputs(calls[0])
        if rope == "before_feature_map":
            query, key = (rotate(case, tokens, size) for tokens in (query, key))
        query, key = plain = torch.relu(query), torch.relu(key)
        if rope == "after_feature_map":
            query, key = (rotate(case, tokens, size) for tokens in (query, key))
        mixing = module.mixing_matrix(layout).double()[block][:, block]
        pairs = mixing * torch.einsum("bthk,bjhk->bhtj", query.double(), key.double())
        sums = (mixing * torch.einsum("bthk,bjhk->bhtj", *(tokens.double() for tokens in plain))).sum(-1) + 1e-6
        expected = torch.einsum("bhtj,bjhv->bthv", pairs / sums.unsqueeze(-1), value.double())
        assert relative_error(calls[0].output, expected) < 1e-5


@pytest.mark.parametrize("case", CASES, ids=named)
def test_softmax_layers_stay_exactly(case):
    case.assert_softmax_layers_stay()


@pytest.mark.parametrize("case", CASES, ids=named)
def test_grid_that_pipelines_sample_at(case):
    cls = case.mhla_class
    assert cls.reference_grid({}) == cls.reference_grid({}, (8, 32)) == cls.default_grid
    size = {"sample_frames": 4, "sample_height": 6, "sample_width": 8}
    assert cls.reference_grid({**size, "patch_size": 2}) == (4, 3, 4)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_original_attention_is_upstreams(case):
    """With norms, rotary embedding and gates, as calibration and matching need it."""
    stock = case.make()
    model = convert(copy.deepcopy(stock), case.options)
    with original_heads(mhla_layers(model)):
        for size in range(3):
            torch.testing.assert_close(case.run(model, size), case.run(stock, size))


# LTX-2


def test_audio_and_text_have_softmax_attention():
    model = LTX23Case().make_mhla()
    is_mhla = {
        name.removesuffix(".processor"): isinstance(processor, MHLAAttnProcessor)
        for name, processor in model.attn_processors.items()
    }
    assert [name for name in is_mhla if is_mhla[name]] == [f"transformer_blocks.{index}.attn1" for index in (0, 1)]
    assert len(is_mhla) == 12


def test_lora_of_gates():
    case = LTX23Case()
    model = case.make_mhla()
    plain = case.run(model)
    model.add_adapter(LoraConfig(r=4, target_modules=["attn1.to_gate_logits"], init_lora_weights=False))
    assert relative_error(case.run(model), plain) > 1e-4
    model.disable_lora()
    torch.testing.assert_close(case.run(model), plain)


def test_spatio_temporal_guidance():
    """Layers that are all perturbed are upstream's, and samples of a batch are perturbed one by one."""
    case, perturbed = LTX23Case(), {"spatio_temporal_guidance_blocks": [0, 1]}
    stock = case.make()
    model, inputs = convert(copy.deepcopy(stock), case.options), case.inputs(2, batch=2)
    mask = torch.tensor([0.0, 1.0])
    with torch.no_grad():
        outputs = [each(**inputs, **perturbed).sample for each in (model, stock)]
        mixed, plain = model(**inputs, **perturbed, perturbation_mask=mask).sample, model(**inputs).sample
    torch.testing.assert_close(*outputs)
    assert relative_error(outputs[0], plain) > 1e-3
    torch.testing.assert_close(mixed, torch.stack([outputs[0][0], plain[1]]))


@pytest.mark.parametrize("case", CASES[1:], ids=named)
def test_coordinates_of_a_pipeline(case):
    """Pipelines make them once, and give them in every step."""
    for make in (case.make, case.make_mhla):
        model, inputs = make(), case.inputs(2)
        sizes = (inputs[name] for name in ("num_frames", "height", "width"))
        coords = model.rope.prepare_video_coords(1, *sizes, torch.device("cpu"), fps=12.0)
        with torch.no_grad():
            output = model(**inputs, video_coords=coords).sample
            torch.testing.assert_close(output, model(**inputs, fps=12.0).sample, rtol=0, atol=0)
            assert relative_error(output, model(**inputs).sample) > 1e-5


def test_a_mask_of_the_videos_tokens_is_refused():
    case = LTX2Case()
    with pytest.raises(ValueError, match="take no video_self_attention_mask"):
        case.make_mhla()(**case.inputs(), video_self_attention_mask=torch.ones(1, 24, 24))


# What is refused


@pytest.mark.parametrize("case", CASES, ids=named)
def test_tokens_beside_the_grid_are_refused(case):
    model, inputs = case.make_mhla(layers=[1]), case.inputs()
    message = "and take no tokens beside the grid, such as those of keyframes; got"
    for changes in ({"num_frames": 2}, {"num_frames": None}, {"width": 5}):
        with pytest.raises(ValueError, match=message):
            model(**{**inputs, **changes})
    if type(case) is not LTXCase:
        # Coordinates of more tokens than there are.
        with pytest.raises(ValueError, match=message):
            model(**inputs, video_coords=torch.zeros(1, 3, 30, 2))


@pytest.mark.parametrize("case", CASES, ids=named)
def test_masks_and_other_processors_are_refused(case):
    model = case.make_mhla(layers=[1])
    attention = model.transformer_blocks[1].attn1
    with pytest.raises(ValueError, match="takes neither encoder_hidden_states nor attention_mask"):
        attention(torch.randn(1, 24, 32), None, torch.ones(1, 24))
    with pytest.raises(ValueError, match="grid=None"):
        attention(torch.randn(1, 24, 32))
    with pytest.raises(ValueError, match="would ignore them"):
        model.set_attn_processor(type(model.transformer_blocks[0].attn1.processor)())
    with pytest.raises(ValueError, match="supports no context parallelism"):
        model.enable_parallelism(config=ContextParallelConfig(ring_degree=2))


# In its pipeline


def video(pipeline, **options):
    sizes = {"height": 32, "width": 64, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16}
    if isinstance(pipeline, LTX2Pipeline):
        # Classifier-free, spatio-temporal and modality guidance.
        sizes["spatio_temporal_guidance_blocks"] = [0, 1]
    generator = torch.Generator().manual_seed(0)
    return pipeline(prompt="a seven", generator=generator, output_type="np", **{**sizes, **options}).frames[0]


@pytest.mark.parametrize("make", [tiny.ltx_pipeline, tiny.ltx2_pipeline])
def test_pipeline(make, tmp_path):
    options, stock = {"blocks": [3, 1, 2], "grid": [3, 2, 4], "layers": [1]}, make()
    stock.save_pretrained(tmp_path / "softmax")
    report = convert_pretrained(tmp_path / "softmax", tmp_path / "mhla", options, progress=False)
    assert report.components["transformer"].num_layers == 2
    assert describe_model(ModelDirectory.read(tmp_path / "mhla"))["num_layers"] == 2
    expected = video(stock)
    in_memory = convert(stock, options)
    on_disk, fresh = type(stock).from_pretrained(tmp_path / "mhla"), load_pipeline(tmp_path / "softmax", mhla=options)
    frames = video(in_memory)
    assert np.abs(frames - expected).max() > 1e-4
    for pipeline in (on_disk, fresh):
        pipeline.set_progress_bar_config(disable=True)
        assert_same_parameters(pipeline.transformer, in_memory.transformer)
        np.testing.assert_array_equal(video(pipeline), frames)
    assert video(on_disk, height=96, width=32, num_frames=9).shape == (9, 96, 32, 3)
    np.testing.assert_array_equal(video(unconvert(on_disk)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, cls, options",
    [
        (tiny.ltx_pipeline, LTXImageToVideoPipeline, {}),
        (tiny.ltx2_pipeline, LTX2ImageToVideoPipeline, {"image_crf": 0}),
    ],
    ids=["ltx", "ltx2"],
)
def test_image_to_video(make, cls, options):
    """The image is the first frame of the grid, with a timestep of its own."""
    pipeline = cls(**convert(make(), {"blocks": [3, 1, 2], "grid": [3, 4, 8]}).components)
    pipeline.set_progress_bar_config(disable=True)
    images = [Image.new("RGB", (64, 32), color) for color in ("red", "blue")]
    red, blue = (video(pipeline, image=image, **options) for image in images)
    assert red.shape == (5, 32, 64, 3) and np.abs(red - blue).max() > 1e-3


class TestLTX(LTXCase, ModelChecks):
    pass


class TestLTX2(LTX2Case, ModelChecks):
    pass


class TestLTX23(LTX23Case, TrainingChecks, AdapterChecks, CompileChecks):
    pass
