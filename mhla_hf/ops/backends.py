# SPDX-License-Identifier: Apache-2.0
"""Choice of the code that computes the operator: plain torch, or Triton kernels where they run, pay and pass a test.

The first use of a family of kernels, for a type, a width, a normaliser and a number of queries that share a key,
compares it with plain torch on a small input: milliseconds, once the kernels are compiled. What passes is remembered
on disk for the device and the releases of torch, Triton and this package. Where it fails, plain torch serves in its
place, and one warning says what to report. While torch.compile traces, the test runs at once; while a CUDA graph is
captured there is none.
"""

from __future__ import annotations

import hashlib
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..utils.messages import check_choice, how_to_install
from .definitions import BACKENDS, NORMALIZERS


logger = logging.getLogger(__name__)

# Wins over what configurations and callers ask for: the person at the machine knows best what runs there.
ENVIRONMENT_VARIABLE = "MHLA_HF_BACKEND"
SELF_TEST_VARIABLE = "MHLA_HF_KERNEL_CHECK"
TRITON_INSTALLED = find_spec("triton") is not None
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Triton's interpreter keeps bfloat16 as integers, and multiplies these.
INTERPRETED_DTYPES = (torch.float32, torch.float16)
# The widest head that the kernels take.
MAX_WIDTH = 256
# The compiler of 3.2 ends the process over some of the kernels.
MIN_TRITON = (3, 4)
# GPUs from here on have bfloat16 and TF32 matrix products.
MIN_CAPABILITY = (8, 0)
# Widths of heads that are tested: powers of two stand for themselves, and one other width for all others below.
_TESTED_WIDTHS = ((16, 8), (32, 24), (64, 40), (128, 72), (256, 144))


# Microseconds that the host needs for one call by kernels and in plain torch, by family: forward passes beside an H100
# with torch 2.11 (`host_milliseconds` of `python -m benchmarks.kernels time`). Nothing here may depend on whether
# gradients are recorded: checkpointing computes the same output with and without.
HOST_TIMES = {"block": (1060.0, 1110.0), "causal": (1000.0, 1400.0)}
# Bytes that plain torch reads and writes for each channel of a query, and in a microsecond: those of an H100, whose
# larger relatives gain from kernels later and smaller ones earlier.
TORCH_BYTES, TORCH_RATE = 60, 2.5e6


def choose_backend(
    requested: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *others: torch.Tensor | None,
    products: bool = True,
    width: int | None = None,
    family: str | None = None,
    normalizer: str = "query",
    check: bool = True,
) -> str:
    """Chooses between `"torch"` and `"triton"` for some token tensors, `[B, T, H, D]` each.

    `"auto"` takes the kernels on a GPU for half precision, and for float32 where TF32 is allowed: exact float32
    products run on no tensor core. Outside of compiled code it leaves so few tokens to torch that launching kernels
    would take longer, see [`has_few_tokens`]. `"triton"` takes the kernels wherever they run. Anything else falls back
    to torch, which is logged once for each reason.

    Args:
        requested: `"auto"`, `"torch"` or `"triton"`; the environment variable `MHLA_HF_BACKEND` wins over it. Calls of
            a kind that is known do not come here again, see [`mhla_hf.ops.plans`].
        query: Queries.
        key: Keys.
        value: Values; their dtype is the one that the kernels work in.
        *others: Queries or keys of the normaliser, or None.
        products: Whether the kernels multiply matrices. Those that do not serve exact float32 as well as any type.
        width: Width of the features that the kernels will be given, where it is not that of `query`.
        family: Family of kernels that would serve, one of `kernel_cases.FAMILIES`.
        normalizer: The normaliser, which that family has to pass its test with.
        check: Whether that family has to pass its test. False where the caller looks to that.

    Returns:
        `"torch"` or `"triton"`.

    Raises:
        ValueError: If the request, or the environment variable, is not one of these.
    """
    wanted: Any = os.environ.get(ENVIRONMENT_VARIABLE) or requested
    if wanted not in BACKENDS:
        check_choice(ENVIRONMENT_VARIABLE if wanted is not requested else "backend", wanted, BACKENDS)
    if wanted == "torch":
        return wanted
    obstacle = triton_obstacle(query, key, value, *(tensor for tensor in others if tensor is not None))
    if obstacle is None and width is not None and width > MAX_WIDTH:
        obstacle = f"the kernels take heads of width {MAX_WIDTH} at most, not {width}"
    if obstacle is None and wanted == "auto":
        obstacle = auto_obstacle(value, products)
        if obstacle is None and not torch.compiler.is_compiling() and has_few_tokens(family, query):
            obstacle = "launching kernels would take longer for few tokens"
    if obstacle is None:
        passes = family is None or not check or kernels_pass(family, query, value, width, normalizer)
        return "triton" if passes else "torch"
    log_fallback(obstacle, logging.WARNING if wanted == "triton" else logging.INFO)
    return "torch"


def triton_obstacle(*tokens: torch.Tensor) -> str | None:
    """The reason why the Triton kernels cannot run on some token tensors `[B, T, H, D]`; None if they can."""
    device = tokens[0].device
    if not TRITON_INSTALLED:
        return f"triton is not installed ({how_to_install('triton')})"
    if device.type != "cuda" and not (device.type == "cpu" and interprets_kernels()):
        return f"the kernels run on GPUs, and the tensors are on {device.type}"
    if device.type == "cuda" and torch.version.hip is not None:
        return "the kernels are written for NVIDIA GPUs"
    if device.type == "cuda" and interprets_kernels():
        return "Triton interprets its kernels (TRITON_INTERPRET), on a CPU only"
    if device.type == "cuda" and _is_too_old(device):
        return f"the GPU is older than compute capability {'.'.join(map(str, MIN_CAPABILITY))}"
    if device.type == "cuda" and (failure := triton_failure()):
        return f"Triton does not work here: {failure}"
    for tensor in tokens:
        if tensor.dtype not in KERNEL_DTYPES:
            return f"the kernels take no {tensor.dtype}"
        if device.type == "cpu" and tensor.dtype not in INTERPRETED_DTYPES:
            return f"Triton's interpreter does not multiply {tensor.dtype}"
        if tensor.shape[-1] > MAX_WIDTH:
            return f"the kernels take heads of width {MAX_WIDTH} at most, not {tensor.shape[-1]}"
        if 0 in tensor.shape:
            return "there are no tokens"
    return None


def auto_obstacle(value: torch.Tensor, products: bool = True) -> str | None:
    """The reason why `"auto"` leaves some values `[B, T, H, V]` to torch where the kernels would run; None if not."""
    if value.device.type != "cuda":
        return "Triton interprets its kernels on a CPU"
    if products and value.dtype == torch.float32 and not tf32_is_allowed():
        return "float32 without TF32 (torch.backends.cuda.matmul.allow_tf32)"
    return None


def has_few_tokens(family: str | None, query: torch.Tensor) -> bool:
    """Whether plain torch should be done before the host has launched the kernels, by `HOST_TIMES`.

    Plain torch takes as long as its host or its memory traffic, whichever is longer. Kernels take less time than that
    on the GPU, so theirs is the host's where it matters here.

    Args:
        family: Family of kernels; those without an entry in the table serve any number of tokens.
        query: Queries `[B, T, H, K]`.
    """
    kernels, plain = HOST_TIMES.get(family or "", (0.0, 0.0))
    return max(plain, TORCH_BYTES * query.numel() / TORCH_RATE) < kernels


@torch.compiler.assume_constant_result
def tf32_is_allowed() -> bool:
    """Returns whether torch multiplies float32 matrices through TF32 on GPUs, by either of its two settings."""
    settings = torch.backends.cuda.matmul
    # Reading the older setting raises an error once somebody has used the newer one, which old releases lack.
    precision = getattr(settings, "fp32_precision", None)
    return settings.allow_tf32 if precision is None else precision == "tf32"


@torch.compiler.assume_constant_result
def interprets_kernels() -> bool:
    """Return whether Triton interprets kernels, as it decides when they are defined: when they are first wanted."""
    return _interprets_kernels()


@cache
def _interprets_kernels() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@torch.compiler.assume_constant_result
def triton_failure() -> str:
    """The reason why Triton cannot compile and launch kernels here; empty if it can. Tried once in a process.

    Triton compiles its own launchers when they are first needed, for which it may want a C compiler and the headers of
    Python: images for running models have neither.
    """
    return _triton_failure()


@cache
def _triton_failure() -> str:
    try:
        import triton
        from triton.runtime import driver

        if tuple(map(int, triton.__version__.split(".")[:2])) < MIN_TRITON:
            needed = ".".join(map(str, MIN_TRITON))
            return f"it is {triton.__version__}, and the kernels need {needed}, which torch 2.8 brings"
        driver.active.get_current_target()
    # Whatever goes wrong here, and its type depends on the release of Triton, torch can do without.
    except Exception as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return ""


@torch.compiler.assume_constant_result
def _is_too_old(device: torch.device) -> bool:
    return _capability(device) < MIN_CAPABILITY


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    # torch looks it up on every call.
    return torch.cuda.get_device_capability(device)


def log_fallback(reason: str, level: int = logging.WARNING) -> None:
    """Log once, and not while torch.compile traces, why plain torch serves in place of kernels."""
    if not torch.compiler.is_compiling():
        _log_once(reason, level)


@cache
def _log_once(reason: str, level: int) -> None:
    logger.log(level, "MHLA runs in plain torch: %s.", reason)


def kernels_pass(
    family: str, query: torch.Tensor, value: torch.Tensor, width: int | None = None, normalizer: str = "query"
) -> bool:
    """Return whether a family of kernels may serve some tokens: it passes its test, or needs none.

    Args:
        family: One of the names in `kernel_cases.FAMILIES`.
        query: Queries `[B, T, H, K]`.
        value: Values `[B, T, G, V]`; their dtype is the one that the kernels work in.
        width: Width of the features that the kernels will be given, where it is not that of `query`.
        normalizer: The normaliser. Kernels that leave it to torch are those for none.
    """
    widths = _tested_width(query.shape[-1] if width is None else width), _tested_width(value.shape[-1])
    # By comparison, as widths: queries that share a key are tested in threes.
    kind = 1 if query.shape[2] == value.shape[2] else 3, "query" if NORMALIZERS[normalizer].kernel else "none"
    return not kernel_failure(family, value.device, value.dtype, *widths, torch.is_grad_enabled(), *kind)


def _tested_width(width: int) -> int:
    # Comparisons alone: widths may be symbols while torch.compile traces, and what comes out has to be a number.
    for power, other in _TESTED_WIDTHS:
        if width <= power:
            return power if width == power else other
    return _TESTED_WIDTHS[-1][1]


@torch.compiler.assume_constant_result
def kernel_failure(
    family: str,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    value_width: int,
    backward: bool,
    repeats: int = 1,
    normalizer: str = "query",
) -> str:
    """The reason why a family of kernels is not used; empty if it is.

    Args:
        family: One of the names in `kernel_cases.FAMILIES`.
        device: The GPU.
        dtype: Type of the tokens.
        width: Width of the features.
        value_width: Width of the values.
        backward: Whether gradients may be wanted.
        repeats: Query heads that share a key head.
        normalizer: `"query"`, or `"none"` for kernels that do not divide.
    """
    if not needs_test(device) or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
        return ""
    kind = family, device, dtype, width, value_width, repeats, normalizer
    return _test_kernels(kind, False) or (_test_kernels(kind, True) if backward else "")


def needs_test(device: torch.device) -> bool:
    """Return whether kernels are tested before their first use: on GPUs. On a CPU, Triton interprets them."""
    is_off = os.environ.get(SELF_TEST_VARIABLE, "1").strip().lower() in ("0", "false", "off", "no")
    return device.type == "cuda" and not is_off


@cache
def _test_kernels(kind: tuple[Any, ...], backward: bool) -> str:
    family, device, dtype, width, *_ = kind
    marker = _marker(device, *map(str, kind), backward)
    if marker is not None and marker.exists():
        return ""
    # One of the package's lazy names: the cases need the operator, which chooses its backend here.
    compare_kernels = import_module(__package__).compare_kernels
    # A thread of its own has none of the caller's modes: autocast, inference, streams, fake tensors.
    with ThreadPoolExecutor(1) as executor:
        _, failure = executor.submit(compare_kernels, *kind, backward=backward).result()
    if failure:
        logger.warning(
            "MHLA runs in plain torch in place of its %s kernels, which failed their test (%s, %s, width %d): %s. "
            "Please report this with the output of `mhla-hf doctor --gpu`. %s=0 uses them untested.",
            family, "backward" if backward else "forward", dtype, width, failure, SELF_TEST_VARIABLE,
        )  # fmt: skip
    elif marker is not None:
        with suppress(OSError):
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
    return failure


def _marker(device: torch.device, *case: Any) -> Path | None:
    """The file that exists once a case has passed on a device with these releases; None without a home directory."""
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    key = name, torch.__version__, triton.__version__, __version__, *case
    home = os.environ.get("MHLA_HF_HOME")
    folder = Path(home) if home else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "mhla_hf"
    with suppress(RuntimeError):
        return folder.expanduser() / "kernel_checks" / hashlib.sha256(repr(key).encode()).hexdigest()[:24]
    return None
