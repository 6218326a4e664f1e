# SPDX-License-Identifier: Apache-2.0
"""Rank, entropy and sparsity of a model's attention through its training, on a fixed probe."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from ..layers.mhla import MHLA
from ..layouts.blocks import is_integer
from ..training.matching.layers import Batch
from ..training.processes import Processes
from ..utils.files import write_json
from ..utils.json_files import check_fields, read_json
from ..utils.messages import shorten_value
from .recording import AttentionTokens, check_memory, observe_batch, query_rows
from .signatures import FailureSignature, probe_figures, probe_signatures, weight_signatures
from .statistics import TOLERANCE, attention_statistics, check_tolerance, rank_bound
from .tokens import LayerTokens


logger = logging.getLogger(__name__)

DEFAULT_ROWS = 256
"""Query tokens of a sample that attention matrices are computed for, while a model trains."""
STATISTICS = ("rank", "effective_rank", "entropy", "relative_entropy", "top_share", "negative_share")
"""Statistics of attention matrices that the history keeps."""
LOGGED = ("rank", "effective_rank", "relative_entropy", "top_share")
"""Statistics that go into logs."""
# Matrices of several heads are handled together up to this size.
_TOGETHER = 2**27


def attention_matrices(
    model: nn.Module,
    batch: Batch,
    *,
    layers: str | Iterable[int] | None = None,
    rows: torch.Tensor | None = None,
) -> dict[str, list[torch.Tensor]]:
    """Attention matrices of a model's self-attention layers, whatever they compute: softmax, linear or MHLA.

    Args:
        model: A model of diffusers or transformers, with MHLA layers or without; not changed.
        batch: Keyword arguments of its `forward`.
        layers: The layers, as numbers or text such as `"1,2,4"`; `None` for all.
        rows: Query tokens whose rows are wanted, LongTensor `[R]`; `None` for all T.

    Returns:
        For each layer by name one matrix `[H, R, T]` for each sample, float64; padding is left out.

    Raises:
        ValueError: If the model has no attention layer that can be observed, an argument is wrong, or a matrix would
            take too much memory.

    Examples:
        >>> matrices = attention_matrices(model, tokenizer("a text", return_tensors="pt"))  # doctest: +SKIP
        >>> matrices["model.layers.0.self_attn"][0].shape  # doctest: +SKIP
        torch.Size([9, 128, 128])
    """
    found: dict[str, list[torch.Tensor]] = {}

    def observe(name: str, sample: AttentionTokens) -> None:
        count = sample.num_tokens if rows is None else len(rows)
        check_memory(sample.num_heads * count, sample.num_tokens, f"rows={count}")
        found.setdefault(name, []).append(sample.attention_matrix(rows=rows))

    observe_batch(model, batch, layers, observe)
    return found


class AttentionTracker:
    """Statistics of a model's attention matrices on a fixed probe, recorded while it trains.

    Recording runs the probe once, in evaluation mode and without gradients, and changes neither the model nor the
    state of the random number generators: training ends with the same bits with it and without.

    Args:
        batch: The probe: keyword arguments of the model's `forward`, or a list of such.
        every: Steps from one record to the next, for callbacks; step 0 is one.
        layers: The layers to record, as numbers or text such as `"1,2,4"`; `None` for all.
        heads: The heads to record; `None` for all.
        rows: Query tokens of a sample that matrices are computed for; of longer samples, so many are drawn at random,
            always the same. Keys are never left out. Ranks are at most this.
        samples: Samples of the probe that matrices are computed for, from its first one on; `None` for all.
        tolerance: Of the numerical rank, see [`numerical_rank`][mhla_hf.analysis.numerical_rank].
        settle: Steps after which mixing weights that started equal should have left that: a failure signature from
            then on.
        seed: Seed of the rows that are drawn, and of models that draw numbers themselves.

    Attributes:
        history: One row for each record, ready for JSON: `step`, `seconds`, and `layers`, which holds for each layer
            by name its `kind` (`"softmax"`, `"linear"` or `"mhla"`), the means over heads and samples of
            [`attention_statistics`][mhla_hf.analysis.attention_statistics], the `tokens` and `rows` of its matrices,
            and the `rank_bound`, where there is one. Statistics are `None` where attention is not finite. Under
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
        layers: str | Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        rows: int = DEFAULT_ROWS,
        samples: int | None = None,
        tolerance: float = TOLERANCE,
        settle: int = 200,
        seed: int = 0,
    ) -> None:
        self.batches = [batch] if isinstance(batch, Mapping) else list(batch)
        if not self.batches or not all(isinstance(one, Mapping) for one in self.batches):
            raise ValueError("batch must hold keyword arguments of the model's forward by name, or be a list of such.")
        least = {"every": (every, 1), "rows": (rows, 2), "settle": (settle, 0)}
        if samples is not None:
            least["samples"] = (samples, 1)
        for name, (value, minimum) in least.items():
            if not is_integer(value) or value < minimum:
                raise ValueError(f"{name}={shorten_value(value)} must be a whole number of at least {minimum}.")
        self.heads = None if heads is None else sorted(set(heads))
        if self.heads is not None and not (self.heads and all(is_integer(head) and head >= 0 for head in self.heads)):
            raise ValueError(f"heads={shorten_value(self.heads)} must be numbers of heads, from 0 on.")
        self.every, self.rows, self.samples, self.settle, self.seed = every, rows, samples, settle, seed
        self.layers = layers if layers is None or isinstance(layers, str) else list(layers)
        self.tolerance = check_tolerance(tolerance)
        self.history: list[dict[str, Any]] = []

    def is_due(self, step: int) -> bool:
        """Whether a callback records after this many steps."""
        return step % self.every == 0

    def record(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Runs the probe, and adds a row to the history.

        Args:
            model: A model of diffusers or transformers, with MHLA layers or without; wrapped for several devices or
                compiled, if it is.
            step: Optimizer steps that it was trained for.

        Returns:
            The row.

        Raises:
            ValueError: If the model has no attention layer that can be observed, or an option does not suit it.
        """
        began = time.perf_counter()
        layers, signatures = self.probe(model, step)
        told = {(each["name"], each["layer"]) for row in self.history for each in row.get("signatures", ())}
        # Of a model in shards, all processes record the same.
        is_first = Processes().rank == 0
        for signature in signatures:
            if is_first and (signature.name, signature.layer) not in told:
                logger.warning("step %d: %s", step, signature)
        row = {
            "step": step,
            "layers": layers,
            "signatures": [signature.to_dict() for signature in signatures],
            "seconds": round(time.perf_counter() - began, 4),
        }
        self.history.append(row)
        return row

    def probe(self, model: nn.Module, step: int = 0) -> tuple[dict[str, dict[str, Any]], list[FailureSignature]]:
        """Runs the probe, and adds nothing to the history.

        Args:
            model: As for `record`.
            step: Likewise.

        Returns:
            What a row holds of the layers, and the failure signatures.
        """
        model = extract_model_from_parallel(model, keep_torch_compile=False)
        gathered = _Gathered(self)
        for batch in self.batches:
            observe_batch(model, batch, self.layers, gathered.add, self.seed)
        layers = gathered.layers()
        return layers, gathered.signatures(layers, bool(getattr(model, "upstream_is_linear", False)), step)

    def figures(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Figures of a row for a log, means over the layers."""
        return mean_figures(row)

    def restore(self, history: Iterable[Mapping[str, Any]], step: int | None = None) -> None:
        """Continues a history, as a resumed run does.

        Args:
            history: Rows of an earlier run.
            step: The step that training resumes from; rows of later steps are left out. `None` keeps all.
        """
        self.history = [dict(row) for row in history if step is None or row["step"] <= step]

    def save(self, path: str | Path) -> None:
        """Writes the history as a JSON file, complete or not at all."""
        write_json(Path(path), {"tolerance": self.tolerance, "rows": self.rows, "history": self.history})

    def load(self, path: str | Path, step: int) -> None:
        """Continues the history of a file that `save` has written, see `restore`.

        Raises:
            ValueError: If the file is damaged.
        """
        path = Path(path)
        content = read_json(path, "the history of attention:", required={"history": list})
        for row in content["history"]:
            check_fields(row, f"a row of {path}", required={"step": int, "layers": dict})
        self.restore(content["history"], step)


def mean_figures(row: Mapping[str, Any], *, per_layer: bool = False) -> dict[str, float]:
    """Figures of one record for a log: means over its layers, and those of each layer.

    Args:
        row: A row of a history.
        per_layer: Add the figures of each layer.

    Returns:
        Figures by name, such as `attention_rank` and `attention_rank/blocks.0.attn1`; those that are not finite are
        left out.
    """
    figures: dict[str, float] = {}
    for statistic in LOGGED:
        values = {name: layer[statistic] for name, layer in row["layers"].items() if layer[statistic] is not None}
        if values:
            figures[f"attention_{statistic}"] = sum(values.values()) / len(values)
        if per_layer:
            figures.update({f"attention_{statistic}/{name}": value for name, value in values.items()})
    return figures


class _Gathered:
    """Statistics of the layers of one record."""

    def __init__(self, tracker: AttentionTracker) -> None:
        self.tracker = tracker
        self.facts: dict[str, dict[str, Any]] = {}
        self.values: dict[str, dict[str, list[torch.Tensor]]] = {}
        self.seen: dict[str, int] = {}
        self.mhla: dict[str, MHLA] = {}
        # Of all rows of the longest sample.
        self.bounds: dict[str, int] = {}

    def add(self, name: str, sample: AttentionTokens) -> None:
        tracker = self.tracker
        self.seen[name] = self.seen.get(name, 0) + 1
        if tracker.samples is not None and self.seen[name] > tracker.samples:
            return
        heads = range(sample.num_heads) if tracker.heads is None else tracker.heads
        if heads[-1] >= sample.num_heads:
            raise ValueError(f"heads names {heads[-1]}, but layer {name} has heads 0 to {sample.num_heads - 1}.")
        rows = query_rows(sample.num_tokens, tracker.rows, tracker.seed)
        count = sample.num_tokens if rows is None else len(rows)
        check_memory(count, sample.num_tokens, f"rows={tracker.rows}")
        facts = self.facts.setdefault(name, {"kind": sample.kind, "tokens": 0, "rows": 0, "rank_bound": None})
        bound = _bound(sample)
        if bound is not None:
            facts["rank_bound"] = max(facts["rank_bound"] or 0, min(bound, count))
            if sample.num_tokens > facts["tokens"]:
                self.bounds[name] = bound
        facts["tokens"], facts["rows"] = max(facts["tokens"], sample.num_tokens), max(facts["rows"], count)
        values = self.values.setdefault(name, {})
        if isinstance(sample, LayerTokens):
            self.mhla[name] = sample.mhla
            for figure, share in probe_figures(sample, heads, rows).items():
                values.setdefault(figure, []).append(torch.tensor([share], dtype=torch.double))
        for matrix in _matrices(sample, heads, rows):
            if not torch.isfinite(matrix).all():
                facts["finite"] = False
                continue
            figures = attention_statistics(matrix, tolerance=tracker.tolerance, visible=sample.visible(rows))
            for statistic, value in figures.items():
                values.setdefault(statistic, []).append(value.flatten().cpu())

    def layers(self) -> dict[str, dict[str, Any]]:
        """What the history keeps of each layer."""
        found = {}
        for name, facts in self.facts.items():
            means: dict[str, float | None] = {}
            for figure, values in self.values[name].items():
                mean = torch.cat(values).mean().item()
                means[figure] = mean if math.isfinite(mean) else None
            if not facts.pop("finite", True):
                means.update(dict.fromkeys(STATISTICS))
            found[name] = {"kind": facts["kind"], **{statistic: means.pop(statistic) for statistic in STATISTICS}}
            found[name].update(facts)
            found[name].update(means)
        return found

    def signatures(self, layers: Mapping[str, Any], linear: bool, step: int) -> list[FailureSignature]:
        """Failure signatures of the MHLA layers, each name once for a layer."""
        found: dict[tuple[str, str], FailureSignature] = {}
        for name, mhla in self.mhla.items():
            settled = step >= self.tracker.settle
            for signature in (
                *probe_signatures(name, layers[name], self.bounds.get(name), linear),
                *weight_signatures(mhla, name, linear=linear, settled=settled),
            ):
                found.setdefault((name, signature.name), signature)
        return list(found.values())


def _bound(sample: AttentionTokens) -> int | None:
    """Bound of the rank of a sample's matrix; `None` where it has none below its size."""
    if sample.causal or sample.kind == "softmax":
        return None
    if not isinstance(sample, LayerTokens):
        return min(sample.num_tokens, sample.query.shape[3])
    return None if sample.mhla.window_gain is not None else rank_bound(sample.layout, sample.num_features)


def _matrices(sample: AttentionTokens, heads: Sequence[int], rows: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Matrices of the heads: all of them at once where they are small, else one by one."""
    count = sample.num_tokens if rows is None else len(rows)
    if 8 * sample.num_heads * count * sample.num_tokens <= _TOGETHER:
        yield sample.attention_matrix(rows=rows)[list(heads)]
        return
    for head in heads:
        yield sample.attention_matrix(head=head, rows=rows)[None]
