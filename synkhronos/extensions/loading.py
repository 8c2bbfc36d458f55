"""Minibatches that are read, decoded and augmented by other processes while the ranks compute.

A :class:`Loader` has processes of its own. They read rows of a source, such as :class:`ImageFolder`,
apply transforms, such as :class:`RandomCrop`, and write the batches into shared memory, ahead of the
script. The ranks use a batch where it is, without a copy.

The rows of a batch depend on the seed and the epoch, and the random numbers for a row on the seed, the
epoch and the row. So a run can be repeated with any number of processes and of ranks.
"""

from __future__ import annotations

import os
import time
import weakref
from typing import Any, Iterator, Sequence

import numpy as np

import synkhronos as synk
from synkhronos._checks import check_choice, check_extent, check_flag, check_int, check_number
from synkhronos._errors import warn
from synkhronos._html import Facts, Shown
from synkhronos._text import listed
from synkhronos.arithmetic.minibatches import BatchPlan
from synkhronos.extensions.loaders import producer, transforms
from synkhronos.extensions.loaders import ring as rings
from synkhronos.extensions.loaders.producer import Expected, Reader
from synkhronos.extensions.loaders.reachable import check_usable_in_copies, fingerprint
from synkhronos.extensions.loaders.ring import Consumer, Processes, Ring, Shards, protected
from synkhronos.extensions.loaders.sources import (
    HDF5,
    Arrays,
    HickleBatches,
    ImageFolder,
    Source,
    UnreadableError,
    as_source,
)
from synkhronos.extensions.loaders.transforms import CenterCrop, Draws, Mirror, Normalize, RandomCrop
from synkhronos.services.background_processes import BackgroundProcesses

__all__ = [
    "Arrays", "CenterCrop", "Draws", "HDF5", "HickleBatches", "ImageFolder", "Loader", "Mirror",
    "Normalize", "RandomCrop", "Shards", "Source", "UnreadableError",
]  # fmt: skip

_MOST_DATAS = 64  # objects `Data` that are kept for the next batches of the same length


class Loader(Shown):
    """Loads minibatches ahead, in processes of its own.

    The processes are copies of the script at this point. If the script changes later what the source or
    the transforms use, they are started again at the next epoch. Create a loader before
    `synkhronos.fork` if that uses GPUs or JAX, whose state should not be copied; on the CPU the order
    does not matter. The processes end with the script, or by :meth:`close`.

    Parameters
    ----------
    source : Source, array-like, path, or list of these
        Where the rows are read from. Arrays, and paths of ``.npy`` files, are as for `Arrays`.
    transform : callable, or list of callables, optional
        Applied to the first array of the source, one after the other. Each gets the images of a part of
        a batch and a `Draws`, and returns as many images.
    ahead : int, default: 2
        How many batches are loaded ahead of the batch that is in use. The memory is that of ``ahead +
        1`` batches.
    batch_size : int
        The number of rows of a batch, of all ranks together.
    processes : int, default: 1
        The number of processes that load. Each loads a part of every batch.
    seed : int, default: 0
        Determines, with the epoch, the order of the rows and the random numbers of the transforms, also
        those of other generators than `Draws`.
    shuffle : bool, default: True
        Whether each epoch has a random order; otherwise it is that of the source.
    drop_last : bool, default: False
        Whether the last rows of an epoch are left out if they are fewer than `batch_size`. Otherwise the
        last batch is shorter.
    unreadable : {"raise", "skip"}
        What happens if a row cannot be read: an error that names it ends the loop; or the row is left
        out, so that the batch is shorter, and a `SynkhronosWarning` names it.
    timeout : float, optional
        The longest wait for a batch, in seconds. By default there is no limit as long as the processes
        live, but a warning after a minute.

    Attributes
    ----------
    waited : float
        The seconds for which the loops over `epoch` have waited for data.
    pids : list of int
        The ids of the processes.

    Raises
    ------
    TypeError, ValueError
        If an argument is wrong.
    MemoryError
        If there is too little memory for the batches.
    SynkhronosError
        If no row can be read, or the system refuses a process.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> from synkhronos.extensions import loading
    >>> images, labels = np.arange(5 * 16, dtype="uint8").reshape(5, 1, 4, 4), np.arange(5)
    >>> loader = loading.Loader((images, labels), loading.RandomCrop(2), batch_size=3)
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x, y = T.tensor4(dtype="uint8"), T.lvector()
    >>> f = synk.function([x, y], [(x.sum(), "sum"), (y.sum(), "sum")])
    >>> for data in loader.epoch(0):
    ...     print(data, f(*data)[1])
    (<Data: uint8 (3, 1, 2, 2)>, <Data: int64 (3,)>) 9
    (<Data: uint8 (2, 1, 2, 2)>, <Data: int64 (2,)>) 1
    >>> loader.close()
    >>> synk.close()
    """

    def __init__(
        self,
        source: Any,
        transform: transforms.Transform | Sequence[transforms.Transform] | None = None,
        ahead: int = 2,
        *,
        batch_size: int,
        processes: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        unreadable: str = "raise",
        timeout: float | None = None,
    ) -> None:
        self._given = source, transform
        self._source, given = as_source(source), _list_of(transform)
        self._skips = check_choice(unreadable, "Loader: unreadable", ("raise", "skip")) == "skip"
        self._timeout = None if timeout is None else check_number(timeout, "Loader: timeout")
        slots = check_int(ahead, "Loader: ahead", 1) + 1
        self._plan = plan = BatchPlan(
            check_int(len(self._source), "Loader: the length of the source", 1),
            check_int(batch_size, "Loader: batch_size", 1),
            check_int(seed, "Loader: seed", 0),
            check_flag(shuffle, "Loader: shuffle"),
            check_flag(drop_last, "Loader: drop_last"),
            check_int(processes, "Loader: processes", 1),
            any(map(transforms.needs_whole_batch, given)),
        )
        if not plan.n_batches:
            raise ValueError(f"Loader: drop_last: expected {batch_size} rows, got {plan.length}")
        self._consumer: Consumer | None = None  # of the latest epoch
        self._following: tuple[int, int] | None = None  # the epoch, and the batch, that can follow
        self._datas: dict[tuple[int, int], tuple[synk.Data, ...]] = {}
        self._generation, self._n_reported, self._owner = 0, 0, os.getpid()
        self.waited = 0.0
        self._start(slots)

    def _start(self, slots: int | None = None) -> None:
        """Start the processes; with `slots`, also make the memory for the batches."""
        check_usable_in_copies(self._given)
        self._fingerprint = fingerprint(self._given)
        # It does not refer to the loader, which may be collected.
        source, applied, plan = self._source, _list_of(self._given[1]), self._plan
        options = plan.seed, self._skips, plan.takes_turns

        def serve(number: int, connection: Any) -> None:
            producer.serve(number, connection, Reader(source, applied, *options))

        self._processes = processes = BackgroundProcesses("loading", plan.processes, serve)
        self.pids = processes.pids
        self._known = Processes(tuple(processes.pids), tuple(processes.stacks), self._timeout)
        try:
            if slots is not None:
                self._expected = self._first_row()
                layout = self._expected.fields, plan.batch_size, slots, plan.processes, plan.length
                self._ring = Ring(rings.Layout(*layout))
        except BaseException:
            processes.end()
            raise
        self._end = weakref.finalize(self, _end, processes, self._ring)
        processes.send((self._ring, self._expected))

    def _first_row(self) -> Expected:
        """Return what a row has. A process finds it, as what it opens is for the process alone."""
        look = self._known.watch("the first row", lambda: 0)
        answer = self._processes.ask(0, producer.FIRST_ROW, look)
        if isinstance(answer, Expected):
            if answer.other:
                warn(
                    f"loading: {answer.other}: loaded twice, with different results. Each process reads "
                    f"other rows, in an order of its own: read rows by their numbers, not by next(), "
                    f"and draw from the second argument of a transform, or numpy.random"
                )
            return answer
        error, text = answer
        raise error from (None if text == str(error) else synk.SynkhronosError(text))

    def _refresh(self) -> None:
        """Start the processes again if the script has changed what the source or transforms use."""
        if fingerprint(self._given) == self._fingerprint:
            return
        self._source = as_source(self._given[0])
        if len(self._source) != self._plan.length:
            raise ValueError(
                f"Loader: expected a source of {self._plan.length} rows, as when the loader was "
                f"created, got {len(self._source)}; create another Loader"
            )
        self._processes.end()
        self._consumer = self._following = None
        self._end.detach()
        try:
            self._start()
        except BaseException:
            self._ring.close()
            raise

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._plan.n_batches

    def _shown(self) -> Facts:
        state = "closed" if not self._end.alive else f"{len(self)} batches an epoch"
        plan = self._plan
        rows: list[tuple[object, ...]] = [
            ("source", self._source),
            ("batch size", plan.batch_size),
            ("processes", plan.processes),
            ("shuffled", "yes" if plan.shuffle else "no"),
            ("waited for batches", f"{self.waited:.3g} s"),
        ]
        return f"Loader: {plan.length} rows, {state}", rows

    def __reduce__(self) -> Any:
        raise TypeError(
            "Loader: expected to stay in the script that has made it; give a program the result of "
            "loader.shards()"
        )

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    # Loops

    def epoch(self, number: int) -> Iterator[tuple[Any, ...]]:
        """Return an iterator over the batches of an epoch.

        After the last batch, the first ones of the next epoch are loaded, for a loop over ``number +
        1``. Any other epoch may follow as well; what was loaded ahead is then dropped.

        Parameters
        ----------
        number : int
            The number of the epoch, from 0.

        Yields
        ------
        tuple of synkhronos.Data
            One for each array of the source. If there are no processes, before `fork` or after `close`,
            they are arrays, which are read-only. They are valid until the next batch.

        Raises
        ------
        SynkhronosError
            In the loop: if a row cannot be read, a process has died or raised an exception, or another
            epoch was begun.
        ClosedError
            If the loader was closed.
        """
        number = check_extent(number, "Loader.epoch: number")
        self._check_usable()
        self._refresh()
        consumer = self._consumer_of(number)
        stop = consumer.number + len(self)
        self._following = number + 1, stop
        return self._batches(consumer, stop)

    def _consumer_of(self, epoch: int) -> Consumer:
        """Return the consumer of the last loop if this epoch follows, or else a new one."""
        last, is_sound = self._consumer, not self._ring.failed.any() and not self._processes.find_dead()
        if last is not None and self._following == (epoch, last.number) and is_sound:
            return last
        shards = self._begin(self._plan._replace(first=epoch))
        self._consumer = made = Consumer(shards, 0, self._processes.check)
        return made

    def _batches(self, consumer: Consumer, stop: int) -> Iterator[tuple[Any, ...]]:
        while consumer.number < stop:
            before = consumer.waited
            try:
                slot, rows = consumer.take()
            finally:
                self.waited += consumer.waited - before
            self._report()
            if rows.stop > rows.start:
                yield self._as_data(consumer, slot, rows)
            consumer.release()

    def shards(self, ranks: int, epochs: int = 1, first: int = 0) -> Shards:
        """Begin to load a share of each batch for each rank of a program.

        The b-th minibatches of all ranks together are the b-th batch of :meth:`epoch`. The ranks may be
        at different batches, as each has memory for its own shares. A last batch with fewer rows than
        ranks is left out.

        Parameters
        ----------
        ranks : int
            The number of ranks, ``synkhronos.size()``, at most `batch_size`.
        epochs : int, default: 1
            The number of epochs.
        first : int, default: 0
            The number of the first epoch.

        Returns
        -------
        Shards
            An argument for the program, which loops over ``shards.minibatches(rank)``. It can be used
            for one run of a program.

        Raises
        ------
        ValueError
            If there are more ranks than rows in a batch.
        SynkhronosError
            If a process of the loader has died.
        """
        ranks = check_int(ranks, "Loader.shards: ranks", 1)
        most = min(self._plan.batch_size, rings.MOST_RANKS)
        if ranks > most:
            raise ValueError(f"Loader.shards: ranks: expected at most {most}, got {ranks}")
        plan = self._plan._replace(
            ranks=ranks,
            epochs=check_extent(epochs, "Loader.shards: epochs"),
            first=check_extent(first, "Loader.shards: first"),
        )
        self._check_usable()
        self._refresh()
        return self._begin(plan)

    def _begin(self, plan: BatchPlan) -> Shards:
        """Let the processes load a plan. None of them still writes for another one afterwards."""
        ring, processes = self._ring, self._processes
        self._report()
        self._consumer = self._following = None
        processes.check()
        self._generation += 1
        processes.send((self._generation, plan))
        ring.wake_processes()
        look, began = self._known.watch("an epoch", lambda: int(ring.begun.argmin())), time.monotonic()
        while (ring.begun < self._generation).any():
            processes.check()
            if not ring.ready(0).wait(rings.CHECK_INTERVAL):
                look(time.monotonic() - began)
        ring.taken[:] = 0
        ring.go[0] = self._generation
        ring.wake_processes()
        return Shards(ring, plan, self._generation, self._known)

    def _as_data(self, consumer: Consumer, slot: int, rows: slice) -> tuple[Any, ...]:
        """Return a batch as `Data`, or as arrays if there is no world."""
        arrays = consumer.arrays(slot, rows)
        if not synk.is_forked():
            return tuple(map(protected, arrays))
        key = slot, rows.stop
        if key not in self._datas or not all(map(_is_usable, self._datas[key])):
            if len(self._datas) >= _MOST_DATAS:
                self._datas.clear()
            self._datas[key] = tuple(map(synk.data, arrays))
        return self._datas[key]

    # Unreadable rows

    @property
    def skipped(self) -> list[str]:
        """The names of the rows that were left out so far because they cannot be read."""
        self._check_usable()
        return list(map(self._source.name, np.flatnonzero(self._ring.unreadable).tolist()))

    def _report(self) -> None:
        """Warn of the rows that were left out since the last time."""
        n_skipped = int(self._ring.n_skipped.sum())
        if n_skipped != self._n_reported:
            self._n_reported = n_skipped
            names = self.skipped
            warn(f"loading: {len(names)} rows cannot be read and are left out: {listed(names)}")

    # Its end

    def close(self) -> None:
        """End the processes and free the memory. It may be called again.

        `Data` of the loader have zeros afterwards.
        """
        if os.getpid() == self._owner:
            self._consumer = self._following = None
            self._datas.clear()
            self._end()

    def _check_usable(self) -> None:
        if os.getpid() != self._owner:
            raise synk.SynkhronosError(
                "loading: this process was forked from the script, to which the loader belongs; create "
                "a Loader here"
            )
        self._ring.check_open()


def _end(processes: BackgroundProcesses, ring: Ring) -> None:
    processes.end()
    ring.close()


def _list_of(transform: Any) -> list[transforms.Transform]:
    given = list(transform) if isinstance(transform, (list, tuple)) else [transform]
    for item in given:
        if item is not None and not callable(item):
            raise TypeError(f"Loader: transform: expected a callable or a list of these, got {item!r}")
    return [item for item in given if item is not None]


def _is_usable(data: synk.Data) -> bool:
    """Whether the world of a `Data` still exists."""
    try:
        return data.ndim == len(data.shape)
    except (ValueError, synk.ClosedError):
        return False
