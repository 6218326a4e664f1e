# SPDX-License-Identifier: Apache-2.0
"""Which layers are MHLA, every grid against the dense definition, and what is refused: for image models."""

import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.models.attention_processor import AttnProcessor2_0

from mhla_hf import BlockLayout, MHLAConfig, convert, mhla_attention
from mhla_hf.models.attention import MHLAAttnProcessor
from tests.families.model_case import OPTION_SETS, ModelCase, attention_inputs, captured, relative_error


class ImageChecks(ModelCase):
    """Attributes: patch: Width of a patch in latents."""

    patch: int

    # Which layers are MHLA

    @pytest.mark.parametrize("layers", [None, [0], [1], [2, 0]], ids=str)
    def test_layers_choose_what_is_mhla(self, layers):
        model = self.make(self.mhla_class, mhla={**self.options, "layers": layers}, num_layers=3)
        chosen = sorted(layers) if layers is not None else [0, 1, 2]
        assert model.mhla_layers == chosen and sorted(model.mhla_modules()) == chosen
        for index, attention in enumerate(model._self_attentions()):
            assert hasattr(attention, "mhla") == (index in chosen)
            assert isinstance(attention.processor, MHLAAttnProcessor) == (index in chosen)

    @pytest.mark.smoke
    def test_hybrid_keeps_the_other_layers_exactly(self):
        stock = self.make(num_layers=3)
        model = self.make(self.mhla_class, mhla={**self.options, "mixing_init": "linear", "layers": [2]}, num_layers=3)
        model.load_state_dict(stock.state_dict(), strict=False)
        layers = [getattr(each, self.block_list)[1] for each in (model, stock)]
        with captured(layers[0]) as ours, captured(layers[1]) as theirs:
            outputs = self.run(model, self.upstream_size), self.run(stock, self.upstream_size)
        assert torch.equal(ours[0].output, theirs[0].output)
        assert relative_error(*outputs) > 1e-3

    def test_without_attention_the_model_is_upstreams(self):
        stock, model = self.make(), self.make_mhla()
        model.load_state_dict(stock.state_dict(), strict=False)
        for each in (stock, model):
            for block in getattr(each, self.block_list):
                block.attn1.to_out[0].weight.data.zero_()
        actual, expected = self.run(model, self.upstream_size), self.run(stock, self.upstream_size)
        torch.testing.assert_close(actual, expected)

    def test_default_options_give_way(self):
        defaults, grid = dict(self.mhla_class.default_options), self.mhla_class.config_grid(self.make().config)
        model = self.make(self.mhla_class, mhla={"blocks": [2, 2]})
        assert model.mhla_config == MHLAConfig(**{**defaults, "blocks": [2, 2], "grid": grid})
        given = {"blocks": [2, 2], "grid": [4, 6], "mixing_init": "cos", "eps": 1e-3}
        assert self.make(self.mhla_class, mhla=given).mhla_config == MHLAConfig(**{**defaults, **given})
        # A configuration says the same as a dict of what it was made with.
        assert self.make(self.mhla_class, mhla=MHLAConfig(**given)).mhla_config == MHLAConfig(**{**defaults, **given})

    def test_blocks_alone_are_for_the_models_own_grid(self, tmp_path):
        """Between half and twice its size the blocks keep their number, beyond their size."""
        stock = self.make()
        side = stock.config.sample_size // self.patch
        model = convert(stock, {"blocks": [2, 2]})
        module = model.mhla_modules()[0]
        assert model.mhla_config.grid == (side, side)
        assert module.layout_for((2 * side - 1, side)).blocks == (2, 2)
        assert module.layout_for((2 * side, side)).blocks == (4, 2)
        assert module.layout_for((side // 2 + 1, side)).blocks == (2, 2)
        assert module.layout_for((side // 2, side)).blocks == (1, 2)
        with captured(module) as calls:
            self.run(model, (2 * side * self.patch, 2 * side * self.patch))
        assert module.layout_for(calls[0].keywords["grid"]).blocks == (4, 4)
        model.save_pretrained(tmp_path)
        assert self.mhla_class.from_pretrained(tmp_path).mhla_config == model.mhla_config

    def test_more_blocks_than_tokens_are_refused(self):
        side = self.make().config.sample_size // self.patch
        with pytest.raises(ValueError, match=rf"more blocks than grid=\({side}, {side}\)"):
            convert(self.make(), {"blocks": [2, side + 1]})
        larger = convert(self.make(), {"blocks": [2, side + 1], "grid": [side, side + 1]})
        assert self.run(larger).isfinite().all()

    # Every grid, against the dense definition

    @pytest.mark.smoke
    @pytest.mark.parametrize("tokens", [(5, 7), (4, 6), (1, 8), (2, 2), (3, 11), (12, 2)], ids=str)
    @pytest.mark.parametrize("normalizer", ["query", "none"])
    def test_every_grid_matches_the_dense_definition(self, normalizer, tokens):
        model = self.make_mhla(normalizer=normalizer, resize="blocks")
        size = tuple(length * self.patch for length in tokens)
        inputs = self.inputs(size, batch=2)
        module = model._self_attentions()[1].mhla
        with captured(module) as calls, torch.no_grad():
            output = model(**inputs).sample
        assert output.shape[0] == 2 and output.shape[2:] == size
        (call,) = calls
        assert tuple(call.keywords["grid"]) == tokens
        layout = BlockLayout(grid=tokens, blocks=[min(pair) for pair in zip(self.options["blocks"], tokens)])
        mixing = module.mixing_matrix(layout).double()
        query, key, value = (tensor.double() for tensor in attention_inputs(call))
        query, key = torch.relu(query), torch.relu(key)
        block = layout.block_of_token
        weights = mixing[block][:, block] * torch.einsum("bthk,bjhk->bhtj", query, key)
        expected = torch.einsum("bhtj,bjhv->bthv", weights, value)
        if normalizer == "query":
            expected = expected / (weights.sum(-1) + model.mhla_config.eps).transpose(1, 2).unsqueeze(-1)
        assert relative_error(call.output, expected) < 1e-5
        # The package's own oracle agrees.
        options = {"normalizer": normalizer, "eps": model.mhla_config.eps}
        oracle = mhla_attention(query, key, value, mixing, layout, backend="naive", **options)
        assert relative_error(call.output, oracle) < 1e-5

    @pytest.mark.smoke
    @pytest.mark.parametrize("options", ["default", "everything"])
    def test_gradients_equal_those_of_the_naive_form(self, options, monkeypatch):
        assert self.naive_gradient_error(OPTION_SETS[options], monkeypatch) < 1e-8

    def test_one_block_is_vanilla_linear_attention(self):
        model = self.make_mhla(trained=False, blocks=[1, 1])
        with captured(model._self_attentions()[0].mhla) as calls:
            self.run(model, 2)
        query, key, value = attention_inputs(calls[0])
        query, key = torch.relu(query), torch.relu(key)
        summary = torch.einsum("bjhk,bjhv->bhkv", key, value)
        denominator = torch.einsum("bthk,bhk->bth", query, key.sum(1)).unsqueeze(-1) + model.mhla_config.eps
        expected = torch.einsum("bthk,bhkv->bthv", query, summary) / denominator
        assert relative_error(calls[0].output, expected) < 1e-5

    def test_block_size_at_another_resolution(self):
        model = self.make_mhla(blocks=None, block_size=[2, 2])
        module = model._self_attentions()[0].mhla
        assert module.mixing.shape == (6, 6)
        with captured(module) as calls:
            self.run(model, tuple(2 * length for length in self.sizes[0]))
        assert module.layout_for(calls[0].keywords["grid"]).blocks == (4, 6)

    def test_rows_of_a_batch_do_not_mix(self):
        model = self.make_mhla()
        inputs = self.inputs(2, batch=3)
        with torch.no_grad():
            together = model(**inputs).sample
            apart = [model(**{name: value[i : i + 1] for name, value in inputs.items()}).sample for i in range(3)]
        torch.testing.assert_close(together, torch.cat(apart), rtol=1e-4, atol=1e-5)

    # What is refused

    def test_other_processors_are_refused(self):
        model = self.make_mhla(layers=[1])
        free, attention = model._self_attentions()
        with pytest.raises(ValueError, match="AttnProcessor2_0 would ignore"):
            attention.set_processor(AttnProcessor2_0())
        assert isinstance(attention.processor, MHLAAttnProcessor)
        # What is not MHLA stays free, and what there is can be set again.
        free.set_processor(AttnProcessor2_0())
        attention.set_processor(attention.processor)

    def test_attention_refuses_what_it_cannot_serve(self):
        attention = self.make_mhla()._self_attentions()[0]
        tokens = torch.randn(1, 24, attention.to_q.in_features)
        assert attention(tokens, grid=(4, 6)).shape == tokens.shape
        for arguments, message in (
            ({"attention_mask": torch.ones(1, 24, dtype=torch.bool), "grid": (4, 6)}, "attention_mask"),
            ({"encoder_hidden_states": tokens, "grid": (4, 6)}, "encoder_hidden_states"),
            ({}, "grid"),
            ({"grid": (4, 5)}, "20 tokens"),
            ({"grid": (4, 6), "temperature": 2.0}, "temperature"),
        ):
            with pytest.raises((ValueError, TypeError), match=message):
                attention(tokens, **arguments)

    def test_parallelism_is_refused(self):
        with pytest.raises(ValueError, match="context"):
            self.make_mhla().enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
