"""What a process of a loader does: it writes its parts of the batches."""

from __future__ import annotations

import errno
import os
import pickle
import traceback
from typing import Any

import numpy as np

from synkhronos._errors import SynkhronosError
from synkhronos.extensions.loaders.generators import seed_generators_without_seed
from synkhronos.extensions.loaders.plan import Plan
from synkhronos.extensions.loaders.reader import Expected, Reader, RowsError
from synkhronos.extensions.loaders.ring import Ring
from synkhronos.extensions.loaders.sources import UnreadableError

#: The first message to the process that loads the first row
FIRST_ROW = "first row"

_MOST_ORDERS = 4
_LONGEST = 60.0  # seconds of one wait; a process is woken when there is something to do


def serve(number: int, connection: Any, reader: Reader) -> None:
    """Run as a process of a loader: load the first row if that is asked for, and then batches."""
    seed_generators_without_seed()
    try:
        message = connection.recv()
        if message == FIRST_ROW:
            connection.send(_first_row(reader))
            message = connection.recv()
    except EOFError:
        return
    ring, reader.expected = message
    Producer(number, ring, reader).serve(connection)


def _first_row(reader: Reader) -> Expected | tuple[BaseException, str]:
    """Return what the first row has, or the exception, and its traceback."""
    try:
        return reader.first_row()
    except Exception as error:
        text = _exception(0, reader)
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an exception can hold anything
            return SynkhronosError(text), text
        return error, text


def _exception(number: int, reader: Reader) -> str:
    """Describe the exception that is handled."""
    text = traceback.format_exc()
    if os.strerror(errno.EBADF) in text:
        text += "Pipes and sockets of the script cannot be used in the loader; open them in Source.read"
    return f"loading: process {number} raised an exception while {reader.doing()}:\n{text}"


class Producer:
    """One process of a loader.

    Parameters
    ----------
    number : int
        Of the process.
    ring : Ring
    reader : Reader
    """

    def __init__(self, number: int, ring: Ring, reader: Reader) -> None:
        self._number, self._ring, self._reader = number, ring, reader
        self._bell = ring.free(number)
        self._orders: dict[int, np.ndarray] = {}  # of the epochs in which the ranks are

    def serve(self, connection: Any) -> None:
        """Load what is asked for, until the connection is closed."""
        while True:
            try:
                generation, plan = connection.recv()
            except EOFError:
                return
            try:
                self._produce(generation, plan, connection)
            except UnreadableError as error:
                self._ring.fail(
                    self._number,
                    f"loading: {error.name} cannot be read: {error.reason}; remove or replace it, or "
                    f"leave such rows out: Loader(..., unreadable='skip')",
                    plan.ranks,
                )
            except RowsError as error:
                self._ring.fail(self._number, str(error), plan.ranks)
            except BaseException:
                self._ring.fail(self._number, _exception(self._number, self._reader), plan.ranks)

    def _produce(self, generation: int, plan: Plan, connection: Any) -> None:
        """Load batches until there are no more, or something else is asked for."""
        ring, number = self._ring, self._number
        self._orders.clear()
        ring.failed[number] = 0
        ring.filled[:, number] = 0
        ring.begun[number] = generation
        ring.ready(0).post()
        following = [0] * plan.ranks
        while True:
            self._bell.drain()
            if connection.poll():
                return
            is_idle = True
            # While all processes are not ready, an old part could still be written to a slot.
            for rank in range(plan.ranks if ring.go[0] == generation else 0):
                batch = following[rank]
                if plan.has(batch) and batch < ring.taken[rank] + ring.layout.slots:
                    self._load(plan, batch, rank)
                    following[rank] += 1
                    ring.filled[rank, number] = following[rank]
                    ring.ready(rank).post()
                    is_idle = False
            if is_idle:
                self._bell.wait(_LONGEST)

    def _load(self, plan: Plan, number: int, rank: int) -> None:
        """Write this process's part of a batch to its slot."""
        places = plan.part(number, rank, self._number)
        slot = number % self._ring.layout.slots
        count = 0
        if len(places):
            epoch, batch = plan.locate(number)
            rows = self._rows_of(plan, epoch)[batch * plan.batch_size :][: plan.batch_size]
            reader = self._reader
            arrays, kept, lost = reader.read(rows[places.start : places.stop], epoch)
            self._ring.unreadable[list(lost)] = 1
            self._ring.n_skipped[self._number] += len(lost)
            count = len(kept)
            if count:
                arrays[0] = reader.transform(arrays[0], kept, epoch, int(rows[0]))
                reader.check(arrays, kept)
                start = plan.place(rank) - plan.share(batch, rank).start + places.start
                for array, field in zip(arrays, self._ring.fields):
                    field[slot, start : start + count] = array
        self._ring.counts[slot, rank, self._number] = count

    def _rows_of(self, plan: Plan, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            if len(self._orders) >= _MOST_ORDERS:
                del self._orders[min(self._orders)]
            self._orders[epoch] = self._reader.order(plan, epoch)
        return self._orders[epoch]
