# SPDX-License-Identifier: Apache-2.0
"""Decoding with an MHLA cache against a KV cache: memory, and seconds per token, at growing contexts.

    python -m benchmarks.decode --contexts 2048,8192,32768 --json decode.json

A copy of the model, turned back into its softmax original, is timed beside it. The MHLA
cache is filled by running random tokens through the model in parts, the KV cache with random keys and values: a prompt
costs softmax attention the square of its length, and the cache's values change neither its size nor the time of a
token. Tokens after the prompt are timed, not the prompt. All contexts and both caches of a dtype are in memory at the
same time; the contexts of a cache take turns token by token.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.programs import make_parser, names, numbers, run_program
from mhla_hf import unconvert
from mhla_hf.cli.output import say, show_table
from mhla_hf.integrations.transformers.cache import MHLACacheLayer, cache_layer_bytes
from mhla_hf.utils.compat.transformers import cache_names
from mhla_hf.utils.locations import local_directory
from mhla_hf.utils.machine import choose_device, machine_facts, parse_dtype, synchronize
from mhla_hf.utils.messages import check_choice, format_bytes


CACHES = ("dynamic", "static")
VOCABULARY = 1024
"""Vocabulary of the random model."""

# The name of the argument in the installed version of transformers.
CACHE = cache_names()[0]
PREFILL_TOKENS = 512
"""Tokens of a prompt that run through the model at a time."""


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """Options of [`measure_decoding`].

    Args:
        model: Directory or Hub id of a causal language model, MHLA or not; `None` for a Llama with random weights.
        hidden_size: Width of the random model.
        layers: Layers of the random model.
        heads: Query heads of the random model.
        kv_heads: Key/value heads of the random model; `None` for as many as `heads`.
        block_size: Tokens of a block; `None` for the default. Not for a model that is MHLA already.
        feature_map: A feature map of `MHLAConfig`; `None` for the default. Not for a model that is MHLA already.
        contexts: Numbers of tokens in the cache when decoding starts.
        dtypes: Types of the model, each with its own measurement; `None` for bfloat16 on a GPU and float32 on a CPU.
        cache: `"dynamic"` (what `generate` uses by default; a dynamic KV cache copies itself for every token) or
            `"static"` (allocated in advance).
        tokens: Timed tokens; a block or more, so that the mean contains the work that comes once a block.
        warmup: Tokens before them that are not timed.
        batch_size: Sequences that decode side by side.
        device: Device to run on; `None` for a GPU if there is one.

    Raises:
        ValueError: If a number is not positive or a name unknown.
    """

    model: str | None = None
    hidden_size: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    block_size: int | None = None
    feature_map: str | None = None
    contexts: tuple[int, ...] = (2048, 8192, 32768)
    dtypes: tuple[str, ...] | None = None
    cache: str = "dynamic"
    tokens: int = 128
    warmup: int = 8
    batch_size: int = 1
    device: str | None = None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.hidden_size % (2 * self.heads) or self.heads % (self.kv_heads or self.heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} must be heads={self.heads} times an even number, and "
                f"kv_heads={self.kv_heads} must divide heads."
            )
        if min(self.contexts, default=0) < 2:
            raise ValueError(f"contexts={self.contexts} must be numbers of at least 2.")
        check_choice("cache", self.cache, CACHES)


def measure_decoding(options: DecodeOptions, progress: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Measures memory and time of decoding with both caches.

    Args:
        options: Options of the measurement.
        progress: Called with each dtype before it is measured.

    Returns:
        A report ready for JSON: `machine`, `model`, `options`, `results` (one row for each dtype and context, with
        `cache_bytes`, `seconds_per_token` (median) and `mean_seconds_per_token` under `mhla` and `softmax`), and
        `growth` (for each dtype, the median at the longest context over that at the shortest).

    Raises:
        ValueError: If the model cannot be MHLA, or its position embeddings do not reach the longest context.
    """
    device = choose_device(options.device)
    dtypes = options.dtypes or ("bfloat16" if device.type == "cuda" else "float32",)
    results = []
    model: Any = None
    for dtype in dtypes:
        if progress is not None:
            progress(dtype)
        model = _load(options, parse_dtype(dtype), device)
        rows = _measure(model, sorted(options.contexts), options)
        results += [{"dtype": dtype, **row} for row in rows]
    layers = [module.mhla for module in model.modules() if hasattr(module, "mhla")]
    return {
        "benchmark": "decode",
        "machine": machine_facts(device),
        "model": {
            "class": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "layers": model.config.num_hidden_layers,
            "mhla_layers": len(layers),
            "kv_heads": layers[0].num_key_value_heads,
            "head_dim": layers[0].head_dim,
            "mhla": model.config.mhla,
        },
        "options": {**asdict(options), "dtypes": dtypes},
        "results": results,
        "growth": {dtype: _growth(results, dtype) for dtype in dtypes},
    }


def _load(options: DecodeOptions, dtype: torch.dtype | None, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

    mhla = {"block_size": options.block_size, "feature_map": options.feature_map}
    mhla = {name: value for name, value in mhla.items() if value is not None}
    longest = max(options.contexts) + options.warmup + options.tokens
    torch.manual_seed(0)
    if options.model is None:
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=options.hidden_size,
            intermediate_size=4 * options.hidden_size,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.kv_heads or options.heads,
            max_position_embeddings=longest,
            attn_implementation="mhla",
            mhla=mhla,
        )
        return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
    local_directory(options.model, "model")
    config = AutoConfig.from_pretrained(options.model)
    given = {}
    if getattr(config, "mhla", None) is None:
        given = {"attn_implementation": "mhla", "mhla": mhla}
    elif mhla:
        raise ValueError(f"{options.model} is MHLA already; {' and '.join(mhla)} cannot be changed any more.")
    positions = getattr(config, "max_position_embeddings", None)
    if getattr(config, "rope_parameters", None) is None and positions is not None and positions < longest:
        raise ValueError(f"contexts and tokens need {longest} positions, but {options.model} has {positions}.")
    return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, **given).to(device).eval()


@torch.no_grad()
def _measure(model: Any, contexts: Sequence[int], options: DecodeOptions) -> list[dict[str, Any]]:
    models = {"mhla": model, "softmax": unconvert(copy.deepcopy(model))}
    caches: dict[tuple[int, str], Any] = {}
    rows: dict[int, dict[str, Any]] = {
        context: {"context": context, "mhla": {}, "softmax": {}} for context in contexts
    }
    for context in contexts:
        for kind, fill in _FILLS.items():
            cache = caches[context, kind] = _make_cache(models[kind], context, options)
            fill(models[kind], cache, context, options.batch_size)
            rows[context][kind]["cache_bytes"] = sum(cache_layer_bytes(layer) for layer in cache.layers)
        states = [layer.state for layer in caches[context, "mhla"].layers if isinstance(layer, MHLACacheLayer)]
        (dtype,) = {state.summaries.dtype for state in states if state is not None}
        rows[context]["mhla"]["summary_dtype"] = str(dtype).removeprefix("torch.")
    token = torch.zeros(options.batch_size, 1, dtype=torch.long, device=model.device)
    seconds: dict[tuple[int, str], list[float]] = {key: [] for key in caches}
    # Contexts take turns token by token, so that whatever else the machine does falls on each of them. Kinds of cache
    # do not: reading keys and values empties the processor's caches.
    for kind, step in itertools.product(models, range(options.warmup + options.tokens)):
        for context in contexts:
            synchronize(model.device)
            start = time.perf_counter()
            models[kind](input_ids=token, use_cache=True, **{CACHE: caches[context, kind]})
            synchronize(model.device)
            if step >= options.warmup:
                seconds[context, kind].append(time.perf_counter() - start)
    for (context, kind), times in seconds.items():
        rows[context][kind]["seconds_per_token"] = statistics.median(times)
        rows[context][kind]["mean_seconds_per_token"] = statistics.fmean(times)
    return list(rows.values())


def _make_cache(model: Any, context: int, options: DecodeOptions) -> Any:
    from transformers import DynamicCache, StaticCache

    if options.cache == "dynamic":
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=context + options.warmup + options.tokens)


def _fill_with_tokens(model: Any, cache: Any, context: int, batch_size: int) -> None:
    """Runs random tokens through the model without its head."""
    tokens = torch.randint(0, model.config.vocab_size, (batch_size, context), device=model.device)
    for part in tokens.split(PREFILL_TOKENS, dim=1):
        model.base_model(input_ids=part, use_cache=True, **{CACHE: cache})


def _fill_with_random_states(model: Any, cache: Any, context: int, batch_size: int) -> None:
    """Runs one token through the model, which gives the shapes, and appends random keys and values."""
    token = torch.zeros(batch_size, 1, dtype=torch.long, device=model.device)
    model.base_model(input_ids=token, use_cache=True, **{CACHE: cache})
    for index, layer in enumerate(cache.layers):
        states = [
            torch.randn(*tensor.shape[:2], context - 1, tensor.shape[3], dtype=tensor.dtype, device=tensor.device)
            for tensor in (layer.keys, layer.values)
        ]
        cache.update(*states, index)


_FILLS = {"mhla": _fill_with_tokens, "softmax": _fill_with_random_states}


def _growth(results: Sequence[dict[str, Any]], dtype: str) -> dict[str, float]:
    rows = [row for row in results if row["dtype"] == dtype]
    return {
        kind: rows[-1][kind]["seconds_per_token"] / rows[0][kind]["seconds_per_token"] for kind in ("mhla", "softmax")
    }


def show(report: dict[str, Any]) -> None:
    """Print the table of a report, and how times grow with the context."""
    rows = []
    for row in report["results"]:
        mhla, softmax = row["mhla"], row["softmax"]
        sizes = [format_bytes(figures["cache_bytes"]) for figures in (mhla, softmax)]
        ratio = f"{mhla['cache_bytes'] / softmax['cache_bytes']:.2f}"
        times = [f"{1e3 * figures['seconds_per_token']:.2f} ms" for figures in (mhla, softmax)]
        rows.append([row["dtype"], f"{row['context']:,}", *sizes, ratio, *times])
    title = f"{report['model']['class']}, {report['machine']['device']}, {report['options']['cache']} cache"
    columns = ("dtype", "context", "MHLA cache", "KV cache", "ratio", "MHLA time", "softmax time")
    show_table((dict(zip(columns, row)) for row in rows), title=title)
    first, last = min(report["options"]["contexts"]), max(report["options"]["contexts"])
    for dtype, growth in report["growth"].items() if first < last else ():
        say(
            f"{dtype}: from {first:,} to {last:,} tokens a token takes {growth['mhla']:.2f} times as long with "
            f"MHLA, {growth['softmax']:.2f} times with softmax."
        )


def main() -> None:
    """Run the program."""
    parser = make_parser(__doc__)
    parser.add_argument("model", nargs="?", help="directory or Hub id of a language model; a random Llama by default")
    for name, text in (
        ("hidden-size", "width of the random model (256)"),
        ("layers", "its layers (4)"),
        ("heads", "its query heads (4)"),
        ("kv-heads", "its key and value heads; as many as --heads by default"),
        ("block-size", "tokens of an MHLA block; the model's by default"),
        ("tokens", "timed tokens (128)"),
        ("warmup", "tokens before them that are not timed (8)"),
        ("batch-size", "sequences side by side (1)"),
    ):
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--feature-map", help="φ(x); the model's by default")
    parser.add_argument("--contexts", type=numbers, help="tokens in the cache before decoding (2048,8192,32768)")
    parser.add_argument("--dtype", type=names, dest="dtypes", help="float32, bfloat16 or float16, or several")
    parser.add_argument("--cache", help="dynamic, which copies itself for every token, or static (dynamic)")

    def work(*, progress: Callable[[str], None] | None, **options: Any) -> dict[str, Any]:
        report = measure_decoding(DecodeOptions(**options), progress)
        show(report)
        return report

    run_program(parser, work)


if __name__ == "__main__":
    main()
