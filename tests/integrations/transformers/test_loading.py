# SPDX-License-Identifier: Apache-2.0
"""Where MHLA parameters come from and go to, and models that are refused with the reason."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from mhla_hf import MHLAConfig, convert
from mhla_hf.integrations.transformers.modules import can_dispatch

from .family_sweep import SETTINGS
from .mhla_models import IMAGE_OPTIONS, TEXT_OPTIONS, first_output, mhla_model, mhla_modules
from .shrinking import tiny_config
from .tiny_models import DECODER, TEXT, VISION, clip_model, inputs, softmax_model


@pytest.fixture(scope="module")
def softmax_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("softmax")
    softmax_model("llama").save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def mhla_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mhla")
    mhla_model("llama").save_pretrained(directory)
    return directory


GIVEN = inputs("llama", length=21)


def test_defaults_follow_the_model(softmax_directory):
    model = AutoModelForCausalLM.from_pretrained(softmax_directory, attn_implementation="mhla")
    options = MHLAConfig.from_dict(model.config.mhla)
    assert options.causal and options.block_size == (64,) and options.grid == (128,)
    assert options.feature_map == "hedgehog" and options.mixing_constraint == "nonnegative"
    assert options.mixing_storage == "distance" and options.mixing_tail == "decay"
    exact = options.window, options.window_size, options.sink_tokens, options.window_share
    assert exact == ("adjacent", (64,), 1, "query")
    assert mhla_modules(model)[0].mixing.shape == (2,) and mhla_modules(model)[0].mixing_decay.shape == (1,)
    encoder = softmax_model("bert", max_position_embeddings=512)
    convert(encoder)
    assert encoder.config.mhla["block_size"] == [8] and mhla_modules(encoder)[0].mixing.shape == (64, 64)
    image = convert(softmax_model("vit"))
    assert image.config.mhla["blocks"] == [2, 2] and image.config.mhla["grid"] == [4, 4]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"window": None}, (None, None, 0, 64, 2048)),
        ({"block_size": 16}, ("adjacent", (16,), 1, 16, 512)),
        ({"block_size": 20000}, ("adjacent", (64,), 1, 20000, 20000)),
        ({"window_size": 8, "sink_tokens": 4}, ("adjacent", (8,), 4, 64, 2048)),
    ],
    ids=str,
)
def test_defaults_around_given_options_of_language_models(given, expected):
    model = convert(softmax_model("llama", max_position_embeddings=8192), given)
    options = MHLAConfig.from_dict(model.config.mhla)
    found = options.window, options.window_size, options.sink_tokens, options.block_size[0], options.grid[0]
    assert found == expected


def test_weights_can_be_given_in_place_of_a_name():
    model = mhla_model("llama")
    again = LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    assert torch.equal(again(**GIVEN).logits, model(**GIVEN).logits)
    with pytest.raises(ValueError, match="^state_dict has adapters in its weights"):
        weights = {**model.state_dict(), "model.layers.0.self_attn.q_proj.base_layer.weight": torch.zeros(32, 32)}
        LlamaForCausalLM.from_pretrained(None, config=model.config, state_dict=weights)


def test_models_from_before_tails_keep_their_numbers(tmp_path, caplog):
    model = mhla_model("llama", grid=[8], mixing_storage="matrix", mixing_tail="constant")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("mixing_storage", "mixing_tail", "mixing_tail_half_life"):
        del config["mhla"][name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert again.config.mhla == model.config.mhla
    changed = AutoModelForCausalLM.from_pretrained(tmp_path, mhla={"mixing_tail": "decay"})
    assert changed.config.mhla == {**model.config.mhla, "mixing_tail": "decay"}
    assert "mixing_tail='constant'; the ones given change what its weights mean" in caplog.text
    with torch.no_grad():
        assert torch.equal(again(**inputs("llama", length=31)).logits, model(**inputs("llama", length=31)).logits)


def test_options_as_a_dict_and_as_a_config_are_the_same():
    given = {"block_size": 8, "mixing_heads": "per_head"}
    first, second = (convert(softmax_model("llama"), options) for options in (given, MHLAConfig(**given)))
    assert first.config.mhla == second.config.mhla and first.config.mhla["feature_map"] == "hedgehog"
    explicit = convert(softmax_model("llama"), MHLAConfig(feature_map="relu"))
    assert explicit.config.mhla["feature_map"] == "relu" and explicit.config.mhla["mixing_init"] == "uniform"
    assert MHLAConfig(eps=0.1).given_options() == {"eps": 0.1}
    assert copy.deepcopy(MHLAConfig(eps=0.1)).given_options() == {"eps": 0.1}


def test_single_options_over_a_checkpoints_own(tmp_path, caplog):
    model = mhla_model("llama", normalizer="none", rope="before_feature_map", output_norm=True)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, mhla={"eps": 1e-5}).eval()
    assert (
        again.config.mhla == {**model.config.mhla, "eps": 1e-5} and "change what its weights mean" not in caplog.text
    )
    assert torch.equal(first_output(again, **GIVEN), first_output(model, **GIVEN))
    changed = AutoModelForCausalLM.from_pretrained(tmp_path, mhla={"normalizer": "query"})
    assert changed.config.mhla["normalizer"] == "query" and changed.config.mhla["rope"] == "before_feature_map"
    assert "normalizer='none'; the ones given change what its weights mean" in caplog.text


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"mixing_storage": "distance"}, r"mixing is \[4, 2, 2\] in the weights, but \[4, 2\]"),
        ("llama", {"block_size": 4}, r"mixing is \[4, 2, 2\] in the weights, but \[4, 4, 4\]"),
        ("llama", {"grid": [24]}, r"mixing is \[4, 2, 2\] in the weights, but \[4, 3, 3\]"),
        ("llama", {"mixing_heads": "shared"}, r"mixing is \[4, 2, 2\] in the weights, but \[2, 2\]"),
        ("bert", {"grid": [24]}, r"mixing is \[4, 2, 2\] in the weights, but \[4, 3, 3\]"),
    ],
)
def test_options_that_change_shapes_are_refused(tmp_path, family, options, message):
    mhla_model(family, block_size=8, grid=[16], mixing_storage="matrix").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message + ".* must be those of config.json: leave them out"):
        AutoModel.from_pretrained(tmp_path, mhla=options)


def test_a_first_call_that_is_not_finite_is_not_blamed_on_rotary_embeddings(monkeypatch):
    monkeypatch.setattr("mhla_hf.integrations.transformers.functions._CHECKED", set())
    model = mhla_model("llama", rope="after_feature_map")
    embedded = torch.randn(1, 21, model.config.hidden_size)
    embedded[0, 4] = float("nan")
    output = first_output(model, inputs_embeds=embedded)
    assert output[0, :4].isfinite().all() and output[0, 4:].isnan().all()


def test_a_softmax_model_with_the_same_configuration_object_stays_softmax():
    teacher = softmax_model("llama")
    student = LlamaForCausalLM(teacher.config)
    mask = torch.ones_like(GIVEN["input_ids"])
    mask[0, -3:] = 0
    expected = teacher(GIVEN["input_ids"], attention_mask=mask).logits
    convert(student, {"block_size": 4})
    assert student.config.mhla["block_size"] == [4] and student.model.config is student.config
    assert torch.equal(teacher(GIVEN["input_ids"], attention_mask=mask).logits, expected)
    # A second model of the same configuration is softmax as well.
    assert teacher.config.mhla is None and not mhla_modules(LlamaForCausalLM(teacher.config))


def test_rotations_under_a_condition_are_left_where_they_are():
    sizes = {**DECODER, "head_dim": 8, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    config = transformers.Cohere2Config(**sizes)
    config.mhla = {}
    assert AutoModelForCausalLM.from_config(config).config.mhla["rope"] == "before_feature_map"
    config = transformers.Cohere2Config(**sizes)
    config.mhla = {"rope": "after_feature_map"}
    with pytest.raises(ValueError, match="use mhla={'rope': 'before_feature_map'}"):
        AutoModelForCausalLM.from_config(config)


OPTIONS = {"dict": {"block_size": 4}, "config": MHLAConfig(feature_map="elu"), "block": MHLAConfig(block_size=4)}


@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_options_reach_every_way_of_building(options, softmax_directory):
    loaded = AutoModelForCausalLM.from_pretrained(softmax_directory, attn_implementation="mhla", mhla=options)
    alone = AutoModelForCausalLM.from_pretrained(softmax_directory, mhla=options)
    config = LlamaConfig(**DECODER)
    config.mhla = options
    built = [loaded, alone, AutoModelForCausalLM.from_config(config), LlamaForCausalLM(copy.deepcopy(config))]
    for model in built:
        assert model.config._attn_implementation == "mhla"
        assert model.config.mhla == loaded.config.mhla
        stored = MHLAConfig.from_dict(model.config.mhla)
        assert stored.causal and stored.block_size == ((64,) if stored.feature_map == "elu" else (4,))
        assert stored.feature_map == ("elu" if options == OPTIONS["config"] else "hedgehog")
        assert {key for key, _ in model.named_parameters()} == {key for key, _ in loaded.named_parameters()}
    json.dumps(loaded.config.to_dict())


def test_weights_go_into_a_model_of_the_same_configuration():
    model = mhla_model("llama")
    other = LlamaForCausalLM(copy.deepcopy(model.config)).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(first_output(other, **GIVEN), first_output(model, **GIVEN))


@pytest.mark.parametrize(
    "how",
    [
        {"device_map": "cpu"},
        {"device_map": {"": "cpu"}},
        {"low_cpu_mem_usage": True},
        {"device_map": {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu",
                        "model.rotary_emb": "cpu", "lm_head": "cpu"}},
    ],
    ids=["device", "map", "memory", "disk"],
)  # fmt: skip
def test_placement(how, mhla_directory, softmax_directory, tmp_path):
    expected = first_output(AutoModelForCausalLM.from_pretrained(mhla_directory).eval(), **GIVEN)
    if "disk" in str(how):
        how = {**how, "offload_folder": tmp_path}
    model = AutoModelForCausalLM.from_pretrained(mhla_directory, **how).eval()
    torch.testing.assert_close(first_output(model, **GIVEN), expected)
    if "disk" in str(how):
        return
    fresh = AutoModelForCausalLM.from_pretrained(softmax_directory, attn_implementation="mhla", **how).eval()
    assert torch.equal(mhla_modules(fresh)[0].mixing, mhla_modules(fresh)[0].initial_tensor("mixing"))
    assert first_output(fresh, **GIVEN).isfinite().all()


def test_hybrids_keep_their_softmax_layers(tmp_path):
    model = mhla_model("llama", layers=[0, 2])
    assert [hasattr(layer.self_attn, "mhla") for layer in model.model.layers] == [True, False, True]
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(first_output(again, **GIVEN), first_output(model, **GIVEN))
    with pytest.raises(ValueError, match="Layer 3 of LlamaModel cannot be MHLA: the model has layers 0 to 2"):
        mhla_model("llama", layers=[3])
    with pytest.raises(ValueError, match="Layer 0 of Gemma3TextModel cannot be MHLA: .* sliding attention"):
        mhla_model("gemma3", layers=[0])


def test_towers_have_options_of_their_own(tmp_path):
    given = {"input_ids": inputs("clip_text")["input_ids"], "pixel_values": torch.randn(2, 3, 16, 16)}
    clip_model().save_pretrained(tmp_path / "softmax")

    def implementations(model):
        return model.config.text_config._attn_implementation, model.config.vision_config._attn_implementation

    both = AutoModel.from_pretrained(tmp_path / "softmax", attn_implementation="mhla")
    assert implementations(both) == ("mhla", "mhla") and len(mhla_modules(both)) == 6
    one = AutoModel.from_pretrained(tmp_path / "softmax", mhla={"vision_config": IMAGE_OPTIONS}).eval()
    assert implementations(one)[1] == "mhla" and implementations(one)[0] != "mhla" and len(mhla_modules(one)) == 3
    named = AutoModel.from_pretrained(tmp_path / "softmax", attn_implementation={"text_config": "mhla"})
    assert implementations(named)[0] == "mhla" and len(mhla_modules(named)) == 3
    for index, model in enumerate((both.eval(), one)):
        model.save_pretrained(tmp_path / str(index))
        again = AutoModel.from_pretrained(tmp_path / str(index)).eval()
        assert implementations(again) == implementations(model)
        assert torch.equal(again(**given).logits_per_image, model(**given).logits_per_image)
    placed = convert(clip_model(), {"text_config": TEXT_OPTIONS})
    assert implementations(placed)[0] == "mhla" and len(mhla_modules(placed)) == 3
    placed.eval()(**given)


@pytest.mark.parametrize("name", ["llama", "bert", "vit", "gemma3"])
def test_conversion_in_place(name):
    model = softmax_model(name)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    given = inputs(name)
    expected = first_output(model, **given)
    assert convert(model) is model
    # A text as short as this one is within the window that causal models have by default.
    is_exact = name in ("llama", "gemma3")
    assert ((first_output(model, **given) - expected).abs().max() < 1e-4) == is_exact
    for key, tensor in before.items():
        assert torch.equal(model.state_dict()[key], tensor)
    with pytest.raises(ValueError, match="is MHLA already"):
        convert(model)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(first_output(model, **given), expected)


def test_conversion_in_place_follows_dtype_and_mode():
    model = softmax_model("llama").to(torch.bfloat16).train()
    convert(model, {"block_size": 4})
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(module.training for module in mhla_modules(model))


def test_a_failed_conversion_leaves_the_model_as_it_was():
    model = softmax_model("llama")
    expected = first_output(model, **GIVEN)
    with pytest.raises(ValueError, match="Unknown mhla option"):
        convert(model, {"blocksize": 4})
    assert model.config._attn_implementation == "sdpa" and model.config.mhla is None
    assert torch.equal(first_output(model, **GIVEN), expected)
    convert(model)


def test_softmax_of_a_trained_mhla_checkpoint_is_refused(mhla_directory):
    with pytest.raises(ValueError, match="Cannot use softmax attention: .* it was trained before"):
        AutoModelForCausalLM.from_pretrained(mhla_directory, attn_implementation="sdpa")


def test_the_name_alone_is_not_enough():
    model = softmax_model("llama")
    model.config._attn_implementation = "mhla"
    with pytest.raises(ValueError, match="This model has no MHLA parameters"):
        model(**GIVEN)


SMALL = {**TEXT, "pad_token_id": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
REFUSED = {
    "Gemma2": ({**DECODER, "head_dim": 8}, "soft-capped"),
    "Mistral": ({**DECODER, "sliding_window": 8}, "sliding window"),
    "GptOss": ({**DECODER, "head_dim": 8, "num_local_experts": 2}, "attention sinks"),
    "DeepseekV3": ({**SMALL, "n_routed_experts": 2}, "multi-head latent attention"),
    "T5": (T5, "encoder-decoder"),
    "GPT2": ({"n_embd": 32, "n_layer": 1, "n_head": 4, "add_cross_attention": True}, "cross-attention"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_models_that_cannot_be_served_are_refused_with_the_reason(name):
    sizes, reason = REFUSED[name]
    config = getattr(transformers, f"{name}Config")(**sizes)
    config.mhla = {}
    with pytest.raises(ValueError, match=f"cannot use attn_implementation='mhla'.*{reason}"):
        AutoModel.from_config(config)


def test_position_biases_are_refused(tmp_path):
    # It goes through the attention interface from transformers 5.24 on.
    model_class = transformers.LayoutLMv3Model
    model_class(tiny_config(model_class.config_class)).save_pretrained(tmp_path)
    reason = "it uses position biases" if can_dispatch(model_class) else "its attention does not go through"
    with pytest.raises(ValueError, match=f"cannot use attn_implementation='mhla': {reason}"):
        model_class.from_pretrained(tmp_path, attn_implementation="mhla")
    with pytest.raises(ValueError, match=f"cannot use attn_implementation='mhla': {reason}"):
        convert(model_class.from_pretrained(tmp_path))


NOT_DISPATCHING = "Falcon Bloom GPTJ Mpt CodeGen GPTNeo Deberta MPNet Swinv2 Longformer".split()


@pytest.mark.parametrize("name", NOT_DISPATCHING)
def test_models_that_do_not_dispatch_are_refused_when_they_are_loaded(name, tmp_path):
    model_class = getattr(transformers, f"{name}Model")
    if can_dispatch(model_class):
        pytest.skip(f"{name} goes through the attention interface in this version of transformers")
    config = tiny_config(model_class.config_class, **SETTINGS.get(model_class.config_class.model_type, {}))
    model_class(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot use attn_implementation='mhla': its attention does not go through"):
        model_class.from_pretrained(tmp_path, attn_implementation="mhla")
    with pytest.raises(ValueError, match="cannot use attn_implementation='mhla': its attention does not go through"):
        convert(model_class.from_pretrained(tmp_path))


class OwnAttention(LlamaAttention):
    def forward(self, hidden_states, *args, **kwargs):
        return self.o_proj(self.v_proj(hidden_states).repeat(1, 1, 2)), None


def test_attention_modules_of_ones_own_that_do_not_dispatch_are_refused():
    config = LlamaConfig(**DECODER)
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.__class__ = OwnAttention
    with pytest.raises(ValueError, match="its attention does not go through"):
        convert(model)


def test_a_bias_that_only_shows_in_the_call_is_refused():
    config = transformers.BeitConfig(**VISION, use_relative_position_bias=True)
    config.mhla = {"blocks": [2, 2]}
    model = AutoModel.from_config(config)
    with pytest.raises(ValueError, match="a bias or mask of its own"):
        model(pixel_values=torch.randn(1, 3, 16, 16))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", {"blocks": [4]}, "Language models take block_size, not blocks"),
        ("llama", {"block_size": [4, 4]}, "must have one entry per axis each"),
        ("llama", {"causal": False}, "contradicts the model, .* looks back only"),
        ("bert", {"causal": True}, "contradicts the model, .* attends in both directions"),
        ("llama", {"normalizer": "block_query"}, "normalizer=.block_query. contradicts the model.*'query'"),
        ("llama", {"lepe_kernel": 3}, "lepe_kernel must be None"),
        ("llama", {"wrong": 1}, "Unknown mhla option.*wrong.*Known options"),
        ("vit", {"causal": True, "block_size": 4}, "are for sequences"),
        ("vit", {"blocks": [2, 2, 2]}, "one number for each axis of this model's token grid, 4 × 4"),
        ("llama", [1], "mhla options must be a dict"),
    ],
    ids=str,
)
def test_wrong_options_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        convert(softmax_model(name), options)


def test_language_models_inside_multi_modal_ones(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    text = {**DECODER, "rope_parameters": rope, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    tokens = {"image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    torch.manual_seed(0)
    model = transformers.Qwen2VLForConditionalGeneration._from_config(config, attn_implementation="mhla").eval()
    # Its image tower has no grid that MHLA would know: it keeps softmax.
    assert (model.config.text_config._attn_implementation, model.config.vision_config._attn_implementation) == (
        "mhla",
        "sdpa",
    )
    ids = torch.tensor([[1, 52, 50, 50, 50, 50, 53, 5, 6, 7]])
    given = {"pixel_values": torch.randn(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    given |= {"input_ids": ids, "mm_token_type_ids": (ids == 50).long(), "do_sample": False, "max_new_tokens": 6}
    output = model.generate(**given)
    assert torch.equal(output, model.generate(**given, use_cache=False))
    model.save_pretrained(tmp_path)
    again = transformers.Qwen2VLForConditionalGeneration.from_pretrained(tmp_path).eval()
    assert torch.equal(again.generate(**given), output)
