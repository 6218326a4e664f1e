# SPDX-License-Identifier: Apache-2.0
"""Models with joint attention: every layer against the dense definition, padding, pipelines, refusals."""

import copy
from typing import Any, ClassVar

import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.models.attention_processor import AttnProcessor

from mhla_hf import convert, convert_pretrained, load_pipeline, unconvert
from mhla_hf.hub.card import describe_model
from mhla_hf.models.directory import ModelDirectory
from mhla_hf.models.registry import MHLA_CLASSES
from mhla_hf.training.data.probes import sample_size
from tests import tiny_joint
from tests.families.model_case import ModelCase, assert_same_parameters, captured, relative_error


class JointCase(ModelCase):
    """Joint attention, whose layers give the text an output as well.

    Attributes:
        is_padded: Whether the text may be padded.
        make_pipeline: Makes a pipeline without encoders.
        latents_of: Makes latents by a pipeline.
        full_size: Size of the samples that the mixing weights are made for.
    """

    block_list = "transformer_blocks"
    is_padded: ClassVar[bool] = True
    make_pipeline: ClassVar[Any]
    full_size: ClassVar[dict[str, int]]
    latents_of: ClassVar[Any] = staticmethod(tiny_joint.latents_of)
    attention = "attn"
    untrained = (".normalizer_scale",)

    def silence(self, model, layer):
        attention = self.mhla_class._self_attentions(model)[layer]
        outs = [getattr(attention, "to_add_out", None), *(getattr(attention, "to_out", None) or ())[:1]]
        for out in filter(None, outs):
            out.weight.data.zero_()
        if any(outs):
            return
        # A block with a single stream: its own projection takes the heads.
        width = attention.to_v.out_features
        block = model.single_transformer_blocks[layer - len(model.transformer_blocks)]
        block.proj_out.weight.data[:, :width] = 0


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
    rotary, text_rotary = (each or (lambda tokens: tokens) for each in (call.keywords["rotary"], text.rotary))
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


class JointChecks(JointCase):
    @pytest.mark.smoke
    def test_every_layer_matches_the_dense_definition(self):
        for size in range(3):
            model, inputs = self.make_mhla(resize="blocks"), self.inputs(size, batch=2)
            for module in model.mhla_modules().values():
                with captured(module) as (calls), torch.no_grad():
                    model(**inputs)
                (call,) = calls
                layout = module.layout_for(call.keywords["grid"])
                expected = dense_attention(call, layout, module.mixing_matrix(layout), module.text_bias.double())
                assert relative_error(call.output, expected) < 1e-5

    @pytest.mark.smoke
    def test_softmax_layers_stay_exactly(self):
        self.assert_softmax_layers_stay(batch=2)

    @pytest.mark.smoke
    def test_text_as_a_block(self):
        model = self.make_mhla(text="block")
        count = 1 + 3 * 1 * 2
        assert all(module.mixing.shape == (count, count) for module in model.mhla_modules().values())
        assert not any("text_bias" in name for name, _ in model.named_parameters())
        inputs = self.inputs(batch=2)
        with torch.no_grad():
            expected = model(**inputs).sample
            assert relative_error(model(**second(inputs)).sample, expected[1:]) < 1e-6
        assert relative_error(expected, self.run(self.make_mhla(), batch=2)) > 1e-4
        for size in (1, 2):
            assert self.run(model, size).isfinite().all()
        other = self.make_mhla(text="block", feature_map="hedgehog")
        if not self.is_padded:
            # Its text is never padded.
            assert self.run(other).isfinite().all()
        else:
            with pytest.raises(ValueError, match="takes padded text with feature_map='relu'"):
                self.run(other)

    @pytest.mark.smoke
    def test_lora_on_all_projections(self):
        from peft import LoraConfig

        model = self.make_mhla()
        expected = self.run(model)
        targets = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
        for target in targets:
            adapted = copy.deepcopy(model)
            torch.manual_seed(0)
            adapted.add_adapter(LoraConfig(r=2, target_modules=[target], init_lora_weights=False))
            assert relative_error(self.run(adapted), expected) > 1e-5, target

    @pytest.mark.smoke
    def test_what_is_refused(self):
        model, inputs = self.make_mhla(), self.inputs()
        with pytest.raises(ValueError, match="supports no context parallelism"):
            model.enable_parallelism(config=ContextParallelConfig(ring_degree=2))
        with pytest.raises(ValueError, match="AttnProcessor would ignore"):
            model.set_attn_processor(AttnProcessor())
        attention = model._self_attentions()[0]
        with captured(attention) as calls, torch.no_grad():
            model(**inputs)
        with pytest.raises(ValueError, match="joint attention take no kv_cache"):
            attention(*calls[0].arguments, **calls[0].keywords, kv_cache=1)

    @pytest.mark.smoke
    def test_padded_text_has_no_effect_and_equals_cut_text(self):
        if not self.is_padded:
            pytest.skip("its text is never padded")
        model, inputs = self.make_mhla(), self.inputs(batch=2)
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

    @pytest.mark.smoke
    def test_pipelines(self, tmp_path):
        stock = self.make_pipeline()
        count = len(stock.transformer.transformer_blocks) + len(
            getattr(stock.transformer, "single_transformer_blocks", ())
        )
        axes = len(MHLA_CLASSES[f"MHLA{type(stock.transformer).__name__}"].load_class().default_grid)
        options = {"blocks": [3, 2, 2][-axes:], "layers": [0, count - 1]}
        absent = {name: part for name, part in stock.components.items() if part is None}
        stock.save_pretrained(tmp_path / "softmax")
        report = convert_pretrained(tmp_path / "softmax", tmp_path / "mhla", options, progress=False)
        assert report.components["transformer"].num_layers == count
        assert describe_model(ModelDirectory.read(tmp_path / "mhla"))["num_layers"] == count
        expected = self.latents_of(stock)
        in_memory = convert(stock, options)
        on_disk = type(stock).from_pretrained(tmp_path / "mhla", **absent)
        fresh = load_pipeline(tmp_path / "softmax", mhla=options, **absent)
        latents = self.latents_of(in_memory)
        assert relative_error(latents, expected) > 1e-4
        for pipeline in (on_disk, fresh):
            assert type(pipeline.transformer) is type(in_memory.transformer)
            assert pipeline.transformer.mhla_layers == [0, count - 1]
            assert_same_parameters(pipeline.transformer, in_memory.transformer)
        torch.testing.assert_close(self.latents_of(on_disk), latents)
        torch.testing.assert_close(self.latents_of(unconvert(on_disk)), expected)

    @pytest.mark.smoke
    def test_size_of_probes(self):
        """That of the grid that the mixing weights were made for."""
        pipeline = convert(self.make_pipeline(), {})
        assert sample_size(pipeline, {"transformer": pipeline.transformer}) == self.full_size
