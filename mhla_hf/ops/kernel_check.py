# SPDX-License-Identifier: Apache-2.0
"""The check of kernels before their first use on a GPU on which they have not been tested yet.

The first use of a family of kernels, for a type and a width, runs it once on a small input and compares it with plain
torch: milliseconds, once the kernels are compiled. The verdict is kept on disk for the device, the releases of torch
and Triton, and the kernels' sources. Where the kernels fail, plain torch serves in their place, and one warning says
what to report. `MHLA_HF_KERNEL_CHECK=0` turns the check off.

In code that torch.compile traces, the check runs while it is traced. While a CUDA graph is captured there is none:
what has no verdict by then is taken as it is. Every process checks for itself, in a separate thread, so that modes
of the caller (autograd, autocast, devices, streams, fake tensors) do not matter; no random state is touched.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import math
import os
import platform
import threading
import uuid
from contextlib import nullcontext, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..utils.files import read_json
from ..utils.messages import shorten_text


logger = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE = "MHLA_HF_KERNEL_CHECK"
HOME_VARIABLE = "MHLA_HF_HOME"
PASSED_ARCHITECTURES: frozenset[tuple[int, int]] = frozenset()
"""Compute capabilities on which all tests of the kernels have passed: nothing is checked there. None so far."""
UNCHECKED_DEVICES = ("cpu",)
"""Types of devices without a check: Triton interprets kernels on a CPU, which is a test already."""
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float32: 5e-3}
"""Largest relative errors of outputs and gradients: several times those of rounding, which TF32 does for float32."""
# Widths of heads that are checked: powers of two stand for themselves, and one other width for all others below.
_WIDTHS = ((16, 8), (32, 24), (64, 40), (128, 72), (256, 144))
_MESSAGE_LENGTH = 300

_lock = threading.Lock()
_verdicts: dict[tuple[Any, ...], str] = {}
_warned: set[str] = set()
# The thread that a check runs in, which holds the lock through the one that waits for it.
_checker: threading.Thread | None = None


def kernels_pass(family: str, query: torch.Tensor, value: torch.Tensor, width: int | None = None) -> bool:
    """Returns whether a family of kernels may serve some tokens: it has passed its check, or needs none.

    Args:
        family: One of the names in `kernel_cases.FAMILIES`.
        query: Queries `[B, T, H, K]`.
        value: Values `[B, T, G, V]`; their dtype is the one that the kernels work in.
        width: Width of the features that the kernels will be given, where it is not that of `query`.
    """
    widths = _checked_width(query.shape[-1] if width is None else width), _checked_width(value.shape[-1])
    return not kernel_failure(family, value.device, value.dtype, *widths, torch.is_grad_enabled())


def _checked_width(width: int) -> int:
    # Comparisons alone: widths may be symbols while torch.compile traces, and what comes out has to be a number.
    for power, other in _WIDTHS:
        if width <= power:
            return power if width == power else other
    return _WIDTHS[-1][1]


@torch.compiler.assume_constant_result
def kernel_failure(
    family: str, device: torch.device, dtype: torch.dtype, width: int, value_width: int, backward: bool
) -> str:
    """The reason why a family of kernels is not used; empty if it is.

    Args:
        family: One of the names in `kernel_cases.FAMILIES`.
        device: The GPU.
        dtype: Type of the tokens.
        width: Width of the features.
        value_width: Width of the values.
        backward: Whether gradients may be wanted.
    """
    key = family, device, dtype, width, value_width
    for backwards in (False, True) if backward else (False,):
        verdict = _verdicts.get((*key, backwards))
        if verdict is None:
            verdict = _decide(key, backwards)
        if verdict:
            return verdict
    return ""


def _decide(key: tuple[Any, ...], backward: bool) -> str:
    """The verdict on a family of kernels: from the disk, or from a check now."""
    family, device, dtype, width, value_width = key
    if not is_checked(device):
        return _verdicts.setdefault((*key, backward), "")
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    # Kernels that run in a check are not checked once more.
    if capturing or threading.current_thread() is _checker:
        return ""
    with _lock:
        verdict = _verdicts.get((*key, backward))
        if verdict is not None:
            return verdict
        file = VerdictFile(device)
        name = f"{family} {'backward' if backward else 'forward'} {dtype} {width} {value_width}"
        verdict = file.read().get(name)
        if verdict is None:
            verdict, lasts = _check(family, device, dtype, width, value_width, backward)
            if lasts:
                file.add(name, verdict)
        if verdict and family not in _warned:
            _warned.add(family)
            direction, kind = "backward" if backward else "forward", str(dtype).removeprefix("torch.")
            logger.warning(
                "MHLA runs in plain torch in place of its %s kernels, which failed their check (%s, %s, width %d) on "
                "%s: %s. Please report this with the output of `mhla-hf doctor --kernels`. %s=0 uses them unchecked.",
                family, direction, kind, width, describe(environment(device)), verdict, ENVIRONMENT_VARIABLE,
            )  # fmt: skip
        _verdicts.setdefault((*key, backward), verdict)
    if verdict:
        _check_device_works(device, family)
    return verdict


def _check_device_works(device: torch.device, family: str) -> None:
    """Raises `RuntimeError` if a kernel has left the GPU in a state in which this process cannot go on."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise RuntimeError(
            f"MHLA's {family} kernels crashed on the GPU, and CUDA needs a new process. It will use plain torch in "
            "their place. Please report this with the output of `mhla-hf doctor --kernels`."
        ) from error


def is_checked(device: torch.device) -> bool:
    """Returns whether kernels are checked on a device before they are used."""
    if os.environ.get(ENVIRONMENT_VARIABLE, "1").strip().lower() in ("0", "false", "off", "no"):
        return False
    if device.type in UNCHECKED_DEVICES:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) not in PASSED_ARCHITECTURES


def _check(
    family: str, device: torch.device, dtype: torch.dtype, width: int, value_width: int, backward: bool
) -> tuple[str, bool]:
    """Runs a family of kernels on a small input, in a separate thread.

    Returns:
        What is wrong, empty for nothing; and whether that holds for later processes.
    """
    global _checker
    outcome = "", True
    if device.type == "cuda":
        # Errors of kernels that the caller launched earlier surface here, and not as a verdict on these. Other streams
        # may be waiting for other processes.
        torch.cuda.current_stream(device).synchronize()

    def compare() -> None:
        nonlocal outcome
        # One of the package's lazy names: what it needs chooses backends, and so comes here.
        kernel_errors = importlib.import_module(__package__).kernel_errors
        try:
            # Gradients are computed in this thread. The autograd thread of the GPU may be waiting for this check: it
            # runs the forward pass of layers once more that are checkpointed.
            single_thread = torch.autograd.set_multithreading_enabled(False)
            with single_thread, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                errors = kernel_errors(family, device, dtype, width, value_width, backward=backward)
            outcome = judge(errors, dtype), True
        # Whatever goes wrong, and compilers and drivers have many types for it, torch can do without the kernels.
        except Exception as error:
            outcome = first_line(error), not _may_pass(error)

    _checker = threading.Thread(target=compare, name="kernel check")
    try:
        _checker.start()
        _checker.join()
    finally:
        _checker = None
    return outcome


def _may_pass(error: Exception) -> bool:
    """Whether an error says nothing about the kernels: memory has run out, or a file could not be written."""
    # Triton reports memory that it could not allocate as a plain RuntimeError.
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError, OSError)) or "out of memory" in str(error)


def judge(errors: dict[str, float], dtype: torch.dtype) -> str:
    """What is wrong with the relative errors of kernels, by name; empty for nothing."""
    for name, error in errors.items():
        if not math.isfinite(error):
            return f"{name} is not finite"
    name, largest = max(errors.items(), key=lambda item: item[1], default=("", 0.0))
    tolerance = TOLERANCES[dtype]
    return "" if largest <= tolerance else f"{name} is off by {largest:.2g} of its size, more than {tolerance:g}"


def first_line(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    message = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {shorten_text(message, _MESSAGE_LENGTH)}"


def environment(device: torch.device) -> dict[str, str]:
    """What a verdict holds for: device, compute capability, releases, and a hash of the kernels' sources."""
    name, capability = platform.processor() or platform.machine(), "interpreter"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    return {
        "device": name,
        "capability": capability,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "mhla-hf": __version__,
        "kernels": sources_hash(),
    }


def describe(facts: dict[str, str]) -> str:
    """The facts of [`environment`] as one line."""
    return f"{facts['device']} ({', '.join(f'{name} {value}' for name, value in facts.items() if name != 'device')})"


def _triton_version() -> str:
    with suppress(PackageNotFoundError):
        return version("triton")
    return "not installed"


@cache
def sources_hash() -> str:
    """Hash of the sources of the kernels; `"unknown"` where they cannot be read."""
    total = hashlib.sha256()
    try:
        for path in sorted((Path(__file__).parent / "triton").glob("*.py")):
            total.update(path.read_bytes())
    except OSError:
        return "unknown"
    return total.hexdigest()[:12]


class VerdictFile:
    """The file that keeps the verdicts for a device and its software. Files that cannot be used are no error.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._environment = environment(device)
        name = hashlib.sha256(repr(sorted(self._environment.items())).encode()).hexdigest()[:16]
        self.path: Path | None = None
        # Where there is no home directory.
        with suppress(RuntimeError):
            self.path = cache_directory() / "kernel_checks" / f"{name}.json"

    def read(self) -> dict[str, str]:
        """Verdicts by name; empty for those that passed."""
        if self.path is None:
            return {}
        try:
            content = read_json(self.path, "kernel checks", required={"verdicts": dict})
        except (OSError, ValueError):
            return {}
        return {name: text for name, text in content["verdicts"].items() if isinstance(text, str)}

    def add(self, name: str, verdict: str) -> None:
        """Adds a verdict to those in the file."""
        if self.path is None:
            return
        content = {"environment": self._environment, "verdicts": {**self.read(), name: verdict}}
        # Under a unique temporary name first: other processes may be doing the same.
        temporary = self.path.with_name(f".{self.path.name}-{uuid.uuid4().hex[:8]}")
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
                os.replace(temporary, self.path)
            finally:
                temporary.unlink(missing_ok=True)

    def remove(self) -> None:
        """Removes the file, so that everything is checked again."""
        if self.path is not None:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)


def cache_directory() -> Path:
    """Folder for what can be made again: `$MHLA_HF_HOME`, or `mhla_hf` in `$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        RuntimeError: If there is no home directory.
    """
    if home := os.environ.get(HOME_VARIABLE):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "mhla_hf"
