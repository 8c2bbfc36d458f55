"""Trial calls: every rank runs calls on copies of what they update, and its state is then as before."""

from __future__ import annotations

from typing import AbstractSet as Set
from typing import Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos.arithmetic.comparison import (
    Difference,
    agree,
    difference,
    largest_of,
    sample,
    tolerance,
)
from synkhronos.arithmetic.partition import select
from synkhronos.functions.copies import without_effects
from synkhronos.stores.handle import Handle
from synkhronos.stores.required_rows import Need
from synkhronos.world.here import Command, Here

#: The difference of arrays of different shapes.
DIFFERENT_SHAPE = Difference(float("inf"), float("inf"))


class Tolerance(NamedTuple):
    """The tolerances given to `Function.check`, and the dtypes that limit the precision."""

    rtol: float | None
    atol: float
    dtypes: Set[np.dtype]

    def allows(self, value: np.ndarray, serial: np.ndarray) -> bool:
        """Whether a value of the same shape agrees with the serial one."""
        rtol = tolerance(serial.dtype, self.dtypes) if self.rtol is None else self.rtol
        return agree(value, serial, self.atol + rtol * largest_of(serial))


class Trial(Command):
    """Calls whose effects are undone.

    It returns what the calls returned, and the new values of variables: on the master all of them; on
    other ranks, where serial values are given, how much each differs, and the value itself if the
    difference is too large.

    Parameters
    ----------
    calls : Command
    updated : list of int
        The variables that the calls update.
    compared : list of int
        Those whose new values are returned.
    serial : dict
        A handle to the serial new value of each of these, or nothing.
    tolerance : Tolerance
    most : int or None
        How many elements of each variable are returned, evenly spaced; None for all.
    """

    def __init__(
        self,
        calls: Command,
        updated: Sequence[int],
        compared: Sequence[int],
        serial: Mapping[int, Handle],
        tolerance: Tolerance,
        most: int | None,
    ) -> None:
        self.calls, self.updated, self.compared = calls, updated, compared
        self.serial, self.tolerance, self.most = serial, tolerance, most

    def needs(self, ranks: range, size: int) -> list[Need]:
        return [*self.calls.needs(ranks, size), *map(Need, self.serial.values())]

    def run(self, here: Here) -> tuple:
        with without_effects(here, self.updated):
            returned = self.calls.run(here)
            compared = self.compared if here.is_master else self.serial
            return returned, {number: self._new(here, number) for number in compared}

    def _new(self, here, number):
        new = here.engine.export(here.shareds[number])
        if here.is_master:
            return None, sampled(new, self.most)
        serial = here.store.get(self.serial[number])
        amount = difference(new, serial) if new.shape == serial.shape else DIFFERENT_SHAPE
        is_right = new.shape == serial.shape and self.tolerance.allows(new, serial)
        return amount, None if is_right else here.send(new)


def sampled(array: np.ndarray, most: int | None) -> np.ndarray:
    """Return a copy of an array, or of `most` of its elements."""
    return np.array(array if most is None else sample(array, most))


class SliceableRows(Command):
    """Send the rows of sliceable shared variables that this rank would use.

    Parameters
    ----------
    numbers : list of int
    batch_s : list or None
        The rows to use, by rank.
    most : int or None
        At most so many.
    """

    def __init__(self, numbers, batch_s, most):
        self.numbers, self.batch_s, self.most = numbers, batch_s, most

    def run(self, here):
        batch = None if self.batch_s is None else self.batch_s[here.rank]
        sent = []
        for number in self.numbers:
            array = here.engine.storage(here.shareds[number])
            own = select(batch, len(array), "batch_s")[: self.most]
            rows = here.engine.to_host(here.engine.take(array, own))
            sent.append(np.array(rows) if here.is_master else here.send(np.array(rows)))
        return sent
