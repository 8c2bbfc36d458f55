"""What an engine must do: compile and call graphs, and access the storage of shared variables.

Everything else in the package knows graphs only through these methods. An engine knows nothing of
processes. `naive` is the specification; ``tests/checks`` conforms every engine to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos._typing import Array, Buffer, Compiled, Rows, SharedVariable, Variable
from synkhronos.arithmetic.operations import NUMPY, Arithmetic
from synkhronos.arithmetic.partition import take_rows
from synkhronos.arithmetic.streams import (
    jump_random_state,
    random_state_from_array,
    random_state_to_array,
)


class TensorType(NamedTuple):
    """What is known of a variable before it has a value."""

    dtype: np.dtype
    ndim: int
    broadcastable: tuple[bool, ...]  # for each axis, whether its extent is always 1


class Engine(ABC):
    """A graph compiler.

    *variable*, *shared* (variable) and *compiled* (function) are the compiler's own objects. An *array*
    is a NumPy array, or of the engine's own type, which then has ``shape``, ``dtype``, ``copy()`` and
    slicing as NumPy's have. The methods that are not abstract do what is right for NumPy arrays.

    Attributes
    ----------
    arithmetic : Arithmetic
        On its arrays.
    survives_fork : bool
        Whether compiled functions can be used in a forked process, which then inherits them.
    """

    arithmetic: Arithmetic = NUMPY
    survives_fork: bool

    @abstractmethod
    def setup(self, device: str, announce: bool = True) -> None:
        """Bind this process to a device, which the compiler may `announce` on the terminal."""

    def before_fork(self) -> None:  # noqa: B027
        """Prepare for other processes that inherit this one's state; raise if they must not."""

    def enter_thread(self) -> None:  # noqa: B027
        """Prepare this thread to use the device; called again and again."""

    # Graphs

    @abstractmethod
    def type_of(self, variable: Variable) -> TensorType:
        """Return the `TensorType` of a variable; a ``TypeError`` if it is not a tensor variable."""

    def is_tensor(self, variable: Variable) -> bool:
        """Whether this is a tensor variable, also a shared one."""
        try:
            self.type_of(variable)
        except TypeError:
            return False
        return True

    @abstractmethod
    def is_shared(self, variable: Variable) -> bool:
        """Whether this is a shared variable, of any type."""

    @abstractmethod
    def build(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        updates: Sequence[tuple[SharedVariable, Variable]],
        givens: Mapping[Variable, Any] | Iterable[tuple[Variable, Any]] | None,
        sliceable: Sequence[SharedVariable],
        on_host: Sequence[bool],
        **kwargs: Any,
    ) -> Compiled:
        """Compile a function.

        Parameters
        ----------
        inputs, outputs : list of variables
        updates : list of (shared, variable)
        givens : as the compiler takes them
        sliceable : list of shared variables
            The compiled function takes the rows to use of each as a further argument, after
            `inputs`, instead of reading the shared variable.
        on_host : list of bool
            Which outputs must be NumPy arrays; others may stay where they are computed.
        **kwargs
            Further options of the compiler.
        """

    @abstractmethod
    def shareds(self, compiled: Compiled) -> list[SharedVariable]:
        """Return the shared variables that a compiled function reads or updates, in fixed order."""

    @abstractmethod
    def updated(self, compiled: Compiled) -> list[SharedVariable]:
        """Return the shared variables that a compiled function updates, also those by default."""

    @abstractmethod
    def reads(self, compiled: Compiled, shared: SharedVariable) -> bool:
        """Whether a compiled function reads, and so may also write to, a variable that it updates."""

    @abstractmethod
    def dumps(self, objects: Any, known: Mapping[SharedVariable, int]) -> Buffer:
        """Pickle objects that contain compiled functions.

        `known` maps a shared variable to the number that stands for it; others are pickled whole.
        """

    def after_replication(self) -> None:  # noqa: B027
        """Note that every rank has loaded what `dumps` has returned last."""

    @abstractmethod
    def loads(self, payload: Buffer, known: Sequence[SharedVariable]) -> Any:
        """Unpickle what `dumps` has returned; `known` is the list of shared variables by number."""

    # Calls

    @abstractmethod
    def call(
        self, compiled: Compiled, arguments: Sequence[Array], subset: Sequence[int] | None = None
    ) -> list[Array]:
        """Call a compiled function and return the list of its outputs, all or a subset of them."""

    # Shared variables and arrays

    @abstractmethod
    def storage(self, shared: SharedVariable) -> Array:
        """Return the very array that holds the shared variable's value now."""

    @abstractmethod
    def store(self, shared: SharedVariable, array: Array) -> None:
        """Make this very array the shared variable's storage."""

    def write(self, shared: SharedVariable, value: np.ndarray) -> None:
        """Copy a NumPy array into a shared variable, in place where it has the same shape."""
        storage = self.storage(shared)
        if storage.shape == value.shape and storage.flags.writeable:
            storage[...] = value
        else:
            self.store(shared, np.array(value))

    def take(self, array: Array, rows: Rows, out: np.ndarray | None = None) -> Array:
        """Return rows of an array: a view of a ``range``, else a copy, of a NumPy array in `out`."""
        return take_rows(array, rows, out)

    def to_host(self, array: Array) -> np.ndarray:
        """Return the array itself if it is a NumPy array, else a copy that is one."""
        return array

    def to_device(self, value: np.ndarray) -> Array:
        """Return a new array of the engine's own type with the values of a NumPy array."""
        return np.array(value)

    def read(self, array: Array, out: np.ndarray) -> None:
        """Copy an array into a C-contiguous NumPy array of the same shape and dtype."""
        out[...] = array

    def export(self, shared: SharedVariable) -> np.ndarray:
        """Return the value as a NumPy array, which may be the storage itself.

        For a random stream too: its state as numbers.
        """
        storage = self.storage(shared)
        if isinstance(storage, np.random.RandomState):
            return random_state_to_array(storage)
        return np.asarray(self.to_host(storage))

    def restore(self, shared: SharedVariable, array: np.ndarray) -> None:
        """Set a shared variable to a copy of what `export` has returned."""
        if isinstance(self.storage(shared), np.random.RandomState):
            self.store(shared, random_state_from_array(array))
        else:
            self.write(shared, array)

    # Random streams

    @abstractmethod
    def random_streams(self, compiled: Compiled) -> list[SharedVariable]:
        """Return the shared variables of a function that hold states of random streams."""

    @abstractmethod
    def seed(self, streams: Any, seed: int | None) -> list[SharedVariable]:
        """Seed the compiler's random streams anew; return the shared variables with their states."""

    def jump(self, shared: SharedVariable, index: int) -> None:
        """Move the state of a random stream to the `index`-th of its independent substreams."""
        self.store(shared, jump_random_state(self.storage(shared), index))
