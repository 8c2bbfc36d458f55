"""The center: a copy of the parameters that belongs to no rank. Ranks exchange their parameters with it.

Each rank trains at its own pace and exchanges its variables with the center from time to time, as in
asynchronous and elastic training. An exchange visits the stripes of the center one after the other. Each
stripe changes atomically. The ranks start at different stripes and skip busy stripes, so several ranks
can exchange at the same time. While a rank goes from stripe to stripe, others may change the center.

The items of all arrays with one dtype follow each other, in C order. They are divided into stripes, and
stripes into pieces. A piece is within one array, and short enough that the operands of an exchange stay
in the cache. A `ProgramLock` is the only stripe of a center without contents.
"""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import time
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import numpy as np

from synkhronos import _html
from synkhronos._checks import check_number
from synkhronos._typing import AnyArray, SharedVariable, SharedVariables, Values
from synkhronos.engines.base import Engine
from synkhronos.services.stripes import RemoteStripes, Stripes
from synkhronos.world.call_lock import takes_call_lock

_STRIPE_BYTES = 1 << 20
_PIECE_BYTES = 1 << 18
_ALIGNMENT = 64
_LOCK_BYTES = 64  # of a stripe that holds nothing


class Center(_html.Shown):
    """A rank's access to the center of some shared variables. `Rank.center` returns it.

    The first rank that asks for a center gives it the values of its variables. The variables of every
    other rank are set to the center's values; the same applies to a rank that replaces a dead one.
    """

    def __init__(
        self,
        open_stripes: Callable[..., Stripes | RemoteStripes],
        engine: Engine,
        shareds: SharedVariables,
        name: str,
        pause: Callable[[], None],
        enter: Callable[[], None] = lambda: None,
        turn: contextlib.AbstractContextManager[None] | None = None,
    ) -> None:
        """Open the center, or create it.

        Parameters
        ----------
        open_stripes : callable
            Creates the stripes: `Stripes` for some named memory, or `RemoteStripes`, with the first
            arguments bound.
        engine : Engine
            This rank's engine.
        shareds : shared variable, or list of shared variables
            Numeric variables, the same on every rank.
        name : str
            Each name denotes a separate center.
        pause : callable
            Called when other ranks are using all remaining stripes. It sleeps briefly, and raises if the
            program must end; then the remaining stripes are not exchanged.
        enter : callable
            Called at the beginning of each method. It raises if the program must end.
        turn : context manager
            Entered for the whole of each method.
        """
        self._enter, self.call_lock = enter, turn or contextlib.nullcontext()
        if not isinstance(name, str) or not name:
            raise TypeError(f"center: expected a name, a string that is not empty, got {name!r}")
        self.name, self._engine = name, engine
        self._is_single = not isinstance(shareds, (list, tuple))
        given: Any = shareds
        self._shareds: list[SharedVariable] = [given] if self._is_single else list(given)
        self._check_variables()
        self._buffers: dict[int, AnyArray] = {}  # for variables that are not used in place
        layout = Layout(self._shapes, self._dtypes)
        self._contents = layout.stripes
        # The changes of one piece; half-precision changes are computed in single precision.
        self._scratch = {dtype: np.empty(layout.largest[dtype], _wide(dtype)) for dtype in layout.totals}
        self._totals = layout.totals
        self._base: dict[np.dtype[Any], AnyArray] | None = None
        arrays, _ = self._open()
        labels = [_label(shared) for shared in self._shareds]
        self._pause = pause
        self._stripes = open_stripes(
            f"center {name}", layout.encode(),
            lambda there: layout.check(there, f"center {name!r}", labels),
            len(layout.stripes), layout.nbytes, lambda *place: self._fill(arrays, *place), pause,
        )  # fmt: skip
        self._pull()

    def _shown(self) -> _html.Facts:
        rows: list[tuple[object, ...]] = [
            (shared.name or shared, f"{dtype} {shape}")
            for shared, dtype, shape in zip(self._shareds, self._dtypes, self._shapes)
        ]
        return f"synkhronos.Center {self.name} of {len(rows)} variables", rows

    # The variables

    def _check_variables(self) -> None:
        engine = self._engine
        if not self._shareds:
            raise ValueError("center: expected at least one shared variable, got an empty list")
        for shared in self._shareds:
            if not engine.is_shared(shared):
                raise TypeError(
                    f"center: expected shared variables, got {shared!r} of type {type(shared).__name__}"
                )
            dtype = getattr(engine.storage(shared), "dtype", None)
            if dtype is None or np.dtype(dtype).kind not in "iufc":
                raise TypeError(
                    f"center: {_label(shared)} has the type {dtype or type(engine.storage(shared))}; a "
                    f"center has variables of integers, floats or complex numbers only"
                )
        if len({id(shared) for shared in self._shareds}) < len(self._shareds):
            raise ValueError("center: a shared variable is in the list twice")
        storages = [engine.storage(shared) for shared in self._shareds]
        self._shapes = [tuple(storage.shape) for storage in storages]
        self._dtypes = [np.dtype(storage.dtype) for storage in storages]

    def _open(self) -> tuple[list[AnyArray], list[int]]:
        """Return a flat array for each variable, and the variables that must be written afterwards.

        An update may replace the storage at any time, so each operation looks it up again.
        """
        arrays, staged = [], []
        for number, shared in enumerate(self._shareds):
            storage = self._engine.storage(shared)
            if (tuple(storage.shape), storage.dtype) != (self._shapes[number], self._dtypes[number]):
                raise ValueError(
                    f"center {self.name!r}: {_label(shared)} has got the shape {tuple(storage.shape)} "
                    f"and the dtype {storage.dtype}; the center has {self._shapes[number]} and "
                    f"{self._dtypes[number]}; set a value of this shape, or make another center"
                )
            if isinstance(storage, np.ndarray) and storage.flags.carray:
                arrays.append(storage.reshape(-1))
                continue
            if number not in self._buffers:
                self._buffers[number] = np.empty(self._shapes[number], self._dtypes[number])
            self._engine.read(storage, self._buffers[number])
            staged.append(number)
            arrays.append(self._buffers[number].reshape(-1))
        return arrays, staged

    @contextlib.contextmanager
    def _opened(self, writes: bool = True) -> Iterator[list[AnyArray]]:
        """Return a flat array for each variable, and write to the variables after the block."""
        arrays, staged = self._open()
        try:
            yield arrays
        finally:
            for number in staged if writes else ():
                self._engine.write(self._shareds[number], self._buffers[number])

    def _parts(
        self, arrays: Sequence[AnyArray], number: int, *memories: AnyArray
    ) -> Iterator[tuple[AnyArray, AnyArray, slice, list[AnyArray]]]:
        """Yield the pieces of a stripe.

        Each has the items of one of the arrays, room for their changes, their place among all items of
        their dtype, and their part of some memories of the stripe.
        """
        dtype, pieces = self._contents[number]
        views = [
            memory[: memory.size // dtype.itemsize * dtype.itemsize].view(dtype) for memory in memories
        ]
        for piece in pieces:
            own = arrays[piece.array][piece.items]
            room = self._scratch[dtype][: own.size]
            yield own, room, piece.flat, [view[piece.places] for view in views]

    # Operations

    @takes_call_lock
    def pull(self, keep_changes: bool = False) -> None:
        """Set this rank's variables to the values of the center, and remember the values for `push`.

        Parameters
        ----------
        keep_changes : bool, default: False
            Whether a change that has not been pushed is part of the next `push`. Otherwise it is lost.
        """
        self._pull(keep_changes)

    def _pull(self, keep_changes: bool = False) -> None:
        self._enter()
        base = self._known_base("pull(keep_changes=True)") if keep_changes else self._bases()
        with self._opened() as arrays:

            def work(number: int, memory: AnyArray) -> None:
                for own, change, flat, [center] in self._parts(arrays, number, memory):
                    former = base[own.dtype][flat]
                    if keep_changes:
                        np.subtract(own, former, change, dtype=change.dtype)
                        np.subtract(center, change, former, casting="same_kind")
                    else:
                        np.copyto(former, center)
                    np.copyto(own, center)

            self._stripes.read(work)

    @takes_call_lock
    def push(self, scale: float = 1, reset: bool = False) -> None:
        """Add `scale` times the change of this rank's variables to the center.

        The change is measured since the last `pull` or `push`, or since the center was created. The same
        change is never added twice, and the variables remain as they are, unless `reset` is true.
        Integers are added exactly, modulo their range.

        Parameters
        ----------
        scale : float
            An int if there are integer variables.
        reset : bool, default: False
            Whether to set this rank's variables to zero afterwards, for a rank that adds up. The next
            change is then measured from zero.
        """
        self._enter()
        factors, base = self._factors(scale), self._known_base("push()")
        with self._opened(writes=reset) as arrays:

            def work(number: int, memory: AnyArray, new: AnyArray) -> None:
                for own, change, flat, [center, changed] in self._parts(arrays, number, memory, new):
                    former = base[own.dtype][flat]
                    np.subtract(own, former, change, dtype=change.dtype)
                    if scale != 1:
                        np.multiply(change, factors[own.dtype], change)
                    np.add(center, change, changed)
                    if reset:
                        own[...] = 0
                    np.copyto(former, own)

            self._stripes.change(work)

    @takes_call_lock
    def elastic(self, alpha: float) -> None:
        r"""Move this rank's variables and the center towards each other.

        With :math:`d = \alpha (x_i - \tilde{x})`, where :math:`x_i` are the variables of rank
        :math:`i` and :math:`\tilde{x}` is the center,

        .. math:: x_i \leftarrow x_i - d, \qquad \tilde{x} \leftarrow \tilde{x} + d

        as in elastic averaging SGD [1]_. Half-precision values are computed in single precision. Call
        `pull` before the next `push`.

        Parameters
        ----------
        alpha : float
            In (0, 1].

        References
        ----------
        .. [1] Zhang, Choromanska, LeCun: Deep learning with elastic averaging SGD, 2015, equations 2
           and 3 in their asynchronous form, algorithm 1.
        """
        self._enter()
        if not 0 < check_number(alpha, "elastic", "a number as alpha") <= 1:
            raise ValueError(f"elastic: expected alpha in (0, 1], got {alpha}")
        for shared, dtype in zip(self._shareds, self._dtypes):
            if dtype.kind != "f":
                raise TypeError(
                    f"center {self.name!r}: elastic() is for floats, and {_label(shared)} has the dtype "
                    f"{dtype}; make a center of the others"
                )
        self._base = None
        with self._opened() as arrays:

            def work(number: int, memory: AnyArray, new: AnyArray) -> None:
                for own, change, _, [center, changed] in self._parts(arrays, number, memory, new):
                    np.subtract(own, center, change, dtype=change.dtype)
                    np.multiply(change, change.dtype.type(alpha), change)
                    np.subtract(own, change, own)
                    np.add(center, change, changed)

            self._stripes.change(work)

    @takes_call_lock
    def update(self, f: Callable[[Any, Any], Any]) -> None:
        """Change the center and this rank's variables by a function, which no other rank interrupts.

        While the function runs, all other exchanges with the center wait. Those that go through the
        center in parts, such as `push`, may wait between two parts, and no change is lost. If the
        function raises, the center remains as it was. If this rank dies while it writes the center, each
        part has its former contents or the new ones.

        Parameters
        ----------
        f : callable
            ``f(center_values, own_values)`` changes arrays in place: lists of arrays, or one array each
            if one variable was given.

        Raises
        ------
        TypeError
            If the function returns a value instead of changing the arrays.
        """
        self._enter()
        if not callable(f):
            raise TypeError(f"update: expected a function of the center's and own values, got {f!r}")
        self._base = None
        with self._opened() as arrays:
            own = [array.reshape(shape) for array, shape in zip(arrays, self._shapes)]
            try:
                while not self._stripes.try_hold():
                    self._pause()
                center, flat = self._copy()
                given = (center[0], own[0]) if self._is_single else (center, own)
                found = f(*given)
                if found is not None and found is not given[0]:  # NumPy's functions return their `out`
                    raise TypeError(
                        f"update: expected a function that changes the arrays in place, such as "
                        f"center[...] += own, and returns None, got {found!r} from {f!r}"
                    )
                self._stripes.change(lambda number, _, new: self._fill(flat, number, new))
            finally:
                self._stripes.let_go()

    @takes_call_lock
    def value(self) -> Any:
        """Return a copy of the center: a list of arrays, or an array if one variable was given."""
        self._enter()
        arrays, _ = self._copy()
        return arrays[0] if self._is_single else arrays

    def _copy(self) -> tuple[list[AnyArray], list[AnyArray]]:
        """Return a copy of the center, and flat views of it."""
        arrays = [np.empty(*shape) for shape in zip(self._shapes, self._dtypes)]
        flat = [array.reshape(-1) for array in arrays]

        def work(number: int, memory: AnyArray) -> None:
            for own, _, _, [center] in self._parts(flat, number, memory):
                np.copyto(own, center)

        self._stripes.read(work)
        return arrays, flat

    @takes_call_lock
    def assign(self, values: Values) -> None:
        """Set the center, for example to continue from a checkpoint. The ranks' variables do not change.

        Parameters
        ----------
        values : list of arrays, or an array if one variable was given
            The values of the variables.
        """
        self._enter()
        flat = self._check_values([values] if self._is_single else values)
        self._stripes.change(lambda number, _, new: self._fill(flat, number, new))

    # Details

    def _fill(self, arrays: Sequence[AnyArray], number: int, memory: AnyArray) -> None:
        for own, _, _, [center] in self._parts(arrays, number, memory):
            np.copyto(center, own)

    def _bases(self) -> dict[np.dtype[Any], AnyArray]:
        if self._base is None:
            self._base = {dtype: np.empty(total, dtype) for dtype, total in self._totals.items()}
        return self._base

    def _known_base(self, method: str) -> dict[np.dtype[Any], AnyArray]:
        if self._base is None:
            raise RuntimeError(
                f"center {self.name!r}: {method} after elastic() or update(): it is not known which "
                f"part of a change the center has already; call pull() before, or use one of them only"
            )
        return self._base

    def _factors(self, scale: float) -> dict[np.dtype[Any], Any]:
        """Return the scale of a push for each dtype, or raise an error if it is wrong."""
        if not math.isfinite(check_number(scale, "push", "a number as scale")):
            raise ValueError(f"push: expected a finite scale, got {scale}")
        factors = {}
        for shared, dtype in zip(self._shareds, self._dtypes):
            if dtype.kind in "iu":
                if not isinstance(scale, numbers.Integral):
                    raise TypeError(
                        f"push: the scale must be an int, got {scale!r}, because {_label(shared)} has "
                        f"the dtype {dtype}; make a center of the others"
                    )
                bits = 8 * dtype.itemsize  # modulo the range, like all integer arithmetic
                unsigned = np.array([int(scale) % (1 << bits)], f"u{dtype.itemsize}")
                factors[dtype] = unsigned.view(dtype)[0]
            else:
                factors[dtype] = self._scratch[dtype].dtype.type(scale)
        return factors

    def _check_values(self, values: Any) -> list[AnyArray]:
        if not isinstance(values, (list, tuple)) or len(values) != len(self._shareds):
            found = f"{len(values)}" if isinstance(values, (list, tuple)) else type(values).__name__
            raise ValueError(
                f"assign: expected a list of {len(self._shareds)} arrays, one for each variable, got "
                f"{found}"
            )
        flat = []
        for value, shared, shape, dtype in zip(values, self._shareds, self._shapes, self._dtypes):
            value = np.asarray(value)
            if value.shape != shape or not np.can_cast(value.dtype, dtype, "same_kind"):
                raise ValueError(
                    f"assign: expected the shape {shape} and the dtype {dtype} for {_label(shared)}, "
                    f"got {value.shape} and {value.dtype}"
                )
            flat.append(np.ascontiguousarray(value, dtype).reshape(-1))
        return flat


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.promote_types(dtype, np.float32) if dtype.kind == "f" else dtype


def _label(shared: SharedVariable) -> str:
    return f"the variable {getattr(shared, 'name', None) or repr(shared)}"


# Where the items are in the stripes


class Piece(NamedTuple):
    """Items of an array that are in one stripe."""

    array: int
    items: slice  # of the array
    places: slice  # of the stripe's items
    flat: slice  # among the items of all arrays with this dtype


class StripeContents(NamedTuple):
    """The contents of a stripe."""

    dtype: np.dtype[Any]
    pieces: list[Piece]


class Layout:
    """The division of arrays into stripes.

    Parameters
    ----------
    shapes : list of tuple of int
        The shapes of the arrays.
    dtypes : list of numpy.dtype
        Their dtypes.

    Attributes
    ----------
    stripes : list of StripeContents
        The contents of each stripe.
    nbytes : int
        The size of the largest stripe.
    totals, largest : dict
        For each dtype, the number of all items, and the number of items in the largest piece.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> None:
        self.shapes, self.dtypes = list(shapes), list(dtypes)
        self.stripes: list[StripeContents] = []
        self.totals: dict[np.dtype[Any], int] = {}
        self.largest: dict[np.dtype[Any], int] = {}
        self.nbytes = _ALIGNMENT
        for dtype in dict.fromkeys(dtypes):
            items, stop = _STRIPE_BYTES // dtype.itemsize, 0
            for number, shape in enumerate(shapes):
                if dtypes[number] == dtype:
                    start, stop = stop, stop + math.prod(shape)
                    self._cut(number, dtype, items, start, stop)
            self.totals[dtype] = stop
            self.largest[dtype] = min(stop, _PIECE_BYTES // dtype.itemsize)
            nbytes = min(stop, items) * dtype.itemsize
            self.nbytes = max(self.nbytes, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)

    def _cut(self, number: int, dtype: np.dtype[Any], items: int, start: int, stop: int) -> None:
        """Append the pieces of an array, whose items are items `start` to `stop` of its dtype."""
        first = start
        while start < stop:
            low = start % items
            if low == 0:
                self.stripes.append(StripeContents(dtype, []))
            end = min(stop, start - low + items, start + _PIECE_BYTES // dtype.itemsize)
            own, places = slice(start - first, end - first), slice(low, low + end - start)
            self.stripes[-1].pieces.append(Piece(number, own, places, slice(start, end)))
            start = end

    def encode(self) -> bytes:
        """Return the shapes and dtypes as bytes."""
        pairs = [[dtype.str, list(shape)] for shape, dtype in zip(self.shapes, self.dtypes)]
        return json.dumps(pairs).encode()

    def check(self, encoded: bytes, what: str, labels: Sequence[str]) -> None:
        """Raise if `encoded` describes other arrays; `what` and `labels` name them in the message."""
        there = [(tuple(shape), np.dtype(dtype)) for dtype, shape in json.loads(encoded)]
        if len(there) != len(labels):
            raise ValueError(
                f"{what} has {len(there)} variables, this rank asked for one with {len(labels)}; give "
                f"the same ones on every rank, or another name"
            )
        for label, ours, others in zip(labels, zip(self.shapes, self.dtypes), there):
            if ours != others:
                raise ValueError(
                    f"{what}: {label} has the shape {ours[0]} and the dtype {ours[1]}, and the center "
                    f"has {others[0]} and {others[1]} in its place; give the same variables in the same "
                    f"order on every rank, or another name"
                )


# A lock


class ProgramLock:
    r"""A lock between ranks. `Rank.lock` returns it.

    Parameters
    ----------
    open_stripes : callable
        Creates the stripes, as for `Center`.
    name : str
    pause : callable
        Called while another rank has the lock.
    enter : callable
        Called before each wait; it raises if the program must end.
    turn : context manager
        Entered while this rank looks at the lock, but not while it waits.

    Examples
    --------
    >>> import synkhronos as synk
    >>> synk.fork(2, use_gpu=False)
    2
    >>> def program(rank, path):
    ...     with rank.lock():
    ...         with open(path, "a") as file:
    ...             print("rank", rank.rank, "of", rank.size, file=file)
    >>> import os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = synk.spmd(program, os.path.join(folder, "log"))
    ...     sorted(open(os.path.join(folder, "log")))
    ['rank 0 of 2\n', 'rank 1 of 2\n']
    >>> synk.close()
    """

    def __init__(
        self,
        open_stripes: Callable[..., Any],
        name: str,
        pause: Callable[[], None],
        enter: Callable[[], None],
        turn: contextlib.AbstractContextManager[Any],
    ) -> None:
        self._pause, self._enter, self._turn, self._name = pause, enter, turn, name
        # Its layout is always the same, and it has no contents.
        nothing: Callable[..., None] = lambda *args: None  # noqa: E731
        self._stripes = open_stripes(f"lock {name}", b"lock", nothing, 1, _LOCK_BYTES, nothing, pause)
        self._is_held = False

    def __repr__(self) -> str:
        state = "held by this rank" if self._is_held else "not held by this rank"
        return f"<synkhronos.ProgramLock {self._name}, {state}>"

    def acquire(self, timeout: float | None = None) -> bool:
        """Wait until no rank has the lock, and take it.

        Parameters
        ----------
        timeout : float, optional
            The longest time to wait, in seconds. By default there is no limit.

        Returns
        -------
        bool
            Whether this rank has the lock; False after the time limit.

        Raises
        ------
        RuntimeError
            If this rank has it already.
        """
        self._enter()
        if self._is_held:
            raise RuntimeError(
                f"rank.lock: this rank has the lock {self._name!r} already; release it before, or use "
                f"a lock of another name"
            )
        until = None if timeout is None else time.monotonic() + timeout
        while not self._try():
            if until is not None and time.monotonic() >= until:
                return False
            self._pause()
        return True

    def _try(self) -> bool:
        with self._turn:
            self._is_held = self._stripes.try_hold()
        return self._is_held

    def release(self) -> None:
        """Give the lock to another rank.

        Raises
        ------
        RuntimeError
            If this rank does not have it.
        """
        if not self._is_held:
            raise RuntimeError(f"rank.lock: this rank does not have the lock {self._name!r}")
        with self._turn:
            self._is_held = False
            self._stripes.let_go()

    def __enter__(self) -> ProgramLock:
        self.acquire()
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()
