"""Trial calls: every rank runs the call on copies of what it updates, and compares the new values."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from synkhronos.arithmetic.comparison import Difference, agree, difference, largest_of, tolerance
from synkhronos.arithmetic.partition import select
from synkhronos.functions.agreement import digests
from synkhronos.functions.copies import on_copies
from synkhronos.stores.needs import Need
from synkhronos.world.here import Command, Here

#: The difference of arrays of different shapes.
DIFFERENT_SHAPE = Difference(float("inf"), float("inf"))


class Tolerance(NamedTuple):
    """The tolerances given to `Function.check`, and the dtypes that limit the precision."""

    rtol: float | None
    atol: float
    dtypes: Sequence[np.dtype]

    def allows(self, value: np.ndarray, serial: np.ndarray) -> bool:
        """Whether a value of the same shape agrees with the serial one."""
        rtol = tolerance(serial.dtype, self.dtypes) if self.rtol is None else self.rtol
        return agree(value, serial, self.atol + rtol * largest_of(serial))


class Trial(Command):
    """A call whose effects are undone.

    It returns what the call returned; for each compared variable, how much it differs from the serial
    value, and the value itself if the difference is too large; and digests of the replicas before the
    call.

    Parameters
    ----------
    call : CallFunction
    updated : list of int
        The variables that the function updates.
    serial : dict
        A handle to the serial new value of each variable that is compared.
    used : list of int
        The variables whose digests are returned.
    tolerance : Tolerance
    """

    def __init__(self, call, updated, serial, used, tolerance):
        self.call, self.updated, self.serial = call, updated, serial
        self.used, self.tolerance = used, tolerance

    def needs(self, ranks: range, size: int) -> list[Need]:
        return [*self.call.needs(ranks, size), *map(Need, self.serial.values())]

    def run(self, here: Here) -> tuple:
        before = digests(here, self.used)
        n_rows = here.rows.get(self.call.number)
        try:
            with on_copies(here, [here.shareds[number] for number in self.updated]):
                returned = self.call.run(here)
                news = {number: self._compare(here, number) for number in self.serial}
        finally:
            here.rows.pop(self.call.number, None)
            if n_rows is not None:
                here.rows[self.call.number] = n_rows
        return returned, news, before

    def _compare(self, here, number):
        new = here.engine.export(here.shareds[number])
        serial = here.store.get(self.serial[number])
        amount = difference(new, serial) if new.shape == serial.shape else DIFFERENT_SHAPE
        if new.shape == serial.shape and self.tolerance.allows(new, serial):
            return amount, None
        return amount, np.array(new) if here.is_master else here.send(new)


class SliceableRows(Command):
    """Send the rows of sliceable shared variables that this rank would use."""

    def __init__(self, numbers, batch_s):
        self.numbers, self.batch_s = numbers, batch_s

    def run(self, here):
        batch = None if self.batch_s is None else self.batch_s[here.rank]
        sent = []
        for number in self.numbers:
            array = here.engine.storage(here.shareds[number])
            rows = here.engine.to_host(here.engine.take(array, select(batch, len(array), "batch_s")))
            sent.append(np.array(rows) if here.is_master else here.send(np.array(rows)))
        return sent
