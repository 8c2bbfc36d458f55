"""The ring of batches in shared memory; and what takes them: the script, or each rank by its shards."""

from __future__ import annotations

import functools
import math
import os
import time
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np

import synkhronos as synk
from synkhronos._errors import ClosedError, SynkhronosError, warn
from synkhronos.arithmetic.minibatches import BatchPlan
from synkhronos.profiles.log import note
from synkhronos.services.background_processes import describe
from synkhronos.stores.base import MappedMemory, map_memory
from synkhronos.transports.children import has_ended
from synkhronos.transports.waiting import NBYTES, Semaphore

#: The most ranks; there are semaphores for them.
MOST_RANKS = 1024
#: The generation of a loader that was closed
CLOSED = -1

_FIELD = "field "  # before the number of an array of the batches
_TEXT = 1 << 16  # bytes for the reason of a failure
_TOKEN = 16  # bytes
_ALIGNMENT = 4096


CHECK_INTERVAL = 0.1  # seconds between two checks that the processes are alive
_LONG = 60.0  # seconds of a wait after which there is a warning


class Field(NamedTuple):
    """What a row has in one of the arrays of a batch."""

    shape: tuple[int, ...]
    dtype: str


class Layout(NamedTuple):
    """What determines the arrays of a `Ring`.

    Attributes
    ----------
    fields : tuple of Field
        One for each array of a batch.
    batch_size, slots, processes, length : int
        `length` is the number of rows of the source.
    """

    fields: tuple[Field, ...]
    batch_size: int
    slots: int
    processes: int
    length: int

    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the shape and the dtype of each array, by name."""
        of_ranks = (MOST_RANKS, self.processes)
        made: dict[str, tuple[tuple[int, ...], str]] = {
            "token": ((_TOKEN,), "u1"),
            "go": ((1,), "i8"),
            "begun": ((self.processes,), "i8"),
            "failed": ((self.processes,), "i8"),
            "n_skipped": ((self.processes,), "i8"),
            "taken": ((MOST_RANKS,), "i8"),
            "filled": (of_ranks, "i8"),
            "counts": ((self.slots, *of_ranks), "i8"),
            "ready": ((MOST_RANKS, NBYTES), "u1"),
            "free": ((self.processes, NBYTES), "u1"),
            "text": ((self.processes, _TEXT), "u1"),
            "unreadable": ((self.length,), "u1"),
        }
        for number, field in enumerate(self.fields):
            made[f"{_FIELD}{number}"] = (self.slots, self.batch_size, *field.shape), field.dtype
        return made

    def places(self) -> tuple[dict[str, slice], int]:
        """Return the bytes of each array, and the number of bytes of all."""
        places, offset = {}, 0
        for name, (shape, dtype) in self.arrays().items():
            places[name] = slice(offset, offset + math.prod(shape) * np.dtype(dtype).itemsize)
            offset = -(-places[name].stop // _ALIGNMENT) * _ALIGNMENT
        return places, max(offset, _ALIGNMENT)


class Ring:
    """The slots and the numbers, as one process sees them.

    Parameters
    ----------
    layout : Layout
    path : str, optional
        Where another process finds the memory. By default it is new, for this process and those that
        are forked from it.
    token : bytes, optional
        What the memory at the path has to begin with.

    Raises
    ------
    SynkhronosError
        If the memory at the path is not that of the loader.
    """

    def __init__(self, layout: Layout, path: str = "", token: bytes | None = None) -> None:
        places, nbytes = layout.places()
        is_new, self.layout = not path, layout
        self._memory = MappedMemory(nbytes, "synkhronos-loading") if is_new else None
        self.path = path if self._memory is None else self._memory.path
        array: Any = _map(path, nbytes) if self._memory is None else self._memory.array
        found = {}
        for name, (shape, dtype) in layout.arrays().items():
            found[name] = array[places[name]].view(dtype).reshape(shape)
            if not name.startswith(_FIELD):
                found[name] = np.asarray(found[name])  # faster than a memmap
        self.go, self.begun, self.failed = found["go"], found["begun"], found["failed"]
        self.taken, self.filled, self.counts = found["taken"], found["filled"], found["counts"]
        self.n_skipped, self.unreadable = found["n_skipped"], found["unreadable"]
        self.fields = [found[f"{_FIELD}{number}"] for number in range(len(layout.fields))]
        self._text, places_of_ranks = found["text"], found["ready"]
        if is_new:
            found["token"][:] = np.frombuffer(os.urandom(_TOKEN), np.uint8)
            for place in places_of_ranks:
                Semaphore(array=place, is_new=is_new)
        elif found["token"].tobytes() != token:
            raise _not_here(self.path)
        self.token = found["token"].tobytes()
        #: Returns the semaphore for which a rank waits.
        self.ready: Callable[[int], Any] = functools.lru_cache(None)(
            lambda rank: Semaphore(array=places_of_ranks[rank], is_new=False)
        )
        #: The semaphores for which the processes wait
        self.free = [Semaphore(array=place, is_new=is_new) for place in found["free"]]

    def __reduce__(self) -> tuple:
        return Ring, (self.layout, self.path, self.token)

    def wake_processes(self) -> None:
        """Let all processes look at the numbers."""
        for bell in self.free:
            bell.post()

    # What a process has to say

    def fail(self, process: int, text: str, ranks: int) -> None:
        """Say to all ranks why a process has given up."""
        data = text.encode()[: _TEXT - 1]
        self._text[process, : len(data)] = np.frombuffer(data, np.uint8)
        self._text[process, len(data)] = 0
        self.failed[process] = 1
        for rank in range(ranks):
            self.ready(rank).post()

    def reason(self, process: int) -> str:
        """Return why a process has given up."""
        return self._text[process].tobytes().partition(b"\0")[0].decode(errors="replace")

    # Its end

    def close(self) -> None:
        """Refuse everything from now on, and return the memory to the system."""
        if self._memory is not None:
            self._memory.close()  # what is written afterwards is still seen in other processes
            self.go[0] = CLOSED

    def check_open(self) -> None:
        """Raise ``ClosedError`` if the loader was closed."""
        if self.go[0] == CLOSED:
            raise ClosedError("loading: this loader was closed")


def _map(path: str, nbytes: int) -> np.ndarray:
    try:
        array = map_memory(path)
    except (OSError, ValueError) as error:
        raise _not_here(path) from error
    if len(array) < nbytes:
        raise _not_here(path)
    return array


def _not_here(path: str) -> SynkhronosError:
    return SynkhronosError(
        f"loading: the memory of the loader ({path}) is not on this machine, or the loader was closed; "
        f"only ranks on the machine of the script can use its loader"
    )


class Processes(NamedTuple):
    """The processes of a loader, as any process of the machine knows them.

    Attributes
    ----------
    pids : tuple of int
    stacks : tuple of str
        Where each writes its stack, for `describe`.
    timeout : float or None
        The longest wait for a batch, in seconds.
    """

    pids: tuple[int, ...]
    stacks: tuple[str, ...]
    timeout: float | None

    def watch(self, what: str, find_late: Callable[[], int]) -> Callable[[float], None]:
        """Return what is called with the seconds of a wait, from time to time.

        It raises after the timeout, and warns after a minute, with the place where the process is that
        `find_late` returns the number of.
        """
        is_known = False

        def look(waited: float) -> None:
            nonlocal is_known
            is_over = self.timeout is not None and waited > self.timeout
            if not is_over and (is_known or waited < _LONG):
                return
            number = find_late()
            found = describe(self.pids[number], self.stacks[number])
            where = f"process {number} of the loader (pid {self.pids[number]}) {found}"
            if is_over:
                raise SynkhronosError(
                    f"loading: {what} was not loaded within timeout={self.timeout} seconds: {where}"
                )
            is_known = True
            warn(f"loading: {what} has not been loaded for {waited:.0f} seconds: {where}")

        return look


class Consumer:
    """Takes the batches of one rank, one after the other.

    Parameters
    ----------
    shards : Shards
        The batches of all ranks.
    rank : int
    check : callable
        Called from time to time during a wait; it raises if the wait has to end.

    Attributes
    ----------
    waited : float
        The seconds of all waits.
    """

    def __init__(self, shards: Shards, rank: int, check: Callable[[], None]) -> None:
        self._ring, self._plan, self._shards = shards.ring, shards.plan, shards
        self._rank, self._check, self.waited = rank, check, 0.0

    @property
    def number(self) -> int:
        """The number of the batch that is next, or in use."""
        return int(self._ring.taken[self._rank])

    def take(self) -> tuple[int, slice]:
        """Wait for the next batch; return its slot and its rows there. `release` has to follow."""
        number = self.number
        if self._is_missing(number):
            began = time.monotonic()
            try:
                self._wait_for(number, began)
            finally:
                waited = time.monotonic() - began
                self.waited += waited
                note("load", f"batch {number}", waited)
        slot = number % self._ring.layout.slots
        return slot, self._closed_gaps(slot, number)

    def release(self) -> None:
        """Let the slot of the present batch be used for another."""
        self.check_generation()
        self._ring.taken[self._rank] += 1
        self._ring.wake_processes()

    def arrays(self, slot: int, rows: slice) -> list[np.ndarray]:
        """Return the arrays of a batch, as views of the shared memory."""
        return [field[slot, rows] for field in self._ring.fields]

    def check_generation(self) -> None:
        """Raise if these batches are no longer loaded."""
        self._ring.check_open()
        if self._ring.go[0] != self._shards.generation:
            raise SynkhronosError(
                "loading: this loop cannot go on, as another epoch of the loader was begun meanwhile; "
                "use a Loader for each loop, such as one for training and one for validation"
            )

    def _is_missing(self, number: int) -> bool:
        self.check_generation()
        return bool((self._filled() <= number).any())

    def _filled(self) -> np.ndarray:
        """Return how many batches each process has loaded for this rank."""
        return self._ring.filled[self._rank, : self._plan.processes]

    def _wait_for(self, number: int, began: float) -> None:
        ring, bell = self._ring, self._ring.ready(self._rank)
        look = self._shards.processes.watch(f"batch {number}", lambda: int(self._filled().argmin()))
        while True:
            bell.drain()
            if not self._is_missing(number):
                return
            for process in np.flatnonzero(ring.failed):
                # It may have failed at a later batch, which is not due yet.
                if ring.filled[self._rank, process] <= number:
                    raise SynkhronosError(ring.reason(process))
            self._check()
            if not bell.wait(CHECK_INTERVAL):
                look(time.monotonic() - began)

    def _closed_gaps(self, slot: int, number: int) -> slice:
        """Return the rows of a batch in its slot, after moving up those behind unreadable rows."""
        plan, rank = self._plan, self._rank
        share, start = plan.share(plan.locate(number)[1], rank), plan.place(rank)
        counts = self._ring.counts[slot, rank, : plan.processes]
        if counts.sum() == len(share):
            return slice(start, start + len(share))
        stop = start
        for process, count in enumerate(counts):
            begin = plan.part(number, rank, process).start - share.start + start
            if count and begin != stop:
                for field in self._ring.fields:
                    field[slot, stop : stop + count] = field[slot, begin : begin + count]
            stop += int(count)
        # A new rank in place of a dead one may take this batch again.
        counts[:] = 0
        counts[0] = stop - start
        return slice(start, stop)


class Shards:
    """The minibatches of all ranks, made by `Loader.shards`. It is given to a program as an argument.

    Parameters
    ----------
    ring : Ring
    plan : BatchPlan
    generation : int
        The generation in which the plan is loaded.
    processes : Processes
    """

    def __init__(self, ring: Ring, plan: BatchPlan, generation: int, processes: Processes) -> None:
        self.ring, self.plan, self.generation, self.processes = ring, plan, generation, processes

    def __len__(self) -> int:
        """Return the number of minibatches of each rank, in all epochs."""
        return self.plan.n_batches * (self.plan.epochs or 0)

    def __repr__(self) -> str:
        return f"<Shards: {len(self)} minibatches for each of {self.plan.ranks} ranks>"

    def minibatches(self, rank: synk.Rank) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield the arrays of a rank's minibatches, one after the other.

        It ends early when the ranks are asked to stop, as ``rank.minibatches`` does. A minibatch whose
        rows can all not be read is left out.

        Parameters
        ----------
        rank : synkhronos.Rank
            The first argument of the program.

        Yields
        ------
        tuple of numpy.ndarray
            One array for each array of the source: the rank's share of the rows of a batch. They are
            views of the shared memory, read-only, and valid until the next minibatch.
        """
        if rank.size != self.plan.ranks:
            raise ValueError(
                f"Shards.minibatches: expected a program on {self.plan.ranks} ranks, for which the "
                f"shards were made, got {rank.size}"
            )
        consumer = Consumer(self, rank.rank, functools.partial(self._check, rank))
        while self.plan.has(consumer.number):
            if rank.should_stop:
                return
            slot, rows = consumer.take()
            if rows.stop > rows.start:
                yield tuple(map(protected, consumer.arrays(slot, rows)))
            consumer.release()

    def _check(self, rank: synk.Rank) -> None:
        rank.clock  # noqa: B018  # raises if the program has to end because another rank has failed
        pids = self.processes.pids
        for number, pid in enumerate(pids):
            if has_ended(pid):
                raise SynkhronosError(
                    f"loading: process {number} of {len(pids)} has ended; close the loader after the "
                    f"program, and create it again"
                )


def protected(array: np.ndarray) -> np.ndarray:
    """Return a read-only view."""
    view = array.view(np.ndarray)
    view.flags.writeable = False
    return view
