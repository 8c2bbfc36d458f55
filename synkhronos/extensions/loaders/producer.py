"""What fills the batches: reads rows, transforms and checks them, in a process of the loader."""

from __future__ import annotations

import errno
import functools
import os
import pickle
import traceback
from typing import Any, Callable, Iterable, NamedTuple, Sequence

import numpy as np

from synkhronos._errors import SynkhronosError
from synkhronos._text import listed
from synkhronos.arithmetic.minibatches import BatchPlan
from synkhronos.extensions.loaders.reachable import Generators, seed_generators_without_seed
from synkhronos.extensions.loaders.ring import Field, Ring
from synkhronos.extensions.loaders.sources import Source, UnreadableError
from synkhronos.extensions.loaders.transforms import Draws, Transform, seeds_of

_ALL = slice(None)
_READ, _TRANSFORM, _ORDER = range(3)  # what seeds are for


#: The first message to the process that loads the first row
FIRST_ROW = "first row"
_MOST_ORDERS = 4
_LONGEST = 60.0  # seconds of one wait; a process is woken when there is something to do


class RowsError(ValueError):
    """Rows that a batch cannot have. The message tells all, without a traceback."""


class Expected(NamedTuple):
    """What all rows have in common with the first one.

    Attributes
    ----------
    dtypes : tuple of str
        Of the arrays of the source.
    fields : tuple of Field
        Of the arrays of a batch.
    other : str
        The name of the first row, if it was another one when it was loaded once more.
    """

    dtypes: tuple[str, ...] = ()
    fields: tuple[Field, ...] = ()
    other: str = ""


class Reader:
    """Reads and transforms rows.

    Parameters
    ----------
    source : Source
    transforms : sequence of callable
        Applied to the first array of the source.
    seed : int
    skips : bool
        Whether rows that cannot be read are left out.
    as_whole : bool
        Whether a transform gets all rows of a batch together.

    Attributes
    ----------
    expected : Expected
        Of the first row; without it, any row is accepted.
    """

    def __init__(
        self, source: Source, transforms: list[Transform], seed: int, skips: bool, as_whole: bool = False
    ) -> None:
        self._source, self._transforms = source, transforms
        self._seed, self._skips, self._as_whole = seed, skips, as_whole
        roots = [transform for transform in (source, *transforms) if not _is_ours(transform)]
        self._generators = Generators(roots) if roots else None
        self._epoch = -1
        self.expected = Expected()
        self._now: tuple[str, Any] = "started", ()

    def first_row(self) -> Expected:
        """Load the first row that can be read; return what the others have to have."""
        for row in range(len(self._source)):
            rows = np.array([row])
            arrays, kept, _ = self.read(rows, 0)
            if len(kept):
                dtypes = tuple(array.dtype.str for array in arrays)
                arrays[0] = self.transform(arrays[0], rows, 0, row)
                fields = tuple(Field(array.shape[1:], array.dtype.str) for array in arrays)
                for number, array in enumerate(arrays):
                    is_named = np.dtype(array.dtype.str) == array.dtype
                    got = "Python objects" if array.dtype.hasobject else f"{array.dtype}"
                    if array.dtype.hasobject or not is_named:
                        raise TypeError(
                            f"loading: array {number} of {self._names(rows)}: expected numbers of one "
                            f"dtype, got {got}"
                        )
                self.expected = Expected(dtypes, fields)
                if self._generators is None or self._is_equal(arrays, rows):
                    return self.expected
                return self.expected._replace(other=self._names(rows))
        raise UnreadableError("all rows of the source", "none of them can be read")

    def _is_equal(self, arrays: Sequence[np.ndarray], rows: np.ndarray) -> bool:
        """Whether a row is the same when it is loaded once more."""
        before = [array.tobytes() for array in arrays]
        again, *_ = self.read(rows, 0)
        again[0] = self.transform(again[0], rows, 0, int(rows[0]))
        return before == [array.tobytes() for array in again]

    def order(self, plan: BatchPlan, epoch: int) -> np.ndarray:
        """Return the row numbers of an epoch, in an order that is the same in all processes."""
        self._now = "ordered the rows", ()

        def order(places: slice) -> np.ndarray:
            return plan.order(self._source, epoch)

        return self._called(_ORDER, order, [self._source], np.array([0]), epoch, as_whole=True)[0]

    def _called(
        self, purpose: int, function: Callable[[slice], Any], parts: Sequence[Any], rows: np.ndarray,
        epoch: int, as_whole: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Return the result for all rows, or, if parts of the script draw from generators, for each."""
        if self._generators is None or all(map(_is_ours, parts)):
            return [function(_ALL)]
        seeds = functools.partial(seeds_of, self._seed, epoch, rows, purpose)
        return self._generators.call(purpose, function, seeds, as_whole)

    # Reading

    def read(self, rows: np.ndarray, epoch: int) -> tuple[list[np.ndarray], np.ndarray, list[int]]:
        """Return the arrays of rows, the rows that could be read, and the others."""
        self._begin(epoch)
        try:
            return self._read(rows, epoch), rows, []
        except UnreadableError:
            if not self._skips:
                raise
        parts, lost = [], []
        for row in rows:
            try:
                parts.append([item.copy() for item in self._read(np.array([row]), epoch)])
            except UnreadableError:
                lost.append(int(row))
        kept = np.array([row for row in rows if row not in lost], np.int64)
        return self._joined(parts, kept), kept, lost

    def _begin(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch = epoch
            if self._generators is not None:
                self._generators.find()

    def _read(self, rows: np.ndarray, epoch: int) -> list[np.ndarray]:
        def read(places: slice) -> list[np.ndarray]:
            chosen = rows[places].copy()  # a source may sort them
            found = self._checked(self._source.read(chosen), rows[places])
            return found if places == _ALL else [item.copy() for item in found]

        self._now = "read", rows
        return self._joined(self._called(_READ, read, [self._source], rows, epoch), rows)

    def _checked(self, found: Any, rows: np.ndarray) -> list[np.ndarray]:
        """Return what `Source.read` has returned for rows, as arrays."""
        if hasattr(found, "shape"):
            found = [found]  # an array, instead of a list of one
        if isinstance(found, (str, bytes, dict)) or not hasattr(found, "__iter__"):
            raise TypeError(
                f"loading: {type(self._source).__name__}.read: expected a list of arrays, got {found!r}"
            )
        arrays, dtypes = list(found), self.expected.dtypes
        if not arrays or len(arrays) != (len(dtypes) or len(arrays)):
            raise RowsError(
                f"loading: {type(self._source).__name__}.read: expected "
                f"{len(dtypes) or 'one or several'} arrays as for the first row, got {len(arrays)} for "
                f"{self._names(rows)}"
            )
        for number, item in enumerate(arrays):
            arrays[number] = array = self._plain(item, f"array {number}", rows)
            if array.ndim == 0 or len(array) != len(rows):
                raise RowsError(
                    f"loading: {type(self._source).__name__}.read: expected {len(rows)} rows, got array "
                    f"{number} with the shape {array.shape} for {self._names(rows)}; raise "
                    f"UnreadableError for rows that are missing"
                )
            self._check_dtype(f"array {number}", array, dtypes[number] if dtypes else None, rows)
        return arrays

    def _plain(self, given: Any, label: str, rows: np.ndarray) -> np.ndarray:
        """Return an array without a mask, in the byte order of this machine."""
        masks: Any = np.ma
        if isinstance(given, list) and any(isinstance(item, np.ma.MaskedArray) for item in given):
            given = masks.stack(given)
        if isinstance(given, np.ma.MaskedArray) and masks.is_masked(given):
            masked = masks.getmaskarray(given)
            is_for_rows = masked.ndim and len(masked) == len(rows)
            chosen = rows[masked.reshape(len(rows), -1).any(axis=1)] if is_for_rows else rows
            raise RowsError(
                f"loading: {label} of {self._names(chosen)} has masked values, which a batch cannot "
                f"have; give them a value by filled(), or, with netCDF4, read them as they are by "
                f"set_auto_mask(False)"
            )
        array = np.asarray(given)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))

    def _check_dtype(self, label: str, array: np.ndarray, dtype: str | None, rows: np.ndarray) -> None:
        if dtype is not None and array.dtype != dtype:
            raise RowsError(
                f"loading: expected {label} to have the dtype of the first row, {np.dtype(dtype)}, got "
                f"{array.dtype} for {self._names(rows)}; give all rows one dtype by astype"
            )

    def doing(self) -> str:
        """Return what this process does, for messages."""
        done, rows = self._now
        return f"it {done} {self._names(rows)}" if len(rows) else f"it {done}"

    def _names(self, rows: Iterable[int]) -> str:
        """Return the numbers of rows, and the names that the source has for them."""
        numbers = [int(row) for row in rows]
        try:
            names = [self._source.name(row) for row in numbers]
        except Exception:  # it would hide the error in the message of which this is
            names = [f"row {row}" for row in numbers]
        if all(name == f"row {row}" for row, name in zip(numbers, names)):
            return f"row{'s' if len(numbers) > 1 else ''} {listed(numbers)}"
        return listed(f"row {row} ({name})" for row, name in zip(numbers, names))

    def _joined(self, parts: list[list[np.ndarray]], rows: np.ndarray) -> list[np.ndarray]:
        """Return the arrays of parts that have one row each, or of a single part."""
        if len(parts) <= 1:
            return parts[0] if parts else []
        joined = []
        for number, column in enumerate(zip(*parts)):
            for part, row in zip(column, rows):
                if part.shape != column[0].shape:
                    raise self._other_shape(number, column[0].shape, part.shape, np.array([row]))
            joined.append(np.concatenate(column))
        return joined

    def _other_shape(self, number: int, shape: Any, got: Any, rows: np.ndarray) -> RowsError:
        return RowsError(
            f"loading: expected all rows of array {number} to have the shape of the first, {shape[1:]}, "
            f"got {got[1:]} for {self._names(rows)}"
        )

    # Transforms

    def transform(self, images: np.ndarray, rows: np.ndarray, epoch: int, first: int) -> np.ndarray:
        """Return the images of rows of a batch, the first row of which is `first`, after transforms."""
        if not self._transforms:
            return images
        self._now = "transformed", rows
        is_spoilt = False  # a transform may change the images that it gets

        def change(places: slice) -> list[np.ndarray]:
            nonlocal images, is_spoilt
            if is_spoilt:
                images, is_spoilt = self._read(rows, epoch)[0], False
            is_spoilt = places == _ALL
            is_own = is_spoilt and (images.flags.owndata or self._generators is None)
            given = images if is_own else images[places].copy()
            draws = Draws(self._seed, epoch, rows[places], first)
            changed = self._apply(given, draws, rows[places])
            return [changed if is_spoilt else changed.copy()]

        chosen = np.array([first]) if self._as_whole else rows
        changed = self._called(_TRANSFORM, change, self._transforms, chosen, epoch, self._as_whole)
        return self._joined(changed, rows)[0]

    def _apply(self, images: np.ndarray, draws: Draws, rows: np.ndarray) -> np.ndarray:
        for transform in self._transforms:
            result = self._plain(transform(images, draws), f"the result of {transform!r}", rows)
            if result.ndim == 0 or len(result) != len(images):
                raise RowsError(
                    f"loading: expected {transform!r} to return {len(images)} images, got an array of "
                    f"{result.shape}"
                )
            images = result
        return images

    def check(self, arrays: Sequence[np.ndarray], rows: np.ndarray) -> None:
        """Raise RowsError if rows of a batch differ from the first row in shape or dtype."""
        for number, (array, field) in enumerate(zip(arrays, self.expected.fields)):
            if array.shape[1:] != field.shape:
                raise self._other_shape(number, (0, *field.shape), array.shape, rows)
            self._check_dtype(f"array {number} of a batch", array, field.dtype, rows)


def _is_ours(item: Any) -> bool:
    """Whether a source or a transform is one of this package, which draws only from `Draws`."""
    return type(item).__module__.startswith("synkhronos.extensions.loaders.")


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
        self._bell = ring.free[number]
        self._order: Callable[[int], np.ndarray]  # of an epoch; those in which the ranks are, are kept

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

    def _produce(self, generation: int, plan: BatchPlan, connection: Any) -> None:
        """Load batches until there are no more, or something else is asked for."""
        ring, number = self._ring, self._number
        self._order = functools.lru_cache(_MOST_ORDERS)(functools.partial(self._reader.order, plan))
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

    def _load(self, plan: BatchPlan, number: int, rank: int) -> None:
        """Write this process's part of a batch to its slot."""
        places = plan.part(number, rank, self._number)
        slot = number % self._ring.layout.slots
        count = 0
        if len(places):
            epoch, batch = plan.locate(number)
            rows = self._order(epoch)[batch * plan.batch_size :][: plan.batch_size]
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
