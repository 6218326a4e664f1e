# SPDX-License-Identifier: Apache-2.0
"""Observing the attention layers of any model while it runs.

MHLA layers are observed by a hook on their `mhla` module, softmax layers where they call
`torch.nn.functional.scaled_dot_product_attention`, as both libraries do. Models of transformers with another
implementation (`eager`, FlashAttention) switch to that one while they are observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.overrides import TorchFunctionMode

from ..config import parse_layers
from ..layers.mhla import MHLA
from ..models.registry import FAMILIES, is_mhla_class, mhla_class_for
from ..training.data.batches import stable_seed
from ..training.matching.layers import Batch, evaluating, on_device, run, trunk_for
from ..training.sharding import is_fully_sharded
from .matrices import LayerTokens, SoftmaxTokens, layer_tokens, softmax_tokens
from .statistics import attention_statistics, mean_and_std


MAX_BYTES = 4 * 2**30
"""Memory that the rows of one head's attention matrix may take, with room to work on them."""
# A matrix in float64, its scores, mask and absolute values, sorted and not.
_COPIES = 6

Sample = LayerTokens | SoftmaxTokens
"""One sample of the call of an attention layer."""

Observer = Callable[[str, Sample], None]
"""Called with the name of a layer and each sample of its calls."""


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Find the self-attention modules of a model by name, in order, MHLA or not.

    Args:
        model: A model of diffusers or transformers that is or can be converted.
    """
    class_name = type(model).__name__
    if is_mhla_class(class_name) or class_name in FAMILIES:
        names = {id(module): name for name, module in model.named_modules()}
        found: Any = type(model) if is_mhla_class(class_name) else mhla_class_for(class_name)
        return {names[id(module)]: module for module in found._self_attentions(model)}
    from ..integrations.transformers.geometry import dispatches, is_cross_attention

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module._modules.get("mhla"), MHLA)
        or (dispatches(module) and not is_cross_attention(name, module))
    }


@contextmanager
def recorded_attention(model: nn.Module, modules: Mapping[str, nn.Module], observe: Observer) -> Iterator[None]:
    """A context in which the calls of a model's attention layers are observed. It changes no output.

    Args:
        model: The model.
        modules: Its attention modules by name; their calls for cross-attention are not observed.
        observe: Called with each sample of each call.
    """
    linear = bool(getattr(model, "upstream_is_linear", False))
    calls = _SoftmaxCalls(observe)

    def of_mhla(name: str) -> Callable[..., None]:
        def hook(module: MHLA, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            for sample in layer_tokens(module, *args, **kwargs, linear=linear):
                observe(name, sample)

        return hook

    with ExitStack() as stack:
        for name, module in modules.items():
            mhla = module._modules.get("mhla")
            if isinstance(mhla, MHLA):
                stack.callback(mhla.register_forward_hook(of_mhla(name), with_kwargs=True).remove)
            else:
                enter, leave = calls.hooks(name)
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(_through_torch(model))
        stack.enter_context(calls)
        yield


@torch.no_grad()
def observe_batch(
    model: nn.Module, batch: Batch, layers: str | Iterable[int] | None, observe: Observer, seed: int = 0
) -> None:
    """Run a batch and observe a model's self-attention layers, without changing the model or the random state.

    Args:
        model: A model of diffusers or transformers; may be wrapped for several devices, or compiled.
        batch: Keyword arguments of its `forward`.
        layers: The layers, as numbers or text such as `"1,2,4"`; `None` for all.
        observe: Called with each sample of each call.
        seed: Seed for models that draw random numbers.

    Raises:
        ValueError: If the model has no attention layer that can be observed, or `layers` is wrong.
    """
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    modules = attention_modules(model)
    chosen = parse_layers(layers, len(modules))
    wanted = {name: modules[name] for index, name in enumerate(modules) if chosen is None or index in chosen}
    reached: set[str] = set()

    def seen(name: str, sample: Sample) -> None:
        reached.add(name)
        observe(name, sample)

    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with evaluating(model), torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(seed)
        batch = on_device(batch, model)
        # FSDP 2 gathers weights outside of blocks in the forward of the full model.
        called = model if is_fully_sharded(model) else trunk_for(model, batch)
        with recorded_attention(model, wanted, seen):
            run(called, batch)
    if not reached:
        raise ValueError(
            f"This {type(model).__name__} has no attention layer that can be observed: MHLA, or softmax by torch."
        )


def query_rows(sample: Sample, most: int, option: str, seed: int = 0) -> torch.Tensor | None:
    """Choose the query tokens of a sample whose rows are computed: all, or as many as are wanted, drawn at random.

    Args:
        sample: The sample.
        most: Largest number of rows.
        option: Name of the option that sets it, for the error.
        seed: Seed of the draw, which gives the same tokens in every layer.

    Returns:
        LongTensor `[most]` in ascending order; `None` for all.

    Raises:
        ValueError: If the rows of one head would take more than `MAX_BYTES`.
    """
    tokens = sample.num_tokens
    needed = 8 * _COPIES * min(tokens, most) * tokens
    if needed > MAX_BYTES:
        raise ValueError(
            f"{option}={most} of {tokens} tokens need {needed / 2**30:.1f} GiB for the matrix of a head, more "
            f"than {MAX_BYTES / 2**30:.0f} GiB: give fewer."
        )
    if tokens <= most:
        return None
    generator = torch.Generator().manual_seed(stable_seed(seed, "rows", tokens))
    return torch.randperm(tokens, generator=generator)[:most].sort().values


@dataclass
class MatrixStatistics:
    """Statistics of a layer's attention matrices on a probe, gathered head by head.

    Attributes:
        tokens: Tokens of a sample (the most, if samples differ).
        rows: Query tokens of a sample that the matrices were computed for; ranks are at most this.
        samples: Number of samples.
        rank_bound: Bound of the rank of MHLA: min(rows, Σ_b min(n_b, d)); `None` for causal attention and with a
            softmax window.
        is_finite: Whether all matrices are.
    """

    tokens: int = 0
    rows: int = 0
    samples: int = 0
    rank_bound: int | None = None
    is_finite: bool = True
    _values: dict[str | None, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, sample: Sample, rows: torch.Tensor | None, kinds: Sequence[str] = ()) -> None:
        """Add a sample: the matrix of what the layer computes, or those of some kinds."""
        count = sample.num_tokens if rows is None else len(rows)
        self.tokens, self.rows = max(self.tokens, sample.num_tokens), max(self.rows, count)
        self.samples += 1
        if sample.rank_bound is not None:
            self.rank_bound = max(self.rank_bound or 0, min(sample.rank_bound, count))
        for kind in kinds or (None,):
            values = self._values.setdefault(kind, {})
            for head in range(sample.num_heads):
                matrix = sample.matrix(kind, head=head, rows=rows)
                if torch.isfinite(matrix).all():
                    for name, value in attention_statistics(matrix, visible=sample.visible(rows)).items():
                        values.setdefault(name, []).append(value.item())
                else:
                    self.is_finite = False

    def summary(self, kind: str | None = None) -> dict[str, dict[str, float]]:
        """Return mean and standard deviation of each statistic over samples and heads, for one kind of attention."""
        return {
            name: mean_and_std(torch.tensor(values, dtype=torch.double)) for name, values in self._values[kind].items()
        }


class _SoftmaxCalls(TorchFunctionMode):
    """Observes softmax attention inside of the modules that are being called."""

    def __init__(self, observe: Observer) -> None:
        super().__init__()
        self.observe = observe
        self.inside: list[str] = []

    def hooks(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        return lambda *args: self.inside.append(name), lambda *args: self.inside.__delitem__(-1)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and self.inside:
            for sample in softmax_tokens(*args, **(kwargs or {})):
                self.observe(self.inside[-1], sample)
        return func(*args, **(kwargs or {}))


@contextmanager
def _through_torch(model: nn.Module) -> Iterator[None]:
    """A context in which the softmax layers of a model of transformers call the attention of torch."""
    from transformers import PreTrainedConfig

    from ..utils.compat.transformers import attention_of, set_attention

    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if isinstance(config, PreTrainedConfig)}
    before = {key: attention_of(config) for key, config in configs.items()}
    others = [key for key, name in before.items() if name not in ("sdpa", "mhla", None)]
    try:
        for key in others:
            set_attention(configs[key], "sdpa")
        yield
    finally:
        for key in others:
            set_attention(configs[key], before[key])
