"""Validation by one rank while the others continue, or by all ranks together."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy

import synkhronos as synk
from synkhronos.extensions.rules.rule import Params, Rule, assign, values_of
from synkhronos.functions.steps import verify_step

_ROWS = 1000  # computed at a time
#: How numbers of the ranks are combined by operations of outputs; by the others, they are averaged.
_COMBINED: dict[str | None, Callable[..., float]] = {"sum": sum, "max": max, "min": min}


class Validation(NamedTuple):
    """The function or callable that validates, and the ranks that take part.

    Attributes
    ----------
    function : Function or callable
        Computes the numbers.
    data : list of Data, or None for a callable
        The arguments of the function.
    by_all : bool
        Whether all ranks validate together, each on its share of the rows.
    operations : dict
        The operations of the function's outputs, by name.
    """

    function: Any
    data: list[Any] | None
    by_all: bool
    operations: Mapping[str, Any] = {}

    def verify(self) -> None:
        """Verify the combination of the ranks' numbers, and of slices, as in a first call."""
        data = self.data
        if data is None:
            return
        num_slices = _num_slices(len(data[0]) // (synk.size() if self.by_all else 1))
        if self.by_all or num_slices > 1:
            verify_step(lambda: self.function(*data, num_slices=num_slices))

    def run(self, rank: synk.Rank, params: Params, rule: Rule, epoch: int) -> dict[str, Any] | None:
        """Validate after an epoch; return the numbers on one rank, None on the others.

        The ranks take turns. The parameters are restored afterwards.
        """
        is_mine = rank.rank == epoch % rank.size
        if not (self.by_all or is_mine or rule.is_synchronous):
            return None
        if self.by_all and not rule.is_synchronous:
            rank.barrier()  # so that all take the same value
        value = rule.value(rank, params)
        if self.by_all and not rule.is_synchronous:
            rank.barrier()
        if not (self.by_all or is_mine):
            return None
        own = None
        if value is not None:
            own = values_of(params)
            assign(params, value)
        numbers, rows = self._compute(rank)
        if own is not None:
            assign(params, own)
        if not self.by_all:
            return {"rank": rank.rank, **numbers}
        every = rank.exchange((rows, numbers))
        return {"rank": None, **combined(every, self.operations)} if rank.rank == 0 else None

    def _compute(self, rank: synk.Rank) -> tuple[dict[str, float], float]:
        """Return the numbers of this rank, and their weight."""
        if self.data is None:
            numbers = dict(self.function(rank))
            rows = numbers.pop("rows", 1)
        else:
            length = len(self.data[0])
            share = rank.rows(length) if self.by_all else range(length)
            rows = len(share)
            if not rows:
                return {}, 0
            outputs = rank.call(
                self.function,
                *self.data,
                batch=slice(share.start, share.stop),
                num_slices=_num_slices(rows),
            )
            numbers = named(outputs)
        return {name: float(number) for name, number in numbers.items()}, float(rows)


def named(outputs: Any) -> dict[str, Any]:
    """Return the outputs of a function by name."""
    if isinstance(outputs, dict):
        return outputs
    if not isinstance(outputs, list):
        return {"loss": outputs}
    return {f"output {position}" if position else "loss": one for position, one in enumerate(outputs)}


def _num_slices(rows: int) -> int:
    return max(1, -(-rows // _ROWS))


def combined(
    every: Sequence[tuple[float, dict[str, float]]], operations: Mapping[str, Any] = {}
) -> dict[str, float]:
    """Return all ranks' numbers, combined by their operations; by default averages, weighted by rows."""
    every = [(rows, numbers) for rows, numbers in every if rows]
    weights = [rows for rows, _ in every]
    found = {}
    for name in every[0][1]:
        values, combine = [numbers[name] for _, numbers in every], _COMBINED.get(operations.get(name))
        found[name] = float(combine(values) if combine else numpy.average(values, weights=weights))
    return found
