# SPDX-License-Identifier: Apache-2.0
"""Launches of an operator, recorded once and repeated for other tensors of the same kind.

Preparing a launch takes several times as long as starting it, and an operator has half a dozen. All that is decided
on the way depends on nothing but the metadata of the operator's inputs and its options. So the first call is recorded:
which tensors are made, and which kernels are launched with which of the tensors. Later calls with the same metadata
make such tensors and start those kernels. A record holds no tensor and no address.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .launching import Launched, listen


# Records kept; beyond that, all are rebuilt.
MAX_RECORDS = 1024
_records: dict[Any, Record | None] = {}


class Record:
    """An operator's tensors and launches.

    Values are counted: inputs first, then the tensors that are made, the tuples that kernels take, and None.

    Args:
        inputs: The operator's tensors, no two of them the same, or None.
        outputs: What it has returned.
        launches: What it has launched.

    Raises:
        ValueError: If it has made tensors in a way that cannot be repeated, or there is nothing to start launches by.
    """

    def __init__(
        self, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...], launches: list[Launched]
    ) -> None:
        plans = [launch.plan for launch, _, _ in launches]
        arguments = [argument for launch, _, _ in launches for argument in launch.tensors]
        tuples: dict[int, Any] = {id(argument): argument for argument in arguments if isinstance(argument, tuple)}
        parts = [*outputs, *arguments, *(part for members in tuples.values() for part in members)]
        given = {id(tensor) for tensor in inputs}
        made = {id(part): part for part in parts if isinstance(part, Tensor) and id(part) not in given}
        _check_made(list(made.values()))
        self.made = [(tensor.shape, tensor.dtype) for tensor in made.values()]
        places = {id(tensor): place for place, tensor in enumerate(inputs) if tensor is not None}
        places.update({key: len(inputs) + place for place, key in enumerate((*made, *tuples, id(None)))})
        self.tuples = [
            (
                type(members)._make,
                [(places[id(part)], None) if isinstance(part, Tensor) else (None, part) for part in members],
            )
            for members in tuples.values()
        ]
        self.device = launches[0][0].device
        self.launches = []
        for (launch, grid, counts), plan in zip(launches, plans):
            if plan is None:
                raise ValueError("Triton's interpreter has no plans")
            compiled, rest = plan
            taken = itemgetter(*(places[id(argument)] for argument in launch.tensors))
            self.launches.append((compiled[grid], taken, counts + rest))
        self.outputs = itemgetter(*(places[id(tensor)] for tensor in outputs))

    def __call__(self, inputs: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        """The operator for other inputs."""
        if self.device >= 0 and self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self._run(inputs)
        return self._run(inputs)

    def _run(self, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        new_empty = inputs[0].new_empty
        values: list[Any] = [*inputs, *[new_empty(shape, dtype=dtype) for shape, dtype in self.made]]
        for make, members in self.tuples:
            values.append(make([part if place is None else values[place] for place, part in members]))
        values.append(None)
        for start, taken, rest in self.launches:
            start(*taken(values), *rest)
        return self.outputs(values)


def _check_made(tensors: list[Tensor]) -> None:
    storages = [tensor.untyped_storage() for tensor in tensors]
    for tensor, storage in zip(tensors, storages):
        if not tensor.is_contiguous() or storage.nbytes() != tensor.numel() * tensor.element_size():
            raise ValueError("a part of a tensor")
    addresses = [storage.data_ptr() for storage in storages if storage.nbytes()]
    if len(set(addresses)) < len(addresses):
        raise ValueError("two views of a tensor")


def replayed(
    function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Any, ...], options: tuple[Any, ...]
) -> tuple[Tensor, ...]:
    """`function(*inputs, *options)`, from the second call on by its record.

    Args:
        function: Makes tensors by `new_empty` and launches kernels by [`launching.prepare`], and does nothing else
            with tensors. It returns two or more of those that it has made.
        inputs: Tensors, or None; the first is one, on the device of all.
        options: Everything else that the function's decisions depend on, hashable.
    """
    kinds = [
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16 == 0)
        for tensor in inputs
    ]
    key = function, inputs[0].get_device(), options, *kinds
    record = _records.get(key)
    given = [id(tensor) for tensor in inputs if tensor is not None]
    # Of two inputs that are one tensor, a record would not know which a kernel was given.
    is_ambiguous = len(set(given)) < len(given)
    if record is not None and not is_ambiguous:
        return record(inputs)
    with listen() as launches:
        outputs = function(*inputs, *options)
    if key not in _records and not is_ambiguous:
        if len(_records) >= MAX_RECORDS:
            _records.clear()
        try:
            _records[key] = Record(inputs, outputs, launches)
        except ValueError:
            _records[key] = None
    return outputs
