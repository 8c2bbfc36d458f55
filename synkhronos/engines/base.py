"""The interface of engines: compile and call graphs, and access the storage of shared variables.

The rest of the package uses graphs only through these methods. An engine knows nothing about processes.
``tests/specifications`` has the specification, against which ``tests/checks`` checks every engine.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import abc
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Iterable,
    List,
    Mapping,
    NamedTuple,
    Protocol,
    Sequence,
)

import numpy as np

from synkhronos._typing import Array, Buffer, Compiled, Rows, SharedVariable, Variable
from synkhronos.arithmetic.operations import NUMPY, Arithmetic
from synkhronos.arithmetic.partition import Buckets, take_rows
from synkhronos.arithmetic.streams import GENERATORS, jump_generator, state_from_array, state_to_array
from synkhronos.host.compiler import TITLES

if TYPE_CHECKING:  # the types of arguments of engines
    Variables = Sequence[Variable]
    SharedVariables = Sequence[SharedVariable]
    Updates = Sequence[tuple[SharedVariable, Variable]]
    Givens = Sequence[tuple[Variable, Any]]
    AnyGivens = Mapping[Variable, Any] | Iterable[tuple[Variable, Any]] | None
    Swap = Mapping[SharedVariable, SharedVariable]
    RowAxes = Mapping[Variable, int]  # the axis of the rows of each variable
    # For each argument, the axis along which its rows are split, None, or `BOUND` for those of `Windows`
    Axes = Sequence[int | str | None]


class TensorType(NamedTuple):
    """The type of a variable, known before it has a value: a tensor, or another value of an input.

    Attributes
    ----------
    dtype, ndim
        For a ``"csr"`` or ``"csc"`` matrix, they describe the matrix; an ``"object"`` has no dtype and
        no dimensions.
    extents : tuple
        For each axis, the extent that the type fixes, or None.
    format : {"dense", "csr", "csc", "object"}
    """

    dtype: Any
    ndim: int
    extents: tuple[int | None, ...]
    format: str = "dense"


def dims_of(variable: Variable) -> tuple[str, ...]:
    """Return the names of the dimensions of a variable, if they have names, as of PyTensor's xtensor."""
    return getattr(getattr(variable, "type", None), "dims", ())


class Definition(NamedTuple):
    """What a function is compiled from.

    Attributes
    ----------
    inputs, outputs : list of variables
        The arguments of the function, and its results.
    on_host : list of bool
        Whether each output must be a NumPy array; other outputs may stay where they are computed.
    updates : list of (shared, variable)
        Shared variables and their new values.
    givens : mapping or pairs
        Replacements of variables, as the compiler takes them.
    sliceable : list of shared variables
        For each, the compiled function takes an additional argument after `inputs`: the rows to use
        instead of the value of the shared variable.
    """

    inputs: Variables
    outputs: Variables
    on_host: Sequence[bool]
    updates: Updates = ()
    givens: AnyGivens = None
    sliceable: SharedVariables = ()


class WrappedInput(NamedTuple):
    """A variable in the compiler's own class for inputs with options."""

    variable: Variable
    name: str | None
    value: Any  # used if a call gives none
    allow_downcast: bool


class Sources(NamedTuple):
    """The inputs from which a value of a compiled function is computed.

    Attributes
    ----------
    shareds : frozenset of shared variables
        The shared variables.
    own_shareds : frozenset of shared variables
        The same without variables that only enter collectives whose result is the same on every rank.
    has_own_rows : bool
        Whether it is computed from arguments that are divided, other than by such collectives.
    """

    shareds: frozenset[SharedVariable]
    own_shareds: frozenset[SharedVariable]
    has_own_rows: bool


class Analysis(NamedTuple):
    """Properties of the results of a compiled function, as far as its graph shows them.

    Attributes
    ----------
    outputs : list of Sources
    updates : dict
        The `Sources` of the new value of each shared variable that is updated.
    accumulated : frozenset of shared variables
        Updated variables whose old value is only added to, or scaled, elementwise.
    extents : list of str or None
        How each output depends on the number of rows: `SUM`, `PARTLY_SUM`, `ROWS`, or None if that is
        not known, or if it is neither.
    loss_ops : list of frozenset of str
        For each output, the `loss_op` of the collectives that gradients pass from which it is computed.
    """

    outputs: list[Sources]
    updates: dict[SharedVariable, Sources]
    accumulated: frozenset[SharedVariable]
    extents: list[str | None]
    loss_ops: list[frozenset[str]]


class Causes(NamedTuple):
    """Why a result of all rows may differ from the results of parts of the rows, if they are combined.

    The causes are names in `synkhronos.engines.analysis.difference_causes`.

    Attributes
    ----------
    possible : frozenset of str
        What to look at if it differs.
    certain : frozenset of str
        Those of them for which it differs for most rows, although it may agree for some.
    """

    possible: frozenset[str] = frozenset()
    certain: frozenset[str] = frozenset()


class Windows(NamedTuple):
    """Givens in which each rank has its part of the rows that an index selects.

    Attributes
    ----------
    givens : list of pairs
        The givens, with parts in place of the new values that are divided.
    bounds : list of variables
        Two int64 scalars: the first row of the part, and the row after the last. Empty if nothing is
        divided.
    lengths : list of variables
        The number of all rows, for each new value that is divided.
    divided : dict
        The variables that are replaced by these values, and the axis of the rows of each.
    whole : list of variables
        The other variables whose new values depend on an index.
    """

    givens: Any
    bounds: list[Variable]
    lengths: list[Variable]
    divided: dict[Variable, int]
    whole: list[Variable]


_FAST = "synkhronos.engines.theano.kernels"

#: If each row occurs twice, an output is twice as large; or a part of it is; or it has twice the rows.
SUM, PARTLY_SUM, ROWS = "sum", "partly sum", "rows"

#: Why a shared variable has no value, and what to do
NO_VALUE = (
    "an operation returned None for its update; have it return an array, and set the variable with "
    "synk.broadcast(variable, value)"
)


def name_of(variable: Variable) -> str:
    """Return how messages refer to a variable."""
    return variable.name or str(variable)


#: In place of the axis of an argument: the argument is a bound of the rows of `Windows`.
BOUND = "bound"


class HardcodedRowCount(NamedTuple):
    """A number in a graph that may be a number of rows.

    Attributes
    ----------
    number : int
        The number.
    text : str
        The operation that contains it.
    regroups : bool
        Whether it groups the rows, so that results differ if a rank has only a part of them.
    is_product : bool
        Whether it may be a multiple of a number of rows.
    cuts : bool
        Whether only as many rows are used, of which each rank would use as many of its own.
    """

    number: int
    text: str
    regroups: bool = False
    is_product: bool = False
    cuts: bool = False


class Peers(Protocol):
    """The ranks that call a function together, as the collectives in its graph see them.

    The ranks call the same methods in the same order, which the numbers confirm. Arrays are of the
    engine's types. They are not changed, and results do not share their memory.

    Attributes
    ----------
    is_master : bool
        Whether this is the master.
    """

    is_master: bool

    def all_reduce(self, array: Array, op: str, number: int | None) -> Array:
        """Return the reduction of the arrays of all ranks.

        Parameters
        ----------
        op : str
            An operation of `synkhronos.arithmetic.operations`; or one of two operations that use the
            numbers of rows of the ranks, n_r, and of this rank, n_s: ``"weighted_sum"``, the sum of the
            arrays times ``n_r / n_s``, and ``"share_of_sum"``, the sum of the arrays, times n_s over the
            sum of n_r.
        number : int or None
            The number of the collective in the function.
        """

    def all_gather(self, array: Array, number: int | None) -> Array:
        """Return the arrays of all ranks, concatenated along axis 0."""

    def own_rows(self, array: Array, op: str, n_rows: int, number: int | None) -> Array:
        """Return `n_rows` rows of a reduction, after the rows of the ranks before this one."""

    def broadcast(self, array: Array, number: int | None) -> Array:
        """Return the array of the master."""

    def zeros_like(self, array: Array) -> Array:
        """Return zeros in the shape and type of an array."""

    def start(self, array: Array, buckets: Buckets, number: int) -> None:
        """If possible, reduce a bucket of a vector while the function computes the other buckets."""


class Engine(ABC):
    """A graph compiler.

    A *variable*, a *shared* variable and a *compiled* function are objects of the compiler. An *array*
    is a NumPy array or an array of the engine's own type, which has ``shape``, ``dtype``, ``copy()`` and
    slicing like NumPy's. The methods that are not abstract are correct for NumPy arrays.

    Attributes
    ----------
    arithmetic : Arithmetic
        The arithmetic on its arrays.
    survives_fork : bool
        Whether compiled functions can be used in a forked process, which then inherits them.
    in_use : str
        For error messages if `survives_fork` is False: what this process uses once it has a device.
    """

    arithmetic: Arithmetic = NUMPY
    survives_fork: bool
    reducers: dict[type, Callable[[Any], Any]] = {}  # pickle further objects in graphs, by type
    in_use = "a GPU"

    @abstractmethod
    def setup(self, device: str, announce: bool = True) -> None:
        """Bind this process to a device. If `announce`, the compiler may print its name."""

    def use_kernels(self, wanted: bool) -> None:  # noqa: B027
        """Compile functions with this library's operations from now on, or without them."""

    def before_fork(self, forks_all: bool = True) -> None:  # noqa: B027
        """Prepare for a fork; raise if forked processes could not use the inherited state.

        Parameters
        ----------
        forks_all : bool
            Whether all workers are forked from this process, and so inherit its state.
        """

    def enter_thread(self) -> None:  # noqa: B027
        """Prepare this thread to use the device. It is called before every command."""

    # Graphs

    @abstractmethod
    def type_of(self, variable: Variable) -> TensorType:
        """Return the `TensorType` of a variable; raise ``TypeError`` if it is not a tensor variable."""

    def input_type_of(self, variable: Variable) -> TensorType:
        """Return the `TensorType` of a variable; raise ``TypeError`` if it cannot be an input."""
        return self.type_of(variable)

    def unwrap_input(self, given: Any) -> WrappedInput | None:
        """Return the contents of the compiler's class for inputs with options; None for the rest."""
        return None

    def unwrap_output(self, given: Any) -> Variable:
        """Return the variable of an output in the compiler's class for options; else the object."""
        return given

    def is_tensor(self, variable: Variable) -> bool:
        """Whether this is a tensor variable, which may be shared."""
        try:
            self.type_of(variable)
        except TypeError:
            return False
        return True

    def pieces_of(self, shared: SharedVariable) -> tuple[tuple[int, ...], ...] | None:
        """Return the shapes of the arrays that a vector holds, if it was made to hold several."""
        return None

    def buckets_of(self, shared: SharedVariable) -> Buckets | None:
        """Return the buckets of a vector, if it is filled and reduced in buckets, or None."""
        return None

    @abstractmethod
    def is_shared(self, variable: Variable) -> bool:
        """Whether this is a shared variable, of any type."""

    @abstractmethod
    def is_function(self, item: Any) -> bool:
        """Whether this is a function that the compiler has compiled."""

    @abstractmethod
    def build(self, definition: Definition, **kwargs: Any) -> Compiled:
        """Compile a function; `kwargs` are further options of the compiler."""

    def free_rows(
        self,
        outputs: Variables,
        updates: Updates,
        givens: Givens,
        rows: RowAxes,
        no_default_updates: Any,
    ) -> tuple[Any, Any, Any, list[HardcodedRowCount]]:
        """Replace numbers of rows in a graph that a script gives as constants.

        An engine that does not recognize such numbers replaces none.

        Parameters
        ----------
        outputs, updates, givens
            As of a `Definition`.
        rows : dict
            The variables whose rows are divided among the ranks, and the axis of the rows.
        no_default_updates : bool or list of shared variables
            An option of the compiler.

        Returns
        -------
        outputs, updates, givens
        fixed : list of HardcodedRowCount
            The numbers that are left.
        """
        return outputs, updates, givens, []

    def cut_windows(self, givens: Givens, index: Variables, divided: RowAxes) -> Windows:
        """Take part of the rows that an index selects in the new values of `givens`.

        An engine that has no givens, or does not recognize such rows, divides nothing.

        Parameters
        ----------
        givens : list of pairs
            Variables and their replacements.
        index : list of variables
            The inputs that may select rows, of which every rank has the whole value.
        divided : dict
            The axis of the rows of each variable of which the ranks have different rows.

        Raises
        ------
        ValueError
            If rows are selected in a way in which they cannot be divided.
        """
        return Windows(givens, [], [], {}, [])

    def has_collectives(self, compiled: Compiled) -> bool:
        """Whether a function contains collectives.

        Its last argument is then the `Peers`, or None to compute alone. Alone, collectives return their
        inputs.
        """
        return False

    def uses_master(self, compiled: Compiled) -> bool:
        """Whether a function contains collectives that take the master's value."""
        return False

    def are_computed_from(self, results: Sequence[Any], variables: Variables) -> list[bool]:
        """Whether each result is computed from one of the variables, which are in `Windows`."""
        return [False] * len(results)

    @abstractmethod
    def shareds(self, compiled: Compiled) -> list[SharedVariable]:
        """Return the shared variables that a compiled function reads or updates, in a fixed order."""

    def fingerprints(self, compiled: Compiled) -> list[tuple[str, list[SharedVariable]]]:
        """Return a digest and the shared variables of a function's outputs, and of each of its updates.

        In a script that builds the same expressions with other variables, the digests are equal and the
        variables in the same order, with that of an update first. An engine that cannot tell returns
        none.
        """
        return []

    @abstractmethod
    def updated(self, compiled: Compiled) -> list[SharedVariable]:
        """Return the shared variables that a compiled function updates, including default updates."""

    @abstractmethod
    def reads(self, compiled: Compiled, shared: SharedVariable) -> bool:
        """Whether a compiled function reads a variable that it updates, so it may write in place."""

    @abstractmethod
    def analyze(self, compiled: Compiled, axes: Axes) -> Analysis:
        """Return the `Analysis` of a compiled function.

        `axes` has, for each argument, the axis along which its rows are split, None, or `BOUND` for the
        bounds of `Windows`. An engine that cannot tell how outputs depend on the number
        of rows reports None. It may report too many dependences, but not too few.
        """

    def difference_causes(
        self, compiled: Compiled, axes: Axes
    ) -> tuple[list[Causes], dict[SharedVariable, Causes]]:
        """Return the `Causes` of each output, and of the new value of each updated shared variable.

        `axes` are as of `analyze`. An engine that cannot tell returns none.
        """
        return [], {}

    def recurrent(self, compiled: Compiled, axes: Axes) -> list[int]:
        """Return the positions of arguments along whose rows a loop depends on earlier steps.

        `axes` are as of `analyze`. An engine that cannot tell returns none.
        """
        return []

    @abstractmethod
    def copy(
        self, compiled: Compiled, swap: Swap, delete_updates: bool = False, **options: Any
    ) -> Compiled:
        """Return a copy of a function in which other shared variables replace some of its own.

        Parameters
        ----------
        swap : dict
            From shared variables of the function to other variables of the same types.
        delete_updates : bool
            Whether the copy makes no updates, not even default updates.
        **options
            ``name`` and ``profile``, as the compiler takes them.
        """

    def to_parts(self, compiled: Compiled) -> Any:
        """Return an object that can be copied and pickled; `from_parts` makes the function of it."""
        return compiled

    def from_parts(self, parts: Any) -> Compiled:
        """Return the compiled function, given the return value of `to_parts` or a copy of it."""
        return parts

    def deepcopy(self, objects: Any, memo: dict[int, Any]) -> Any:
        """Return ``copy.deepcopy(objects, memo)``, also of deep graphs."""
        return copy.deepcopy(objects, memo)

    @abstractmethod
    def duplicate(self, shared: SharedVariable) -> SharedVariable:
        """Return a new shared variable of the same type, with a copy of the value."""

    @abstractmethod
    def dumps(self, objects: Any, known: Mapping[SharedVariable, int]) -> Buffer:
        """Pickle objects that contain compiled functions.

        `known` maps shared variables to numbers, which are pickled instead of them.
        """

    def after_replication(self) -> None:  # noqa: B027
        """Record that every rank has loaded the last return value of `dumps`."""

    @abstractmethod
    def loads(self, payload: Buffer, known: Mapping[int, SharedVariable]) -> Any:
        """Unpickle the return value of `dumps`; `known` has the shared variables by number."""

    def referrer(self, known: Mapping[SharedVariable, int]) -> Callable[[Any], tuple[str, int] | None]:
        """Return the function that returns what stands in a pickle for an object.

        That is for the shared variables in `known`, and for their parts; for other objects it is None.
        """
        return lambda item: ("shared", known[item]) if self.is_shared(item) and item in known else None

    def resolve(self, reference: tuple[str, int], known: Mapping[int, SharedVariable]) -> Any:
        """Return the object for which a `referrer` has returned this, on the receiving rank."""
        return known[reference[1]]

    def reduce(self, compiled: Compiled) -> Any:
        """Return how a compiled function is pickled, as ``__reduce__`` does, or ``NotImplemented``.

        Its shared variables, and their parts, are pickled as objects for a `referrer`.
        """
        return NotImplemented

    # Calls

    @abstractmethod
    def call(
        self, compiled: Compiled, arguments: Sequence[Array], subset: Sequence[int] | None = None
    ) -> list[Array]:
        """Call a compiled function and return the list of its outputs, all or a subset of them.

        Arguments that are NumPy arrays have a layout that compiled code can use; see
        `synkhronos.arithmetic.conversion.usable`.
        """

    @abstractmethod
    def time_operations(self, compiled: Compiled) -> ContextManager[Timing]:
        """Return a context in which calls of a compiled function also time its operations.

        Its value, a `Timing`, can be read after each call. It is a list, too, which is filled when the
        context ends: an `OperationTime` for each operation, with the sums over its nodes and over all
        calls. Results of calls do not change.

        Raises
        ------
        ValueError
            If the function is compiled in a way in which its operations cannot be timed.
        """

    # Shared variables and arrays

    @abstractmethod
    def storage(self, shared: SharedVariable) -> Array:
        """Return the array that currently holds the shared variable's value, not a copy."""

    @abstractmethod
    def store(self, shared: SharedVariable, array: Array) -> None:
        """Make this array, not a copy, the shared variable's storage."""

    @abstractmethod
    def release(self, shareds: SharedVariables, used: Iterable[SharedVariable]) -> None:
        """Free the values of shared variables, except values that a variable in `used` also has."""

    def notice_changes(  # noqa: B027
        self, shared: SharedVariable, notify: Callable[[str], None] | None
    ) -> None:
        """Call ``notify(how)`` when the script may change the value, until this is called with None.

        `how` is ``"set"`` after the script has set the value, ``"update"`` after a function of the
        script has updated it, and ``"read"`` before the script gets the value, and may write to it.
        `store`, `write` and functions of this engine do not count. An engine that cannot detect this
        does nothing.
        """

    def is_borrowed(self, shared: SharedVariable) -> bool:
        """Whether the script has the array of the value, or a view of it, and may write to it."""
        return False

    def overwrite(self, array: Array, value: Array) -> Array:
        """Return an array of the type of `array` with a copy of the values of another array.

        It is `array` itself, overwritten, if that can be changed and has the same shape. `array` may be
        None, which an operation may have returned in place of an array.
        """
        if array is None or array.shape != value.shape or not array.flags.writeable:
            return np.array(value)
        array[...] = value
        return array

    def write(self, shared: SharedVariable, value: np.ndarray) -> None:
        """Copy a NumPy array into a shared variable, as `overwrite` does."""
        self.store(shared, self.overwrite(self.storage(shared), value))

    def take(self, array: Array, rows: Rows, out: np.ndarray | None = None) -> Array:
        """Return rows of an array: a view for a ``range``, else a copy, for NumPy arrays in `out`."""
        return take_rows(array, rows, out)

    def to_host(self, array: Array) -> np.ndarray:
        """Return the array itself if it is a NumPy array, else a copy as a NumPy array.

        None, which an operation may return in place of an array, stays None.
        """
        return array

    def to_device(self, value: np.ndarray) -> Array:
        """Return a new array of the engine's own type with the values of a NumPy array."""
        return np.array(value)

    def read(self, array: Array, out: np.ndarray) -> None:
        """Copy an array into a C-contiguous NumPy array of the same shape and dtype."""
        out[...] = array

    def export(self, shared: SharedVariable) -> np.ndarray:
        """Return the value as a NumPy array, which may be the storage itself.

        The value of a random stream is its state, as numbers.

        Raises
        ------
        ValueError
            If an update has set the variable to None.
        """
        storage = self.storage(shared)
        if storage is None:
            raise ValueError(f"{shared} has no value: {NO_VALUE}")
        if isinstance(storage, GENERATORS):
            return state_to_array(storage)
        return np.asarray(self.to_host(storage))

    def restore(self, shared: SharedVariable, array: np.ndarray) -> None:
        """Set a shared variable to a copy of a value returned by `export`."""
        if isinstance(self.storage(shared), GENERATORS):
            self.store(shared, state_from_array(array))
        else:
            self.write(shared, array)

    # Random streams

    def check_state(self, array: np.ndarray) -> None:
        """Raise ``ValueError`` if an array from a file is not the state of a random stream."""
        state_from_array(array)

    @abstractmethod
    def random_streams(self, compiled: Compiled) -> list[SharedVariable]:
        """Return the shared variables of a function that hold states of random streams."""

    @abstractmethod
    def seed(self, streams: Any, seed: int | None) -> list[SharedVariable]:
        """Seed random streams of the compiler; return the shared variables with their states."""

    def jump(self, shared: SharedVariable, index: int) -> None:
        """Advance a random stream to its `index`-th independent substream."""
        self.store(shared, jump_generator(self.storage(shared), index))


# Times of operations


class OperationTime(NamedTuple):
    """The nodes of a compiled function that have the same operation, and the time that they took.

    Attributes
    ----------
    name : str
        The operation as the compiler writes it.
    kind : str
        Its class, with the module.
    kernel : str
        ``"fast"`` for an operation of `synkhronos.engines.theano.kernels`, else whose operation it is.
    nodes : int
        The number of these nodes that were computed.
    seconds : float
        The time of all of them, in all calls.
    """

    name: str
    kind: str
    kernel: str
    nodes: int
    seconds: float


class Timing(List[OperationTime]):
    """The operations of a function, which are in the list when the timing has ended.

    Parameters
    ----------
    nodes : list of str
        The operation of each node of the function, in the order in which they are computed.
    read : callable
        Returns the seconds that each node has taken so far.
    """

    def __init__(self, nodes: Sequence[str], read: Callable[[], Sequence[float]]) -> None:
        super().__init__()
        self.nodes, self.read = nodes, read


def sum_by_operation(timed: Iterable[tuple[str, str, float]]) -> list[OperationTime]:
    """Return the sums over nodes, given the name, the class and the seconds of each."""
    sums: dict[tuple[str, str], list[float]] = {}
    for name, kind, seconds in timed:
        sums.setdefault((name, kind), []).append(seconds)
    return [
        OperationTime(name, kind, _kernel(kind), len(each), sum(each))
        for (name, kind), each in sums.items()
    ]


def _kernel(kind: str) -> str:
    if kind.startswith(f"{_FAST}."):
        return "fast"
    package = kind.partition(".")[0]
    return f"{TITLES.get(package, package)}'s own"


# Copies of functions


def check_swap(
    swap: Any, function: str, own: SharedVariables, names: str, is_shared: Callable[[Variable], bool]
) -> dict[SharedVariable, SharedVariable]:
    """Return the argument `swap` of a copy of a function as a dict, or raise an error.

    Parameters
    ----------
    swap : object
        The argument that the script has given, or None.
    function : str
        The name of the function in messages.
    own : list of shared variables
        The shared variables that the function uses.
    names : str
        The names of these variables in messages.
    is_shared : callable
        Whether a variable is a shared variable.
    """
    if swap is None:
        return {}
    if not isinstance(swap, abc.Mapping):
        raise TypeError(f"copy: swap: expected a dict of shared variables, got {swap!r}")
    for old, new in swap.items():
        if not is_shared(old) or not is_shared(new):
            raise TypeError(f"copy: swap: expected shared variables, got {old!r} and {new!r}")
        if old not in own:
            raise ValueError(
                f"copy: swap: {function} does not use the shared variable {old}; it uses "
                f"{names or 'none'}"
            )
        if old.type != new.type:
            raise TypeError(
                f"copy: swap: expected a variable of the type of {old}, {old.type}, got {new}, which is "
                f"{new.type}"
            )
    news = [swap.get(handle, handle) for handle in own]
    if len(set(news)) < len(news):
        raise ValueError(f"copy: swap: two shared variables of {function} would be the same one")
    return dict(swap)
