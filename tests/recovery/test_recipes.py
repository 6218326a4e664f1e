# SPDX-License-Identifier: Apache-2.0
"""Recipes are checked before anything is loaded, and those of the package fit the models they are for."""

import inspect
from pathlib import Path

import pytest
import torch
import transformers

import mhla_hf
from mhla_hf.config import parse_layers
from mhla_hf.recovery import recipes, stages
from mhla_hf.recovery.recipes import (
    FAMILIES,
    STAGES,
    VARIANTS,
    check_arguments,
    default_recipe,
    default_settings,
    load_recipe,
    models_of,
    parse_recipe,
    recipe_names,
)
from mhla_hf.training.layers import mhla_layers


# The configurations of the published models.
DIFFUSERS = {
    "wan-1.3b": (
        "MHLAWanTransformer3DModel",
        {"num_attention_heads": 12, "num_layers": 30, "ffn_dim": 8960, "attention_head_dim": 128, "text_dim": 4096},
    ),
    "sana-0.6b": (
        "MHLASanaTransformer2DModel",
        {
            "num_attention_heads": 36, "attention_head_dim": 32, "num_cross_attention_heads": 16, "num_layers": 28,
            "cross_attention_head_dim": 72, "cross_attention_dim": 1152, "caption_channels": 2304, "sample_size": 16,
        },
    ),
    "wan-14b": (
        "MHLAWanTransformer3DModel",
        {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824, "attention_head_dim": 128, "text_dim": 4096},
    ),
    # The defaults of their constructors.
    "ltx-2": ("MHLALTX2VideoTransformer3DModel", {"num_layers": 48}),
    "hunyuan-video-1.5": ("MHLAHunyuanVideo15Transformer3DModel", {"num_layers": 54}),
    "qwen-image": ("MHLAQwenImageTransformer2DModel", {"num_layers": 60}),
    "dit-xl-2": (
        "MHLADiTTransformer2DModel",
        {"num_layers": 28, "num_attention_heads": 16, "attention_head_dim": 72, "out_channels": 8, "sample_size": 32},
    ),
}  # fmt: skip
DIFFUSERS["wan-1.3b-hybrid"] = DIFFUSERS["wan-1.3b"]
TRANSFORMERS = {
    "qwen3-0.6b": (
        "AutoModelForCausalLM",
        lambda: transformers.Qwen3Config(
            vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
        ),
    ),
    "minilm": (
        "AutoModel",
        lambda: transformers.BertConfig(
            vocab_size=30522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        ),
    ),
}  # fmt: skip
PARAMETERS = {
    "wan-1.3b": 1.42e9, "sana-0.6b": 5.9e8, "dit-xl-2": 6.75e8, "qwen3-0.6b": 5.96e8, "minilm": 2.27e7,
    "wan-14b": 1.43e10, "ltx-2": 1.9e10, "hunyuan-video-1.5": 8.3e9, "qwen-image": 2.04e10,
}  # fmt: skip
LAYERS = {
    "wan-1.3b-hybrid": 20, "wan-1.3b": 30, "wan-14b": 40, "ltx-2": 48, "hunyuan-video-1.5": 54, "qwen-image": 60,
    "qwen3-0.6b": 21, "minilm": 6,
}  # fmt: skip
MINIMAL = {"family": "wan", "match": {"steps": 600}}


def full_size(name: str, recipe):
    """The model of a recipe as it is published, converted, without memory for its weights."""
    options = dict(recipe.mhla)
    if name in DIFFUSERS:
        class_name, sizes = DIFFUSERS[name]
        chosen = parse_layers(recipe.layers, sizes["num_layers"])
        options |= {} if chosen is None else {"layers": chosen}
        with torch.device("meta"):
            return getattr(mhla_hf, class_name)(**sizes, mhla=options)
    auto, config = TRANSFORMERS[name]
    made = config()
    if recipe.layers.startswith("auto:"):
        # Which ones is measured; how many is not.
        layers = parse_layers(recipe.layers.removeprefix("auto:"), made.num_hidden_layers)
        options |= {"layers": layers}
    made.mhla = options
    with torch.device("meta"):
        return getattr(transformers, auto).from_config(made, attn_implementation="mhla")


def test_all_recipes_are_tested():
    assert set(recipe_names()) == {*DIFFUSERS, *TRANSFORMERS}


@pytest.mark.parametrize("name", sorted({*DIFFUSERS, *TRANSFORMERS}))
def test_recipes_fit_the_published_models(name):
    recipe = load_recipe(name)
    model = full_size(name, recipe)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(PARAMETERS[name.removesuffix("-hybrid")], rel=0.25)
    assert len(mhla_layers(model)) == LAYERS.get(name, 28)


@pytest.mark.parametrize("family", FAMILIES)
def test_default_recipes(family):
    recipe = default_recipe(family)
    assert recipe.family == family and bool(recipe.stages) == (family != "sana-video")
    assert parse_recipe(recipe.to_dict(), "again") == recipe
    for variant in VARIANTS:
        if family in default_settings()[variant]:
            shared = default_recipe(family, variant).mhla.get("mixing_heads") == "shared"
            assert shared == (variant == "paper")
        else:
            message = f"recipe {variant} has no setting for {models_of(family)}, only for "
            with pytest.raises(ValueError, match=message):
                default_recipe(family, variant)
    assert set(default_settings()["defaults"]) == set(FAMILIES)


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"match": {"stepz": 3}},
            "Unknown match option stepz. Known options: steps, batches, .* Did you mean 'steps'",
        ),
        ({"matches": {}}, "Unknown recipe option matches. Known options: family, layers"),
        ({"match": {"steps": "many"}}, r"match.steps must be a whole number \(at least 1 and at most .*, got 'many'"),
        ({"match": {"steps": 0}}, "match.steps must be at least 1, got 0"),
        ({"match": 600}, "match options must be a dict"),
        ({"family": "mochi"}, "family='mochi' is not one of 'wan', 'wan-vace'"),
        ({"mhla": {"feature_maps": "relu"}}, "Unknown mhla option feature_maps. Known options: feature_map, rope"),
        ({"mhla": {"layers": [1]}}, "mhla.layers: give layers at the top of the recipe instead"),
        ({"mhla": {"causal": True}}, "mhla.causal: wan models decide that themselves"),
        (
            {"layers": "some"},
            "layers='some' must be all, different layer indices",
        ),
        (
            {"data": {"max_length": 128}},
            "data.max_length is not an option of wan models, only of ltx2, hunyuan-video-1.5",
        ),
        (
            {"distill": {"temperature": 2.0}},
            "distill.temperature is not an option of wan models, only of language models, text encoders",
        ),
        ({"family": "causal", "mhla": {"lepe_kernel": 3}}, "mhla.lepe_kernel must be None with causal=True"),
        ({"family": "encoder", "mhla": {"blocks": [4]}}, "mhla.blocks: it has no meaning for sequences of text"),
        ({"match": None}, "it has no stage; give one of calibrate, match, blockwise, distill, finetune"),
        ({"match": {"batch_size": 4096}}, "match.batch_size must be at most data.samples, 2048, got 4096"),
    ],
)
def test_mistakes_name_the_key(changes, message):
    content = {name: value for name, value in {**MINIMAL, **changes}.items() if value is not None}
    with pytest.raises(ValueError, match=f"^recipe a.yaml: {message.removeprefix(': ')}"):
        parse_recipe(content, "recipe a.yaml")


def test_files(tmp_path: Path):
    path = tmp_path / "own.yaml"
    path.write_text("family: wan\nlayers: [1, 2]\nmatch: {learning_rate: 3e-4}\n")
    recipe = load_recipe(path)
    assert recipe.layers == "1,2" and [*recipe.stages] == ["match"]
    assert recipe.stages["match"].learning_rate == 3e-4
    for text in ("1e5_column", "1_000", "0x10", "on", "No", "NULL", "~", "2024-01-01", "1:30", ".5e3", "010", "1.5"):
        path.write_text(f"family: causal\ndata: {{text_field: {text}}}\nmatch: {{}}\n")
        assert load_recipe(path).data.text_field == text
    path.write_text(
        "family: wan\nlayers: 010\nmatch: {steps: 1_000, learning_rate: .5e-3, mhla_learning_rate: 1E-5}\n"
    )
    recipe = load_recipe(path)
    match = recipe.stages["match"]
    assert (recipe.layers, match.steps) == ("010", 1000)
    assert (match.learning_rate, match.mhla_learning_rate) == (5e-4, 1e-5)
    for content in (b"family: w\xe4n", b"family: wan\nmatch: {steps: 1, steps: 2}", b"? [wan]\n: 1"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not valid YAML"):
            load_recipe(path)
    for name in ("nothing", "../recipes/minilm", "nothing.yaml"):
        with pytest.raises(
            ValueError, match="is neither a .yaml file nor one of fast, paper, dit-xl-2, hunyuan-video-1.5, ltx-2"
        ):
            load_recipe(name)


def test_the_former_name_of_a_stage(caplog):
    """`blocks` still names the stage `blockwise`, in recipes and options, and says once that it is deprecated."""
    for name in recipe_names():
        load_recipe(name)
    recipes._deprecate.cache_clear()
    assert "deprecated" not in caplog.text
    recipe = parse_recipe({"family": "wan", "blocks": {"steps": 7}}, "recipe a.yaml")
    assert recipe == parse_recipe({"family": "wan", "blockwise": {"steps": 7}}, "recipe a.yaml")
    assert recipe.changed({"blocks.steps": 8}).stages["blockwise"].steps == 8
    assert recipe.only(("blocks",)) == recipe and recipe.changed({"blocks": None, "match": {}}).only(("match",))
    check_arguments(None, None, None, None, ("blocks",), {"blocks.steps": 3, "mhla.blocks": [2]})
    assert caplog.text.count("the stage blocks is called blockwise now; the old name is deprecated") == 1
    with pytest.raises(ValueError, match="recipe a.yaml: blocks is the former name of blockwise; give one of them"):
        parse_recipe({"family": "wan", "blocks": {}, "blockwise": {}}, "recipe a.yaml")


def test_every_stage_has_a_function():
    for name, stage in STAGES.items():
        assert inspect.signature(getattr(stages, name)).parameters["options"].annotation == stage.options.__name__
