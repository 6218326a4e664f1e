# SPDX-License-Identifier: Apache-2.0
"""Plans of calls: they compute what the calls compute, and serve no call of another kind.

There is no GPU: kernels are interpreted, and stand for compiled ones that take addresses.
"""

from __future__ import annotations

import copy
import ctypes

import pytest
import torch


pytest.importorskip("triton")

from mhla_hf import MHLA, BlockLayout, MHLAConfig, mhla_attention
from mhla_hf.layers import HeadNorms, PairwiseRotary
from mhla_hf.layers.state import TokenSequence
from mhla_hf.layouts.sequences import SequenceLayout
from mhla_hf.ops import backends, plans
from mhla_hf.ops.triton import launching


pytestmark = pytest.mark.skipif(not backends.interprets_kernels(), reason="needs TRITON_INTERPRET=1")


class Compiled:
    """An interpreted kernel in the place of a compiled one, which knows types but no tensors."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel, keywords, arguments):
        self.kernel, self.keywords = kernel, keywords
        self.types = [_types(argument) for argument in arguments]
        self.streams = []

    def run(self, x, y, z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
        assert (function, metadata, launch_metadata, enter, leave) == ("function", "metadata", None, None, None)
        self[x, y, z](*arguments, stream=stream)

    def __getitem__(self, grid):
        def start(*arguments, stream):
            self.streams.append(stream)
            count = len(self.types)
            tensors = [_tensor(value, kind) for value, kind in zip(arguments, self.types)]
            names = self.kernel.arg_names[count:]
            options = {name: self.keywords[name] for name in ("num_warps", "num_stages") if name in self.keywords}
            self.kernel[grid](*tensors, **dict(zip(names, arguments[count:], strict=True)), **options)

        return start


def _types(argument):
    if isinstance(argument, torch.Tensor):
        storage = argument.untyped_storage()
        return argument.dtype, storage.nbytes() - argument.storage_offset() * argument.element_size()
    return (type(argument), *map(_types, argument)) if isinstance(argument, tuple) else None


def _tensor(value, kind):
    """A tensor behind an address, as long as the one that the kernel was compiled with."""
    if isinstance(value, tuple):
        parts = [_tensor(*pair) for pair in zip(value, kind[1:], strict=True)]
        return kind[0](*parts) if hasattr(kind[0], "_fields") else tuple(parts)
    if kind is None:
        return value
    dtype, size = kind
    if not size:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * size).from_address(value), dtype=dtype)


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that were compiled, in order; afterwards there are no plans."""
    made, original = [], launching.first_launch

    def first_launch(kernel, grid, *arguments, **keywords):
        original(kernel, grid, *arguments, **keywords)
        made.append(Compiled(kernel, keywords, arguments))
        return made[-1]

    monkeypatch.setattr(launching, "first_launch", first_launch)
    monkeypatch.setattr(plans, "ON_CPU", True)
    plans.forget()
    yield made
    plans.forget()


def number_of_plans() -> int:
    return sum(isinstance(entry, plans.Plan) for entry in plans._plans.values())


def tokens(seed: int, dtype=torch.float32, heads=2, key_heads=2, batch=1, gradients=False):
    """Queries, keys and values of 12 tokens."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, 12, count, 16) for count in (heads, key_heads, key_heads)]
    made = [torch.rand(shape, generator=generator).to(dtype) for shape in shapes]
    return [tensor.requires_grad_(gradients) for tensor in made]


LAYOUTS = {
    "even": BlockLayout((12,), blocks=(3,)),
    "ragged": BlockLayout((3, 4), blocks=(2, 3)),
    "causal": BlockLayout((12,), block_size=(4,)),
    "causal, ragged": BlockLayout((12,), block_size=(5,)),
}


@pytest.mark.parametrize(
    ("name", "key_heads", "per_head", "normalizer"),
    [
        ("ragged", 1, True, "query"),
        pytest.param("even", 2, False, "block_query", marks=pytest.mark.slow),
        pytest.param("ragged", 2, False, "none", marks=pytest.mark.slow),
        pytest.param("even", 1, False, "query", marks=pytest.mark.slow),
        pytest.param("causal", 2, False, "query", marks=pytest.mark.slow),
        pytest.param("causal, ragged", 1, True, "none", marks=pytest.mark.slow),
    ],
)
def test_later_calls_compute_the_same(compiled, monkeypatch, name, key_heads, per_head, normalizer):
    """Outputs and all gradients, to the bit, and beside float64, of calls with other numbers than the recorded one."""
    layout, causal = LAYOUTS[name], name.startswith("causal")
    blocks, options = layout.num_blocks, {"normalizer": normalizer, "causal": causal}
    for gradients in (False, True):
        for seed in range(3):
            given = tokens(seed, key_heads=key_heads, batch=2, gradients=gradients)
            mixing = torch.rand((2, blocks, blocks) if per_head else (blocks, blocks), requires_grad=gradients)
            output = mhla_attention(*given, mixing, layout, backend="triton", **options)
            exact = [tensor.detach().double().requires_grad_(gradients) for tensor in (*given, mixing)]
            expected = mhla_attention(*exact, layout, backend="naive", **options)
            monkeypatch.setattr(plans, "ON_CPU", False)
            without = mhla_attention(*given, mixing, layout, backend="triton", **options)
            monkeypatch.setattr(plans, "ON_CPU", True)
            results = [(output, without, expected)]
            if gradients:
                upstream = torch.rand_like(output)
                got = torch.autograd.grad(output, [*given, mixing], upstream)
                monkeypatch.setattr(plans, "ON_CPU", False)
                others = torch.autograd.grad(without, [*given, mixing], upstream)
                monkeypatch.setattr(plans, "ON_CPU", True)
                results += zip(got, others, torch.autograd.grad(expected, exact, upstream.double()), strict=True)
            for one, same, right in results:
                torch.testing.assert_close(one, same, rtol=0, atol=0)
                assert (one.double() - right).norm() <= 1e-4 * right.norm()
    # Without gradients the whole call; with them the operator, and its backward pass.
    assert number_of_plans() == 3


def attend(given, layout=LAYOUTS["even"], mixing=None, **options):
    """A call by kernels, with equal weights."""
    blocks = layout.num_blocks
    mixing = torch.full((blocks, blocks), 1 / blocks) if mixing is None else mixing
    return mhla_attention(*given, mixing, layout, backend="triton", **options)


def close(given, layout=LAYOUTS["even"], **options):
    """A call by kernels, compared with plain torch."""
    output = attend(given, layout, **options)
    mixing = torch.full((layout.num_blocks,) * 2, 1 / layout.num_blocks)
    torch.testing.assert_close(output, mhla_attention(*given, mixing, layout, backend="torch", **options))
    return output


def test_kernels_start_on_the_stream_of_their_call(compiled, monkeypatch):
    streams = iter(range(100, 200))
    monkeypatch.setattr(plans, "current_stream", lambda index: next(streams))
    for seed in range(4):
        close(tokens(seed))
    # The second call makes the plan, which then runs once to be compared.
    assert [kernel.streams for kernel in compiled if kernel.streams] == [[100, 101, 102]] * 3


def test_another_device_has_plans_of_its_own(compiled, monkeypatch):
    """Where a parameter lies elsewhere, too: kernels would take its address."""
    devices = {}
    monkeypatch.setattr(torch.Tensor, "get_device", lambda tensor: devices.get(id(tensor), -1))
    given = tokens(0)
    first = plans.kind_of(given, "call")
    devices[id(given[2])] = 1
    second = plans.kind_of(given, "call")
    devices |= dict.fromkeys(map(id, given), 1)
    assert len({first, second, plans.kind_of(given, "call")}) == 3


def test_plans_run_on_the_device_of_their_tensors(compiled, monkeypatch):
    """Triton's launcher starts kernels in the current context."""
    entered = []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *_):
            pass

    for seed in range(3):
        close(tokens(seed))
    (plan,) = [entry for entry in plans._plans.values() if isinstance(entry, plans.Plan)]
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(plans, "current_stream", lambda index: index)
    for current in (0, 1, 0):
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda current=current: current, raising=False)
        plan.index = 1
        close(tokens(5))
    assert entered == [1, 1]
    assert compiled[-1].streams[-3:] == [1, 1, 1]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_rows_of_another_alignment_have_plans_of_their_own(compiled, which):
    """Two calls of the same sizes and strides, in turn."""
    memory = torch.rand(4 * 12 * 2 * 16 + 64)
    start = -memory.data_ptr() % 64 // 4
    for turn in range(4):
        for offset in (0, 1, 2):
            given = tokens(turn)
            shifted = memory[start + offset : start + offset + given[which].numel()].view(given[which].shape)
            given[which] = shifted.copy_(given[which])
            close(given)
    assert number_of_plans() == 3


def test_rows_of_other_strides_have_plans_of_their_own(compiled):
    for seed in range(4):
        close(tokens(seed))
        packed = torch.stack(tokens(seed), dim=2)
        close(packed.unbind(2))
        close([tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tokens(seed)])
    assert number_of_plans() == 3


def test_one_tensor_for_several_arguments(compiled):
    """What is one tensor now may be two the next time."""
    for seed in range(4):
        query, key, value = tokens(seed)
        close((query, query, value))
        close((query, key, value))


def test_calls_that_checks_refuse_have_no_plan(compiled):
    """Next to a plan, and before there is one."""
    for seed in range(3):
        given = tokens(seed)
        for wrong in (
            {"eps": True},
            {"causal": 0},
            {"normalizer": "qeury"},
            {"normalizer": []},
            {"eps": float("nan")},
        ):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                attend(given, **wrong)
        with pytest.raises(ValueError, match="value"):
            attend([*given[:2], given[2][:, :, :, None]])
        with pytest.raises(ValueError, match="mixing"):
            attend(given, mixing=torch.rand(4, 4))
        close(given, eps=1)
    assert number_of_plans() == 1


def test_settings_change_the_kind(compiled, monkeypatch):
    given = tokens(0)
    kinds = {plans.kind_of(given)}
    monkeypatch.setattr(plans, "tf32_is_allowed", lambda: True)
    kinds.add(plans.kind_of(given))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kinds.add(plans.kind_of(given))
    assert len(kinds) == 3


def test_plans_run_outside_of_autocast(compiled):
    for seed in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            given = tokens(seed)
            assert close(given).dtype == torch.float32


def test_hooks_of_profilers_see_launches(compiled, monkeypatch):
    from triton import knobs

    for seed in range(3):
        close(tokens(seed))
    started, original, run = [], Compiled.__getitem__, Compiled.run
    monkeypatch.setattr(Compiled, "__getitem__", lambda kernel, grid: started.append(grid) or original(kernel, grid))
    monkeypatch.setattr(Compiled, "run", None)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    close(tokens(3))
    assert len(started) == 3
    # Afterwards as before.
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", None)
    monkeypatch.setattr(Compiled, "run", run)
    close(tokens(4))


def test_no_plan_where_somebody_looks_into_operators(compiled):
    """Modes and functorch see the operators, and get no plan's result in their place."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    for seed in range(3):
        close(tokens(seed))
    before = [len(kernel.streams) for kernel in compiled]
    given = tokens(3)
    with FlopCounterMode(display=False) as counter:
        attend(given)
    assert counter.get_total_flops() > 0
    assert [len(kernel.streams) for kernel in compiled][: len(before)] == before
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(tensor) for tensor in given]
        assert not plans.is_plain(fake)
    assert not plans.is_plain([torch.rand(2).as_subclass(type("Subclass", (torch.Tensor,), {}))])
    seen = []
    torch.vmap(lambda tensor: seen.append(plans.is_plain([tensor])) or tensor)(torch.rand(2, 3))
    torch.func.grad(lambda tensor: seen.append(plans.is_plain([tensor])) or tensor.sum())(torch.rand(3))
    assert seen == [False, False]


def test_graphs_are_captured_without_plans_of_tables(compiled, monkeypatch):
    """A graph knows a table by its address, and `cached` keeps those that it hands out while capturing."""
    for seed in range(3):
        close(tokens(seed))
    made = len(compiled)
    monkeypatch.setattr(plans, "is_capturing", lambda tensors: True)
    close(tokens(3))
    assert len(compiled) > made


def test_what_reads_numbers_back_has_no_plan(compiled):
    def function(tensor):
        attend([tensor, tensor + 1, tensor + 2])
        return tensor * float(tensor.sum())

    for seed in range(3):
        query = tokens(seed)[0]
        kind = plans.kind_of([query], "f")
        torch.testing.assert_close(plans.planned(kind, function, [query]), query * query.sum())
    assert not isinstance(plans._plans[kind], plans.Plan)


def test_precision_follows_the_values(compiled, monkeypatch):
    """float32 values beside queries and keys in half precision."""
    given = [*(tensor.half() for tensor in tokens(0)[:2]), tokens(0)[2]]
    kinds = set()
    for allowed in (True, False):
        monkeypatch.setattr(plans, "tf32_is_allowed", lambda allowed=allowed: allowed)
        kinds.add(plans.kind_of(given))
    assert len(kinds) == 2


def test_negative_bits_are_resolved(compiled):
    for seed in range(4):
        query, key, value = tokens(seed)
        negative = torch._neg_view(-value)
        assert negative.is_neg()
        close((query, key, negative))


def test_padding_is_the_same_every_time(compiled, caplog):
    """What kernels leave out in padded rows is compared too."""
    layout = SequenceLayout(torch.arange(12)[None] < torch.tensor([[12], [7]]), 4)
    for causal in (False, True):
        for seed in range(3):
            given, mixing = tokens(seed, batch=2, gradients=True), torch.full((3, 3), 1 / 3)
            mhla_attention(*given, mixing, layout, causal=causal, backend="triton").sum().backward()
    assert number_of_plans() > 0 and "did not repeat it" not in caplog.text


def test_a_call_that_fits_once_is_not_lost(compiled, monkeypatch):
    def fail(plan, *tensors):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(plans.Plan, "__call__", fail)
    for seed in range(4):
        close(tokens(seed))
    assert number_of_plans() == 0


def test_decisions_are_bounded(monkeypatch):
    monkeypatch.setattr(plans, "MAX_PLANS", 10)
    for kind in range(100):
        plans.decide(kind, "torch")
    assert plans.decided(99) == "torch" and len(plans.decisions) <= 20
    plans.forget()


def test_a_plan_that_computes_something_else_is_not_used(compiled, monkeypatch, caplog):
    repeat = plans.Plan.__call__
    wrong = lambda plan, *tensors: torch.utils._pytree.tree_map(torch.zeros_like, repeat(plan, *tensors))  # noqa: E731
    monkeypatch.setattr(plans.Plan, "__call__", wrong)
    for seed in range(4):
        close(tokens(seed))
    # One for the whole call, one for the operator in it.
    assert number_of_plans() == 0 and caplog.text.count("did not repeat it") == 2


def test_temporaries_share_memory_where_they_are_not_needed_together():
    entries = {}
    for name, made, last, size in (("a", 0, 3, 1000), ("b", 1, 5, 600), ("c", 4, 6, 900), ("d", 6, 8, 2000)):
        entries[name] = plans._Memory((), 0, size, made=made, last=last)
    offsets, size = plans._pack(entries)
    for name, entry in entries.items():
        for other, its in entries.items():
            if name < other and entry.made <= its.last and its.made <= entry.last:
                assert offsets[name] >= offsets[other] + its.size or offsets[other] >= offsets[name] + entry.size
    assert size <= 3072 and all(offset % 512 == 0 for offset in offsets.values())


LAYERS = {
    "grid": {},
    "normed and gated": {"output_norm": True, "output_gate": True, "mixing_heads": "per_head"},
    "step by step": {"normalizer": "block_query", "feature_map": "elu"},
    "hedgehog": {"feature_map": "hedgehog", "rope": "before_feature_map"},
    "convolution": {"lepe_kernel": 3},
}


def layer_call(seed, rotary=False, norms=False, gradients=False):
    """Arguments of a layer's call on a grid of 3 × 4 tokens."""
    torch.manual_seed(seed)
    options = {"grid": (3, 4), "hidden_states": torch.rand(1, 12, 32)}
    if rotary:
        angles = torch.rand(1, 12, 1, 8)
        options["rotary"] = PairwiseRotary(angles.cos(), angles.sin())
    if norms:
        options["norms"] = HeadNorms(*[torch.nn.RMSNorm(32, eps=1e-6) for _ in range(2)])
        torch.nn.init.uniform_(options["norms"].query.weight)
    return tokens(seed, gradients=gradients), options


def make_layer(**options):
    layer = MHLA(MHLAConfig(blocks=(1, 2), backend="triton", **options), hidden_size=32, num_heads=2, head_dim=16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.uniform_(layer.mixing)
    return layer


def check_layer(layer, given, options):
    """A call by kernels beside one in plain torch."""
    reference = copy.deepcopy(layer)
    reference.config = layer.config.replace(backend="torch")
    output = layer(*given, **options)
    torch.testing.assert_close(output, reference(*given, **options), rtol=2e-4, atol=2e-5)
    return output


@pytest.mark.parametrize("extras", [{}, {"rotary": True, "norms": True}], ids=["plain", "rotary and norms"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_compute_the_same(compiled, name, extras):
    """Of other tokens, tables, norms, and parameters that have learned or been replaced."""
    layer = make_layer(**LAYERS[name])
    with torch.no_grad():
        for seed in range(4):
            check_layer(layer, *layer_call(seed, **extras))
            layer.mixing.mul_(1.1)
        layer.mixing = torch.nn.Parameter(layer.mixing.flip(-1).clone())
        check_layer(layer, *layer_call(4, **extras))
        for seed in range(3):
            layer = make_layer(**LAYERS[name])
            check_layer(layer, *layer_call(seed, **extras))


def test_layers_learn_the_same(compiled):
    layer = make_layer(output_norm=True, output_gate=True)
    wanted = list(layer.parameters())
    for seed in range(4):
        given, options = layer_call(seed, gradients=True, rotary=True)
        got = torch.autograd.grad(layer(*given, **options).square().sum(), [*given, *wanted])
        reference = copy.deepcopy(layer)
        reference.config = layer.config.replace(backend="torch")
        expected = torch.autograd.grad(
            reference(*given, **options).square().sum(), [*given, *reference.parameters()]
        )  # fmt: skip
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-3, atol=1e-3)


def test_layers_that_change_have_other_plans(compiled):
    """Another eps, hooks, another configuration, another grid, and calls that are refused."""
    layer = make_layer(output_norm=True)
    with torch.no_grad():
        for seed in range(3):
            given, options = layer_call(seed, norms=True)
            before = check_layer(layer, given, options)
        layer.output_norm.eps = 0.5
        assert not torch.equal(check_layer(layer, given, options), before)
        handle = layer.output_norm.register_forward_hook(lambda module, given, output: output * 2)
        torch.testing.assert_close(layer(*given, **options), 2 * check_layer(layer, given, options) / 2)
        handle.remove()
        layer.output_norm.eps = 1e-6
        options["norms"].query.eps = 0.5
        assert not torch.equal(check_layer(layer, given, options), before)
        options["norms"].query.eps = 1e-6
        torch.testing.assert_close(layer(*given, **options), before)
        check_layer(layer, given, {**options, "grid": (4, 3)})
        for _ in range(3):
            ordered = check_layer(layer, given, {**options, "block_order": True})
        assert not torch.equal(ordered, before)
        for grid in ((3, 5), (True, 12), (float("inf"), 2), torch.tensor([3, 4]), "12", 12, None):
            with pytest.raises(ValueError, match="grid"):
                layer(*given, **{**options, "grid": grid})
        with pytest.raises(ValueError, match="scaling"):
            layer(*given, **options, scaling=True - 1)
        layer.config = layer.config.replace(feature_map="exp")
        assert not torch.equal(check_layer(layer, given, options), before)


def test_layers_of_texts(compiled):
    config = MHLAConfig(grid=(12,), block_size=(4,), causal=True, backend="triton", mixing_tail="decay")
    layer = MHLA(config, hidden_size=32, num_heads=2, head_dim=16, num_key_value_heads=1)
    with torch.no_grad():
        for seed in range(4):
            sequence = TokenSequence(causal=True)
            check_layer(layer, tokens(seed, key_heads=1), {"sequence": sequence})
            valid = torch.arange(12)[None] < 9
            check_layer(layer, tokens(seed, key_heads=1), {"sequence": TokenSequence(causal=True, valid=valid)})
    assert number_of_plans() >= 1
