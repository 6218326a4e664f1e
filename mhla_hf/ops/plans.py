# SPDX-License-Identifier: Apache-2.0
"""Plans of calls: what shapes decide is decided once, and later calls of a kind only allocate and launch.

The first call of a kind runs as it is written, which checks, chooses and compiles. The second one is recorded: which
kernels it launches, which operations of torch it calls, and which memory they share. From the third on, a function
that is made of the record runs in its place. It launches compiled kernels with addresses, which Triton then need not
ask for, on the stream and the device of the call. Temporaries that only kernels touch share one piece of memory.

A kind is all that the record may depend on: sizes, strides, types, devices and alignment of all tensors, and the
options. Plans hold no tensor but tables that [`mhla_hf.layouts.blocks.cached`] remembers, and what follows from these.
What reads numbers back to the host, or a tensor that is neither given nor made on the way, gets no plan and runs as it
is written. So do calls on a CPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from threading import local
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..layouts.blocks import is_remembered
from .backends import tf32_is_allowed


logger = logging.getLogger(__name__)

# Kinds that are remembered. Beyond that, all are recorded again: sizes have been many, and most will not come back.
MAX_PLANS = 4096
# Whether calls on a CPU have plans, for tests and measurements that pretend to have a GPU.
ON_CPU = False
# Temporaries of so many bytes are given back as soon as they are not needed.
LARGE = 1 << 20
_NO_PLAN, _SEEN = "none", "seen"
_plans: dict[Any, Any] = {}
# What checks have passed and choices have come out of, by kind, for calls that have no plan of their own.
decisions: dict[Any, Any] = {}
_current = local()
# Functions that operators run, by name; see `triton.operators`.
BODIES: dict[str, Callable[..., Any]] = {}


def is_plain(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether nobody looks into operators: torch.compile, functorch, modes, tracing, subclasses of tensors."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        # The dispatcher resolves negative bits.
        if tensor is not None and (
            (type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter)
            or tensor.is_neg()
            or tensor.layout is not torch.strided
        ):
            return False
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
    )


def has_plans(tensor: Any) -> bool:
    """Return whether calls on tensors of this device have plans."""
    return isinstance(tensor, Tensor) and (ON_CPU or tensor.is_cuda)


def kind_of(tensors: Sequence[Tensor | None], *options: Any) -> Any:
    """Return the kind of a call on some plain tensors; `None` where it has no plan.

    Args:
        tensors: All tensors that the call reads or writes, but for remembered tables.
        options: Everything else that it depends on, hashable.
    """
    first = tensors[0]
    if first is None or not has_plans(first):
        return None
    device = first.get_device()
    kind: list[Any] = [options]
    addresses = 0
    for tensor in tensors:
        if tensor is None:
            kind.append(None)
        else:
            kind += tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device()
            addresses |= tensor.data_ptr()
    if addresses & 15:
        # One of them is not aligned: which one?
        kind.append(tuple([None if tensor is None else tensor.data_ptr() & 15 for tensor in tensors]))
    # The precision of products follows the values, which need not be of the queries' type.
    if any(tensor is not None and tensor.dtype == torch.float32 for tensor in tensors[:3]):
        kind.append(tf32_is_allowed())
    name = "cpu" if device < 0 else "cuda"
    if torch.is_autocast_enabled(name):
        kind.append(torch.get_autocast_dtype(name))
    return tuple(kind)


def planned(
    kind: Any,
    function: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    *options: Any,
    is_repeatable: bool = True,
) -> Any:
    """Return `function(*tensors, *options)`, by its plan where there is one.

    A new plan runs once beside the call that it was made of, and has to return the same bits.

    Args:
        kind: See [`kind_of`].
        function: Returns a tensor, or a tuple of tensors. It records no gradients.
        tensors: All that it takes.
        options: Everything else that it takes.
        is_repeatable: Whether it leaves its tensors as they are.
    """
    try:
        plan = _plans.get(kind)
    except TypeError:
        # Options that are not hashable are wrong ones.
        kind = plan = None
    if type(plan) is Plan and not (plan.has_tables and is_capturing(tensors)):
        return plan(*tensors)
    # What is made for a CUDA graph is not made for every call; within a record, all is part of it.
    in_record = getattr(_current, "recording", None) is not None
    if kind is None or plan is _NO_PLAN or in_record or is_capturing(tensors):
        return function(*tensors, *options)
    if len(_plans) >= MAX_PLANS:
        forget()
    if plan is None:
        result = function(*tensors, *options)
        # Whatever is refused has not come here.
        _plans[kind] = _SEEN
        return result
    recording = Recording(tensors)
    with recording:
        result = function(*tensors, *options)
    made = recording.plan(result)
    if made is not None and is_repeatable:
        try:
            if not _same_bits(made(*tensors), result):
                logger.warning("A plan of a call did not repeat it, and is not used: %s. Please report this.", kind)
                made = None
        except torch.OutOfMemoryError:
            # There is room for the call, but not for it twice.
            made = None
    _plans[kind] = made or _NO_PLAN
    return result


def _same_bits(one: Any, other: Any) -> bool:
    """Return whether two tensors, or tuples of them, are equal, NaN included."""
    pairs = zip(one, other) if isinstance(one, tuple) else [(one, other)]
    return all(torch.allclose(*pair, rtol=0, atol=0, equal_nan=True) for pair in pairs)


def decided(kind: Any) -> Any:
    """Return what has been decided for calls of a kind; `None` if nothing has."""
    with suppress(TypeError):
        return decisions.get(kind)
    return None


def decide(kind: Any, choice: Any, owner: Any = None) -> None:
    """Remember what calls of a kind are decided to do.

    Args:
        kind: See [`kind_of`].
        choice: What has been decided.
        owner: An object whose `id` is part of the kind, which has to live as long.
    """
    if len(decisions) >= 2 * MAX_PLANS:
        forget()
    decisions[kind] = choice
    if owner is not None:
        decisions[id(owner)] = owner


def forget() -> None:
    """Forget all plans and decisions, for measurements that change what calls do."""
    _plans.clear()
    decisions.clear()


def is_capturing(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether a CUDA graph is being captured, which would know tables by their addresses alone."""
    return tensors[0] is not None and tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()


def record_launch(launch: Callable[[], Any], programs: int, arguments: Sequence[Any]) -> None:
    """Launch a kernel, and record it where a call is being recorded.

    Args:
        launch: Launches it, and returns what was compiled.
        programs: How many programs run.
        arguments: What the compiled kernel takes.
    """
    recording = getattr(_current, "recording", None)
    if recording is None:
        launch()
        return
    # What Triton does with torch is no part of the call.
    recording.is_paused = True
    try:
        kernel = launch()
    finally:
        recording.is_paused = False
    recording.launch(kernel, programs, arguments)


@contextmanager
def within(context: Callable[[], Any]) -> Iterator[None]:
    """Enter a context, in plans too."""
    recording = getattr(_current, "recording", None)
    if recording is not None:
        recording.statements.append(_Statement(f"with {recording.bind(context)}():", opens=1))
    with context():
        yield
    if recording is not None:
        recording.statements.append(_Statement("pass", opens=-1))


@dataclass
class _Statement:
    """A line of a plan, or a launch or allocation, which become lines once all is known.

    Attributes:
        text: The line; for a launch the arguments.
        kernel: Number of the kernel.
        programs: How many are launched.
        makes: Name of the memory that is allocated.
        opens: 1 before lines that are further in, -1 for the last one of them.
        reads: Memory that an operation reads, where it writes to none but its results.
        results: What it makes, by name, where that is small.
    """

    text: str = ""
    reads: frozenset[str] = frozenset()
    results: dict[str, Tensor] | None = None
    kernel: int | None = None
    programs: int = 0
    makes: str = ""
    opens: int = 0


@dataclass
class _Memory:
    """Memory that a call is given or makes.

    Attributes:
        like: Size, stride, type and device.
        address: Where it lay.
        size: Its bytes.
        is_given: Whether it is an argument.
        made: Number of the statement that allocates it, where kernels alone may touch it.
        last: Number of the last statement that uses it.
        as_tensor: Whether something else than a kernel uses it.
        is_table: Whether it is a remembered table.
        may_change: Whether a kernel or an operation may write to it, or it leaves the call.
    """

    like: tuple[Any, ...]
    address: int
    size: int
    is_given: bool = False
    made: int = -1
    last: int = -1
    as_tensor: bool = False
    is_table: bool = False
    may_change: bool = False


class _Unplannable(Exception):
    """A call whose record would not be enough."""


class Recording(TorchDispatchMode):
    """Records what a function does to its tensors while it runs.

    Args:
        inputs: The tensors, each an object of its own.
    """

    def __init__(self, inputs: Sequence[Tensor | None]) -> None:
        super().__init__()
        self.memory: dict[str, _Memory] = {}
        self.places = WeakTensorKeyDictionary()
        self.statements: list[_Statement] = []
        self.values: dict[str, Any] = {}
        self.kernels: list[tuple[Any, int]] = []
        self.pointers: set[str] = set()
        self.used: set[str] = set()
        self.has_tables = self.is_paused = False
        self.parameters = [f"given{index}" for index in range(len(inputs))]
        self.outer: list[Any] = []
        given = [tensor for tensor in inputs if tensor is not None]
        self.device = given[0].device
        # Arguments that are one object need not be one the next time.
        self.failed = len({id(tensor) for tensor in given}) < len(given)
        for name, tensor in zip(self.parameters, inputs):
            if tensor is not None:
                self.add(name, tensor, is_given=True)

    def __enter__(self) -> Any:
        # Entered again for each operator within.
        self.outer.append(getattr(_current, "recording", None))
        _current.recording = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _current.recording = self.outer.pop()
        super().__exit__(*exception)

    def add(self, name: str, tensor: Tensor, **options: Any) -> None:
        """Note new memory."""
        like = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
        size = tensor.untyped_storage().nbytes()
        self.memory[name] = _Memory(like, tensor.data_ptr(), size, last=len(self.statements), **options)
        self.places[tensor] = name

    def bind(self, value: Any) -> str:
        """Give a value a name in the plan."""
        name = f"value{len(self.values)}"
        self.values[name] = value
        return name

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        body = BODIES.get(operation._schema.name)
        if body is not None:
            # Into the operators of this package.
            with self:
                return body(*args, **kwargs)
        result = operation(*args, **kwargs)
        if not (self.failed or self.is_paused):
            try:
                self.record(operation, args, kwargs, result)
            except _Unplannable:
                self.failed = True
        return result

    def record(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record an operation of torch, unless it only views or allocates memory."""
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not all(isinstance(tensor, Tensor) for tensor in results):
            raise _Unplannable
        storages = {tensor.untyped_storage()._cdata: tensor for tensor in reversed(tensors)}
        new = [tensor for tensor in results if tensor.untyped_storage()._cdata not in storages]
        for tensor in results:
            source = storages.get(tensor.untyped_storage()._cdata)
            if source is not None and tensor not in self.places:
                self.places[tensor] = self.place(source)[0]
        if operation in _ALLOCATIONS:
            if result.device != self.device:
                raise _Unplannable
            name = f"made{len(self.statements)}"
            self.add(name, result, made=len(self.statements))
            self.statements.append(_Statement(makes=name))
            return
        if not new and not operation._schema.is_mutable:
            return
        if 0 < len(new) < len(results):
            raise _Unplannable
        self.used = set()
        words = [self.expression(value) for value in args]
        words += [f"{name}={self.expression(value)}" for name, value in kwargs.items()]
        text = f"{self.bind(operation)}({', '.join(words)})"
        if new:
            names = [f"made{len(self.statements)}_{index}" for index in range(len(new))]
            for name, tensor in zip(names, new):
                self.add(name, tensor, as_tensor=True)
            text = f"{', '.join(names)} = {text}"
        is_pure = not operation._schema.is_mutable and torch.Tag.nondeterministic_seeded not in operation.tags
        if is_pure and sum(tensor.nbytes for tensor in new) <= LARGE:
            made = dict(zip(names, new))
            self.statements.append(_Statement(text, reads=frozenset(self.used), results=made))
            return
        for name in self.used:
            self.memory[name].may_change |= not is_pure
        self.statements.append(_Statement(text))

    def launch(self, kernel: Any, programs: int, arguments: Sequence[Any]) -> None:
        """Record a launch."""
        if kernel is None:
            # Triton's interpreter compiles nothing.
            self.failed = True
        if self.failed:
            return
        try:
            words = "".join(f"{self.argument(value)}, " for value in arguments)
        except _Unplannable:
            self.failed = True
            return
        self.statements.append(_Statement(words, kernel=len(self.kernels), programs=programs))
        self.kernels.append((kernel, programs))

    def place(self, tensor: Tensor) -> tuple[str, int]:
        """The memory of a tensor, which is used now, and where in it the tensor begins."""
        name = self.places.get(tensor)
        if name is None:
            if not is_remembered(tensor):
                raise _Unplannable
            name, self.has_tables = self.bind(tensor), True
            self.add(name, tensor, is_given=True, as_tensor=True, is_table=True)
        self.used.add(name)
        memory = self.memory[name]
        memory.last = len(self.statements)
        return name, tensor.data_ptr() - memory.address if tensor.numel() else 0

    def argument(self, value: Any) -> str:
        """An argument of a kernel, with addresses in place of tensors."""
        if isinstance(value, Tensor):
            name, offset = self.place(value)
            self.pointers.add(name)
            self.memory[name].may_change = True
            return f"{name}_address + {offset}" if offset else f"{name}_address"
        if isinstance(value, tuple):
            return f"({''.join(f'{self.argument(part)}, ' for part in value)})"
        return self.expression(value)

    def expression(self, value: Any) -> str:
        """An argument of an operation of torch."""
        if isinstance(value, Tensor):
            name, offset = self.place(value)
            memory = self.memory[name]
            memory.as_tensor = True
            size, stride, dtype, _ = memory.like
            if (value.shape, value.stride(), value.dtype, offset) == (size, stride, dtype, 0):
                return name
            if value.dtype != dtype:
                raise _Unplannable
            start = str(offset // value.element_size())
            if memory.is_given:
                start = f"{name}.storage_offset() + {start}"
            return f"{name}.as_strided({tuple(value.shape)}, {value.stride()}, {start})"
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self.expression(part) for part in value)}]"
        if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self.bind(value)

    def plan(self, result: Any) -> Plan | None:
        """The plan of the call, which has returned `result`; `None` where it cannot have one."""
        try:
            if self.failed or not self.kernels:
                return None
            results = result if isinstance(result, tuple) else (result,)
            places = [self.place(tensor)[0] for tensor in results]
            if any(self.memory[name].is_given for name in places):
                return None
            for name in places:
                self.memory[name].may_change = True
            self.keep_tables()
            words = [self.expression(tensor) for tensor in results]
        except _Unplannable:
            return None
        text = f"({''.join(f'{word}, ' for word in words)})" if isinstance(result, tuple) else words[0]
        return Plan(self, f"return {text}")

    def keep_tables(self) -> None:
        """Keep what follows from remembered tables and sizes alone, in place of making it in every call."""
        for statement in self.statements:
            made, statement.results = statement.results or {}, None
            results = [self.memory[name] for name in made]
            follows = all(self.memory[name].is_table for name in statement.reads)
            if results and follows and not any(entry.may_change for entry in results):
                statement.text, self.has_tables = "", True
                self.values |= made
                for entry in results:
                    entry.is_table = entry.is_given = True
        if self.has_tables and self.device.type == "cuda":
            # The next call may be on another stream.
            torch.cuda.current_stream(self.device).synchronize()

    def lines(self, last: str, launched: str) -> list[str]:
        """The body of the plan's function.

        Args:
            last: Its last line.
            launched: A launch, with places for the kernel's number, the programs and the arguments.
        """
        temporaries = {name: entry for name, entry in self.memory.items() if entry.made >= 0 and not entry.as_tensor}
        offsets, size = _pack(temporaries)
        lines = []
        if offsets:
            lines.append(f"scratch = empty({size}, dtype=uint8, device=device)")
            lines.append("scratch_address = scratch.data_ptr()")
        lines += [f"{name}_address = scratch_address + {offset}" for name, offset in offsets.items()]
        known = [name for name, entry in self.memory.items() if entry.is_given and name in self.pointers]
        lines += [f"{name}_address = {name}.data_ptr()" for name in known]
        depth = 0
        for number, statement in enumerate(self.statements):
            indent, name = "    " * depth, statement.makes
            depth += statement.opens
            if statement.kernel is not None:
                lines.append(indent + launched.format(statement.kernel, statement.programs, statement.text))
            elif statement.text:
                lines.append(indent + statement.text)
            elif name and name not in offsets:
                entry = self.memory[name]
                shape, stride, dtype, _ = entry.like
                make = f"empty_strided({tuple(shape)}, {stride}, dtype={self.bind(dtype)}, device=device)"
                lines.append(f"{indent}{name} = {make}")
            made = [name for name in self.pointers if name.split("_")[0] == f"made{number}" and name not in offsets]
            lines += [f"{indent}{name}_address = {name}.data_ptr()" for name in made]
            for name, entry in self.memory.items():
                if entry.last == number and not entry.is_given and name not in offsets and entry.size >= LARGE:
                    lines.append(f"{'    ' * depth}{name} = None")
        return [*lines, last]


_aten = torch.ops.aten
_EMPTY = "new_empty", "empty_like", "empty_strided", "new_empty_strided"
_ALLOCATIONS = {_aten.empty.memory_format, *(getattr(_aten, name).default for name in _EMPTY)}


def _pack(temporaries: dict[str, _Memory]) -> tuple[dict[str, int], int]:
    """Places in one piece of memory for temporaries of which those that are needed together do not overlap."""
    offsets: dict[str, int] = {}
    size = 0
    for name, entry in sorted(temporaries.items(), key=lambda item: -item[1].size):
        others = [(offsets[other], offsets[other] + -(-temporaries[other].size // 512) * 512) for other in offsets
                  if temporaries[other].made <= entry.last and entry.made <= temporaries[other].last]  # fmt: skip
        start = 0
        for first, stop in sorted(others):
            if start + entry.size <= first:
                break
            start = max(start, stop)
        offsets[name] = start
        size = max(size, start + entry.size)
    return offsets, size


class Plan:
    """What a call of one kind does, as a function of its tensors."""

    __slots__ = ("device", "has_tables", "index", "make", "run", "runtime", "watched")

    def __init__(self, recording: Recording, last: str) -> None:
        index = recording.device.index
        self.device, self.index = recording.device.type, -1 if index is None else index
        self.has_tables = recording.has_tables
        from triton import knobs

        self.runtime: Any = knobs.runtime
        grids = [(kernel, (programs, 1, 1)) for kernel, programs in recording.kernels]
        names = {"empty": torch.empty, "empty_strided": torch.empty_strided, "uint8": torch.uint8}
        names |= {"device": recording.device, **recording.values}

        def make(watched: bool) -> Callable[..., Any]:
            pattern = "start{0}({1}, 1, 1, stream, function{0}, metadata{0}, None, None, None, {2})"
            if watched:
                pattern = "start{0}({2}stream=stream)"
            body = recording.lines(last, pattern)
            # Each function has names of its own: they differ in what starts kernels.
            space: dict[str, Any] = {**names, **recording.values}
            for number, (kernel, grid) in enumerate(grids):
                start = kernel[grid] if watched else kernel.run
                space |= {f"start{number}": start, f"function{number}": kernel.function}
                space[f"metadata{number}"] = kernel.packed_metadata
            head = f"def run({', '.join(recording.parameters)}, *, stream):"
            exec(compile("\n    ".join([head, *body]), "<plan>", "exec"), space)
            return space.pop("run")

        self.make, self.run, self.watched = make, make(False), cast(Any, None)

    def __call__(self, *tensors: Tensor | None) -> Any:
        run, index = self.run, self.index
        if _is_watched(self.runtime):
            run = self.watched = self.watched or self.make(True)
        elsewhere = index >= 0 and torch._C._cuda_getDevice() != index
        if elsewhere or torch.is_autocast_enabled(self.device):
            # The record is of what autocast has made of the call.
            with torch.autocast(self.device, enabled=False), torch.cuda.device(index) if elsewhere else nullcontext():
                return run(*tensors, stream=current_stream(index))
        return run(*tensors, stream=current_stream(index))


def current_stream(index: int) -> int:
    """Return the handle of the current stream of a GPU; 0 for a CPU."""
    return torch._C._cuda_getCurrentRawStream(index) if index >= 0 else 0


def _is_watched(runtime: Any) -> bool:
    """Whether hooks of a profiler want to know of launches. Releases have none, a function, or a list of them."""
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
