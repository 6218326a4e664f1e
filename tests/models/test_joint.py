# SPDX-License-Identifier: Apache-2.0
"""Models with joint attention: MHLA layers, the dense definition, padding, refusals, and the shared checks."""

import copy

import pytest
import torch
from diffusers import ContextParallelConfig, HunyuanVideoImageToVideoPipeline
from diffusers.models.attention_processor import AttnProcessor
from safetensors.torch import load_file, save_file

from mhla_hf import convert, convert_pretrained, load_pipeline, unconvert
from mhla_hf.families.flux import grid_of
from mhla_hf.hub.card import describe_model
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.models.registry import MHLA_CLASSES
from mhla_hf.training.data.probes import sample_size
from tests import tiny_joint
from tests.models.adapter_checks import AdapterChecks
from tests.models.cases import ChromaCase, FluxCase, HunyuanVideo15Case, HunyuanVideoCase, QwenImageCase
from tests.models.compile_checks import CompileChecks
from tests.models.memory_checks import InPlaceChecks, MemoryChecks
from tests.models.model_case import OPTION_SETS, assert_same_parameters, captured, gradient_error, relative_error
from tests.models.saving_checks import SavingChecks
from tests.models.training_checks import TrainingChecks


CASES = [HunyuanVideoCase(), HunyuanVideo15Case(), QwenImageCase(), FluxCase(), ChromaCase()]


def named(case):
    return type(case).__name__


def second(inputs):
    """The second sample of a batch of two."""
    return {name: value if name.endswith("_ids") else value[1:] for name, value in inputs.items()}


def cut_text(inputs, tokens):
    """Inputs without the last tokens of their text."""
    cut = {name: value[:, :-tokens] if name.startswith("encoder_") else value for name, value in inputs.items()}
    if "attention_mask" in inputs:
        keep = len(inputs["txt_ids"]) - tokens
        mask = inputs["attention_mask"]
        cut["txt_ids"] = inputs["txt_ids"][:-tokens]
        cut["attention_mask"] = torch.cat([mask[:, :keep], mask[:, keep + tokens :]], dim=1)
    return cut


def dense_attention(call, layout, mixing, text_bias):
    """The output of a captured call from its definition, in float64, by a loop over blocks."""
    text = call.keywords["text"]
    query, key, value = (tensor.double() for tensor in call.arguments)
    rotary, text_rotary = call.keywords["rotary"], text.rotary or (lambda tokens: tokens)
    scale, block = query.shape[3] ** -0.5, layout.block_of_token
    weights = mixing.double()[block][:, block]
    features = query.relu(), key.relu()
    numerator = torch.einsum("bthk,bshk->bhts", *(rotary(x) for x in features)) * weights
    divisor = (torch.einsum("bthk,bshk->bhts", *features) * weights).sum(-1) + 1e-6
    attended = torch.einsum("bhts,bshv->bthv", numerator / divisor.unsqueeze(-1), value)
    query, key = rotary(query), rotary(key)
    landmarks = 0.0
    for number in range(layout.num_blocks):
        mean = key[:, block == number].mean(1)
        logits = torch.einsum("bthk,bhk->bth", query, mean) * scale + text_bias
        landmarks = landmarks + int((block == number).sum()) * logits.exp()
    logits = torch.einsum("bthk,bshk->bths", query, text_rotary(text.key.double())) * scale
    if text.valid is not None:
        logits = logits.masked_fill(~text.valid[:, None, None], float("-inf"))
    to_text = torch.einsum("bths,bshv->bthv", logits.softmax(-1), text.value.double())
    of_text = logits.exp().sum(-1)
    share = (of_text / (of_text + landmarks)).unsqueeze(-1)
    return share * to_text + (1 - share) * attended


@pytest.mark.parametrize("case", CASES, ids=named)
class TestJoint:
    def test_every_layer_matches_the_dense_definition(self, case):
        for size in range(3):
            model, inputs = case.make_mhla(resize="blocks"), case.inputs(size, batch=2)
            for module in model.mhla_modules().values():
                with captured(module) as (calls), torch.no_grad():
                    model(**inputs)
                (call,) = calls
                layout = module.layout_for(call.keywords["grid"])
                expected = dense_attention(call, layout, module.mixing_matrix(layout), module.text_bias.double())
                assert relative_error(call.output, expected) < 1e-5

    def test_softmax_layers_stay_exactly(self, case):
        case.assert_softmax_layers_stay(batch=2)

    def test_text_as_a_block(self, case):
        model = case.make_mhla(text="block")
        count = 1 + 3 * 1 * 2
        assert all(module.mixing.shape == (count, count) for module in model.mhla_modules().values())
        assert not any("text_bias" in name for name, _ in model.named_parameters())
        inputs = case.inputs(batch=2)
        with torch.no_grad():
            expected = model(**inputs).sample
            assert relative_error(model(**second(inputs)).sample, expected[1:]) < 1e-6
        assert relative_error(expected, case.run(case.make_mhla(), batch=2)) > 1e-4
        for size in (1, 2):
            assert case.run(model, size).isfinite().all()
        other = case.make_mhla(text="block", feature_map="hedgehog")
        if type(case) is FluxCase:
            # Its text is never padded.
            assert case.run(other).isfinite().all()
        else:
            with pytest.raises(ValueError, match="takes padded text with feature_map='relu'"):
                case.run(other)

    def test_lora_on_all_projections(self, case):
        from peft import LoraConfig

        model = case.make_mhla()
        expected = case.run(model)
        targets = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
        for target in targets:
            adapted = copy.deepcopy(model)
            torch.manual_seed(0)
            adapted.add_adapter(LoraConfig(r=2, target_modules=[target], init_lora_weights=False))
            assert relative_error(case.run(adapted), expected) > 1e-5, target

    def test_what_is_refused(self, case):
        model, inputs = case.make_mhla(), case.inputs()
        with pytest.raises(ValueError, match="supports no context parallelism"):
            model.enable_parallelism(config=ContextParallelConfig(ring_degree=2))
        with pytest.raises(ValueError, match="AttnProcessor would ignore"):
            model.set_attn_processor(AttnProcessor())
        attention = model._self_attentions()[0]
        with captured(attention) as calls, torch.no_grad():
            model(**inputs)
        with pytest.raises(ValueError, match="joint attention take no kv_cache"):
            attention(*calls[0].arguments, **calls[0].keywords, kv_cache=1)


@pytest.mark.parametrize("case", [case for case in CASES if type(case) is not FluxCase], ids=named)
def test_padded_text_has_no_effect_and_equals_cut_text(case):
    model, inputs = case.make_mhla(), case.inputs(batch=2)
    one, mask = second(inputs), next(name for name in inputs if name.endswith("_mask"))
    with torch.no_grad():
        expected = model(**one).sample
        states = one["encoder_hidden_states"].clone()
        states[:, -2:] = 9.0
        assert relative_error(model(**{**one, "encoder_hidden_states": states}).sample, expected) < 1e-6
        assert relative_error(model(**cut_text(one, 2)).sample, expected) < 1e-6
        # In a batch with longer text.
        assert relative_error(model(**inputs).sample[1:], expected) < 1e-6
        shorter = one[mask].clone()
        shorter[:, one["encoder_hidden_states"].shape[1] - 3] = 0
        assert relative_error(model(**{**one, mask: shorter}).sample, expected) > 1e-5


def test_reference_images_are_refused():
    case = QwenImageCase()
    model, inputs = case.make_mhla(), case.inputs()
    tokens = torch.cat([inputs["hidden_states"]] * 2, dim=1)
    message = "take one image of one size: no images to edit and no layers beside it"
    for shapes in ([[(1, 4, 6), (1, 4, 6)]], [[(2, 4, 6)]]):
        with pytest.raises(ValueError, match=message):
            model(**{**inputs, "hidden_states": tokens, "img_shapes": shapes})
    with pytest.raises(ValueError, match=message):
        model(**{**case.inputs(batch=2), "img_shapes": [[(1, 4, 6)], [(1, 6, 4)]]})
    stock = case.make(use_layer3d_rope=True)
    with pytest.raises(ValueError, match="Qwen-Image-Layered .* has no MHLA version"):
        convert(stock, case.options)
    assert type(stock) is case.upstream
    case = FluxCase()
    model, inputs = case.make_mhla(), case.inputs()
    reference, columns = (
        inputs["img_ids"].clone(),
        inputs["img_ids"].unflatten(0, (4, 6)).transpose(0, 1).flatten(0, 1),
    )
    reference[:, 0] = 1
    for ids in (torch.cat([inputs["img_ids"], reference]), reference, columns, inputs["img_ids"][:-1]):
        with pytest.raises(ValueError, match="take the tokens of one image, row by row: no reference images"):
            model(**{**inputs, "img_ids": ids})
    adapter = {"joint_attention_kwargs": {"ip_hidden_states": [tokens]}}
    with pytest.raises(ValueError, match="take no ip_hidden_states"):
        model(**inputs, **adapter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grids_of_flux(dtype):
    for height, width in ((128, 128), (1, 200), (200, 1), (96, 171), (3, 513), (513, 3)):
        rows, columns = torch.arange(height)[:, None], torch.arange(width)
        ids = torch.stack([torch.zeros(height, width), rows.expand(height, width), columns.expand(height, width)], -1)
        assert grid_of(ids.flatten(0, 1).to(dtype)) == grid_of(ids.flatten(0, 1)[None].to(dtype)) == (height, width)


def test_the_grid_may_be_given():
    case = FluxCase()
    model = case.make_mhla()
    for size, grid in enumerate(case.sizes):
        expected = case.run(model, size)
        with torch.no_grad():
            given = model(**case.inputs(size), joint_attention_kwargs={"grid": grid, "scale": 1.0}).sample
        assert torch.equal(given, expected)


@pytest.mark.parametrize("case", [FluxCase(), ChromaCase()], ids=lambda case: case.upstream.__name__)
@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ((4, 5), r"grid=\(4, 5\) has 20 tokens, but img_ids has 24"),
        ((5, 6), r"grid=\(5, 6\) has 30 tokens, but img_ids has 24"),
        ((24,), r"grid=\(24,\) has 1 axes, but the grid has 2"),
        ((-4, -6), "must be one to three positive integers"),
        ((4.0, 6), "must be one to three positive integers"),
        (None, "grid=None must be one to three positive integers"),
    ],
)
def test_a_given_grid_has_the_tokens_of_the_image(case, grid, message):
    with pytest.raises(ValueError, match=message):
        case.make_mhla()(**case.inputs(), joint_attention_kwargs={"grid": grid})


def test_other_text_than_in_the_checkpoint_is_refused(tmp_path):
    case = FluxCase()
    for stored, given, message in (
        ("softmax", "block", "leave out 4 trained MHLA weight"),
        ("block", "softmax", "stored under text='block', but the mhla options ask for 'softmax'"),
    ):
        case.make_mhla(text=stored).save_pretrained(tmp_path / stored)
        with pytest.raises(ValueError, match=message):
            case.mhla_class.from_pretrained(tmp_path / stored, mhla={"text": given})


def test_a_checkpoint_without_the_scale_of_the_normalizer(tmp_path, caplog):
    """As those made before there was one: 1 is what they have been trained with."""
    model = FluxCase().make_mhla()
    for module in model.mhla_modules().values():
        module.normalizer_scale.data.fill_(1.0)
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    save_file({name: value for name, value in tensors.items() if not name.endswith("normalizer_scale")}, file)
    caplog.clear()
    loaded = type(model).from_pretrained(tmp_path)
    assert "newly initialised" not in caplog.text
    torch.testing.assert_close(FluxCase().run(loaded), FluxCase().run(model))


def test_an_image_beside_the_text():
    case = HunyuanVideo15Case()
    model = case.make_mhla()
    without, image = (case.run(model, with_image=each) for each in (False, True))
    assert without.isfinite().all() and relative_error(image, without) > 1e-4


@pytest.mark.parametrize("kind", ["latent_concat", "token_replace"])
def test_hunyuan_video_from_an_image(kind):
    """Blocks that leave the first frame clean are classes of their own; their attention is the same."""
    case = HunyuanVideoCase()
    stock = case.make(image_condition_type=kind)
    model = convert(copy.deepcopy(stock), {**case.options, "layers": [0, 3]})
    assert type(model) is case.mhla_class and model.mhla_layers == [0, 3]
    expected = case.run(stock, batch=2)
    output = case.run(model, batch=2)
    assert output.isfinite().all() and relative_error(output, expected) > 1e-4
    assert relative_error(case.run(unconvert(model), batch=2), expected) == 0
    assert case.run(convert(stock, case.options), 1).isfinite().all()


@pytest.mark.parametrize("kind, channels", [("latent_concat", 9), ("token_replace", 4)])
def test_hunyuan_video_pipeline_from_an_image(kind, channels, tmp_path):
    stock = tiny_joint.hunyuan_video_pipeline()
    transformer = tiny_joint.hunyuan_video(image_condition_type=kind, in_channels=channels)
    parts = {"transformer": transformer, "vae": stock.vae, "scheduler": stock.scheduler}
    absent = {**tiny_joint.encoders(HunyuanVideoImageToVideoPipeline), "image_processor": None}
    pipeline = HunyuanVideoImageToVideoPipeline(**parts, **absent)
    pipeline.save_pretrained(tmp_path)
    options = {"blocks": [3, 2, 2], "layers": [0, 3]}
    random = torch.Generator().manual_seed(1)
    call = {
        "image": torch.rand(1, 3, 32, 48, generator=random), "height": 32, "width": 48, "num_frames": 9,
        "prompt_embeds": torch.randn(1, 7, tiny_joint.TEXT_DIM, generator=random),
        "pooled_prompt_embeds": torch.randn(1, 8, generator=random),
        "prompt_attention_mask": torch.ones(1, 7), "num_inference_steps": 2, "output_type": "latent",
    }  # fmt: skip
    converted, loaded = (
        each(**call, generator=torch.Generator().manual_seed(0))[0]
        for each in (convert(pipeline, options), load_pipeline(tmp_path, mhla=options, **absent))
    )
    assert loaded.isfinite().all() and loaded.ndim == 5 and pipeline.transformer.mhla_layers == [0, 3]
    assert relative_error(loaded, converted) < 1e-6


PIPELINES = {
    "hunyuan-video": tiny_joint.hunyuan_video_pipeline,
    "1.5": tiny_joint.hunyuan_video_15_pipeline,
    "qwen-image": tiny_joint.qwen_image_pipeline,
    "flux": tiny_joint.flux_pipeline,
    "chroma": tiny_joint.chroma_pipeline,
}


@pytest.mark.parametrize("make", PIPELINES.values(), ids=PIPELINES)
def test_pipelines(make, tmp_path):
    stock = make()
    count = len(stock.transformer.transformer_blocks) + len(
        getattr(stock.transformer, "single_transformer_blocks", ())
    )
    axes = len(MHLA_CLASSES[f"MHLA{type(stock.transformer).__name__}"].load_class().default_grid)
    options = {"blocks": [3, 2, 2][-axes:], "layers": [0, count - 1]}
    absent = tiny_joint.encoders(type(stock))
    stock.save_pretrained(tmp_path / "softmax")
    report = convert_pretrained(tmp_path / "softmax", tmp_path / "mhla", options, progress=False)
    assert report.components["transformer"].num_layers == count
    assert describe_model(ModelDirectory.read(tmp_path / "mhla"))["num_layers"] == count
    expected = tiny_joint.latents_of(stock)
    in_memory = convert(stock, options)
    on_disk = type(stock).from_pretrained(tmp_path / "mhla", **absent)
    fresh = load_pipeline(tmp_path / "softmax", mhla=options, **absent)
    latents = tiny_joint.latents_of(in_memory)
    assert relative_error(latents, expected) > 1e-4
    for pipeline in (on_disk, fresh):
        assert type(pipeline.transformer) is type(in_memory.transformer)
        assert pipeline.transformer.mhla_layers == [0, count - 1]
        assert_same_parameters(pipeline.transformer, in_memory.transformer)
    torch.testing.assert_close(tiny_joint.latents_of(on_disk), latents)
    torch.testing.assert_close(tiny_joint.latents_of(unconvert(on_disk)), expected)


@pytest.mark.parametrize(
    "name, size",
    [
        ("hunyuan-video", {"height": 720, "width": 1280, "num_frames": 129}),
        ("1.5", {"height": 480, "width": 832, "num_frames": 121}),
        ("qwen-image", {"height": 1328, "width": 1328}),
        ("flux", {"height": 1024, "width": 1024}),
        ("chroma", {"height": 1024, "width": 1024}),
    ],
)
def test_sizes_of_probes(name, size):
    """Those of the grid that the mixing weights were made for."""
    pipeline = convert(PIPELINES[name](), {})
    assert sample_size(pipeline, {"transformer": pipeline.transformer}) == size


def test_grids_that_pipelines_sample_at():
    expected = {HunyuanVideoCase: ((33, 45, 80), (4, 8)), HunyuanVideo15Case: ((31, 30, 52), (4, 16))}
    for case, (grid, compression) in expected.items():
        assert case.mhla_class.reference_grid({}) == case.mhla_class.reference_grid({}, compression) == grid


class TestHunyuanVideoModel(
    HunyuanVideoCase, SavingChecks, TrainingChecks, AdapterChecks, MemoryChecks, InPlaceChecks
):
    block_class = "HunyuanVideoTransformerBlock"


class TestHunyuanVideoCompile(HunyuanVideoCase, CompileChecks):
    pass


class TestHunyuanVideo15Model(
    HunyuanVideo15Case, SavingChecks, TrainingChecks, AdapterChecks, MemoryChecks, InPlaceChecks
):
    block_class = "HunyuanVideo15TransformerBlock"


class TestHunyuanVideo15Compile(HunyuanVideo15Case):
    """By blocks alone: upstream's forward sorts the text by the values of its masks."""

    gradients = TrainingChecks.gradients

    @pytest.mark.slow
    @pytest.mark.parametrize("options", ["default", "everything"])
    def test_blocks_trace_without_graph_breaks(self, options):
        model = self.make_mhla(**OPTION_SETS[options])
        expected = [self.gradients(model, (size,)) for size in (0, 2)]
        torch.compiler.reset()
        model.compile_repeated_blocks(fullgraph=True, dynamic=False, backend="aot_eager")
        for size, gradients in zip((0, 2), expected):
            assert gradient_error(self.gradients(model, (size,)), gradients) < 1e-4
        torch.compiler.reset()


class TestQwenImageModel(QwenImageCase, SavingChecks, TrainingChecks, AdapterChecks, MemoryChecks, InPlaceChecks):
    block_class = "QwenImageTransformerBlock"


class TestQwenImageCompile(QwenImageCase, CompileChecks):
    pass


class TestFluxModel(FluxCase, SavingChecks, TrainingChecks, AdapterChecks, MemoryChecks, InPlaceChecks):
    block_class = "FluxTransformerBlock"


class TestFluxCompile(FluxCase, CompileChecks):
    def inputs(self, size=0, **options):
        """With the grid: reading it from positions would break the graph."""
        return {**super().inputs(size, **options), "joint_attention_kwargs": {"grid": self.sizes[size]}}


class TestChromaModel(ChromaCase, SavingChecks, TrainingChecks, AdapterChecks, MemoryChecks, InPlaceChecks):
    block_class = "ChromaTransformerBlock"


class TestChromaCompile(TestFluxCompile, ChromaCase):
    pass
