# SPDX-License-Identifier: Apache-2.0
"""Operations by hand, on small configurations; memory beside what recipes and measured caches say; errors; blocks."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from typer.testing import CliRunner

from benchmarks.estimates import MODELS, PAGE, bounds_row, estimates
from mhla_hf.bench import BenchOptions
from mhla_hf.cli.main import app
from mhla_hf.estimate import (
    count_operations,
    estimate,
    find_candidate,
    find_grid,
    measure_block,
    on_meta,
    training_memory,
)
from mhla_hf.families.inputs import example_inputs
from mhla_hf.matching.blockwise import _added, _bytes_of, _inputs, list_blocks
from mhla_hf.matching.records import tensor_bytes
from mhla_hf.models.registry import family_for
from mhla_hf.presets import PRESETS
from mhla_hf.recovery.recipes import (
    DATA_FREE,
    BlockwiseOptions,
    MatchOptions,
    choose_layers,
    default_recipe,
    load_recipe,
    recipe_names,
)
from mhla_hf.training.layers import mhla_layers, record_calls
from tests import ROOT
from tests.families.cases import (
    CASES,
    ChromaCase,
    FluxCase,
    HunyuanVideo15Case,
    HunyuanVideoCase,
    LTX2Case,
    SkyReelsCase,
    WanAnimateCase,
    WanVACECase,
)
from tests.recovery.test_recipes import DIFFUSERS, TRANSFORMERS
from tests.tiny import TEXT_DIM, WAN
from tests.tiny_images import PIXART


DIT = {
    "_class_name": "DiTTransformer2DModel", "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3,
    "in_channels": 4, "out_channels": 8, "sample_size": 16, "patch_size": 2,
}  # fmt: skip
SANA = {
    "_class_name": "SanaTransformer2DModel", "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
    "num_cross_attention_heads": 2, "cross_attention_head_dim": 8, "cross_attention_dim": 16, "sample_size": 16,
    "caption_channels": 16,
}  # fmt: skip
FLUX = {
    "_class_name": "FluxTransformer2DModel", "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1,
    "num_single_layers": 2, "in_channels": 64, "joint_attention_dim": 32, "pooled_projection_dim": 8,
    "axes_dims_rope": [4, 6, 6],
}  # fmt: skip
AURAFLOW = {
    "_class_name": "AuraFlowTransformer2DModel", "num_attention_heads": 2, "attention_head_dim": 16, "sample_size": 64,
    "num_mmdit_layers": 2, "num_single_dit_layers": 1, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 24,
    "caption_projection_dim": 32, "pos_embed_max_size": 4096,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}  # fmt: skip


_UNBUILT = r"can be built of its configuration \("


@pytest.fixture
def candidate(tmp_path):
    def make(config):
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return find_candidate(tmp_path)

    return make


def test_operations_of_a_dit(candidate):
    subject = candidate(DIT)
    found = estimate(subject, find_grid(subject, height=768, width=768))
    tokens, width, layers = 48**2, 16, 3
    assert (found.grid, found.tokens, found.layers) == ((48, 48), tokens, layers)
    assert found.mixing == layers * 4 * tokens**2 * width
    # q, k, v, o and an MLP of four times the width; patches of 2 × 2 latents in and out.
    linear = layers * 2 * tokens * 12 * width**2 + 2 * tokens * width * 4 * (4 + 8)
    assert found.operations == pytest.approx(found.mixing + linear, rel=1e-3)
    # A head has 8 × 8 products to sum up a token, to read it and to mix two of 48 blocks, 8 more of the normaliser.
    summaries = 2 * width * (8 * 2 * tokens + (8 + 1) * 48**2)
    assert found.mhla_operations == found.operations - found.mixing + layers * summaries
    assert found.advice == "worth trying"
    assert find_grid(subject) == (8, 8) and find_grid(subject, tokens=30) == (5, 6)


def test_operations_of_wan(candidate):
    subject = candidate({"_class_name": "WanTransformer3DModel", **WAN})
    grid = find_grid(subject, height=128, width=160, num_frames=21)
    found = estimate(subject, grid)
    tokens, width, layers, text = 6 * 8 * 10, 24, 2, 512
    assert (grid, found.tokens) == ((6, 8, 10), tokens)
    assert found.mixing == layers * 4 * tokens**2 * width
    # Attention and cross-attention to the text, and an MLP of width 32.
    linear = layers * 2 * (tokens * (6 * width**2 + 2 * width * 32) + text * 2 * width**2)
    linear += layers * 4 * tokens * text * width
    linear += 2 * (text * (TEXT_DIM * width + width**2) + tokens * 2 * width * 64)
    assert found.operations == pytest.approx(found.mixing + linear, rel=0.01)
    bound = {row["layers"]: row for row in found.bounds()}
    share = found.mixing / found.operations
    assert bound["all"]["mixing_free"] == pytest.approx(1 / (1 - share)) and bound["all"]["converted"] == layers
    assert bound["2/3"]["mixing_free"] == pytest.approx(1 / (1 - share / 2)) and bound["2/3"]["converted"] == 1
    assert bound["all"]["with_mhla"] == pytest.approx(found.operations / found.mhla_operations)
    assert find_grid(subject) == (21, 30, 52)


def test_operations_and_cache_of_a_llama(candidate):
    subject = candidate(LLAMA)
    found = estimate(subject)
    tokens, width, layers = 4096, 32, 2
    assert (found.grid, found.layers) == ((tokens,), layers)
    # Causal: half of the pairs.
    assert found.mixing == layers * 2 * tokens**2 * width
    # Keys and values are half as wide; only the last token goes through the head.
    assert found.operations - found.mixing == layers * 2 * tokens * (3 * width**2 + 3 * width * 48) + 2 * width * 64
    assert found.parameters == sum(each.numel() for each in subject.build().parameters())
    assert found.kv_bytes == layers * 2 * tokens * width // 2 * 2
    assert found.sentence().startswith("Worth trying: the products of softmax attention are ")


def test_caches_are_as_large_as_measured(candidate):
    """At a context where the measured cache has stopped growing."""
    path = ROOT / "benchmarks" / "results" / "decode-2026-11-28-amd-epyc-dynamic.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    (row,) = (row for row in report["results"] if (row["dtype"], row["context"]) == ("bfloat16", 32768))
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    found = estimate(candidate({**LLAMA, **sizes, "num_key_value_heads": 4, "max_position_embeddings": 32768}))
    assert found.kv_bytes == row["softmax"]["cache_bytes"] and found.state_bytes == row["mhla"]["cache_bytes"]


def test_a_model_without_mhla(candidate):
    subject = candidate(AURAFLOW)
    found = estimate(subject, find_grid(subject, height=512, width=768))
    # The text and eight registers take part.
    tokens, width = 512 + 8 + 32 * 48, 32
    assert (found.grid, found.tokens, found.layers) == ((32, 48), tokens, 3)
    assert found.mixing == 3 * 4 * tokens**2 * width and found.mhla_operations is None and found.training == []
    assert "MHLA does not support it: AuraFlowTransformer2DModel has no MHLA version" in found.sentence()
    assert [row["with_mhla"] for row in found.bounds()] == [None] * 4


def test_text_beside_the_grid(candidate):
    """Softmax from the text and to it, with a mean key of each block, are MHLA's own operations."""
    subject = candidate(FLUX)
    found = estimate(subject, find_grid(subject, height=512, width=768))
    text, grid, width = 512, 32 * 48, 32
    tokens = text + grid
    assert (found.grid, found.tokens, found.layers) == ((32, 48), tokens, 3)
    assert found.mixing == 3 * 4 * tokens**2 * width
    exact = 3 * 4 * (text * tokens + grid * text) * width
    assert exact < found.mhla_operations < found.mixing


@pytest.mark.parametrize(
    ("case", "trained_as", "recipes"),
    [
        (WanVACECase(), "wan-vace", ["default"]),
        (WanAnimateCase(), "wan-animate", []),
        (SkyReelsCase(), "wan", ["default", "wan-1.3b", "wan-1.3b-hybrid", "wan-14b"]),
        (LTX2Case(), "ltx2", ["default", "ltx-2"]),
        (HunyuanVideoCase(), "hunyuan-video", ["default"]),
        (HunyuanVideo15Case(), "hunyuan-video-1.5", ["default", "hunyuan-video-1.5"]),
        (FluxCase(), "flux", ["default"]),
        (ChromaCase(), "chroma", ["default"]),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "upstream") else "",
)
def test_models_with_inputs_or_lists_of_blocks_of_their_own(case, trained_as, recipes, candidate):
    model = case.make(case.upstream)
    subject = candidate({**model.config, "_class_name": case.upstream.__name__})
    size = {"height": 64, "width": 64, **({"num_frames": 9} if len(case.mhla_class.default_grid) == 3 else {})}
    found = estimate(subject, find_grid(subject, **size))
    assert found.refusal is None and found.layers == case.mhla_class.layer_count(model.config)
    assert subject.family(model) == trained_as and [row["recipe"] for row in found.training] == recipes
    report = measure_block(subject, found.grid, BenchOptions(device="cpu", seconds=0.05))
    assert [(row["contestant"], row["reason"]) for row in report["results"]] == [("ordinary", None), ("mhla", None)]


def test_linear_attention_has_nothing_to_gain(candidate):
    found = estimate(candidate(SANA))
    assert (found.tokens, found.mixing, found.bounds(), found.advice) == (256, 0, [], "keep softmax")
    assert found.sentence().startswith("No gain in speed: its attention is linear already")


def test_layers_with_a_window_are_no_gain(candidate):
    tokens, window, width = 1024, 64, 32
    mistral = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    qwen = {**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}
    qwen |= {"sliding_window": window, "layer_types": ["full_attention", "sliding_attention"]}
    with pytest.raises(ValueError, match="MistralForCausalLM has no self-attention"):
        estimate(candidate(mistral), (tokens,))
    found = estimate(candidate(qwen), (tokens,))
    assert (found.layers, found.mixing) == (1, 2 * tokens**2 * width)
    assert found.windowed == (1,) and "Layers with windows of their own stay softmax: 1." in found.sentence()
    linear = 2 * 2 * tokens * (3 * width**2 + 3 * width * 48) + 2 * width * 64
    assert found.operations == found.mixing + 4 * tokens * window * width + linear


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_grouped_mm"), reason="this torch has no grouped products")
def test_operations_of_experts(candidate):
    tokens, width = 1024, 32
    mixtral = {**LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    found = estimate(candidate({**mixtral, "num_experts_per_tok": 2}), (tokens,))
    # Two of four experts for a token, and the router.
    linear = 2 * 2 * tokens * (3 * width**2 + 2 * 3 * width * 48 + 4 * width) + 2 * width * 64
    assert found.operations - found.mixing == linear


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_say_what_they_take(name, candidate):
    """The figures at the top of each recipe, rounded to two digits, for the model that it names."""
    if name in DIFFUSERS:
        class_name, sizes = DIFFUSERS[name]
        config = {"_class_name": class_name.removeprefix("MHLA"), **sizes}
    else:
        config = TRANSFORMERS[name][1]().to_dict()
    subject = candidate(config)
    row = training_memory(subject, load_recipe(name))
    text = " ".join((ROOT / "mhla_hf" / "recipes" / f"{name}.yaml").read_text(encoding="utf-8").split("\n# "))
    stated = [float(figure) for figure in re.findall(r"([\d.]+) GB", text)]
    counted = [row[key] / 1e9 for key in ("weights", "training", "records", "block_records") if row[key]]
    assert stated == pytest.approx(counted, rel=0.05)
    assert f"{row['steps']:,} optimizer steps" in text


@pytest.mark.parametrize(
    "case", [case for case in CASES if not isinstance(case, WanAnimateCase)], ids=lambda case: type(case).__name__
)
def test_records_are_as_large_as_the_stages_count_them(case, candidate):
    """Without values, beside what the stages count of a batch with values: for every family that is recovered."""
    config = {**case.make(case.upstream).config, "_class_name": case.upstream.__name__}
    subject, stages = candidate(config), {"match": MatchOptions(), "blockwise": BlockwiseOptions()}
    recipe = replace(default_recipe(family_for(case.upstream.__name__).training), stages=stages)
    size = {"height": 64, "width": 96, **({"num_frames": 17} if len(case.mhla_class.default_grid) == 3 else {})}
    recipe = replace(recipe, data=replace(recipe.data, **size))
    row = training_memory(subject, recipe)
    model = case.mhla_class.from_config({**config, "mhla": dict(recipe.mhla)}).eval()
    layers, grid = mhla_layers(model), subject.grid(**size)
    names = {layers[index].name for index in choose_layers(recipe.layers, len(layers))}
    batch = example_inputs(model, grid, torch.float32, torch.device("cpu"), text=recipe.data.max_length or 0)
    with torch.no_grad():
        calls = record_calls(model, layers, batch, only=names, keep=lambda each: each.to(torch.bfloat16))
        seen = _inputs(list_blocks(model, batch), batch)
        hints = sum(each is not None for each in _added(seen))
    counted = tensor_bytes(calls), _bytes_of(seen, batch, hints)
    expected = recipe.record_bytes(*counted, from_calls=recipe.family in DATA_FREE)
    assert (row["records"], row["block_records"]) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (DIT, {"tokens": 64, "height": 64}, "^tokens cannot be given with height"),
        (DIT, {"height": 0}, "^height=0 must be a whole number of at least 1"),
        (DIT, {"height": 8}, "^height must be at least 16"),
        (DIT, {"num_frames": 5}, "^num_frames is for videos, and DiTTransformer2DModel makes images"),
        (LLAMA, {"height": 64}, "^LlamaForCausalLM reads text: give tokens"),
        ({"model_type": "vit"}, {"tokens": 64}, "^vit sees images: give height and width"),
        ({"_class_name": "NoTransformer2DModel"}, {}, "^NoTransformer2DModel is not in diffusers"),
        ({"_class_name": "MHLADiTTransformer2DModel"}, {}, "is MHLA already: give the model that it was converted"),
        ({}, {}, "names neither its class in diffusers"),
        ({"_class_name": "WanTransformer3DModel", **WAN, "image_dim": 2.5}, {}, _UNBUILT + "TypeError: 'float'"),
        ({**LLAMA, "hidden_act": "x"}, {}, _UNBUILT + "KeyError: 'x'.*: correct its values"),
        ({**LLAMA, "rope_theta": "x"}, {}, _UNBUILT + "TypeError"),
        ({"model_type": "gpt2", "n_inner": -3}, {}, _UNBUILT + "RuntimeError"),
        ({**DIT, "activation_fn": "x"}, {}, _UNBUILT + "UnboundLocalError"),
        ({**DIT, "_class_name": ["DiTTransformer2DModel"]}, {}, "_class_name"),
        # A list of the names of all its layers is made when it is loaded.
        ({"model_type": "dinov2", "num_hidden_layers": 10**9}, {}, "num_hidden_layers=1000000000 must be a positive"),
        ({"model_type": "bert", "pad_token_id": -1, "vocab_size": 8, "type_vocab_size": -1}, {}, _UNBUILT),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_errors(config, size, message, candidate):
    with pytest.raises(ValueError, match=message):
        find_grid(candidate(config), **size)


def test_size_of_a_pipeline(tmp_path):
    """An image pipeline's size is that of its VAE, and each of its transformers can be chosen."""
    for name, config in {"transformer": FLUX, "vae": {"block_out_channels": [8, 8]}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    index = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    assert find_grid(find_candidate(tmp_path), height=64, width=128) == (16, 32)
    with pytest.raises(ValueError, match="component='transformer_2' is not a component"):
        find_candidate(tmp_path, "transformer_2")


@pytest.mark.parametrize("config", [{"_class_name": "WanTransformer3DModel", **WAN}, SANA, LLAMA])
def test_one_block_is_timed(config, candidate):
    subject = candidate(config)
    report = measure_block(subject, find_grid(subject, tokens=256), BenchOptions(device="cpu", seconds=0.05))
    assert [row["reason"] for row in report["results"]] == [None, None]
    assert [row["attention"] for row in report["results"]] == ["linear" if config is SANA else "softmax", "mhla"]
    assert all(row["milliseconds"] > 0 for row in report["results"])


def test_a_block_that_cannot_be_built_is_one_error(candidate):
    subject = candidate({"_class_name": "PixArtTransformer2DModel", **PIXART, "cross_attention_dim": None})
    grid = find_grid(subject, tokens=16)
    assert "can be built of its configuration" in estimate(subject, grid).refusal
    with pytest.raises(ValueError, match="correct its values"):
        measure_block(subject, grid, BenchOptions(device="cpu", seconds=0.05))


def test_work_of_counting_does_not_grow_with_the_text(candidate):
    """On the meta device every call takes the same time, whatever the number of tokens."""

    class Calls(TorchFunctionMode):
        number = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.number += 1
            return func(*args, **(kwargs or {}))

    def calls(tokens):
        subject = candidate({**LLAMA, "max_position_embeddings": tokens})
        model = on_meta(subject, subject.options((tokens,)))
        with Calls() as counted:
            count_operations(subject, model, (tokens,))
        return counted.number

    assert calls(2**16) <= 1.1 * calls(2**13)


def test_the_command(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    words = ["estimate", str(tmp_path), "--tokens", "512", "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["sentence"] in result.stdout and report["mixing"] == 2 * 2 * 512**2 * 32
    assert "LlamaForCausalLM: 512 tokens" in result.stdout and "Memory of a recovery" in result.stdout
    wrong = CliRunner().invoke(app, ["estimate", "dit-s-2-256", "--tokens", "64", "--width", "64"])
    assert wrong.exit_code == 2 and wrong.stderr == "error: --tokens cannot be given with width.\n"
    wrong = CliRunner().invoke(app, ["estimate", "wan-2.1-1.3b"])
    assert "nor a preset" in wrong.stderr and "Did you mean 'wan2.1-1.3b'?" in wrong.stderr


@pytest.mark.parametrize("name", ["DiT-XL/2", "FLUX.1-dev", "all-MiniLM-L6-v2"])
def test_the_page_has_what_is_counted(name):
    (model,) = (model for model in MODELS if model.name == name)
    rows = [bounds_row(name, size, found) for size, found in estimates(model)]
    assert set(rows) <= set(PAGE.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(
    ("preset", "recommended"),
    [
        ("wan2.1-1.3b", "wan-1.3b-hybrid"),
        ("wan2.1-14b", "wan-14b"),
        ("qwen3-0.6b", "qwen3-0.6b"),
        ("smollm2-135m", "default"),
    ],
)
def test_the_recipe_for_a_model_of_the_size_comes_first(preset, recommended):
    found = find_candidate(preset)
    rows = estimate(found, (2048,) if "wan" not in preset else (21, 30, 52)).training
    assert [row["recipe"] for row in rows if row["recommended"]] == [rows[0]["recipe"]] == [recommended]


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_has_an_estimate_of_its_recovery(preset):
    rows = estimate(find_candidate(preset)).training
    # Wan-Animate has no recovery.
    assert bool(rows) is ("animate" not in preset)
