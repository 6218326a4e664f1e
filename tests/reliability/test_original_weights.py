# SPDX-License-Identifier: Apache-2.0
"""Converted models know their pretrained weights: softmax is restored exactly, or refused, whatever was done since."""

import copy
import json
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BertForMaskedLM, CLIPModel, PreTrainedModel

import mhla_hf
from mhla_hf.conversion import convert_pretrained, unconvert_pretrained
from mhla_hf.hub.push import prepare_push
from mhla_hf.layers.weight_record import record_step, weights_state
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.recovery import match_layers
from mhla_hf.training.teacher import SharedTeacher
from tests import tiny
from tests.families.cases import DiTCase, PixArtCase, SanaCase, WanCase
from tests.integrations.transformers.mhla_models import NEEDS_ADD_ADAPTER
from tests.integrations.transformers.tiny_files import save_softmax
from tests.integrations.transformers.tiny_models import clip_model, inputs, softmax_model


REFUSED = {
    "sdpa": lambda model, batches: model.set_attn_implementation("sdpa"),
    "calibrate": mhla_hf.calibrate,
    "match": lambda model, batches: match_layers(model, batches, steps=1),
    "unconvert": lambda model, batches: mhla_hf.unconvert(model),
}


@pytest.fixture
def softmax():
    return softmax_model("llama")


@pytest.fixture
def batches():
    return [inputs("llama", seed=seed, batch=4) for seed in range(4)]


@pytest.fixture
def clip():
    return clip_model()


def logits(model, batches):
    with torch.no_grad():
        return model(**batches[0]).logits


def fitted(softmax, batches, how):
    """The model converted, then calibrated or matched."""
    model = mhla_hf.convert(copy.deepcopy(softmax), block_size=4)
    if how == "calibrated":
        mhla_hf.calibrate(model, batches)
    else:
        match_layers(model, batches, steps=3)
    return model


def test_a_second_calibration_begins_with_the_original(softmax, batches):
    model = mhla_hf.convert(copy.deepcopy(softmax), block_size=4)
    mhla_hf.calibrate(model, batches, fit_steps=0)
    once, report = logits(model, batches), mhla_hf.calibrate(model, batches, fit_steps=0)
    assert (logits(model, batches) - once).norm() < 0.02 * once.norm()
    # The layers' errors are those against the original: against calibrated weights they would be others.
    again = mhla_hf.calibrate(model, batches, fit_steps=0)
    assert again.error_after == pytest.approx(report.error_after, rel=0.02)


def test_matching_after_calibration_aims_at_the_original(softmax, batches):
    model = fitted(softmax, batches, "calibrated")
    twin = copy.deepcopy(model)
    report = match_layers(model, batches, steps=2)
    expected = match_layers(twin, batches, steps=2, teacher=softmax)
    assert report.losses == expected.losses


@pytest.mark.parametrize("copied", ["same", "deepcopy", "pickle", "bfloat16"])
@pytest.mark.parametrize("how", ["calibrated", "matched"])
def test_softmax_is_restored_and_mhla_comes_back(softmax, batches, how, copied):
    model = fitted(softmax, batches, how)
    if copied == "deepcopy":
        model = copy.deepcopy(model)
    elif copied == "pickle":
        model = pickle.loads(pickle.dumps(model))
    elif copied == "bfloat16":
        model, softmax = model.to(torch.bfloat16), softmax.to(torch.bfloat16)
    expected = logits(model, batches)
    assert not torch.equal(expected, logits(softmax, batches))
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model, batches), logits(softmax, batches))
    model.set_attn_implementation("mhla")
    assert torch.equal(logits(model, batches), expected)


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "data"])
def test_training_is_noticed_whichever_optimizer_does_it(softmax, batches, optimizer, refused):
    model = mhla_hf.convert(softmax, block_size=4)
    if optimizer == "data":
        model.model.layers[1].self_attn.k_proj.weight.data[0, 0] += 1e-3
    else:
        model(**batches[0], labels=batches[0]["input_ids"]).loss.backward()
        getattr(torch.optim, optimizer)(model.parameters(), lr=1e-5).step()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"Cannot .* pretrained weight\(s\) of this LlamaForCausalLM have changed"):
        refused(model, batches)
    assert model.config._attn_implementation == "mhla"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_training_of_mhla_alone_leaves_the_original_there(softmax, batches):
    expected = logits(softmax, batches)
    model = mhla_hf.convert(softmax, block_size=4)
    for name, parameter in model.named_parameters():
        if ".mhla." in name:
            parameter.data.add_(0.1)
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model, batches), expected)


@pytest.mark.parametrize("state", ["converted", "calibrated", "matched", "trained"])
def test_the_saved_configuration_says_what_was_done(softmax, batches, state, tmp_path):
    expected = logits(softmax, batches)
    if state in ("calibrated", "matched"):
        model = fitted(softmax, batches, state)
    else:
        model = mhla_hf.convert(softmax, block_size=4)
    if state == "trained":
        model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.5)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["_mhla_state"] == state
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(logits(again, batches), logits(model, batches))
    if state == "converted":
        again.set_attn_implementation("sdpa")
        assert torch.equal(logits(again, batches), expected)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
        assert torch.equal(logits(loaded, batches), expected)
        return
    message = f"Cannot .* of this LlamaForCausalLM are not known: it was {state} before it was saved"
    for refused in REFUSED.values():
        with pytest.raises(ValueError, match=message):
            refused(again, batches)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    # Saved once more, the state stays what it was.
    again.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["_mhla_state"] == state


@pytest.mark.parametrize("how", ["sdpa", "unconvert"])
@pytest.mark.parametrize("done", ["converted", "calibrated"])
def test_a_restored_model_is_saved_as_a_plain_softmax_checkpoint(softmax, batches, done, how, tmp_path):
    expected = logits(softmax, batches)
    model = fitted(softmax, batches, done) if done == "calibrated" else mhla_hf.convert(softmax, block_size=4)
    before = logits(model, batches)
    if how == "sdpa":
        model.set_attn_implementation("sdpa")
    else:
        assert mhla_hf.unconvert(model) is model and torch.equal(logits(model, batches), expected)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert not {"mhla", "_mhla_state", "attn_implementation", "transformers_weights"} & config.keys()
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert again.config._attn_implementation == "sdpa" and torch.equal(logits(again, batches), expected)
    if how == "sdpa":
        # Saving has changed nothing in the model itself.
        model.set_attn_implementation("mhla")
        assert torch.equal(logits(model, batches), before)


def test_one_tower_of_several(clip, tmp_path):
    model, given = clip, {"input_ids": torch.arange(3, 23)[None], "pixel_values": torch.randn(1, 3, 16, 16)}
    with torch.no_grad():
        expected = model(**given)[0]
        mhla_hf.convert(model, {"text_config": {"block_size": 4}})
        mixed = model(**given)[0]
        model.save_pretrained(tmp_path)
        again = CLIPModel.from_pretrained(tmp_path)
        assert again.config.vision_config.mhla is None and again.config.text_config.mhla is not None
        torch.testing.assert_close(again(**given)[0], mixed)
        assert not [name for name, _ in again.named_parameters() if "vision" in name and ".mhla." in name]
        mhla_hf.unconvert(model)
        assert torch.equal(model(**given)[0], expected)


DIFFUSERS = {
    "wan": (WanCase(), {"blocks": (1, 2, 2), "grid": (3, 2, 4)}),
    "dit": (DiTCase(), {"blocks": (2, 2)}),
    "pixart": (PixArtCase(), {"blocks": (2, 2)}),
    "sana": (SanaCase(), {"blocks": (2, 2), "mixing_init": "linear"}),
}


@pytest.mark.parametrize("name", DIFFUSERS)
def test_models_of_diffusers_are_turned_back(name, tmp_path):
    case, options = DIFFUSERS[name]
    model, given = case.make(), case.inputs(case.upstream_size)
    with torch.no_grad():
        expected, original = model(**given)[0], type(model)
    mhla_hf.convert(model, options)
    match_layers(model, [given], steps=2)
    with torch.no_grad():
        assert not torch.equal(model(**given)[0], expected)
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "config.json").read_text())["_mhla_state"] == "matched"
        loaded = type(model).from_pretrained(tmp_path)
        assert not {"mhla", "_mhla_state"} & mhla_hf.unconvert(copy.deepcopy(model)).config.keys()
        assert type(mhla_hf.unconvert(model)) is original
        torch.testing.assert_close(model(**given)[0], expected, rtol=0, atol=1e-6)
        with pytest.raises(ValueError, match="was matched before it was saved"):
            mhla_hf.unconvert(loaded)
        mhla_hf.unconvert(loaded, case.make())
        torch.testing.assert_close(loaded(**given)[0], expected, rtol=0, atol=1e-6)
        with pytest.raises(ValueError, match="has no MHLA layers"):
            mhla_hf.unconvert(model)


def test_pipelines_are_turned_back(tmp_path):
    pipeline = mhla_hf.convert(tiny.wan_pipeline(), blocks=(1, 2, 2), grid=(3, 2, 4))
    mhla_hf.calibrate(pipeline, samples=4, steps=2)
    pipeline.save_pretrained(tmp_path / "mhla")
    assert mhla_hf.unconvert(pipeline) is pipeline
    pipeline.save_pretrained(tmp_path / "softmax")
    index = json.loads((tmp_path / "softmax" / "model_index.json").read_text())
    assert index["transformer"] == ["diffusers", "WanTransformer3DModel"]
    expected = tiny.wan_pipeline().transformer.state_dict()
    again = type(pipeline).from_pretrained(tmp_path / "softmax").transformer.state_dict()
    assert again.keys() == expected.keys() and all(torch.equal(again[name], expected[name]) for name in expected)


def test_directories_are_turned_back(tmp_path):
    pipeline = tiny.wan_pipeline()
    pipeline.save_pretrained(tmp_path / "softmax")
    convert_pretrained(tmp_path / "softmax", tmp_path / "mhla", blocks=(1, 2, 2), grid=(3, 2, 4), progress=False)
    unconvert_pretrained(tmp_path / "mhla", tmp_path / "again", progress=False)
    for part in ("transformer/diffusion_pytorch_model.safetensors", "model_index.json"):
        assert (tmp_path / "again" / part).read_bytes() == (tmp_path / "softmax" / part).read_bytes()
    configs = [json.loads((tmp_path / name / "transformer/config.json").read_text()) for name in ("softmax", "again")]
    assert configs[0] == configs[1]
    with pytest.raises(ValueError, match="has no MHLA model"):
        unconvert_pretrained(tmp_path / "again", tmp_path / "more", progress=False)
    # Of a trained one, weights come from the original, and only from there.
    config = tmp_path / "mhla" / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"converted"', '"trained"'))
    unconvert_pretrained(tmp_path / "mhla", tmp_path / "found", progress=False)
    (tmp_path / "softmax").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"original must be given: .* comes from softmax, which is neither"):
        unconvert_pretrained(tmp_path / "mhla", tmp_path / "lost", progress=False)
    unconvert_pretrained(tmp_path / "mhla", tmp_path / "given", original=tmp_path / "elsewhere", progress=False)
    for name in ("found", "given"):
        part = "transformer/diffusion_pytorch_model.safetensors"
        assert (tmp_path / name / part).read_bytes() == (tmp_path / "elsewhere" / part).read_bytes()


@pytest.mark.parametrize("model_class", [BertForMaskedLM, CLIPModel])
def test_directories_of_transformers_are_turned_back(model_class, clip, tmp_path):
    (clip if model_class is CLIPModel else softmax_model("bert")).save_pretrained(tmp_path / "softmax")
    convert_pretrained(tmp_path / "softmax", tmp_path / "mhla", progress=False)
    unconvert_pretrained(tmp_path / "mhla", tmp_path / "again", progress=False)
    models = [model_class.from_pretrained(tmp_path / folder) for folder in ("softmax", "again")]
    assert models[1].config._attn_implementation == "sdpa"
    states = [model.state_dict() for model in models]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert "mhla" not in (tmp_path / "again" / "config.json").read_text()


def test_an_original_is_followed_by_records_of_this_machine_alone(tmp_path, monkeypatch):
    save_softmax("bert", tmp_path / "models" / "softmax")
    convert_pretrained(tmp_path / "models" / "softmax", tmp_path / "elsewhere" / "mhla", progress=False)
    source = ModelDirectory.read(tmp_path / "elsewhere" / "mhla")
    assert source.find_original().folder == tmp_path / "models" / "softmax"
    with monkeypatch.context() as another:
        another.setattr("platform.node", lambda: "another-machine")
        assert source.find_original() is None
    # What came from the Hub's cache is of others.
    cache = tmp_path / "hub" / "models--you--model" / "snapshots"
    cache.mkdir(parents=True)
    (tmp_path / "elsewhere" / "mhla").rename(cache / "0")
    source = ModelDirectory.read(cache / "0")
    assert source.find_original() is None


def test_pushed_records_have_no_paths(tmp_path):
    save_softmax("bert", tmp_path / "softmax")
    convert_pretrained(tmp_path / "softmax", tmp_path / "mhla", progress=False)
    assert json.loads((tmp_path / "mhla" / "conversion.json").read_text())["source"]["path"] == str(
        tmp_path / "softmax"
    )
    pushed = prepare_push(tmp_path / "mhla", "you/mhla")[0].files["conversion.json"]
    assert isinstance(pushed, bytes)
    assert json.loads(pushed)["source"] == {"location": "softmax"}


def test_weights_outside_of_towers_stay_as_they_are(clip):
    model = mhla_hf.convert(clip, {"text_config": {"block_size": 4}, "vision_config": {"blocks": [2, 2]}})
    model.text_projection.weight.data.add_(0.1)
    expected = model.text_projection.weight.clone()
    model.set_attn_implementation("sdpa")
    model.set_attn_implementation("mhla")
    assert torch.equal(mhla_hf.unconvert(model).text_projection.weight, expected)


def merge_into_mlp(model):
    config = LoraConfig(r=2, target_modules=["up_proj"], init_lora_weights=False)
    return get_peft_model(model, config).merge_and_unload()


def replace_head(model):
    model.lm_head = torch.nn.Linear(model.config.hidden_size, 2 * model.config.vocab_size, bias=False)
    model.config.vocab_size *= 2
    return model


def train_head(model):
    model.lm_head.weight.data.mul_(1.5)
    return model


def train_softmax_layer(model):
    model.model.layers[1].self_attn.q_proj.weight.data.mul_(1.5)
    return model


def add_tokens(model):
    model.resize_token_embeddings(model.config.vocab_size + 4)
    return model


CHANGES_OUTSIDE = {
    "new tokens": add_tokens,
    "new head": replace_head,
    "trained head": train_head,
    "LoRA merged into the MLP": merge_into_mlp,
    "softmax layer of a hybrid": train_softmax_layer,
}


@pytest.mark.parametrize("done", ["converted", "calibrated", "matched"])
@pytest.mark.parametrize("change", CHANGES_OUTSIDE.values(), ids=CHANGES_OUTSIDE)
def test_what_changes_outside_of_mhla_stops_neither_calibration_nor_softmax(softmax, batches, change, done, tmp_path):
    torch.manual_seed(0)
    model = mhla_hf.convert(copy.deepcopy(softmax), block_size=4, layers=[0, 2])
    if done == "calibrated":
        mhla_hf.calibrate(model, batches, fit_steps=0)
    elif done == "matched":
        match_layers(model, batches, steps=1)
    model = change(model)
    # The same change of the softmax model.
    expected = copy.deepcopy(softmax)
    expected.config.vocab_size = model.config.vocab_size
    for name, module in model.named_modules():
        if not name.endswith(("layers.0", "layers.2")) and (".self_attn" not in name or ".layers.1" in name):
            for own, parameter in module.named_parameters(recurse=False):
                setattr(expected.get_submodule(name), own, copy.deepcopy(parameter))
    expected = logits(expected, batches)
    report = mhla_hf.calibrate(model, batches, fit_steps=0)
    assert report.error_after < report.error_before
    fitted_logits = logits(model, batches)
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model, batches), expected)
    model.set_attn_implementation("mhla")
    assert torch.equal(logits(model, batches), fitted_logits)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["_mhla_state"] == "calibrated"
    assert torch.equal(logits(mhla_hf.unconvert(model), batches), expected)


@pytest.mark.parametrize("change", [add_tokens, train_head, merge_into_mlp])
def test_what_changed_outside_of_mhla_is_saved_as_a_converted_model(softmax, batches, change, tmp_path):
    model = change(mhla_hf.convert(softmax, block_size=4))
    expected = {name: tensor for name, tensor in model.state_dict().items() if ".mhla." not in name}
    model.save_pretrained(tmp_path / "mhla")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "mhla")
    assert again.config._mhla_state == "converted"
    assert mhla_hf.calibrate(again, batches, fit_steps=0).layers
    unconvert_pretrained(tmp_path / "mhla", tmp_path / "softmax", progress=False)
    for path, options in (("mhla", {"attn_implementation": "sdpa"}), ("softmax", {})):
        state = AutoModelForCausalLM.from_pretrained(tmp_path / path, **options).state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("name", ["attention.self.query", "attention.output.dense"])
def test_the_projection_of_an_attention_counts_as_its_own(name):
    model = mhla_hf.convert(softmax_model("bert"), block_size=4)
    model.bert.encoder.layer[0].get_submodule(name).weight.data.mul_(1.5)
    with pytest.raises(ValueError, match=r"1 pretrained weight\(s\) .* have changed since its conversion"):
        mhla_hf.unconvert(model)


def test_more_positions(tmp_path):
    model = mhla_hf.convert(softmax_model("bert"), block_size=4)
    batches = [inputs("bert", seed=seed, batch=4) for seed in range(4)]
    mhla_hf.calibrate(model, batches, fit_steps=0)
    table = model.bert.embeddings.position_embeddings
    larger = torch.nn.Embedding(2 * table.num_embeddings, table.embedding_dim)
    larger.weight.data[: table.num_embeddings] = table.weight.data
    model.bert.embeddings.position_embeddings = larger
    mhla_hf.calibrate(model, batches, fit_steps=0)
    assert torch.equal(mhla_hf.unconvert(model).bert.embeddings.position_embeddings.weight, larger.weight)


def test_a_lora_fused_into_the_feed_forward_of_diffusers(tmp_path):
    pipeline = tiny.wan_pipeline()
    mhla_hf.convert(pipeline, blocks=(1, 2, 2), grid=(3, 2, 4), layers=[1])
    model, batches = pipeline.transformer, [{**tiny.wan_inputs(batch=2), "return_dict": False} for _ in range(4)]
    model.add_adapter(LoraConfig(r=2, target_modules=["ffn.net.2", "attn2.to_q"], init_lora_weights=False))
    model.fuse_lora()
    model.unload_lora()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items() if ".mhla." not in name}
    pipeline.save_pretrained(tmp_path)
    again = mhla_hf.load_pipeline(tmp_path)
    assert again.transformer.config["_mhla_state"] == "converted"
    for part in (pipeline, again):
        mhla_hf.calibrate(part.transformer, batches, fit_steps=0)
        state = mhla_hf.unconvert(part).transformer.state_dict()
        assert state.keys() == expected.keys() and all(torch.equal(state[key], expected[key]) for key in expected)


def test_blocks_that_changed_before_they_were_matched_keep_that_change(softmax, batches):
    model = train_head(mhla_hf.convert(softmax, block_size=4))
    mlp = model.model.layers[0].mlp.up_proj.weight
    mlp.data.mul_(1.5)
    before, fitted_to = mlp.detach().clone(), {"model.layers.0.mlp.up_proj.weight": mlp.detach().clone()}
    mlp.data.mul_(1.1)
    model.model.layers[0].self_attn.mhla.mixing.data.mul_(1.1)
    record_step(model, "matched", fitted_to)
    after = mlp.detach().clone()
    for attention, value in (("sdpa", before), ("mhla", after)):
        model.set_attn_implementation(attention)
        assert torch.equal(mlp, value)
    assert weights_state(model) == "matched"
    mlp.data.mul_(1.1)
    with pytest.raises(ValueError, match=r"1 pretrained weight\(s\) .*up_proj"):
        model.set_attn_implementation("sdpa")


def test_towers_are_switched_all_or_none(clip, tmp_path):
    given = {"input_ids": torch.arange(3, 23)[None], "pixel_values": torch.randn(1, 3, 16, 16)}
    original = copy.deepcopy(clip)
    model = mhla_hf.convert(clip, {"text_config": {"block_size": 4}, "vision_config": {"blocks": [2, 2]}})
    model.save_pretrained(tmp_path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for part, requested, message in (
        (model, {"vision_config": "sdpa", "text_config": "nonsense"}, "nonsense"),
        (model, {"vision_config": "sdpa"}, "All MHLA layers of CLIPModel use one attn_implementation"),
        (model.vision_model, "sdpa", "is part of a converted model: switch the whole model"),
    ):
        with pytest.raises(ValueError, match=message):
            part.set_attn_implementation(requested)
        assert {part.config._attn_implementation for part in (model.text_model, model.vision_model)} == {"mhla"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.vision_model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="CLIPAttention has an MHLA layer and cannot use 'sdpa' attention"):
        model.get_image_features(given["pixel_values"])
    model.vision_model.config._attn_implementation = "mhla"
    with torch.no_grad():
        expected, fitted = original(**given).logits_per_image, model(**given).logits_per_image
        model.set_attn_implementation("sdpa")
        loaded = CLIPModel.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
        weights = original.state_dict()
        for softmax in (model, loaded):
            # Loaded weights lie in the file as it is mapped, where matrix products of some CPUs round otherwise.
            assert all(torch.equal(softmax.state_dict()[name], tensor) for name, tensor in weights.items())
            torch.testing.assert_close(softmax(**given).logits_per_image, expected, rtol=1e-6, atol=1e-6)
            with pytest.raises(ValueError, match="is part of a converted model"):
                softmax.vision_model.set_attn_implementation("mhla")
            softmax.set_attn_implementation("mhla")
            torch.testing.assert_close(softmax(**given).logits_per_image, fitted, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="All MHLA layers of CLIPModel use one attn_implementation"):
        CLIPModel.from_pretrained(tmp_path, attn_implementation={"vision_config": "sdpa"})


def test_flash_attention_needs_a_model_that_was_switched(softmax, batches, monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "_check_and_adjust_attn_implementation", lambda self, name, **_: name)
    model = fitted(softmax, batches, "calibrated")
    expected = logits(model, batches)
    with pytest.raises(ValueError, match="has MHLA layers: they switch to 'sdpa' or 'eager' alone"):
        model.set_attn_implementation("flash_attention_2")
    assert model.config._attn_implementation == "mhla" and torch.equal(logits(model, batches), expected)
    model.set_attn_implementation("sdpa")
    model.set_attn_implementation("flash_attention_2")
    assert model.config._attn_implementation == "flash_attention_2"


def test_what_is_trained_with_softmax_is_the_original_from_then_on(softmax, batches, tmp_path):
    model = fitted(softmax, batches, "calibrated")
    model.set_attn_implementation("sdpa")
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.5)
    expected = logits(model, batches)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), batches), expected)
    model.set_attn_implementation("mhla")
    assert weights_state(model) == "converted"
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model, batches), expected)
    # Turned back while it computes softmax attention, it stays as it is.
    assert torch.equal(logits(mhla_hf.unconvert(model), batches), expected)


def test_a_checkpoint_of_mhla_stays_one_under_another_configuration(softmax, batches, tmp_path):
    model = mhla_hf.convert(softmax, block_size=4)
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(1.5)
    model.save_pretrained(tmp_path)
    config = copy.deepcopy(model.config)
    config.mhla = None
    config.mhla = {"block_size": 4}
    del config._mhla_state
    again = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
    with pytest.raises(ValueError, match="was trained before it was saved"):
        again.set_attn_implementation("sdpa")


@NEEDS_ADD_ADAPTER
def test_adapters_are_refused(softmax, batches):
    model = mhla_hf.convert(softmax, block_size=4)
    model.add_adapter(LoraConfig(target_modules=["o_proj"], init_lora_weights=False))
    with pytest.raises(ValueError, match="Cannot restore softmax attention: this LlamaForCausalLM has adapters"):
        model.set_attn_implementation("sdpa")
    # As its own teacher the model is run without them.
    output = SharedTeacher(model)(**batches[0], use_cache=False).logits
    torch.testing.assert_close(output, logits(softmax_model("llama"), batches), rtol=0, atol=1e-5)


def test_a_failed_conversion_leaves_nothing_behind(clip):
    before = {name for name, _ in clip.named_modules()}
    options = {"text_config": {"block_size": 4}, "vision_config": {"layers": [7]}}
    with pytest.raises(ValueError, match="Layer 7 of CLIPVisionModel cannot be MHLA"):
        mhla_hf.convert(clip, options)
    assert {name for name, _ in clip.named_modules()} == before
    assert not [name for name, module in clip.named_modules() if module._forward_pre_hooks]
    mhla_hf.convert(clip, {"text_config": {"block_size": 4}})


def test_unconvert_changes_nothing_where_it_refuses():
    pipeline = mhla_hf.convert(tiny.wan_pipeline(second_transformer=True), blocks=(1, 2, 2), grid=(3, 2, 4))
    wrong = tiny.wan_pipeline(second_transformer=True)
    wrong.transformer_2 = tiny.wan_transformer(ffn_dim=16)
    for part in (pipeline.transformer, pipeline.transformer_2):
        part.proj_out.weight.data.mul_(2)
    before = {name: tensor.clone() for name, tensor in pipeline.transformer.state_dict().items()}
    with pytest.raises(ValueError, match="original lacks .* or has them in another shape"):
        mhla_hf.unconvert(pipeline, wrong)
    assert type(pipeline.transformer).__name__ == "MHLAWanTransformer3DModel"
    assert all(torch.equal(tensor, before[name]) for name, tensor in pipeline.transformer.state_dict().items())
    with pytest.raises(ValueError, match="is no MHLA model of diffusers: take the one inside"):
        mhla_hf.unconvert(torch.nn.Sequential(pipeline.transformer))


def test_models_that_compute_softmax_are_not_fitted(softmax, batches):
    model = mhla_hf.convert(softmax, block_size=4)
    model.set_attn_implementation("sdpa")
    for refused in (lambda: mhla_hf.calibrate(model, batches), lambda: match_layers(model, batches, steps=1)):
        with pytest.raises(ValueError, match="computes softmax attention now: switch back"):
            refused()
    model.set_attn_implementation("mhla")
    with pytest.raises(TypeError):
        match_layers(model, [batches[0], 3], steps=4)
    assert weights_state(model) == "converted"


def test_another_model_is_no_original(tmp_path):
    tiny.wan_transformer().save_pretrained(tmp_path / "softmax")
    tiny.wan_transformer(ffn_dim=16).save_pretrained(tmp_path / "other")
    convert_pretrained(tmp_path / "softmax", tmp_path / "mhla", blocks=(1, 2, 2), grid=(3, 2, 4), progress=False)
    with pytest.raises(ValueError, match="is not the original of .* have another shape in it"):
        unconvert_pretrained(tmp_path / "mhla", tmp_path / "out", original=tmp_path / "other", progress=False)
