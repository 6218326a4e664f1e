# SPDX-License-Identifier: Apache-2.0
"""Attention of any model while it runs: its matrices on a batch, and their statistics during training.

MHLA layers are observed by a hook on their `mhla` module, softmax layers where they call
`torch.nn.functional.scaled_dot_product_attention`, as diffusers and the `sdpa` attention of transformers do.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import DistributedType
from accelerate.state import AcceleratorState
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from ..config import parse_layers
from ..layers.mhla import MHLA
from ..models.registry import FAMILIES, is_mhla_class, mhla_class_for
from ..training.data.order import stable_seed
from ..training.layers import Batch, evaluating, on_device, run, trunk_for
from ..training.processes import Processes, is_fully_sharded
from ..utils.messages import check_count
from .matrices import LayerTokens, SoftmaxTokens, layer_tokens, softmax_tokens
from .signatures import FailureSignature, probe_figures, probe_signatures, weight_signatures
from .statistics import attention_statistics, mean_and_std


logger = logging.getLogger(__name__)

DEFAULT_ROWS = 256
"""Query tokens of a sample that attention matrices are computed for during training."""
STATISTICS = ("rank", "effective_rank", "entropy", "relative_entropy", "top_share")
"""Statistics of attention matrices that the history keeps, and logs show."""
_UNSEEN = "This {} has no attention layer that can be observed: MHLA, or softmax with attn_implementation='sdpa'."

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
    from ..integrations.transformers.modules import self_attentions

    known = dict(self_attentions(model))
    modules = model.named_modules()
    return {name: each for name, each in modules if name in known or isinstance(each._modules.get("mhla"), MHLA)}


@torch.no_grad()
def observe_batch(
    model: nn.Module, batch: Batch, layers: str | Iterable[int] | None, observe: Observer, seed: int = 0
) -> None:
    """Run a batch and observe a model's self-attention layers, without changing the model or the random state.

    Args:
        model: A model of diffusers or transformers; may be wrapped for several devices, or compiled.
        batch: Keyword arguments of its `forward`.
        layers: The layers, as numbers or text such as `"1,2,4"`; `None` for all.
        observe: Called with each sample of each call; calls for cross-attention are left out.
        seed: Seed for models that draw random numbers.

    Raises:
        ValueError: If `layers` is wrong.
    """
    model = extract_model_from_parallel(model, keep_torch_compile=False)
    modules = list(attention_modules(model).items())
    chosen = parse_layers(layers, len(modules))

    def of_mhla(name: str) -> Callable[..., None]:
        def hook(module: MHLA, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            for sample in layer_tokens(module, *args, **kwargs):
                observe(name, sample)

        return hook

    calls = _SoftmaxCalls(observe)
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with evaluating(model), torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(seed)
        batch = on_device(batch, model)
        # FSDP 2 gathers weights outside of blocks in the forward of the full model.
        called = model if is_fully_sharded(model) else trunk_for(model, batch)
        with ExitStack() as stack:
            for name, module in modules if chosen is None else [modules[index] for index in chosen]:
                mhla = module._modules.get("mhla")
                if isinstance(mhla, MHLA):
                    stack.callback(mhla.register_forward_hook(of_mhla(name), with_kwargs=True).remove)
                else:
                    enter, leave = calls.hooks(name)
                    stack.callback(module.register_forward_pre_hook(enter).remove)
                    stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            stack.enter_context(calls)
            run(called, batch)


def query_rows(sample: Sample, most: int, seed: int) -> torch.Tensor | None:
    """Choose the query tokens of a sample whose rows are computed: all, or as many as are wanted, drawn at random.

    Args:
        sample: The sample.
        most: Largest number of rows.
        seed: Seed of the draw, which gives the same tokens in every layer.

    Returns:
        LongTensor `[most]` in ascending order; `None` for all.
    """
    tokens = sample.num_tokens
    if tokens <= most:
        return None
    generator = torch.Generator().manual_seed(stable_seed(seed, "rows", tokens))
    return torch.randperm(tokens, generator=generator)[:most].sort().values


@dataclass
class AttentionSummary:
    """Statistics of a layer's attention matrices on a probe, gathered head by head.

    Attributes:
        tokens: Tokens of a sample (the most, if samples differ).
        rows: Query tokens of a sample that the matrices were computed for; ranks are at most this.
        samples: Number of samples.
        rank_bound: Bound of the rank of MHLA: min(rows, Σ_b min(n_b, d)); `None` for causal attention and with a
            softmax window.
        linear_bound: Bound of the rank of linear attention; `None` for softmax layers and causal attention.
        is_finite: Whether all matrices are.
        statistics: Mean and standard deviation over samples and heads, by kind of attention and statistic, see
            [`attention_statistics`][mhla_hf.analysis.attention_statistics]; filled when all samples are there.
        text_share: Share of the text in the attention of joint layers by kind, mean over samples and queries for each
            head; see [`LayerTokens.text_share`][mhla_hf.analysis.LayerTokens].
    """

    tokens: int = 0
    rows: int = 0
    samples: int = 0
    rank_bound: int | None = None
    linear_bound: int | None = None
    is_finite: bool = True
    statistics: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    text_share: dict[str, list[float]] = field(default_factory=dict)
    _values: dict[str | None, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, sample: Sample, rows: torch.Tensor | None, kinds: Sequence[str] = ()) -> None:
        """Add a sample: the matrix of what the layer computes, or those of some kinds."""
        count = sample.num_tokens if rows is None else len(rows)
        self.tokens, self.rows = max(self.tokens, sample.num_tokens), max(self.rows, count)
        self.samples += 1
        if sample.rank_bound is not None:
            self.rank_bound = max(self.rank_bound or 0, min(sample.rank_bound, count))
        if isinstance(sample, LayerTokens) and not sample.causal:
            self.linear_bound = min(self.rows, sample.num_features)
        for name, shares in sample.text_share(rows).items() if isinstance(sample, LayerTokens) else ():
            means = zip(self.text_share.get(name, shares), shares, strict=True)
            self.text_share[name] = [old + (new - old) / self.samples for old, new in means]
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


def attention_matrices(
    model: nn.Module, batch: Batch, *, layers: str | Iterable[int] | None = None, rows: torch.Tensor | None = None
) -> dict[str, list[torch.Tensor]]:
    """Compute the attention matrices of a model's self-attention layers, softmax or MHLA.

    Args:
        model: A model of diffusers or transformers, with MHLA layers or without; not changed.
        batch: Keyword arguments of its `forward`.
        layers: The layers, as numbers or text such as `"1,2,4"`; `None` for all.
        rows: Query tokens to compute, LongTensor `[R]`; `None` for all T.

    Returns:
        For each layer by name one matrix `[H, R, T]` for each sample, float64; padding is left out. Layers with the
        linear attention of SANA have none.

    Raises:
        ValueError: If the model has no attention layer that can be observed, or an argument is wrong.

    Examples:
        >>> matrices = attention_matrices(model, tokenizer("a text", return_tensors="pt"))  # doctest: +SKIP
        >>> matrices["model.layers.0.self_attn"][0].shape  # doctest: +SKIP
        torch.Size([9, 128, 128])
    """
    found: dict[str, list[torch.Tensor]] = {}

    def observe(name: str, sample: Sample) -> None:
        found.setdefault(name, []).append(sample.matrix(rows=rows))

    observe_batch(model, batch, layers, observe)
    if not found:
        raise ValueError(_UNSEEN.format(type(model).__name__))
    return found


class AttentionTracker:
    """Statistics of a model's attention matrices on a fixed probe, recorded during training.

    Recording runs the probe once, in evaluation mode and without gradients, and changes neither the model nor the
    state of the random number generators: training gives the same bits with and without it.

    Args:
        batch: The probe: keyword arguments of the model's `forward`, or a list of such.
        every: Number of steps between records, for callbacks; step 0 is one.
        layers: The layers to record, as numbers or text such as `"1,2,4"`; `None` for all.
        rows: Largest number of query tokens of a sample that matrices are computed for, drawn at random once. Keys
            are never left out. Ranks are at most this.
        settle: Steps after which mixing weights that were initialised as equal should differ, else they are reported
            as a failure signature.
        seed: Seed of the rows that are drawn, and of models that draw random numbers.

    Attributes:
        history: One row for each record, ready for JSON: `step`, `seconds`, and `layers`, which holds for each layer
            by name its `kind` (`"softmax"`, `"linear"` or `"mhla"`), the means over heads and samples of
            [`attention_statistics`][mhla_hf.analysis.attention_statistics], the `tokens` and `rows` of its matrices,
            and the `rank_bound`, if there is one. Statistics are `None` if attention is not finite. Under
            `signatures` it has the failure signatures of MHLA layers; a warning is logged for the first of each
            name and layer.

    Raises:
        ValueError: If an argument is wrong.

    Examples:
        >>> import torch
        >>> from transformers import BertConfig, BertModel
        >>> from mhla_hf.analysis import AttentionTracker
        >>> model = BertModel(BertConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=50))
        >>> tracker = AttentionTracker({"input_ids": torch.arange(20)[None]}, every=50)
        >>> row = tracker.record(model, step=0)
        >>> row["layers"]["encoder.layer.0.attention.self"]["kind"]
        'softmax'
    """

    def __init__(
        self,
        batch: Batch | Sequence[Batch],
        *,
        every: int = 1,
        layers: str | Sequence[int] | None = None,
        rows: int = DEFAULT_ROWS,
        settle: int = 200,
        seed: int = 0,
    ) -> None:
        self.batches = [batch] if isinstance(batch, Mapping) else list(batch)
        check_count("every", every)
        check_count("rows", rows, 2)
        self.every, self.rows, self.settle, self.seed = every, rows, settle, seed
        self.layers = layers
        self.history: list[dict[str, Any]] = []

    def is_due(self, step: int) -> bool:
        """Return whether a callback records after this many steps."""
        return step % self.every == 0

    def record(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Run the probe, and add a row to the history.

        Args:
            model: A model of diffusers or transformers, with MHLA layers or without; may be wrapped for several
                devices, or compiled.
            step: Optimizer steps so far.

        Returns:
            The row.

        Raises:
            ValueError: If the model has no attention layer that can be observed, or an option does not suit it.
        """
        began = time.perf_counter()
        layers, signatures = self.probe(model, step)
        known = {(each["name"], each["layer"]) for row in self.history for each in row.get("signatures", ())}
        # All processes of a sharded model record the same.
        is_first = Processes().rank == 0
        for signature in signatures:
            if is_first and (signature.name, signature.layer) not in known:
                logger.warning("step %d: %s", step, signature)
        row = {
            "step": step,
            "layers": layers,
            "signatures": [signature.to_dict() for signature in signatures],
            "seconds": round(time.perf_counter() - began, 4),
        }
        self.history.append(row)
        return row

    def probe(
        self, model: nn.Module, step: int | None = None
    ) -> tuple[dict[str, dict[str, Any]], list[FailureSignature]]:
        """Run the probe, without adding to the history.

        Args:
            model: As for `record`.
            step: Likewise; `None` if unknown, where untrained mixing weights are not reported as uniform.

        Returns:
            The `layers` of a row, and the failure signatures.
        """
        settled = None if step is None else step >= self.settle
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        records: dict[str, _LayerRecord] = {}

        def observe(name: str, sample: Sample) -> None:
            rows = query_rows(sample, self.rows, self.seed)
            records.setdefault(name, _LayerRecord(kind=sample.kind)).add(sample, rows)

        for batch in self.batches:
            observe_batch(model, batch, self.layers, observe, self.seed)
        if not records:
            raise ValueError(_UNSEEN.format(type(model).__name__))
        layers = {name: record.to_dict() for name, record in records.items()}
        found: dict[tuple[str, str], FailureSignature] = {}
        for name, record in records.items():
            if record.mhla is not None:
                facts = layers[name]
                for signature in (
                    *probe_signatures(name, facts, record.bound, record.mhla.replaces_linear),
                    *weight_signatures(record.mhla, name, settled=settled, tokens=facts["tokens"]),
                ):
                    found.setdefault((name, signature.name), signature)
        return layers, list(found.values())

    def figures(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return the figures of a row for a log: means over the layers such as `attention_rank`.

        Layers whose attention is not finite are left out.
        """
        figures: dict[str, float] = {}
        for statistic in STATISTICS:
            values = [layer[statistic] for layer in row["layers"].values() if layer[statistic] is not None]
            if values:
                figures[f"attention_{statistic}"] = sum(values) / len(values)
        return figures

    def restore(self, history: Iterable[Mapping[str, Any]], step: int | None = None) -> None:
        """Continue a history, as a resumed run does.

        Args:
            history: Rows of an earlier run.
            step: The step that training resumes from; later rows are dropped. `None` keeps all.
        """
        self.history = [dict(row) for row in history if step is None or row["step"] <= step]


class TrackingCallback(TrainerCallback):
    """Records attention in the `Trainer` of transformers, at the beginning and every `tracker.every` steps.

    Means over the layers are logged as `attention_rank`, `attention_effective_rank`, ...; the rest is in
    `tracker.history`.

    Args:
        tracker: The tracker, with the probe.
        trainer: The trainer, whose `log` passes the figures on, to TensorBoard for example; `None` logs nothing.

    Examples:
        >>> trainer = Trainer(model, arguments, train_dataset=dataset)  # doctest: +SKIP
        >>> trainer.add_callback(TrackingCallback(AttentionTracker(batch, every=50), trainer))  # doctest: +SKIP
    """

    def __init__(self, tracker: AttentionTracker, trainer: Any = None) -> None:
        self.tracker, self.trainer = tracker, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Record the model that training begins with.

        Raises:
            ValueError: Under DeepSpeed ZeRO-3, where no process has all weights.
        """
        if is_deepspeed_zero3_enabled():
            raise ValueError("TrackingCallback does not run under DeepSpeed ZeRO-3; use FSDP 2, or ZeRO-2.")
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Record attention if the step is due."""
        # A sharded model needs all processes; without shards each has a copy. `accelerate launch` can shard too,
        # which the arguments do not say.
        is_sharded = AcceleratorState().distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        if not self.tracker.is_due(state.global_step) or not (state.is_world_process_zero or is_sharded):
            return
        row = self.tracker.record(model, state.global_step)
        if self.trainer is not None and state.is_world_process_zero:
            # This log would cancel the trainer's that is due at this step.
            due = control.should_log
            self.trainer.log(self.tracker.figures(row))
            control.should_log = due


@dataclass
class _LayerRecord(AttentionSummary):
    """One layer on a probe; `bound` is that of all rows of the longest sample."""

    kind: str = ""
    figures: dict[str, list[float]] = field(default_factory=dict)
    mhla: MHLA | None = None
    bound: int | None = None

    def add(self, sample: Sample, rows: torch.Tensor | None, kinds: Sequence[str] = ()) -> None:
        if sample.num_tokens > self.tokens:
            self.bound = sample.rank_bound
        super().add(sample, rows, kinds)
        if isinstance(sample, LayerTokens):
            self.mhla = sample.mhla
            for name, figure in probe_figures(sample, rows).items():
                self.figures.setdefault(name, []).append(figure)

    def to_dict(self) -> dict[str, Any]:
        """Return a layer's entry in the history."""
        means = {name: value["mean"] for name, value in self.summary().items()}
        means |= {} if self.is_finite else dict.fromkeys(STATISTICS, math.nan)
        means |= {name: sum(values) / len(values) for name, values in self.figures.items()}
        facts = {"kind": self.kind, "tokens": self.tokens, "rows": self.rows, "rank_bound": self.rank_bound}
        return facts | {name: mean if math.isfinite(mean) else None for name, mean in means.items()}
