# SPDX-License-Identifier: Apache-2.0
"""Wan, Wan-VACE, Wan-Animate, SkyReels-V2: which layers are MHLA, the dense definition, refusals, shared checks."""

import json

import numpy as np
import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanRotaryPosEmbed

from mhla_hf import (
    BlockLayout,
    MHLAConfig,
    MHLASkyReelsV2Transformer3DModel,
    MHLAWanAnimateTransformer3DModel,
    MHLAWanTransformer3DModel,
    MHLAWanVACETransformer3DModel,
    convert,
    load_pipeline,
    mhla_attention,
    unconvert,
)
from mhla_hf.conversion import convert_pretrained
from mhla_hf.hub.card import describe_model
from mhla_hf.models.attention import MHLAAttnProcessor
from mhla_hf.models.directory import ModelDirectory
from tests import tiny
from tests.families.checks import EagerChecks, ModelChecks
from tests.families.model_case import (
    ModelCase,
    assert_same_parameters,
    assert_tables_of_upstream,
    attention_inputs,
    captured,
    perturb_mhla,
    relative_error,
)
from tests.families.training_checks import TrainingChecks


class WanCase(ModelCase):
    """Text-to-video; latents of 3×4×8 are a token grid of 3×2×4."""

    config = tiny.WAN
    text_tokens = 16
    block_class = "WanTransformerBlock"
    mhla_class = MHLAWanTransformer3DModel
    options = {"blocks": [3, 1, 2], "grid": [3, 2, 4]}
    thorough = True
    # Frames, height and width of the latents.
    sizes = ((3, 4, 8), (1, 8, 12), (5, 6, 14))


class WanImageToVideoCase(WanCase):
    """With image cross-attention."""

    config = tiny.WAN_IMAGE_TO_VIDEO
    # The model tells image tokens from text by assuming 512 of text.
    text_tokens = 512


class WanVACECase(WanCase):
    """Two blocks of Wan and a control block, whose layer is the third."""

    config = {**tiny.WAN, "vace_layers": [0], "vace_in_channels": 6}
    mhla_class = MHLAWanVACETransformer3DModel
    thorough = False


class SkyReelsCase(WanCase):
    """Text-to-video."""

    block_class = "SkyReelsV2TransformerBlock"
    mhla_class = MHLASkyReelsV2Transformer3DModel
    thorough = False


class WanAnimateCase(WanImageToVideoCase):
    """The first frame of latents is the reference image."""

    config = {
        **tiny.WAN_IMAGE_TO_VIDEO,
        "motion_encoder_channel_sizes": {"4": 4, "8": 4, "16": 4},
        "motion_encoder_size": 16,
        "motion_style_dim": 4,
        "motion_dim": 2,
        "motion_encoder_dim": 8,
        "face_encoder_hidden_dim": 8,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 1,
    }
    mhla_class = MHLAWanAnimateTransformer3DModel
    thorough = False
    sizes = ((3, 4, 8), (2, 6, 8), (5, 6, 14))


CASE = WanCase()
FAMILY = [WanVACECase(), WanAnimateCase(), SkyReelsCase()]
# Frames, height and width of latents: one frame, odd sizes, sizes that the blocks do not divide, tall and wide ones.
GRIDS = [(3, 4, 8), (1, 4, 8), (1, 2, 2), (5, 6, 14), (7, 10, 6), (2, 16, 4), (4, 2, 26), (1, 8, 12)]


def rotate(tokens, latents, model):
    """Wan's rotary embedding as complex multiplication, from upstream's own tables: float64 `[B, T, H, K]`."""
    embed = WanRotaryPosEmbed(model.config.attention_head_dim, model.config.patch_size, model.config.rope_max_seq_len)
    cosine, sine = embed(latents)
    frequency = torch.complex(cosine[..., 0::2].double(), sine[..., 0::2].double())
    pairs = torch.view_as_complex(tokens.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * frequency).flatten(-2)


def dense_attention(call, model, latents, layout, mixing):
    """MHLA by its definition, in float64: every pair of tokens weighted by m_{b(t), b(j)} φ(q_t)·φ(k_j)."""
    query, key, value = (tensor.double() for tensor in attention_inputs(call))
    config = model.mhla_config
    if config.rope == "before_feature_map":
        query, key = rotate(query, latents, model), rotate(key, latents, model)
    features = {"relu": torch.relu, "elu": lambda x: torch.nn.functional.elu(x) + 1}[config.feature_map]
    query, key = features(query) + config.feature_map_eps, features(key) + config.feature_map_eps
    plain = (query, key)
    if config.rope == "after_feature_map":
        query, key = rotate(query, latents, model), rotate(key, latents, model)
    block = layout.block_of_token
    weights = mixing.double()[block][:, block]
    numerator = weights * torch.einsum("bthk,bjhk->bhtj", query, key)
    output = torch.einsum("bhtj,bjhv->bthv", numerator, value)
    if config.normalizer == "query":
        denominator = (weights * torch.einsum("bthk,bjhk->bhtj", *plain)).sum(-1) + config.eps
        output = output / denominator.transpose(1, 2).unsqueeze(-1)
    return output


def layout_of(model, size):
    """The layout of latents of a size: the block counts of the options, fewer where an axis has fewer tokens."""
    grid = (size[0], size[1] // 2, size[2] // 2)
    return BlockLayout(grid=grid, blocks=[min(pair) for pair in zip(model.mhla_config.blocks, grid)])


def assert_matches_the_dense_definition(model, inputs, size, layer=1):
    """Compares a layer with the dense definition and returns its call."""
    layout, module = layout_of(model, size), model.mhla_modules()[layer]
    with captured(module) as calls, torch.no_grad():
        output = model(**inputs).sample
    assert output.shape == (len(inputs["hidden_states"]), 16, *size)
    (call,) = calls
    assert tuple(call.keywords["grid"]) == layout.grid
    expected = dense_attention(call, model, inputs["hidden_states"], layout, module.mixing_matrix(layout))
    assert relative_error(call.output, expected) < 1e-5
    return call


# Which layers are MHLA


@pytest.mark.parametrize("layers", [None, [0], [1], [2, 0]], ids=str)
def test_layers_choose_what_is_mhla(layers):
    model = CASE.make(MHLAWanTransformer3DModel, mhla={**CASE.options, "layers": layers}, num_layers=3)
    chosen = sorted(layers) if layers is not None else [0, 1, 2]
    assert model.mhla_layers == chosen and sorted(model.mhla_modules()) == chosen
    for index, block in enumerate(model.blocks):
        assert hasattr(block.attn1, "mhla") == (index in chosen)
        assert isinstance(block.attn1.processor, MHLAAttnProcessor if index in chosen else WanAttnProcessor)
        assert isinstance(block.attn2.processor, WanAttnProcessor) and not hasattr(block.attn2, "mhla")


def test_hybrid_keeps_softmax_layers_exactly():
    stock = CASE.make(num_layers=3)
    model = CASE.make(MHLAWanTransformer3DModel, mhla={**CASE.options, "layers": [2]}, num_layers=3)
    model.load_state_dict(stock.state_dict(), strict=False)
    for size in range(3):
        with captured(model.blocks[1]) as ours, captured(stock.blocks[1]) as theirs:
            outputs = CASE.run(model, size), CASE.run(stock, size)
        assert torch.equal(ours[0].output, theirs[0].output)
        assert relative_error(*outputs) > 1e-3


def test_options_need_not_fit_the_grid_of_the_inputs():
    model = CASE.make(MHLAWanTransformer3DModel)
    assert model.mhla_config.blocks is not None and model.mhla_config.grid == (21, 30, 52)
    assert CASE.run(model).isfinite().all()


def test_bad_layers_are_named():
    with pytest.raises(ValueError, match=r"layers names 2"):
        CASE.make(MHLAWanTransformer3DModel, mhla={"layers": [0, 2]})


# Every grid, against the dense definition


@pytest.mark.parametrize("size", GRIDS, ids=lambda size: "x".join(map(str, size)))
@pytest.mark.parametrize(
    "options",
    [{}, {"normalizer": "none", "feature_map_eps": 1e-6}, {"feature_map": "elu", "rope": "before_feature_map"}],
    ids=["default", "authors", "rope_first"],
)
def test_every_grid_matches_the_dense_definition(options, size):
    model = CASE.make_mhla(**options, resize="blocks")
    inputs = CASE.inputs(size, batch=2)
    call = assert_matches_the_dense_definition(model, inputs, size)
    layout = layout_of(model, size)
    mixing = model.blocks[1].attn1.mhla.mixing_matrix(layout)
    # The package's own oracle agrees, from the same inputs.
    query, key, value = attention_inputs(call)
    features = {"relu": torch.relu, "elu": lambda x: torch.nn.functional.elu(x) + 1}[model.mhla_config.feature_map]
    if model.mhla_config.rope == "after_feature_map":
        query, key = (features(tokens) + model.mhla_config.feature_map_eps for tokens in (query, key))
        oracle = mhla_attention(
            rotate(query, inputs["hidden_states"], model),
            rotate(key, inputs["hidden_states"], model),
            value.double(),
            mixing,
            layout,
            normalizer_query=query.double(),
            normalizer_key=key.double(),
            normalizer=model.mhla_config.normalizer,
            backend="naive",
        )
        assert relative_error(call.output, oracle) < 1e-5


@pytest.mark.parametrize(
    "resize, size, blocks",
    [
        ("block_size", (3, 4, 8), (3, 1, 2)),
        ("block_size", (6, 4, 12), (6, 1, 3)),
        ("block_size", (3, 8, 4), (3, 2, 1)),
        ("block_size", (1, 4, 8), (1, 1, 2)),
        ("blocks", (6, 8, 16), (3, 1, 2)),
        ("auto", (4, 4, 12), (3, 1, 2)),
        ("auto", (6, 4, 8), (6, 1, 2)),
    ],
    ids=str,
)
def test_resize(resize, size, blocks):
    model = CASE.make_mhla(resize=resize)
    inputs = CASE.inputs(size)
    module = model.blocks[0].attn1.mhla
    with captured(module) as calls, torch.no_grad():
        model(**inputs)
    layout = module.layout_for(calls[0].keywords["grid"])
    assert layout.blocks == blocks
    mixing = module.mixing_matrix(layout)
    assert mixing.shape == (layout.num_blocks, layout.num_blocks)
    torch.testing.assert_close(mixing.sum(-1).mean(), module.mixing_matrix().sum(-1).mean(), rtol=0.1, atol=0)
    expected = dense_attention(calls[0], model, inputs["hidden_states"], layout, mixing)
    assert relative_error(calls[0].output, expected) < 1e-5


def test_block_size_at_other_grids():
    model = CASE.make_mhla(blocks=None, block_size=[1, 2, 3])
    module = model.blocks[0].attn1.mhla
    assert module.mixing.shape == (6, 6)
    for size in GRIDS:
        inputs = CASE.inputs(size)
        with captured(module) as calls, torch.no_grad():
            model(**inputs)
        layout = module.layout_for(calls[0].keywords["grid"])
        expected = dense_attention(calls[0], model, inputs["hidden_states"], layout, module.mixing_matrix(layout))
        assert relative_error(calls[0].output, expected) < 1e-5


@pytest.mark.parametrize("case", [CASE, *FAMILY], ids=lambda case: type(case).__name__)
def test_one_block_is_vanilla_linear_attention(case):
    model, inputs = case.make_mhla(trained=False, blocks=[1, 1, 1]), case.inputs(2)
    with captured(model._self_attentions()[-1].mhla) as calls, torch.no_grad():
        model(**inputs)
    query, key, value = attention_inputs(calls[0])
    query, key = torch.relu(query), torch.relu(key)
    turned_query, turned_key = (rotate(tokens, inputs["hidden_states"], model).float() for tokens in (query, key))
    summary = torch.einsum("bjhk,bjhv->bhkv", turned_key, value)
    denominator = torch.einsum("bthk,bhk->bth", query, key.sum(1)).unsqueeze(-1) + 1e-6
    expected = torch.einsum("bthk,bhkv->bthv", turned_query, summary) / denominator
    assert relative_error(calls[0].output, expected) < 1e-5


def test_rotary_tables_keep_upstream_values():
    assert_tables_of_upstream(CASE, WanRotaryPosEmbed)


# Variants of Wan


@pytest.mark.parametrize("size", GRIDS[:5], ids=lambda size: "x".join(map(str, size)))
def test_image_to_video_attends_to_the_image(size):
    case = WanImageToVideoCase()
    model = case.make_mhla()
    inputs = case.inputs(size)
    with torch.no_grad():
        output = model(**inputs).sample
        inputs["encoder_hidden_states_image"] = inputs["encoder_hidden_states_image"].flip(-1)
        other = model(**inputs).sample
    assert output.shape == (1, 16, *size)
    assert relative_error(other, output) > 1e-5
    assert model.blocks[0].attn2.add_k_proj is not None and not hasattr(model.blocks[0].attn1, "norm_added_k")


def test_image_to_video_cross_attention_is_upstreams():
    case = WanImageToVideoCase()
    model, stock = case.make_mhla(layers=[1]), case.make()
    stock.load_state_dict({name: value for name, value in model.state_dict().items() if ".mhla." not in name})
    with captured(model.blocks[0].attn2) as ours, captured(stock.blocks[0].attn2) as theirs:
        case.run(model, 2), case.run(stock, 2)
    assert torch.equal(ours[0].output, theirs[0].output)


def test_a_timestep_for_each_token():
    """Wan 2.2's small model gives every token its own timestep."""
    model, inputs = CASE.make_mhla(), CASE.inputs()
    with torch.no_grad():
        expected = model(**inputs).sample
        same = model(**{**inputs, "timestep": torch.full((1, 24), 500.0)}).sample
        varied = model(**{**inputs, "timestep": torch.linspace(0, 900, 24)[None]}).sample
    torch.testing.assert_close(same, expected)
    assert relative_error(varied, expected) > 1e-3


def test_rows_of_a_batch_do_not_mix():
    model = CASE.make_mhla()
    inputs = CASE.inputs(2, batch=3)
    with torch.no_grad():
        together = model(**inputs).sample
        apart = [model(**{name: value[i : i + 1] for name, value in inputs.items()}).sample for i in range(3)]
    torch.testing.assert_close(together, torch.cat(apart))


def test_without_query_key_norm():
    model = perturb_mhla(CASE.make(MHLAWanTransformer3DModel, mhla=CASE.options, cross_attn_norm=False))
    assert CASE.run(model).isfinite().all()


# The family


@pytest.mark.parametrize("case", FAMILY, ids=lambda case: type(case).__name__)
class TestFamily:
    def test_every_layer_matches_the_dense_definition(self, case):
        model, inputs = case.make_mhla(resize="blocks"), case.inputs(2)
        for layer in range(len(model._self_attentions())):
            assert_matches_the_dense_definition(model, inputs, case.sizes[2], layer)

    def test_softmax_layers_stay_exactly(self, case):
        case.assert_softmax_layers_stay()

    def test_context_parallelism_is_refused(self, case):
        with pytest.raises(ValueError, match="supports no context parallelism"):
            case.make_mhla().enable_parallelism(config=ContextParallelConfig(ring_degree=2))


def test_synchronous_diffusion_forcing():
    """Every frame has its own timestep and sees all others."""
    case = SkyReelsCase()
    model, inputs = case.make_mhla(), case.inputs()
    model._set_ar_attention(1)
    with torch.no_grad():
        expected = model(**inputs).sample
        for timesteps, is_same in ((torch.full((1, 3), 500.0), True), (torch.tensor([[900.0, 500.0, 100.0]]), False)):
            output = model(**{**inputs, "timestep": timesteps}, enable_diffusion_forcing=True).sample
            assert (relative_error(output, expected) < 1e-5) == is_same


def test_causal_diffusion_forcing_is_refused():
    case, message = SkyReelsCase(), "no attention mask, as diffusion forcing in causal blocks of 2 frames needs"
    with pytest.raises(ValueError, match=message):
        case.make_mhla()._set_ar_attention(2)
    stock = case.make(num_frame_per_block=2)
    with pytest.raises(ValueError, match=message):
        convert(stock, case.options)
    assert type(stock) is case.upstream


def test_grids_that_pipelines_sample_at():
    for case, grid in zip(FAMILY, [(21, 30, 52), (21, 45, 80), (25, 34, 60)]):
        assert case.mhla_class.reference_grid({}) == case.mhla_class.reference_grid({}, (4, 8)) == grid


PIPELINES = {"vace": (tiny.vace_pipeline, 3), "skyreels": (tiny.skyreels_pipeline, 2)}


@pytest.mark.parametrize("make, num_layers", PIPELINES.values(), ids=PIPELINES)
def test_pipelines_of_the_family(make, num_layers, tmp_path):
    options, stock = {"blocks": [2, 1, 2], "grid": [2, 1, 2], "layers": [0, num_layers - 1]}, make()
    stock.save_pretrained(tmp_path / "softmax")
    report = convert_pretrained(tmp_path / "softmax", tmp_path / "mhla", options, progress=False)
    assert report.components["transformer"].num_layers == num_layers
    assert describe_model(ModelDirectory.read(tmp_path / "mhla"))["num_layers"] == num_layers
    expected = tiny.wan_video(stock)
    in_memory = convert(stock, options)
    on_disk = type(stock).from_pretrained(tmp_path / "mhla")
    fresh = load_pipeline(tmp_path / "softmax", mhla=options)
    video = tiny.wan_video(in_memory)
    assert np.abs(video - expected).max() > 1e-4
    for pipeline in (on_disk, fresh):
        assert type(pipeline.transformer) is type(in_memory.transformer)
        assert pipeline.transformer.mhla_layers == [0, num_layers - 1]
        assert_same_parameters(pipeline.transformer, in_memory.transformer)
    np.testing.assert_array_equal(tiny.wan_video(on_disk), video)
    np.testing.assert_array_equal(tiny.wan_video(unconvert(on_disk)), expected)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vace_layers": [0, 1]}, "describes 4 layers, but the weights have 3"),
        ({"vace_layers": "all"}, "vace_layers='all' must be list"),
        ({"vace_layers": [0, 10**9]}, "vace_layers=.* must be list"),
    ],
)
def test_layers_of_control_blocks_are_counted(changes, message, tmp_path):
    source = tmp_path / "source"
    WanVACECase().make().save_pretrained(source)
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    for load in (
        lambda: convert_pretrained(source, tmp_path / "out", progress=False),
        lambda: WanVACECase.mhla_class.from_pretrained(source),
    ):
        with pytest.raises(ValueError, match=message):
            load()


# What is refused


def test_softmax_processor_is_refused():
    model = CASE.make_mhla(layers=[1])
    with pytest.raises(ValueError, match="weights are MHLA"):
        model.blocks[1].attn1.set_processor(WanAttnProcessor())
    with pytest.raises(ValueError, match="WanAttnProcessor would ignore"):
        model.set_attn_processor(WanAttnProcessor())
    assert isinstance(model.blocks[1].attn1.processor, MHLAAttnProcessor)
    # What is not MHLA stays free, and what there is can be set again.
    model.blocks[0].attn1.set_processor(WanAttnProcessor())
    expected = CASE.run(model)
    model.set_attn_processor(model.attn_processors)
    assert torch.equal(CASE.run(model), expected)


def test_attention_backend_of_the_softmax_layers():
    model = CASE.make_mhla(layers=[1])
    expected = CASE.run(model)
    model.set_attention_backend("_native_math")
    torch.testing.assert_close(CASE.run(model), expected)
    assert not hasattr(model.blocks[1].attn1.processor, "_attention_backend")


def test_attention_refuses_what_it_cannot_serve():
    model = CASE.make_mhla()
    attention = model.blocks[0].attn1
    latents = CASE.inputs()["hidden_states"]
    tokens, rotary = torch.randn(1, 24, 24), model.rope(latents)
    assert attention(tokens, None, None, rotary).shape == (1, 24, 24)
    with pytest.raises(ValueError, match="attention_mask"):
        attention(tokens, None, torch.ones(1, 24, dtype=torch.bool), rotary)
    with pytest.raises(ValueError, match="encoder_hidden_states"):
        attention(tokens, tokens, None, rotary)
    with pytest.raises(ValueError, match="grid=None"):
        attention(tokens, None, None, None)
    with pytest.raises(TypeError):
        attention(tokens, None, None, tuple(table.flatten(1, 3) for table in rotary))
    # A part of the sequence, as context parallelism would pass it.
    with pytest.raises(ValueError, match="24 tokens"):
        attention(tokens[:, :12], None, None, rotary)


def test_bad_options_are_refused():
    for options, message in (
        ({"blocks": [4]}, "each axis"),
        ({"causal": True, "block_size": [4]}, "causal|each axis"),
        ({"unknown": 1}, "unknown"),
        ("linear", "mhla options must be"),
    ):
        with pytest.raises(ValueError, match=message):
            CASE.make(MHLAWanTransformer3DModel, mhla=options)


def test_options_as_a_config_object():
    config = MHLAConfig(blocks=(3, 1, 2), output_norm=True)
    model = CASE.make(MHLAWanTransformer3DModel, mhla=config)
    assert model.mhla_config == config and model.config.mhla == config.to_dict()


class TestWan(WanCase, ModelChecks):
    pass


class TestWanVACE(WanVACECase, ModelChecks):
    pass


class TestWanAnimate(WanAnimateCase, EagerChecks):
    pass


class TestSkyReels(SkyReelsCase, ModelChecks):
    pass


@pytest.mark.slow
def test_animate_traces_without_graph_breaks():
    """By dynamo alone: `aot_eager` fails in the backward of the face encoder, of the stock model too."""
    case = WanAnimateCase()
    model = case.make_mhla()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend="eager")
    for size in (0, 2):
        torch.testing.assert_close(case.run(compiled, size), case.run(model, size))
    torch.compiler.reset()


class TestWanImageToVideoTraining(WanImageToVideoCase):
    gradients = TrainingChecks.gradients
    test_every_parameter_has_a_gradient = TrainingChecks.test_every_parameter_has_a_gradient
