# SPDX-License-Identifier: Apache-2.0
"""Language models from scratch: making one and training it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mhla_hf
from mhla_hf.training.data.order import stable_seed
from mhla_hf.training.parameters import set_learning_rate
from mhla_hf.utils.machine import synchronize

from ..optimization import descend, freeze_mixing, make_optimizers
from .language_data import Corpus, CorpusOptions, load_corpus
from .language_evaluation import bits_by_position, long_file_windows, packed_windows, token_losses


BLOCK_SIZE = 64
WARMUP_SHARE = 0.05
CURVE_POINTS = 50


def language_case(
    *,
    attention: str,
    mhla: Mapping[str, Any],
    frozen_mixing: bool,
    seed: int,
    sizes: Mapping[str, int],
    corpus: Mapping[str, Any],
    context: int,
    longest: int,
    batch: int,
    steps: int,
    rates: Mapping[str, float],
    dtype: str,
    windows: int,
    long_windows: int,
    device: torch.device,
    work: Path,
) -> dict[str, Any]:
    """Trains a model and measures it.

    Args:
        attention: `"softmax"`, `"mhla"`, or `"gla"` from flash-linear-attention.
        mhla: Options that replace those of [`mhla_options`].
        frozen_mixing: Do not train the mixing weights.
        seed: Seed of the weights and of the order of the data.
        sizes: Arguments of [`make_model`].
        corpus: Arguments of [`CorpusOptions`].
        context: Tokens that are trained on at a time.
        longest: Tokens of the longest text that is evaluated.
        batch: Contexts of a step.
        steps: Number of steps.
        rates: Peak learning rates: `matrix` of Muon, `other` and `mixing` of AdamW.
        dtype: Dtype of matrix products.
        windows: Held-out texts of `context` tokens to evaluate.
        long_windows: Held-out texts of `longest` tokens to evaluate.
        device: Device to run on.
        work: Directory for the corpus.

    Returns:
        The figures, or only `skipped` with the reason if flash-linear-attention or a GPU is missing.
    """
    if attention == "gla" and (reason := _no_gla(device)):
        return {"skipped": reason}
    data = load_corpus(work, CorpusOptions(**corpus))
    options = {} if attention != "mhla" else mhla_options(context, **mhla)
    model = make_model(attention, options, vocabulary=len(data.token_bytes), context=context, seed=seed, **sizes)
    model.to(device)
    if frozen_mixing:
        freeze_mixing(model)
    started, processor = time.perf_counter(), time.process_time()
    precision = getattr(torch, dtype)
    losses = train(model, data, context=context, batch=batch, steps=steps, rates=rates, seed=seed, dtype=precision)
    synchronize(device)
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    model.eval()
    files = long_file_windows(data, longest, long_windows)

    def measure(texts: Sequence[np.ndarray], restart: int | None = None) -> dict[str, Any]:
        return bits_by_position(model, texts, data.token_bytes, dtype=precision, restart=restart)

    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": batch * context * steps,
        "training_seconds": round(seconds, 2),
        "training_cpu_seconds": round(processor, 2),
        "corpus": data.facts,
        "loss": loss_curve(losses, batch * context),
        "held_out": measure(packed_windows(data, context, windows)),
        "long": {"texts": len(files), "whole": measure(files), "restarted": measure(files, context)},
    }


def mhla_options(context: int, **changes: Any) -> dict[str, Any]:
    """Options of MHLA as in the preset `mhla-lm-340m`, for a context of `context` tokens, and changes to them."""
    from mhla_hf.presets import PRESETS

    return {**PRESETS["mhla-lm-340m"].mhla, "block_size": [BLOCK_SIZE], "grid": [context], **changes}


def make_model(
    attention: str,
    mhla: Mapping[str, Any],
    *,
    vocabulary: int,
    context: int,
    seed: int,
    width: int,
    layers: int,
    heads: int,
    intermediate: int,
) -> Any:
    """A Llama, or the GLA model of flash-linear-attention of the same width and depth, with tied embeddings.

    Llamas of one seed have equal weights, but for those that MHLA adds.
    """
    torch.manual_seed(stable_seed("language", seed))
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": None,
    }
    if attention == "gla":
        from fla.models import GLAConfig, GLAForCausalLM

        # Keys and queries have half the width, as in the GLA paper.
        return GLAForCausalLM(GLAConfig(**sizes, num_heads=max(1, heads // 2), norm_eps=1e-6))
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "rms_norm_eps": 1e-6}
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="sdpa"))
    return model if attention == "softmax" else mhla_hf.convert(model, mhla)


def train(
    model: Any,
    data: Corpus,
    *,
    context: int,
    batch: int,
    steps: int,
    rates: Mapping[str, float],
    seed: int,
    dtype: torch.dtype,
) -> list[float]:
    """Trains a model in place.

    Returns:
        Bits for each byte of every step's text.

    Raises:
        FloatingPointError: If the loss is not finite.
    """
    optimizers = make_optimizers(model, **{f"{name}_rate": rate for name, rate in rates.items()}, betas=(0.9, 0.95))
    token_bytes = torch.from_numpy(data.token_bytes).to(model.device)
    bits = []
    model.train()
    for step in range(steps):
        factor = min(1.0, (step + 1) / max(1, round(WARMUP_SHARE * steps)), (steps - step) / steps * 2)
        tokens = training_batch(data.training, context, batch, seed, step).to(model.device)
        loss = token_losses(model, tokens, dtype)
        for optimizer in optimizers:
            set_learning_rate(optimizer, factor)
        descend(model, optimizers, loss.mean())
        bits.append(loss.detach().sum() / math.log(2) / token_bytes[tokens[:, 1:]].sum())
    values = torch.stack(bits).tolist()
    if not all(map(math.isfinite, values)):
        raise FloatingPointError("The loss is no longer finite.")
    return values


def training_batch(tokens: np.ndarray, context: int, batch: int, seed: int, step: int) -> torch.Tensor:
    """The texts of a step, int64 `[batch, context + 1]`: every token is seen once before any is seen twice."""
    places = (len(tokens) - 1) // context
    if not places:
        raise ValueError(f"The corpus has {len(tokens)} tokens, fewer than a context of {context}.")
    rows = []
    for number in range(step * batch, (step + 1) * batch):
        epoch, index = divmod(number, places)
        start = context * int(_order(places, seed, epoch)[index])
        rows.append(tokens[start : start + context + 1].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


def loss_curve(bits: Sequence[float], tokens: int) -> dict[str, list[float]]:
    """Means of consecutive steps: `bits_per_byte`, and the number of `tokens` that each ends at."""
    steps = -(-len(bits) // CURVE_POINTS)
    parts = [bits[start : start + steps] for start in range(0, len(bits), steps)]
    ends = np.cumsum([len(part) for part in parts]) * tokens
    return {"tokens": ends.tolist(), "bits_per_byte": [round(float(np.mean(part)), 4) for part in parts]}


def _no_gla(device: torch.device) -> str | None:
    """Why the GLA model cannot run; `None` if it can."""
    if device.type != "cuda":
        return "not run: needs a GPU"
    try:
        from fla.models import GLAForCausalLM  # noqa: F401
    except ImportError as error:
        return f"not run: flash-linear-attention cannot be imported ({error})"
    return None


def _order(places: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng(stable_seed("language", "order", seed, epoch)).permutation(places)
