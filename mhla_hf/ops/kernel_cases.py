# SPDX-License-Identifier: Apache-2.0
"""Small cases of every family of kernels, compared with plain torch in float64.

For the test of kernels before their first use (`kernels_pass`) and for `mhla-hf doctor --gpu`. Inputs have a
generator of their own and are rounded to the kernels' type first, so that only the computation errs. Blocks have three
tiles of tokens, so that every loop over them goes around; in one of the runs with a tile in each program, in the other
with all of a block in one.

Shape letters: B batch, T tokens, H heads, G key/value heads, K query/key width, V value width, M blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from ..layouts.blocks import BlockLayout
from ..layouts.sequences import SequenceLayout
from ..utils.messages import shorten_text
from .band import StoredMixing
from .definitions import FEATURE_MAPS
from .forms import attend_by_block, attend_on
from .operands import MHLAState, Operands, tensors_of
from .recurrent import empty_state, extend, step


KEY_HEADS = 2
NORM_EPS = 1e-6
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 5e-3}
"""Largest relative errors of outputs and gradients: several times those of rounding, which TF32 does for float32."""
# Error of single numbers relative to their size and the tensor's root mean square: a single wrong row shows.
ELEMENT_TOLERANCE = 8
MESSAGE_LENGTH = 300
# Tensors by name. Not so to mypy, which does not know the parameters that the names stand for.
Results = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the tokens of a case.

    Attributes:
        grid: Token grid of attention in both directions, which the blocks do not divide evenly.
        blocks: Its blocks.
        length: Tokens of causal attention.
        block_size: Tokens of a causal block.
        batch: Batch entries.
        repeats: Query heads that share a key head.
        normalizer: `"query"` or `"none"`.
    """

    grid: tuple[int, int]
    blocks: tuple[int, int]
    length: int
    block_size: int
    batch: int
    repeats: int = 1
    normalizer: str = "query"

    @property
    def heads(self) -> int:
        """Query heads."""
        return KEY_HEADS * self.repeats


@dataclasses.dataclass(frozen=True)
class Case:
    """One family of kernels.

    Attributes:
        inputs: Draws inputs in float64 from a generator, sizes and widths.
        kernels: Computes results from inputs by kernels.
        reference: The same by plain torch.
        has_gradients: Whether the kernels have a backward pass.
    """

    inputs: Callable[[torch.Generator, Sizes, int, int], Results]
    kernels: Callable[[Results, Sizes], Results]
    reference: Callable[[Results, Sizes], Results]
    has_gradients: bool = False


# Blocks of three times as many tokens as a program reads at a time; and as little as an interpreter can bear.
SMALL = Sizes(grid=(14, 62), blocks=(2, 3), length=500, block_size=150, batch=4)
TINY = Sizes(grid=(3, 5), blocks=(2, 2), length=11, block_size=4, batch=1)


def compare_kernels(
    family: str,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    value_width: int,
    repeats: int = 1,
    normalizer: str = "query",
    *,
    backward: bool,
) -> tuple[dict[str, float], str]:
    """Run a family of kernels on a small input, and judge its errors.

    Args:
        family: One of [`FAMILIES`].
        device: The GPU; the CPU where Triton interprets kernels.
        dtype: Type of the tokens.
        width: K.
        value_width: V.
        repeats: Query heads that share a key head.
        normalizer: `"query"` or `"none"`.
        backward: Whether to compute gradients too.

    Returns:
        ‖x - reference‖ / ‖reference‖ for the output, the tensors of a new state and the gradients, by name, which is
        empty where the family has no gradients and these are asked for, or no kernels for these widths; and what is
        wrong, empty for nothing.
    """
    # Gradients are computed in this thread: that of autograd for the GPU may be waiting for this test, in the backward
    # pass of a checkpointed layer.
    try:
        with torch.autograd.set_multithreading_enabled(False):
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                sizes = dataclasses.replace(
                    TINY if device.type == "cpu" else SMALL, repeats=repeats, normalizer=normalizer
                )
                errors = _kernel_errors(family, device, dtype, width, value_width, backward, sizes)
    # Compilers and drivers raise errors of many types, and torch can do without the kernels.
    except Exception as error:
        message = (str(error).strip() or "no message").splitlines()[0]
        return {}, f"{type(error).__name__}: {shorten_text(message, MESSAGE_LENGTH)}"
    # NaN is not below the tolerance either.
    tolerance = TOLERANCES[dtype]
    wrong = [
        f"{name} is off by {whole:.2g} of its size" for name, (whole, _) in errors.items() if not whole <= tolerance
    ]
    wrong = wrong or [
        f"numbers of {name} are off by {error:.2g} of their size"
        for name, (_, error) in errors.items()
        if not error <= ELEMENT_TOLERANCE * tolerance
    ]
    return {name: error for name, (error, _) in errors.items()}, ", ".join(wrong)


def _kernel_errors(
    family: str, device: torch.device, dtype: torch.dtype, width: int, value_width: int, backward: bool, sizes: Sizes
) -> dict[str, tuple[float, float]]:
    """Errors of whole tensors and of their numbers."""
    case = FAMILIES[family]
    if (backward and not case.has_gradients) or not _fits(family, width, value_width, dtype, device):
        return {}
    inputs = case.inputs(torch.Generator().manual_seed(0), sizes, width, value_width)
    rounded = {name: _rounded(name, tensor, dtype) for name, tensor in inputs.items()}
    exact = {name: x.to(device, torch.float64) for name, x in rounded.items()}
    expected = _results(case.reference, exact, sizes, backward)
    tokens = {name: x.to(device) for name, x in rounded.items()}
    runs = [_results(case.kernels, tokens, sizes, backward)]
    if device.type != "cpu":
        # By the plans that the first run has left, and with longer loops.
        with _whole_blocks():
            runs.append(_results(case.kernels, tokens, sizes, backward))
    errors = [_errors(actual, expected) for actual in runs]
    # `amax` keeps NaN, and `max` may not.
    worst = torch.tensor([list(run.values()) for run in errors], dtype=torch.float64).amax(dim=0)
    return dict(zip(errors[0], map(tuple, worst.tolist())))


@contextmanager
def _whole_blocks() -> Iterator[None]:
    """Has programs work through whole blocks, as in large inputs, however few programs there are."""
    from .triton import launching

    before, launching.FEW_PROGRAMS = launching.FEW_PROGRAMS, 1
    try:
        yield
    finally:
        launching.FEW_PROGRAMS = before


def _fits(family: str, width: int, value_width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a family has kernels for widths K and V, a type and a device."""
    # Imported here alone: Triton need not be installed.
    from .triton import fits_fused_kernels, fits_hedgehog_kernels
    from .triton.small import fits_small_kernels

    if family == "small":
        return fits_small_kernels(max(width, value_width), device)
    if family == "fused":
        return fits_fused_kernels(width, value_width, True, dtype)
    return family != "hedgehog" or fits_hedgehog_kernels(width, True, dtype)


def _rounded(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Those are float32 beside tokens of any type.
    return tensor.float() if name in ("mixing", "mixing_per_head", "cosine", "sine") else tensor.to(dtype)


def _results(compute: Callable[..., Results], inputs: Results, sizes: Sizes, backward: bool) -> Results:
    if not backward:
        with torch.no_grad():
            return compute(inputs, sizes)
    leaves = {name: x.requires_grad_() for name, x in inputs.items() if name not in ("cosine", "sine")}
    output = compute({**inputs, **leaves}, sizes)["output"]
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(output, list(leaves.values()), direction.to(output.device, output.dtype))
    named = {f"gradient of {name}": gradient for name, gradient in zip(leaves, gradients)}
    return {"output": output.detach(), **named}


def _errors(actual: Results, expected: Results) -> dict[str, tuple[float, float]]:
    # Gradients may cancel to next to nothing, beside terms of the size of the others.
    floor = 1e-3 * max(reference.norm().item() for reference in expected.values())
    errors = {}
    for name, reference in expected.items():
        difference, size = actual[name].double() - reference, max(reference.norm().item(), floor)
        single = (difference.abs() / (reference.abs() + size / max(reference.numel(), 1) ** 0.5)).amax()
        errors[name] = difference.norm().item() / size, single.item()
    return errors


def _draw(generator: torch.Generator, *shape: int, positive: bool = False) -> torch.Tensor:
    if positive:
        return torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") + 0.05
    return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")


def _tokens(generator: torch.Generator, sizes: Sizes, length: int, width: int, value_width: int) -> Results:
    """Features, and a pair of their own for the normaliser, which has to stay positive."""
    shape = sizes.batch, length
    tokens = {
        "query": _draw(generator, *shape, sizes.heads, width),
        "key": _draw(generator, *shape, KEY_HEADS, width),
        "value": _draw(generator, *shape, KEY_HEADS, value_width),
    }
    if sizes.normalizer == "none":
        return tokens
    return {
        **tokens,
        "normalizer_query": _draw(generator, *shape, sizes.heads, width, positive=True),
        "normalizer_key": _draw(generator, *shape, KEY_HEADS, width, positive=True),
    }


def _operands(inputs: Results, sizes: Sizes) -> Operands:
    tokens = {name: tensor for name, tensor in inputs.items() if not name.startswith("mixing")}
    return Operands(**tokens, normalizer=sizes.normalizer)


def _layout(sizes: Sizes, causal: bool) -> BlockLayout:
    if causal:
        return BlockLayout((sizes.length,), block_size=(sizes.block_size,))
    return BlockLayout(sizes.grid, sizes.blocks)


def _attention(causal: bool) -> Case:
    def inputs(generator: torch.Generator, sizes: Sizes, width: int, value_width: int) -> Results:
        layout = _layout(sizes, causal)
        blocks = layout.num_blocks
        mixing = _draw(generator, 1 + sizes.heads, blocks, blocks, positive=True)
        mixing = mixing.tril() if causal else mixing
        tokens = _tokens(generator, sizes, layout.num_tokens, width, value_width)
        return {**tokens, "mixing": mixing[0], "mixing_per_head": mixing[1:]}

    def on(backend: str) -> Callable[[Results, Sizes], Results]:
        def compute(inputs: Results, sizes: Sizes) -> Results:
            operands, layout = _operands(inputs, sizes), _layout(sizes, causal)
            outputs = []
            for name in ("mixing", "mixing_per_head"):
                blocks = StoredMixing.of(inputs[name]) if causal else inputs[name]
                outputs.append(attend_on(backend, operands, blocks, layout, causal=causal))
            if causal:
                blocks = StoredMixing.of(inputs["mixing"])
                outputs.append(attend_on(backend, operands, blocks, _documents(sizes, operands), causal=True))
            return {"output": torch.cat(outputs)}

        return compute

    return Case(inputs, on("triton"), on("torch"), has_gradients=True)


# The kernels that take a whole head at a time, which have no pair of the normaliser's.


def _small_inputs(generator: torch.Generator, sizes: Sizes, width: int, value_width: int) -> Results:
    tokens = _tokens(generator, sizes, _layout(sizes, causal=False).num_tokens, width, value_width)
    pair = {name: tokens.pop(f"normalizer_{name}", tokens[name]) for name in ("query", "key")}
    blocks = [layout.num_blocks for layout in _small_layouts(sizes)]
    return {
        **tokens,
        **pair,
        "mixing": _draw(generator, blocks[0], blocks[0], positive=True),
        "mixing_per_head": _draw(generator, sizes.heads, blocks[1], blocks[1], positive=True),
    }


def _small_layouts(sizes: Sizes) -> tuple[BlockLayout, BlockLayout]:
    """Blocks of several tiles of tokens, and blocks of one."""
    rows, columns = sizes.grid
    return _layout(sizes, causal=False), BlockLayout(sizes.grid, (min(rows, 4), min(columns, 4)))


def _by_small_kernels(operands: Operands, mixing: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    from .triton.small import small_attention

    table = layout.token_table(operands.query.device)
    return small_attention(*operands.tokens, mixing, table, bool(operands.entry.kernel), operands.eps)[0]


def _small_attention(attend: Callable[..., torch.Tensor]) -> Callable[[Results, Sizes], Results]:
    def compute(inputs: Results, sizes: Sizes) -> Results:
        operands, mixing = _operands(inputs, sizes), (inputs["mixing"], inputs["mixing_per_head"])
        return {"output": torch.cat(list(map(attend, (operands, operands), mixing, _small_layouts(sizes))))}

    return compute


def _documents(sizes: Sizes, operands: Operands) -> SequenceLayout:
    """Two documents after some padding."""
    places = torch.arange(sizes.length, device=operands.query.device).expand(sizes.batch, -1)
    return SequenceLayout(places >= 3, sizes.block_size, (places >= sizes.length // 3).long(), 2)


# Two stored blocks, and more before the tokens: some have left the ring.
STORED, PAST, DECODED, DECAY = 2, 3, 2, 0.5


def _decode_inputs(generator: torch.Generator, sizes: Sizes, width: int, value_width: int) -> Results:
    tokens = _tokens(
        generator, dataclasses.replace(sizes, batch=2), PAST * sizes.block_size + DECODED, width, value_width
    )
    return {**tokens, "mixing": _draw(generator, STORED, STORED, positive=True).tril()}


def _past_state(inputs: Results, sizes: Sizes) -> tuple[MHLAState, Results]:
    """The state after the first tokens, computed by plain torch in float64 on the CPU, and the tokens after them.

    One entry of the batch starts a block with its next token, the other one ends one.
    """
    past = PAST * sizes.block_size
    tokens = {name: tensor for name, tensor in inputs.items() if name != "mixing"}
    before = {name: tensor[:, :past].cpu().double() for name, tensor in tokens.items()}
    key, value = before["key"], before["value"]
    state = empty_state(
        2, KEY_HEADS, key.shape[3], value.shape[3], sizes.block_size, STORED, dtype=torch.float64, device="cpu"
    )
    valid = torch.ones(2, past, dtype=torch.bool, device="cpu")
    valid[1, 0] = False
    _, state = extend(
        Operands(**before, normalizer=sizes.normalizer), _decayed(inputs["mixing"].cpu().double()), state, valid
    )
    return state, {name: tensor[:, past:] for name, tensor in tokens.items()}


def _decayed(mixing: torch.Tensor) -> StoredMixing:
    return StoredMixing.of(mixing, mixing.new_tensor(DECAY))


def _decode(backend: str) -> Callable[[Results, Sizes], Results]:
    def compute(inputs: Results, sizes: Sizes) -> Results:
        state, tokens = _past_state(inputs, sizes)
        device, dtype = inputs["query"].device, torch.float64 if backend == "torch" else torch.float32
        kept = {name: x.to(device) for name, x in tensors_of(state).items()}
        held: Results = {name: x.to(dtype) if x.is_floating_point() else x for name, x in kept.items()}
        state = dataclasses.replace(state, **held)
        outputs = []
        for part in zip(*[x.split(1, dim=1) for x in tokens.values()]):
            operands = Operands(**dict(zip(tokens, part)), normalizer=sizes.normalizer)
            output, state = step(operands, _decayed(inputs["mixing"]), state, None, backend)
            outputs.append(output)
        tensors = {f"state.{name}": x.double() for name, x in tensors_of(state).items()}
        return {"output": torch.cat(outputs, dim=1), **tensors}

    return compute


# The fused kernels: norms of queries and keys, feature map, rotary embedding, output norm and gate.


def _fused_inputs(generator: torch.Generator, sizes: Sizes, width: int, value_width: int) -> Results:
    layout = _layout(sizes, causal=False)
    length, angles = layout.num_tokens, _draw(generator, layout.num_tokens, width // 2)
    tokens = _tokens(generator, sizes, length, width, value_width)
    return {
        **{name: tokens[name] for name in ("query", "key", "value")},
        "mixing": _draw(generator, layout.num_blocks, layout.num_blocks, positive=True),
        "cosine": angles.cos(),
        "sine": angles.sin(),
        "query_norm": _draw(generator, sizes.heads * width, positive=True),
        "key_norm": _draw(generator, KEY_HEADS * width, positive=True),
        "output_norm": _draw(generator, value_width, positive=True),
        "gate": _draw(generator, sizes.batch, length, sizes.heads, value_width),
    }


def _by_fused_kernels(inputs: Results, sizes: Sizes) -> Results:
    from .triton import fused_mhla_attention

    output = fused_mhla_attention(
        inputs["query"], inputs["key"], inputs["value"], inputs["mixing"], _layout(sizes, causal=False),
        feature_map="relu", feature_map_eps=1e-3, normalizer=sizes.normalizer, eps=1e-6, scaling=0.5,
        rotary=(inputs["cosine"], inputs["sine"]), gate=inputs["gate"],
        **{name: (inputs[name], NORM_EPS) for name in ("query_norm", "key_norm", "output_norm")},
    )  # fmt: skip
    return {"output": output}


def _like_fused_kernels(inputs: Results, sizes: Sizes) -> Results:
    features: Results = {}
    for name in ("query", "key"):
        tokens = _normed(inputs, name) * 0.5
        features[f"normalizer_{name}"] = FEATURE_MAPS["relu"].forward(tokens) + 1e-3
        features[name] = _rotated(features[f"normalizer_{name}"], inputs["cosine"], inputs["sine"])
    operands = Operands(**features, value=inputs["value"], normalizer=sizes.normalizer)
    output = attend_by_block(operands, inputs["mixing"], _layout(sizes, causal=False))
    output = F.rms_norm(output, output.shape[-1:], inputs["output_norm"], NORM_EPS)
    return {"output": output * F.silu(inputs["gate"])}


def _normed(inputs: Results, name: str) -> torch.Tensor:
    tokens, weight = inputs[name], inputs[f"{name}_norm"]
    return F.rms_norm(tokens.flatten(2), weight.shape, weight, NORM_EPS).view(tokens.shape)


def _rotated(tokens: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    even, odd = tokens.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosine[:, None], sine[:, None]
    return torch.stack((even * cosine - odd * sine, even * sine + odd * cosine), dim=-1).flatten(-2)


# Hedgehog features: norm, rotary embedding, and a weight of each head.


def _hedgehog_inputs(generator: torch.Generator, sizes: Sizes, width: int, value_width: int) -> Results:
    inputs = _fused_inputs(generator, sizes, width, value_width)
    noise = 0.3 * width**-0.5 * _draw(generator, sizes.heads, width, width)
    names = ("query", "query_norm", "cosine", "sine")
    identity = torch.eye(width, dtype=torch.float64, device="cpu")
    return {**{name: inputs[name] for name in names}, "weight": identity + noise}


def _by_hedgehog_kernels(inputs: Results, sizes: Sizes) -> Results:
    from .triton import hedgehog_features

    rotary, norm = (inputs["cosine"], inputs["sine"]), (inputs["query_norm"], NORM_EPS)
    options: Results = {"scaling": 0.5, "feature_eps": 1e-4, "rotary": rotary, "norm": norm}
    return {"output": hedgehog_features(inputs["query"], inputs["weight"], **options)}


def _like_hedgehog_kernels(inputs: Results, sizes: Sizes) -> Results:
    tokens = _rotated(_normed(inputs, "query") * 0.5, inputs["cosine"], inputs["sine"])
    return {"output": FEATURE_MAPS["hedgehog"].forward(tokens, inputs["weight"]) + 1e-4}


FAMILIES: dict[str, Case] = {
    "block": _attention(causal=False),
    "small": Case(
        _small_inputs, _small_attention(_by_small_kernels), _small_attention(attend_by_block), has_gradients=True
    ),
    "fused": Case(_fused_inputs, _by_fused_kernels, _like_fused_kernels, has_gradients=True),
    "hedgehog": Case(_hedgehog_inputs, _by_hedgehog_kernels, _like_hedgehog_kernels, has_gradients=True),
    "causal": _attention(causal=True),
    "decode": Case(_decode_inputs, _decode("triton"), _decode("torch")),
}
"""Families of kernels by name."""
