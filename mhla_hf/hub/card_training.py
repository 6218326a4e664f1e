# SPDX-License-Identifier: Apache-2.0
"""The part of a model card about recovery and training, and the machine of a measurement in words."""

from __future__ import annotations

import math
from typing import Any

from ..utils.messages import pluralize
from .markdown import code, count, duration, plain, rate, show, sizes, table
from .records import Records, entry


_STAGES = {
    "calibrate": "calibration: closed-form fits on a small probe, no training",
    "match": "matching: each layer alone learns the output of the layer it replaced",
    "distill": "distillation: the whole model learns the original's prediction",
    "finetune": "fine-tuning: the whole model trains on its own objective",
    "transfer": "matching: each layer alone learns the output of the layer it replaced",
}
_TRAINED = {"mhla": "the parameters that MHLA adds", "lora": "LoRA and the parameters that MHLA adds"}
_KINDS = {
    "latents": "latents",
    "text in packed rows": "rows of text",
    "passages of text": "passages of text",
    "images": "images",
    "calls of the pipeline's model": "recorded calls of the model while its pipeline generated samples",
}


def training_section(records: Records) -> dict[str, Any]:
    """Facts about recovery and training, for the template."""
    return {"recovery": _recovery(records.recovery), "training": _training(records.training)}


def _recovery(report: dict[str, Any]) -> dict[str, Any] | None:
    figures, recipe = entry(report, "figures"), entry(report, "recipe")
    rows = []
    for name in ("calibrate", "match", "distill", "finetune"):
        if name not in figures:
            continue
        stage, options = entry(report, "stages", name), entry(recipe, name)
        seconds = entry(report, "seconds", name)
        steps = count(options.get("steps")) or count(stage.get("steps"))
        learning_rate, added = rate(options.get("learning_rate")), rate(options.get("mhla_learning_rate"))
        rows.append(
            {
                "stage": _STAGES[name],
                "steps": f"{steps:,}" if steps else None,
                "samples per step": show(count(options.get("batch_size")) if steps else None, "{:,}"),
                "learning rate": learning_rate,
                "learning rate, MHLA": added if added != learning_rate else None,
                "time": duration(seconds.get("seconds")),
                "CPU time": duration(seconds.get("cpu_seconds")),
            }
        )
    if not rows:
        return None
    right = ("steps", "samples per step", "learning rate", "learning rate, MHLA", "time", "CPU time")
    stages = table(rows, right) or "\n".join(f"- {row['stage']}" for row in rows)
    return {"stages": stages, "data": _data(report), "where": machine_sentence(entry(report, "machine"))}


def _data(report: dict[str, Any]) -> str | None:
    """The data in a clause such as `160 samples (latents of 8×5×16×16)`."""
    data = entry(report, "data")
    samples, kind = count(data.get("samples")), _KINDS.get(entry(data, "kind", kind=str))
    if not samples:
        return None
    shape, length = sizes(data.get("shape")), count(data.get("length"))
    details = [] if kind is None else [f"{kind} of {shape}" if shape and kind == "latents" else kind]
    if length:
        tokens = pluralize(length, "token")
        details.append(f"of {tokens}" if data.get("kind") == "text in packed rows" else f"of at most {tokens}")
    origin = entry(data, "origin", kind=str)
    where = {"generated": " that the original generated", "digits": " of scikit-learn's handwritten digits"}
    text = pluralize(samples, "sample") + (where.get(origin) or (f" of {code(origin)}" if origin else ""))
    return f"{text} ({' '.join(details)})" if details else text


def _training(record: dict[str, Any]) -> dict[str, Any] | None:
    config = entry(record, "config")
    if not config:
        return None
    losses = entry(record, "final_losses")
    names = {"transfer": "transfer_steps", "distill": "distill_steps", "finetune": "max_steps"}
    base_rate = rate(config.get("learning_rate"))
    rows = []
    for name, field in names.items():
        steps = count(config.get(field))
        if not steps:
            continue
        own = rate(config.get(f"{name}_learning_rate")) or base_rate
        rows.append(
            {
                "stage": _STAGES[name],
                "steps": f"{steps:,}",
                "learning rate": own,
                "training loss of the last step": show(losses.get(name), "{:.4g}"),
            }
        )
    if not rows:
        return None
    factors = [config.get("batch_size"), config.get("gradient_accumulation_steps"), record.get("world_size")]
    batch = math.prod(factors) if all(count(factor) for factor in factors) else None  # type: ignore[arg-type]
    added = rate(config.get("mhla_learning_rate"))
    precision = entry(config, "mixed_precision", kind=str)
    trained = entry(config, "train", kind=str)
    distilled = count(config.get("transfer_steps")) or count(config.get("distill_steps"))
    facts = [
        f"{pluralize(batch, 'sample')} a step" if batch else None,
        f"learning rate {added} for MHLA's parameters" if added and added != base_rate else None,
        "teacher: the model before its conversion" if distilled and config.get("teacher") is None else None,
        f"{_TRAINED[trained]} trained" if trained in _TRAINED else None,
        f"mixed precision {code(precision)}" if precision not in ("", "no") else None,
        f"seed {count(config.get('seed'))}" if count(config.get("seed")) is not None else None,
    ]
    samples = count(record.get("dataset_size"))
    return {
        "stages": table(rows, ("steps", "learning rate", "training loss of the last step")),
        "facts": "; ".join(filter(None, facts)),
        "data": pluralize(samples, "sample") if samples else None,
    }


def machine_sentence(machine: dict[str, Any]) -> str | None:
    """Machine, version of torch and date of a measurement, in a clause; `None` without any of them."""
    threads, cuda = count(machine.get("threads")), entry(machine, "cuda", kind=str)
    device = plain(entry(machine, "device", kind=str))
    torch, date = (plain(entry(machine, name, kind=str)) for name in ("torch", "date"))
    parts = [
        device,
        pluralize(threads, "CPU thread") if threads and not cuda else "",
        torch and f"torch {torch}",
        date,
    ]
    return ", ".join(filter(None, parts)) or None
