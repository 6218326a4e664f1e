# SPDX-License-Identifier: Apache-2.0
"""Time and memory of MHLA beside softmax and linear attention on this device: the operator alone, and models.

Shape letters: B batch, T tokens, H heads, K = V width, M blocks. Contestants take turns in rounds, so that other load
on the machine falls on all of them.
"""

from __future__ import annotations

import gc
import json
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Measurement, Timer

from .config import MHLAConfig
from .families.inputs import example_inputs
from .layers.mixing import initial_mixing
from .layouts.blocks import BlockLayout, choose_blocks
from .models.registry import mhla_class_for
from .ops import mhla_attention, triton_obstacle
from .ops.backends import ENVIRONMENT_VARIABLE, kernels_pass
from .presets import PRESETS, from_preset
from .utils.compat.diffusers import kept_in_fp32
from .utils.machine import choose_device, machine_facts, parse_dtype
from .utils.messages import check_choice


EPS = 1e-6
ROUNDS = 3
# Suffix of the names of sizes for a CPU.
SMALL = "-small"
OPERATORS = ("mhla-torch", "mhla-triton", "softmax", "softmax-flash", "softmax-cudnn", "linear")
# The diffusers class with its own attention, and with MHLA.
ORDINARY = "ordinary"
MODELS = (ORDINARY, "mhla-torch", "mhla-triton")

_SDPA = {"softmax-flash": SDPBackend.FLASH_ATTENTION, "softmax-cudnn": SDPBackend.CUDNN_ATTENTION}
_INPUT_BYTES, _MOST_INPUTS = 256 << 20, 32
_REASON_LENGTH = 200


@dataclass(frozen=True)
class OperatorShape:
    """Self-attention of T tokens with H heads of width K = V.

    Args:
        batch: B.
        heads: H.
        width: K and V.
        grid: Tokens along each axis.
        blocks: Blocks along each axis; [`choose_blocks`] decides by default.
        chunk: Tokens of a block of causal attention, in place of `blocks`; None for attention in both directions.
    """

    batch: int
    heads: int
    width: int
    grid: tuple[int, ...]
    blocks: tuple[int, ...] | None = None
    chunk: int | None = None

    @property
    def tokens(self) -> int:
        """T."""
        return math.prod(self.grid)

    @property
    def causal(self) -> bool:
        """Whether tokens look back only."""
        return self.chunk is not None

    @cache  # noqa: B019
    def layout(self) -> BlockLayout:
        """Block layout of the tokens."""
        if self.chunk is not None:
            return BlockLayout(self.grid, block_size=(self.chunk,))
        return BlockLayout(self.grid, blocks=self.blocks or choose_blocks(self.grid))


# Heads and widths of Wan2.1-T2V-1.3B, DiT-XL/2, SANA 1.6B and a language model of 400 million parameters.
SHAPES: dict[str, OperatorShape] = {
    "wan": OperatorShape(1, 12, 128, (21, 30, 50), (3, 5, 10)),
    "wan-720p": OperatorShape(1, 12, 128, (21, 45, 80), (3, 5, 10)),
    "wan-720p-h24": OperatorShape(1, 24, 128, (21, 45, 80), (3, 5, 10)),
    "dit-256": OperatorShape(16, 16, 72, (16, 16)),
    "dit-512": OperatorShape(16, 16, 72, (32, 32)),
    "sana-1024": OperatorShape(4, 70, 32, (32, 32)),
    "sana-2048": OperatorShape(4, 70, 32, (64, 64)),
    **{
        f"causal-{k}k": OperatorShape(max(1, 16 // k), 16, 64, (1024 * k,), chunk=64)
        for k in (2, 4, 8, 16, 32, 64, 128)
    },
    "wan-small": OperatorShape(1, 2, 128, (6, 20, 30), (2, 4, 6)),
    "dit-256-small": OperatorShape(2, 4, 72, (16, 16)),
    "dit-512-small": OperatorShape(2, 4, 72, (32, 32)),
    "sana-1024-small": OperatorShape(1, 8, 32, (32, 32)),
    "sana-2048-small": OperatorShape(1, 8, 32, (64, 64)),
    **{f"causal-{k}k-small": OperatorShape(max(1, 4 // k), 2, 64, (1024 * k,), chunk=64) for k in (1, 2, 4, 8)},
}


@dataclass(frozen=True)
class ModelCase:
    """A diffusion transformer with inputs of one size.

    Args:
        preset: Name of the preset.
        sizes: Arguments of the model's constructor in place of the preset's.
        grid: Tokens of one input along each axis.
        text: Tokens of the text, for models that have one.
        batch: B.
    """

    preset: str
    sizes: Mapping[str, Any]
    grid: tuple[int, ...]
    text: int = 0
    batch: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of its self-attention."""
        return math.prod(self.grid)

    @property
    def attention(self) -> str:
        """Kind of its own self-attention."""
        is_linear = mhla_class_for(PRESETS[self.preset].model).upstream_is_linear
        return "linear" if is_linear else "softmax"


_SMALL_SIZES = {"num_layers": 2, "num_attention_heads": 2}

MODEL_CASES: dict[str, ModelCase] = {
    "wan": ModelCase("wan2.1-1.3b", {}, (21, 30, 50), text=512),
    "dit-256": ModelCase("dit-xl-2-256", {}, (16, 16), batch=16),
    "dit-512": ModelCase("dit-xl-2-512", {}, (32, 32), batch=16),
    "sana-1024": ModelCase("sana-0.6b", {"sample_size": 32}, (32, 32), text=300, batch=4),
    "sana-2048": ModelCase("sana-0.6b", {"sample_size": 64}, (64, 64), text=300, batch=4),
    "wan-small": ModelCase("wan2.1-1.3b", {**_SMALL_SIZES, "ffn_dim": 256}, (5, 16, 20), text=64),
    "dit-512-small": ModelCase("dit-xl-2-512", _SMALL_SIZES, (32, 32)),
    "sana-1024-small": ModelCase(
        "sana-0.6b",
        {**_SMALL_SIZES, "num_cross_attention_heads": 1, "cross_attention_dim": 64, "sample_size": 32},
        (32, 32),
        text=64,
    ),
}


def choose_cases(
    argument: str, known: Collection[str], names: Sequence[str] | None, device: torch.device, quick: bool = False
) -> list[str]:
    """Check names of cases; return them, or by default those that suit the device: on a CPU the small ones.

    Args:
        argument: Name of the argument that holds the names.
        known: Names of all cases.
        names: Names that were asked for.
        device: Device that they run on.
        quick: Choose one by default.

    Raises:
        ValueError: If a name is unknown.
    """
    for name in names or ():
        check_choice(argument, name, known)
    suited = [name for name in known if name.endswith(SMALL) == (device.type == "cpu")]
    return list(names or suited[: 1 if quick else None])


class Inputs(NamedTuple):
    """Tensors of one run.

    Attributes:
        query: Positive features `[B, T, H, K]`.
        key: The same for keys.
        value: `[B, T, H, V]`.
        mixing: float32 `[M, M]`.
        gradient: Gradient of the output, `[B, T, H, V]`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mixing: torch.Tensor
    gradient: torch.Tensor


def make_inputs(shape: OperatorShape, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Draw inputs: `elu(x) + 1` of normal queries and keys, normal values and gradients, initial mixing weights."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.batch, shape.tokens, shape.heads, shape.width)
    query, key, value, gradient = (
        torch.randn(size, generator=generator, dtype=dtype, device=device) for _ in range(4)
    )
    config = MHLAConfig(causal=shape.causal, block_size=None if shape.chunk is None else (shape.chunk,))
    mixing = initial_mixing(config, shape.layout().blocks).to(device)
    return Inputs(F.elu(query) + 1, F.elu(key) + 1, value, mixing, gradient)


def attend(name: str, inputs: Inputs, shape: OperatorShape, normalizer: str | None) -> torch.Tensor:
    """Compute attention, `[B, T, H, V]`.

    Args:
        name: A contestant, or `mhla-` and any backend.
        inputs: Tensors of the shape.
        shape: Sizes.
        normalizer: `"query"` or `"none"`; ignored by softmax.

    Raises:
        RuntimeError: If an implementation of softmax attention does not support these tensors.
    """
    if name.startswith("mhla-"):
        return mhla_attention(
            *inputs[:4], shape.layout(), normalizer=normalizer or "query", causal=shape.causal,
            eps=EPS, backend=name.removeprefix("mhla-"),
        )  # fmt: skip
    query, key, value = (x.transpose(1, 2) for x in inputs[:3])
    if name == "linear":
        return _linear(query, key, value, shape.chunk, normalizer).transpose(1, 2)
    with sdpa_kernel(_SDPA[name]) if name in _SDPA else nullcontext():
        return F.scaled_dot_product_attention(query, key, value, is_causal=shape.causal).transpose(1, 2)


def _linear(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chunk: int | None, normalizer: str | None
) -> torch.Tensor:
    """φ(q)ᵀ Σ φ(k) vᵀ, with the normaliser over φ(q)ᵀ Σ φ(k) + eps (arXiv 2006.16236, equation 5), `[B, H, T, V]`.

    Causal attention sums over earlier tokens, in chunks that divide T (arXiv 2312.06635, section 2.2).
    """
    if chunk is None:
        output = query @ (key.mT @ value)
        return output / (query @ key.sum(dim=-2, keepdim=True).mT + EPS) if normalizer == "query" else output
    query, key, value = (x.unflatten(2, (-1, chunk)) for x in (query, key, value))
    scores = (query @ key.mT).tril()
    output = query @ _earlier(key.mT @ value) + scores @ value
    if normalizer == "query":
        sums = _earlier(key.sum(dim=-2, keepdim=True).mT)
        output = output / (query @ sums + scores.sum(dim=-1, keepdim=True) + EPS)
    return output.flatten(2, 3)


def _earlier(sums: torch.Tensor) -> torch.Tensor:
    """Sums over the chunks before each, in float32: `[B, H, M, K, V]`."""
    return (sums.cumsum(dim=2, dtype=torch.float32) - sums).to(sums.dtype)


def _require(name: str, shape: OperatorShape, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `ValueError` where a contestant would not run, or plain torch in its place."""
    if device.type != "cuda" and (name in _SDPA or name == "mhla-triton"):
        # Interpreted kernels, which tests run on CPUs, say nothing about time.
        raise ValueError(f"runs on GPUs only, not on {device.type}")
    tokens = torch.empty(1, 1, 1, shape.width, dtype=dtype, device=device)
    family = "causal" if shape.causal else "block"
    if name == "mhla-triton" and triton_obstacle(tokens) is None and not kernels_pass(family, tokens, tokens):
        raise ValueError(f"the {family} kernels failed their check (mhla-hf doctor --gpu)")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of every measurement.

    Args:
        dtype: dtype of tokens or models; None for bfloat16 on a GPU and float32 on a CPU.
        device: Device to run on; None for a GPU if there is one.
        seconds: Approximate time for all runs of one case.
        quick: Measure one case, in a tenth of the time.

    Raises:
        ValueError: If `seconds` is not positive, or an environment variable chooses the backend.
    """

    dtype: str | None = None
    device: str | None = None
    seconds: float = 3.0
    quick: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds={self.seconds} must be finite and positive.")
        if os.environ.get(ENVIRONMENT_VARIABLE):
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE} is set and would choose the backend of all contestants; unset it."
            )

    def place(self) -> tuple[torch.device, Any]:
        """Return device and dtype."""
        device = choose_device(self.device)
        return device, parse_dtype(self.dtype or ("bfloat16" if device.type == "cuda" else "float32"))

    def report(self, benchmark: str, results: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
        """Return a report for JSON of the results, with the machine and all options."""
        device, dtype = self.place()
        options |= {**asdict(self), "device": device.type, "dtype": str(dtype).removeprefix("torch.")}
        return {"benchmark": benchmark, "machine": machine_facts(device), "options": options, "results": results}


def measure_operator(
    options: BenchOptions,
    shapes: Sequence[str] | None = None,
    contestants: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
    normalizers: Sequence[str] = ("none", "query"),
) -> dict[str, Any]:
    """Measure time and memory of attention at the sizes of models, forward alone and with the backward pass.

    Args:
        options: Options of the measurement.
        shapes: Names of `SHAPES`; None for those that suit the device.
        contestants: Names of `OPERATORS`; None for all.
        progress: Called with the name of each case before it is measured.
        normalizers: Normalisers of MHLA and linear attention.

    Returns:
        A report for JSON: `machine`, `options` and `results`, a row for each shape, direction, contestant and
        normaliser. Contestants that did not run have a `reason` in place of figures.

    Raises:
        ValueError: If a name is unknown.
    """
    device, dtype = options.place()
    names = choose_cases("contestants", OPERATORS, contestants or OPERATORS, device)
    keys = [(name, each) for name in names for each in ((None,) if "softmax" in name else normalizers)]
    results: list[dict[str, Any]] = []
    for title in choose_cases("shapes", SHAPES, shapes, device, options.quick):
        shape = SHAPES[title]
        inputs = _input_sets(shape, dtype, device)
        for direction in ("forward", "fwd+bwd"):
            if progress is not None:
                progress(f"{title}, {direction}")
            makers = {key: partial(_operator_run, *key, shape, inputs, direction != "forward") for key in keys}
            case = {"shape": title, **asdict(shape), "tokens": shape.tokens, "direction": direction}
            for (name, normalizer), row in compare(makers, options, "softmax").items():
                results.append({**case, "contestant": name, "normalizer": normalizer, **row})
    return options.report("op", results)


def _operator_run(
    name: str, normalizer: str | None, shape: OperatorShape, inputs: Iterator[Inputs], backward: bool
) -> Callable[[], tuple[torch.Tensor | None, ...]]:
    drawn = next(inputs).query
    _require(name, shape, drawn.dtype, drawn.device)
    return lambda: run_operator(lambda each: attend(name, each, shape, normalizer), next(inputs), backward)


def _input_sets(shape: OperatorShape, dtype: torch.dtype, device: torch.device) -> Iterator[Inputs]:
    """Inputs that runs take in turns, together larger than the last cache of a CPU or GPU."""
    size = 3 * shape.batch * shape.heads * shape.tokens * shape.width * dtype.itemsize
    count = min(_MOST_INPUTS, max(2, -(-_INPUT_BYTES // size)))
    return cycle([make_inputs(shape, dtype, device, seed) for seed in range(count)])


def run_operator(
    attention: Callable[[Inputs], torch.Tensor], inputs: Inputs, backward: bool
) -> tuple[torch.Tensor | None, ...]:
    """Compute attention; return the output, and with a backward pass the gradients of tokens and mixing weights."""
    if not backward:
        with torch.no_grad():
            return (attention(inputs),)
    leaves = [x.detach().requires_grad_() for x in inputs[:4]]
    output = attention(inputs._replace(**dict(zip(Inputs._fields, leaves))))
    return output.detach(), *torch.autograd.grad(output, leaves, inputs.gradient, allow_unused=True)


def measure_models(
    options: BenchOptions,
    models: Sequence[str] | None = None,
    contestants: Sequence[str] | None = None,
    progress: Callable[[str], None] | None = None,
    compile_backend: str | None = None,
    make_run: Callable[[Any, Iterator[dict[str, torch.Tensor]]], Callable[[], Any]] | None = None,
) -> dict[str, Any]:
    """Measure time and memory of models with random weights, with their own attention and with MHLA.

    Args:
        options: Options of the measurement.
        models: Names of `MODEL_CASES`; None for those that suit the device.
        contestants: Names of `MODELS`; None for all.
        progress: Called with the name of each model before it is measured.
        compile_backend: Backend of torch.compile for every transformer block; None for no compilation.
        make_run: Makes the function to time from a model and an iterator of its inputs; a forward pass by default.

    Returns:
        A report for JSON: `machine`, `options` and `results`, a row for each model and contestant.
        Contestants that did not run have a `reason` in place of figures.

    Raises:
        ValueError: If a name is unknown.
    """
    device, dtype = options.place()
    names = choose_cases("contestants", MODELS, contestants or MODELS, device)
    results: list[dict[str, Any]] = []
    for title in choose_cases("models", MODEL_CASES, models, device, options.quick):
        case = MODEL_CASES[title]
        if progress is not None:
            progress(title)
        makers = {name: partial(_model_run, case, name, dtype, device, compile_backend, make_run) for name in names}
        for name, row in compare(makers, options, ORDINARY).items():
            attention = case.attention if name == ORDINARY else "mhla"
            results.append({"model": title, "tokens": case.tokens, "contestant": name, "attention": attention, **row})
    return options.report("model", results, compile_backend=compile_backend)


def _model_run(
    case: ModelCase,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    compile_backend: str | None,
    make_run: Callable[[Any, Iterator[dict[str, torch.Tensor]]], Callable[[], Any]] | None,
) -> Callable[[], Any]:
    # An obstacle to the narrowest heads is one to every model.
    _require(name, OperatorShape(1, 1, 16, (16,)), dtype, device)
    torch.manual_seed(0)
    with torch.device(device):
        mhla = name != ORDINARY and {"backend": name.removeprefix("mhla-")}
        model = from_preset(case.preset, mhla=mhla, **case.sizes).eval()
    cast_model(model, dtype)
    if compile_backend is not None:
        torch.compiler.reset()
        for block in model.blocks if hasattr(model, "blocks") else model.transformer_blocks:
            block.compile(backend=compile_backend, dynamic=False)
    draw = partial(example_inputs, model, case.grid, dtype, device, text=case.text, batch=case.batch)
    inputs = cycle([draw(seed=seed) for seed in range(3)])
    if make_run is not None:
        return make_run(model, inputs)
    return torch.no_grad()(lambda: model(**next(inputs), return_dict=False)[0])


def cast_model(model: Any, dtype: torch.dtype) -> None:
    """Cast a model in place; as `from_pretrained` does, leave in float32 what the class keeps so."""
    kept = kept_in_fp32(model)
    for key, parameter in model.named_parameters():
        if not kept(key):
            parameter.data = parameter.data.to(dtype)


def compare(
    makers: Mapping[Any, Callable[[], Callable[[], Any]]], options: BenchOptions, baseline: str
) -> dict[Any, dict[str, Any]]:
    """Make runs, time them in rounds, and measure their memory.

    Args:
        makers: By key, what makes the function to time; it may raise to say why there is none.
        options: Device and time.
        baseline: Part of the keys whose fastest run the others are compared with.

    Returns:
        By key `reason`, and where that is None the figures of [`time_in_rounds`], `peak_memory_bytes` and
        `speedup_over_` the baseline, where that ran.
    """
    (device, _), runs = options.place(), {}
    rows: dict[Any, dict[str, Any]] = {key: {"reason": None} for key in makers}
    for key, make in makers.items():
        try:
            runs[key] = make()
        except Exception as error:  # A contestant that cannot be made is a result.
            rows[key]["reason"] = failure_reason(error)
    timed = time_in_rounds(runs, device, seconds=options.seconds / (10 if options.quick else 1))
    best = [row["milliseconds"] for key, row in timed.items() if baseline in str(key) and isinstance(row, dict)]
    for key, figures in timed.items():
        if isinstance(figures, str):
            rows[key]["reason"] = figures
            continue
        rows[key] |= {**figures, "peak_memory_bytes": peak_memory(runs[key], device)}
        if best:
            rows[key][f"speedup_over_{baseline}"] = min(best) / figures["milliseconds"]
    runs.clear()
    free_memory(device)
    return rows


def time_in_rounds(
    runs: Mapping[Any, Callable[[], Any]], device: torch.device, *, seconds: float, rounds: int = ROUNDS
) -> dict[Any, dict[str, Any] | str]:
    """Time several functions in turns with `torch.utils.benchmark`.

    Args:
        runs: Functions to time; a first call in each round is not timed.
        device: Device that they run on.
        seconds: Approximate time for all of them together.
        rounds: Rounds of equal length.

    Returns:
        For each function `milliseconds` (median), `milliseconds_20` and `milliseconds_80` (percentiles) and `runs`, or
        the reason why it failed.
    """
    measured: dict[Any, list[Measurement]] = {name: [] for name in runs}
    results: dict[Any, dict[str, Any] | str] = {}
    for name, run in rounds * list(runs.items()):
        if name in results:
            continue
        try:
            run()
            timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
            measured[name].append(timer.blocked_autorange(min_run_time=seconds / (rounds * len(runs))))
        except Exception as error:  # A contestant that cannot run is a result.
            results[name] = failure_reason(error)
            free_memory(device)
    for name in runs.keys() - results.keys():
        times = [1e3 * time for round_ in measured[name] for time in round_.times]
        median, low, high = map(float, np.percentile(times, (50, 20, 80)))
        count = sum(len(round_.times) * round_.number_per_run for round_ in measured[name])
        results[name] = {"milliseconds": median, "milliseconds_20": low, "milliseconds_80": high, "runs": count}
    return {name: results[name] for name in runs}


def peak_memory(run: Callable[[], Any], device: torch.device) -> int:
    """Peak memory of a call in bytes, beyond what was allocated before and the tensors that it returns.

    The allocator reports it on a GPU, torch's profiler on a CPU; memory that libraries allocate past both is not seen.

    Args:
        run: Returns a tensor or several.
        device: Device that it runs on.
    """
    if device.type == "cuda":
        free_memory(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        kept = run()
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        # Keeps the profiler from logging to standard error.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            kept = run()
        with tempfile.TemporaryDirectory() as directory:
            profiler.export_chrome_trace(path := str(Path(directory, "trace.json")))
            events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
        peak = max(accumulate((change for _, change in changes), initial=0))
    returned = (kept,) if kept is None or isinstance(kept, torch.Tensor) else kept
    storages = [tensor.untyped_storage() for tensor in returned if tensor is not None]
    return max(0, peak - sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))


def failure_reason(error: Exception) -> str:
    """Format an error as one short line; our own refusals without their type."""
    first = " ".join(str(error).split()).split(". ")[0]
    kind = "" if type(error) is ValueError else type(error).__name__
    return ": ".join(filter(None, (kind, first)))[:_REASON_LENGTH]


def free_memory(device: torch.device) -> None:
    """Return unused memory to the device."""
    gc.collect()
    if device.type == "cuda":
        # After a fault in a kernel every call of CUDA fails; the next run reports it.
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
