# SPDX-License-Identifier: Apache-2.0
"""Attention of any layer as it is computed: MHLA, softmax and linear layers of transformers and diffusers.

MHLA layers are observed at their `mhla` module. Softmax layers are observed where they call
`torch.nn.functional.scaled_dot_product_attention`, which both libraries do; models of transformers that use another
implementation (`eager`, FlashAttention) compute with that one while they are observed.

Shape letters: T tokens, R query tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.overrides import TorchFunctionMode

from ..config import parse_layers
from ..layers.fused import PairwiseRotary
from ..layers.mhla import MHLA
from ..models.registry import FAMILIES, is_mhla_class, mhla_class_for
from ..training.data.batches import stable_seed
from ..training.matching.layers import Batch, evaluating, on_device, run, trunk_for
from ..training.sharding import is_fully_sharded
from ..utils.messages import shorten_list
from .original_tokens import LinearTokens, SoftmaxTokens, softmax_tokens
from .tokens import LayerTokens, layer_tokens


MAX_BYTES = 4 * 2**30
"""Memory that the rows of one head's attention matrix may take, with room to work on them."""
# A matrix in float64, its scores, mask and absolute values, sorted and not.
_COPIES = 6

AttentionTokens = LayerTokens | SoftmaxTokens | LinearTokens
"""One sample of the call of an attention layer. All have `kind`, `attention_matrix` and `visible`."""

Observer = Callable[[str, AttentionTokens], None]
"""Called with the name of a layer and each sample of its calls."""


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The self-attention modules of a model by name, in order, whatever they compute.

    Args:
        model: A model of diffusers or transformers, with MHLA layers or without.
    """
    name = type(model).__name__
    names = {id(module): name for name, module in model.named_modules()}
    own: Any = model
    if is_mhla_class(name):
        return [(names[id(module)], module) for module in own._self_attentions()]
    if name in FAMILIES:
        return [(names[id(module)], module) for module in mhla_class_for(name)._self_attentions(own)]
    if any(base.__module__.startswith("diffusers.") for base in type(model).__mro__):
        return [(name, module) for name, module in model.named_modules() if _is_of_diffusers(name, module)]
    from ..integrations.transformers.geometry import dispatches, is_cross_attention

    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module._modules.get("mhla"), MHLA)
        or (dispatches(module) and not is_cross_attention(name, module))
    ]


@contextmanager
def recorded_attention(model: nn.Module, modules: Mapping[str, nn.Module], observe: Observer) -> Iterator[None]:
    """A context in which the calls of a model's attention layers are observed. It changes no output.

    Args:
        model: The model.
        modules: Its attention modules by name, see
            [`attention_modules`][mhla_hf.analysis.attention_modules]. Of each, calls in which tokens attend to each
            other are observed; cross-attention is not.
        observe: Called with each sample of each call.
    """
    linear = bool(getattr(model, "upstream_is_linear", False))
    calls = _SoftmaxCalls(observe)
    with ExitStack() as stack:
        softmax = False
        for name, module in modules.items():
            mhla = module._modules.get("mhla")
            if isinstance(mhla, MHLA):
                handle = mhla.register_forward_hook(_mhla_hook(name, observe, linear), with_kwargs=True)
                stack.callback(handle.remove)
            elif _is_linear(module):
                stack.callback(_observe_linear(name, module, observe))
            else:
                softmax = True
                stack.callback(module.register_forward_pre_hook(calls.entering(name)).remove)
                stack.callback(module.register_forward_hook(calls.leaving, always_call=True).remove)
        if softmax:
            stack.enter_context(_through_torch(model))
            stack.enter_context(calls)
        yield


@torch.no_grad()
def observe_batch(
    model: nn.Module,
    batch: Batch,
    layers: str | Iterable[int] | None,
    observe: Observer,
    seed: int = 0,
) -> None:
    """Runs a batch, and observes the calls of a model's self-attention layers; changes no state but the observer's.

    Args:
        model: A model of diffusers or transformers; wrapped for several devices or compiled, if it is.
        batch: Keyword arguments of its `forward`.
        layers: The layers, as numbers or text such as `"1,2,4"`; `None` for all.
        observe: Called with each sample of each call.
        seed: Seed of models that draw numbers themselves.

    Raises:
        ValueError: If the model has no attention layer that can be observed, or `layers` is wrong.
    """
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    modules = attention_modules(model)
    chosen = parse_layers(layers, len(modules))
    wanted = {name: module for index, (name, module) in enumerate(modules) if chosen is None or index in chosen}
    if not wanted:
        raise ValueError(f"This {type(model).__name__} has no attention layer that can be observed.")
    reached: set[str] = set()

    def seen(name: str, sample: AttentionTokens) -> None:
        reached.add(name)
        observe(name, sample)

    with evaluating(model), _own_random_numbers(model, seed), torch.compiler.set_stance("force_eager"):
        batch = on_device(batch, model)
        # Under FSDP 2 the whole model gathers what its blocks do not, the first time above all.
        called = model if is_fully_sharded(model) else trunk_for(model, batch)
        with recorded_attention(model, wanted, seen):
            run(called, batch)
    if not reached:
        raise ValueError(
            f"This {type(model).__name__} has no attention layer that can be observed: {shorten_list(wanted)} do not "
            "compute softmax by torch, and are not MHLA."
        )


def query_rows(num_tokens: int, most: int, seed: int) -> torch.Tensor | None:
    """Query tokens whose rows are computed: all, or as many as are wanted, drawn at random.

    Args:
        num_tokens: T.
        most: Rows that are wanted at most.
        seed: Seed of the draw, which gives the same tokens in every layer.

    Returns:
        LongTensor `[most]` in ascending order; `None` for all.
    """
    if num_tokens <= most:
        return None
    generator = torch.Generator().manual_seed(stable_seed(seed, "rows", num_tokens))
    return torch.randperm(num_tokens, generator=generator)[:most].sort().values


def check_memory(rows: int, num_tokens: int, option: str, argument: str = "") -> None:
    """Checks that the rows of an attention matrix fit into memory.

    Args:
        rows: R.
        num_tokens: T.
        option: The option that makes them fewer, with its value.
        argument: The command line's name of it, if it has one.

    Raises:
        ValueError: If they would take more than `MAX_BYTES`.
    """
    needed = 8 * _COPIES * rows * num_tokens
    if needed > MAX_BYTES:
        raise ValueError(
            f"{option} of {num_tokens} would take {needed / 2**30:.1f} GiB for the attention matrix of a head; at "
            f"most {MAX_BYTES / 2**30:.0f} GiB are taken, so give fewer{argument and f' ({argument})'}."
        )


class _SoftmaxCalls(TorchFunctionMode):
    """Observes softmax attention inside of the modules that are being called."""

    def __init__(self, observe: Observer) -> None:
        super().__init__()
        self.observe = observe
        self.inside: list[str] = []

    def entering(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.inside.append(name)

        return hook

    def leaving(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and self.inside:
            for sample in softmax_tokens(*args, **(kwargs or {})):
                self.observe(self.inside[-1], sample)
        return func(*args, **(kwargs or {}))


def _mhla_hook(name: str, observe: Observer, linear: bool) -> Callable[..., None]:
    def hook(module: MHLA, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for sample in layer_tokens(module, *args, **kwargs, linear=linear):
            observe(name, sample)

    return hook


def _is_of_diffusers(name: str, module: nn.Module) -> bool:
    """Whether a module is one for self-attention, as those of diffusers; others are told by their calls."""
    projections = (getattr(module, part, None) for part in ("to_q", "to_k", "to_v"))
    return name.rpartition(".")[2] != "attn2" and all(isinstance(part, nn.Module) for part in projections)


def _is_linear(module: nn.Module) -> bool:
    names = "SanaLinearAttnProcessor2_0", "SanaLinearAttnProcessor3_0"
    return type(getattr(module, "processor", None)).__name__ in names


def _observe_linear(name: str, module: Any, observe: Observer) -> Callable[[], None]:
    """Observes an attention module of SANA or SANA-Video; returns what ends that."""
    from ..models.attention import tables_of_layer

    found: dict[str, torch.Tensor] = {}

    def keep(which: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            found[which] = output.detach().relu().double().unflatten(2, (module.heads, -1))

        return hook

    def leave(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tokens = {which: found.pop(which) for which in ("query", "key")}
        tables = kwargs.get("rotary_emb")
        if tables is not None:
            cosine, sine = tables_of_layer(tables, is_mhla=False)[0]
            rotary = PairwiseRotary(cosine[..., 0::2], sine[..., 1::2])
            plain = {f"normalizer_{which}": each for which, each in tokens.items()}
            tokens = {which: rotary(each) for which, each in tokens.items()} | plain
        for index in range(len(tokens["query"]) if tokens["query"].shape == tokens["key"].shape else 0):
            observe(name, LinearTokens(**{which: each[index : index + 1] for which, each in tokens.items()}))

    parts = {"query": module.norm_q or module.to_q, "key": module.norm_k or module.to_k}
    handles = [part.register_forward_hook(keep(which)) for which, part in parts.items()]
    handles.append(module.register_forward_hook(leave, with_kwargs=True))

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


@contextmanager
def _through_torch(model: nn.Module) -> Iterator[None]:
    """A context in which the softmax layers of a model of transformers call the attention of torch."""
    if not hasattr(type(model), "_supports_sdpa"):
        yield
        return
    from transformers import PreTrainedConfig

    from ..utils.compat.transformers import attention_of, set_attention, supports_sdpa

    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    others = [
        config
        for config in configs.values()
        if isinstance(config, PreTrainedConfig) and attention_of(config) not in ("sdpa", "mhla", None)
    ]
    if others and not supports_sdpa(model):
        raise ValueError(
            f"{type(model).__name__} cannot compute its attention by torch's scaled_dot_product_attention, where its "
            "matrices would be observed."
        )
    before = [attention_of(config) for config in others]
    try:
        for config in others:
            set_attention(config, "sdpa")
        yield
    finally:
        for config, implementation in zip(others, before):
            set_attention(config, implementation)


@contextmanager
def _own_random_numbers(model: nn.Module, seed: int) -> Iterator[None]:
    """A context in which random numbers are those of a seed, and after which they go on as if it had not been."""
    devices = {parameter.device.index for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.random.fork_rng(sorted(devices)):
        torch.random.default_generator.manual_seed(seed)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
