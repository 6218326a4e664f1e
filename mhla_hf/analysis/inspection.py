# SPDX-License-Identifier: Apache-2.0
"""What the MHLA layers of one model have learned, and how their attention compares on a probe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..config import parse_layers
from ..layouts.blocks import BlockLayout
from ..training.matching.layers import Batch, evaluating, find_projections, first, mhla_layers, on_device, run
from ..training.matching.teacher import shared_teacher
from .findings import AttentionSummary, LayerInspection, ModelInspection
from .mixing import mixing_summary
from .recording import AttentionTokens, attention_modules, check_memory, query_rows, recorded_attention
from .statistics import TOLERANCE, attention_statistics, rank_bound, spread
from .tokens import KINDS, LayerTokens


Progress = Callable[[int, int], None]
"""Called with the number of batches that were run and of all."""

DEFAULT_TOKENS = 512
"""Query tokens of a sample that attention matrices are computed for."""


def inspect_model(
    model: nn.Module,
    batches: Sequence[Batch] = (),
    *,
    base: nn.Module | None = None,
    layers: str | Iterable[int] | None = None,
    tokens: int = DEFAULT_TOKENS,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    component: str = "model",
    progress: Progress | None = None,
) -> ModelInspection:
    """Inspects a model with MHLA layers.

    Args:
        model: An MHLA model of diffusers or transformers; not changed.
        batches: The probe: keyword arguments of the model's `forward`. Without any, mixing weights are all there is.
        base: The softmax model that it was made from, to compare outputs with.
        layers: The layers to inspect, as numbers or text such as `"1,2,4"`; `None` for all MHLA layers.
        tokens: Query tokens of a sample that attention matrices are computed for; of samples with more, so many are
            drawn at random. Keys are never left out.
        tolerance: Of the numerical rank, see [`numerical_rank`][mhla_hf.analysis.numerical_rank].
        seed: Seed of the query tokens that are drawn.
        component: Name of the model in its pipeline.
        progress: Called with the number of batches that were run and of all; with a base model, batches count twice.

    Raises:
        ValueError: If the model has no MHLA layers, an argument is wrong, weights or activations are not finite, or
            the matrices would take too much memory.

    Examples:
        >>> report = inspect_model(model, [tokenizer(texts, return_tensors="pt", padding=True)])  # doctest: +SKIP
        >>> report.mhla_layers[0].attention.statistics["mhla"]["effective_rank"]["mean"]  # doctest: +SKIP
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise ValueError(f"tokens={tokens!r:.40} must be a whole number of at least 2.")
    converted = {layer.name: layer for layer in mhla_layers(model)}
    linear = bool(getattr(model, "upstream_is_linear", False))
    found, modules = [], attention_modules(model)
    chosen = parse_layers(layers, len(modules))
    for index, (name, _) in enumerate(modules):
        original = "linear" if linear else "softmax"
        layer = LayerInspection(index, name, "mhla" if name in converted else original, original)
        found.append(layer)
        if name in converted and (chosen is None or index in chosen):
            try:
                layer.mixing = mixing_summary(converted[name].mhla)
            except ValueError as error:
                raise ValueError(f"layer {name}: {error}") from error
            gains = converted[name].mhla.window_gain
            layer.gains = None if gains is None else (gains[0].mean().item(), gains[1].mean().item())
    wanted = {layer.name: layer for layer in found if layer.mixing is not None}
    if not wanted:
        known = ", ".join(str(layer.index) for layer in found if layer.kind == "mhla")
        raise ValueError(f"layers names none of the MHLA layers of this {type(model).__name__}: {known}.")
    options = next(iter(converted.values())).mhla.config.to_dict()
    report = ModelInspection(component, type(model).__name__, options, found, batches=len(batches))
    if not batches:
        return report
    total = len(batches) * (1 if base is None else 2)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    with evaluating(model), torch.no_grad():
        attention = _AttentionProbe({name: converted[name].attention for name in wanted}, tokens, tolerance, seed)
        for batch in batches:
            with recorded_attention(model, attention.layers, attention.add):
                run(model, on_device(batch, model))
            advance()
        for name, summary in attention.summaries().items():
            wanted[name].attention = summary
            _place_on_grid(wanted[name], attention.layouts[name])
        report.notes += _other_grids(wanted.values())
        unreached = [name for name, layer in wanted.items() if layer.attention is None]
        if unreached:
            report.notes.append(f"The probe does not reach {', '.join(unreached)}.")
        if base is not None:
            _compare(model, base, batches, wanted, report, advance)
    return report


def _place_on_grid(layer: LayerInspection, layout: BlockLayout) -> None:
    """Takes the tokens of the probe for those of mixing weights whose options name none."""
    mixing = layer.mixing
    if mixing is not None and mixing.grid is None and mixing.layout.blocks == layout.blocks:
        layer.mixing = replace(mixing, layout=layout, grid=layout.grid)


def _other_grids(layers: Iterable[LayerInspection]) -> list[str]:
    """Notes on token grids of the probe that are not those that the mixing weights were made for."""
    notes = []
    for layer in layers:
        mixing, probe = layer.mixing, layer.attention
        if mixing is None or probe is None or len(probe.grid) < 2 or mixing.grid == probe.grid:
            continue
        blocks, grid = ("×".join(map(str, axes)) for axes in (probe.blocks, probe.grid))
        notes.append(f"The probe ran in {blocks} blocks on a grid of {grid} tokens.")
    return list(dict.fromkeys(notes))


class _AttentionProbe:
    """Statistics of the attention matrices of some layers, gathered while a model runs."""

    def __init__(self, layers: Mapping[str, nn.Module], tokens: int, tolerance: float, seed: int) -> None:
        self.layers, self.tokens, self.tolerance, self.seed = layers, tokens, tolerance, seed
        self.found: dict[str, AttentionSummary] = {}
        self.layouts: dict[str, BlockLayout] = {}
        self.values: dict[str, dict[str, dict[str, list[torch.Tensor]]]] = {}

    def add(self, name: str, sample: AttentionTokens) -> None:
        """Adds one sample of a layer, head by head."""
        assert isinstance(sample, LayerTokens)
        rows = query_rows(sample.num_tokens, self.tokens, self.seed)
        count = sample.num_tokens if rows is None else len(rows)
        check_memory(count, sample.num_tokens, f"tokens={self.tokens}", "--tokens")
        layout = self.layouts.setdefault(name, sample.layout)
        summary = self.found.setdefault(name, AttentionSummary(grid=layout.grid, blocks=layout.blocks))
        summary.samples += 1
        summary.tokens, summary.rows = max(summary.tokens, sample.num_tokens), max(summary.rows, count)
        if not sample.causal:
            summary.linear_bound = min(summary.rows, sample.num_features)
            if sample.mhla.window_gain is None:
                summary.rank_bound = min(summary.rows, rank_bound(sample.layout, sample.num_features))
        visible = sample.visible(rows)
        values = self.values.setdefault(name, {kind: {} for kind in KINDS})
        for kind in KINDS:
            for head in range(sample.num_heads):
                matrix = sample.matrix(kind, head=head, rows=rows)
                if not torch.isfinite(matrix).all():
                    raise ValueError(f"layer {name}: {kind} attention of the probe is not finite.")
                figures = attention_statistics(matrix, tolerance=self.tolerance, visible=visible)
                for statistic, value in figures.items():
                    values[kind].setdefault(statistic, []).append(value.cpu())

    def summaries(self) -> dict[str, AttentionSummary]:
        """The statistics by layer."""
        for name, summary in self.found.items():
            summary.statistics = {
                kind: {statistic: spread(torch.stack(values)) for statistic, values in statistics.items()}
                for kind, statistics in self.values[name].items()
            }
        return self.found


def _compare(
    model: nn.Module,
    base: nn.Module,
    batches: Iterable[Batch],
    wanted: Mapping[str, LayerInspection],
    report: ModelInspection,
    advance: Callable[[], None],
) -> None:
    """Errors of the layers' and of the model's outputs against those of the base model."""
    errors: dict[str, list[float]] = {name: [] for name in wanted}
    outputs = []
    try:
        teacher = shared_teacher(model, base)
    except ValueError as error:
        raise ValueError(f"base: {error}") from error
    layers = find_projections(model, mhla_layers(model), on_device(next(iter(batches)), model))
    for batch in (on_device(batch, model) for batch in batches):
        calls = teacher.record(layers, batch, only=list(wanted))
        for layer in layers:
            if layer.name not in calls:
                continue
            call = calls[layer.name]
            output, target = layer(call.arguments, call.hidden_states), call.output
            for index in range(len(output)):
                keep = slice(None) if call.valid is None else call.valid[index]
                errors[layer.name].append(_relative_error(output[index, keep], target[index, keep]))
        expected = teacher.compute(partial(_output, batch=batch))
        outputs.append(_relative_error(_output(model, batch), expected))
        advance()
    for name, values in errors.items():
        wanted[name].output_error = spread(torch.tensor(values)) if values else None
    report.output_error = spread(torch.tensor(outputs))


def _output(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The first output of a model, without what it says of padding."""
    output = first(run(model, batch)[0])
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape == output.shape[:2]:
        return output[mask.bool()]
    return output


def _relative_error(output: torch.Tensor, target: torch.Tensor) -> float:
    difference, size = (output.double() - target.double()).norm(), target.double().norm()
    return (difference / size).item() if size > 0 else math.inf if difference > 0 else 0.0
