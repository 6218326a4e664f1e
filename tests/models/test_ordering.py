# SPDX-License-Identifier: Apache-2.0
"""Tokens in block order through a whole model: the same numbers as row by row, and where it stays with rows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers.hooks.smoothed_energy_guidance_utils import (
    SmoothedEnergyGuidanceConfig,
    _apply_smoothed_energy_guidance_hook,
)
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from mhla_hf import MHLA, BlockLayout, MHLAConfig, MHLAWanTransformer3DModel
from mhla_hf.families import dit, flux
from mhla_hf.layers.fused import PairwiseRotary
from mhla_hf.models import ordering
from mhla_hf.models.ordering import order_of
from tests.families.model_case import relative_error
from tests.families.test_dit import DiTCase
from tests.families.test_flux import ChromaCase, FluxCase
from tests.families.test_hunyuan_video import HunyuanVideo15Case, HunyuanVideoCase
from tests.families.test_wan import SkyReelsCase, WanCase, WanVACECase


GRID = (3, 2, 4)
JOINT = [FluxCase(), ChromaCase(), HunyuanVideoCase(), HunyuanVideo15Case()]
ORDERED = [WanCase(), WanVACECase(), SkyReelsCase(), DiTCase(), *JOINT]


@pytest.fixture(params=ORDERED, ids=lambda case: type(case).__name__)
def case(request):
    return request.param


@pytest.fixture
def orders(monkeypatch):
    """The layouts that calls of models took; `None` for rows."""
    taken = []

    def observed(*arguments):
        taken.append(order_of(*arguments))
        return taken[-1]

    for module in (ordering, dit, flux):
        monkeypatch.setattr(module, "order_of", observed)
    return taken


def gradients_of(case, model, inputs, block_order):
    model.block_order = block_order
    model.zero_grad()
    case.predict(model, **inputs).square().sum().backward()
    return case.gradients_of(model)


@pytest.mark.parametrize("options", [{}, {"lepe_kernel": 3, "output_gate": True}, {"layers": [1]}], ids=str)
@pytest.mark.parametrize("size", [0, 2], ids=["even", "ragged"])
def test_outputs_are_those_of_rows(case, size, options, orders):
    model = case.make_mhla(**options)
    ordered = case.run(model, size, batch=2)
    model.block_order = False
    assert relative_error(ordered, case.run(model, size, batch=2)) < 1e-5
    assert orders[0] is not None and orders[0].num_blocks > 1 and orders[1:] in ([], [None])


@pytest.mark.parametrize("case", JOINT[::2], ids=lambda case: type(case).__name__)
def test_text_as_a_block_comes_before_the_ordered_grid(case, orders):
    model, inputs = case.make_mhla(text="block"), case.inputs(2)
    with torch.no_grad():
        ordered = case.predict(model, **inputs)
        model.block_order = False
        assert relative_error(ordered, case.predict(model, **inputs)) < 1e-5
    assert orders[0] is not None


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_rows(case, checkpointing):
    model, inputs = case.make_mhla().train(), case.inputs(2, batch=2)
    expected = gradients_of(case, model, inputs, block_order=False)
    if checkpointing:
        model.enable_gradient_checkpointing()
    # Some gradients are nothing but rounding, as those of biases of keys before a softmax.
    floor = 1e-3 * max(gradient.norm() for gradient in expected.values())
    for name, gradient in gradients_of(case, model, inputs, block_order=True).items():
        assert (gradient - expected[name]).norm() <= 1e-5 * max(expected[name].norm(), floor), name


def test_whole_models_compile_in_block_order(case, orders):
    torch._dynamo.reset()
    model, inputs = case.make_mhla(), case.inputs(0)
    if "img_ids" in inputs:
        inputs["joint_attention_kwargs"] = {"grid": case.sizes[0]}
    with torch.no_grad():
        # The text of HunyuanVideo-1.5 is sorted by its values upstream.
        whole = not isinstance(case, HunyuanVideo15Case)
        compiled = torch.compile(lambda: case.predict(model, **inputs), backend="eager", fullgraph=whole)
        torch.testing.assert_close(compiled(), case.predict(model, **inputs), rtol=1e-5, atol=1e-5)


def test_layers_are_told_the_order(case):
    model = case.make_mhla()
    seen = []
    for layer in model.mhla_modules().values():
        layer.layout_for = lambda grid, block_order=False, call=layer.layout_for: (
            seen.append(block_order) or call(grid, block_order)
        )
    case.run(model)
    assert seen and all(seen)


def test_steps_of_single_tokens_are_put_in_order(orders):
    case = WanCase()
    model, inputs = case.make_mhla(), case.inputs(2, batch=2)
    grid = (5, 3, 7)
    inputs["timestep"] = torch.rand(2, 105, generator=torch.Generator().manual_seed(0)) * 1000
    with torch.no_grad():
        ordered = model(**inputs).sample
        model.block_order = False
        assert relative_error(ordered, model(**inputs).sample) < 1e-5
    assert orders[0].grid == grid


def hook_block(model):
    model.blocks[1].register_forward_hook(lambda *_: None)


def hook_attention(model):
    model.blocks[0].attn1.register_forward_pre_hook(lambda *_: None)


def hook_layer(model):
    model.mhla_modules()[0].register_forward_hook(lambda *_: None)


def hook_rope(model):
    model.rope.register_forward_hook(lambda *_: None)


def hook_projection(model):
    model.blocks[0].attn1.to_q.register_forward_hook(lambda *_: None)


def blur_queries(model):
    config = SmoothedEnergyGuidanceConfig(indices=[0])
    _apply_smoothed_energy_guidance_hook(model, config, 1e5)


def replace_forward(model):
    block, original = model.blocks[0], model.blocks[0].forward
    block.forward = lambda *args: original(*args)


def replace_processor(model):
    model.blocks[0].attn2.set_processor(type("Places", (WanAttnProcessor,), {})())


def replace_processor_by_name(model):
    model.blocks[0].attn2.set_processor(type("WanAttnProcessor", (WanAttnProcessor,), {})())


def replace_attention(model):
    model.blocks[0].attn2.__class__ = type("WanAttention", (type(model.blocks[0].attn2),), {})


def replace_text_attention(model):
    model.blocks[0].attn2 = torch.nn.Identity()


def put_in_sequence(model):
    model.blocks = torch.nn.Sequential(*model.blocks)


def replace_block(model):
    model.blocks[0].__class__ = type("Places", (type(model.blocks[0]),), {})


def share_tokens(model):
    model.blocks[0].attn1.processor._parallel_config = SimpleNamespace()


def turn_off(model):
    model.block_order = False


def unlike(model):
    layer = model.mhla_modules()[1]
    layer.config = layer.config.replace(eps=1e-3)


@pytest.mark.parametrize(
    "change",
    [
        hook_block, hook_attention, hook_layer, hook_rope, hook_projection, blur_queries, replace_forward,
        replace_processor, replace_processor_by_name, replace_attention, replace_text_attention, replace_block,
        put_in_sequence, share_tokens, turn_off, unlike,
    ],
)  # fmt: skip
def test_models_stay_with_rows_where_something_may_read_places(change):
    model = WanCase().make_mhla()
    assert order_of(model, GRID) == BlockLayout(GRID, blocks=(3, 1, 2))
    change(model)
    assert order_of(model, GRID) is None


@pytest.mark.parametrize("options", [{"window": "block"}, {"blocks": [1, 1, 1]}], ids=str)
def test_models_stay_with_rows_where_nothing_is_gained(options):
    assert order_of(WanCase().make_mhla(**options), GRID) is None


def test_caches_get_rows():
    from diffusers import FirstBlockCacheConfig

    model = WanCase().make_mhla()
    model.enable_cache(FirstBlockCacheConfig(threshold=0.0))
    assert order_of(model, GRID) is None
    model.disable_cache()
    assert order_of(model, GRID) is not None


def test_hooks_of_all_modules_get_rows():
    model = WanCase().make_mhla()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert order_of(model, GRID) is None
    handle.remove()
    assert order_of(model, GRID) is not None


def test_classes_between_are_called():
    class Between(MHLAWanTransformer3DModel._upstream_class()):
        calls = 0

        def forward(self, *args, **kwargs):
            Between.calls += 1
            return super().forward(*args, **kwargs)

    model = WanCase().make_mhla()
    expected = WanCase().run(model)
    model.__class__ = type("Both", (type(model), Between), {})
    assert relative_error(WanCase().run(model), expected) < 1e-5 and Between.calls == 1


def test_arguments_stay_where_they_are_given(orders):
    """Upstream reads the scale of adapters from arguments by name alone."""
    from peft import LoraConfig

    model, inputs = WanCase().make_mhla(), WanCase().inputs()
    model.add_adapter(LoraConfig(target_modules=["to_q"], init_lora_weights=False))
    first = [inputs.pop(name) for name in ("hidden_states", "timestep", "encoder_hidden_states")]
    with torch.no_grad():
        for given in ((None, False, {"scale": 0.1}), (None, False)):
            model.block_order = True
            ordered = model(*first, *given)[0]
            model.block_order = False
            assert relative_error(ordered, model(*first, *given)[0]) < 1e-5
    assert orders[0] is not None


def test_empty_batches_come_in_order():
    model, case = DiTCase().make_mhla(), DiTCase()
    inputs = {name: x[:0] if isinstance(x, torch.Tensor) else x for name, x in case.inputs().items()}
    assert case.predict(model, **inputs).shape[0] == 0


def test_forwards_of_others_get_rows(monkeypatch, orders):
    upstream = MHLAWanTransformer3DModel._upstream_class()
    original, model, inputs = upstream.forward, WanCase().make_mhla(), WanCase().inputs()
    monkeypatch.setattr(upstream, "forward", lambda self, *args, **kwargs: original(self, *args, **kwargs))
    model(**inputs)
    assert orders == []


OPTIONS = {
    "plain": {},
    "everything": {
        "feature_map": "hedgehog",
        "mixing_heads": "per_head",
        "output_norm": True,
        "output_gate": True,
        "lepe_kernel": 3,
        "window": "block",
        "window_size": (2, 2),
    },
    "cut": {"window": "adjacent", "window_size": (2, 3), "rope": "before_feature_map", "feature_map": "elu"},
}


@pytest.mark.parametrize("prefix", [0, 3])
@pytest.mark.parametrize("grid", [(4, 6), (5, 7)], ids=["even", "ragged"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_layers_in_block_order_match_rows(options, grid, prefix):
    torch.manual_seed(0)
    layer = MHLA(
        MHLAConfig(blocks=(2, 3), **options), hidden_size=16, num_heads=2, head_dim=8, num_prefix_tokens=prefix
    ).double()
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    layout = layer.layout_for(grid)
    tokens = [torch.randn(2, layout.num_tokens, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    hidden = torch.randn(2, layout.num_tokens, 16, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(1, layout.num_tokens, 1, 4, dtype=torch.float64)
    weights = torch.randn(2, layout.num_tokens, 2, 8, dtype=torch.float64)

    def results(block_order):
        move = layout.to_block_order if block_order else lambda x: x
        rotary = PairwiseRotary(move(angles.cos()), move(angles.sin()))
        output = layer(
            *map(move, tokens), grid=grid, block_order=block_order, hidden_states=move(hidden), rotary=rotary
        )
        output = layout.from_block_order(output) if block_order else output
        inputs = [*tokens, hidden, *layer.parameters()]
        gradients = torch.autograd.grad((output * weights).sum(), inputs, allow_unused=True)
        return [output, *gradients]

    for actual, expected in zip(results(True), results(False), strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
