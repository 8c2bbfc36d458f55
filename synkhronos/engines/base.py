"""What an engine must do: compile and call graphs, and reach the storage of shared variables.

Everything else in the package knows graphs only through these methods. An engine knows nothing of
processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos._operations import Arithmetic
from synkhronos._typing import Array, Buffer, Compiled, Rows, SharedVariable, Variable


class TensorType(NamedTuple):
    """What is known of a variable before it has a value."""

    dtype: np.dtype
    ndim: int
    broadcastable: tuple[bool, ...]  # for each axis, whether its extent is 1 always


class Engine(ABC):
    """A graph compiler.

    *variable*, *shared* (variable) and *compiled* (function) are the compiler's own objects. An *array*
    is NumPy's, or of the engine's own type, which then has ``shape``, ``dtype``, ``copy()`` and slicing
    as NumPy's have.

    Attributes
    ----------
    arithmetic : Arithmetic
        On its arrays.
    forks_late : bool
        Whether workers may be forked when this process has compiled and computed already.
    """

    arithmetic: Arithmetic
    forks_late: bool

    @abstractmethod
    def setup(self, device: str, announce: bool = True) -> None:
        """Bind this process to a device, which the compiler may `announce` on the terminal."""

    @abstractmethod
    def before_fork(self) -> None:
        """Called as other processes are about to inherit this one's state; raises if they must not."""

    @abstractmethod
    def enter_thread(self) -> None:
        """Called in each thread, again and again, before it uses the device."""

    # Graphs

    @abstractmethod
    def type_of(self, variable: Variable) -> TensorType:
        """Return the `TensorType` of a variable; a ``TypeError`` if it is not a tensor variable."""

    @abstractmethod
    def is_shared(self, variable: Variable) -> bool:
        """Whether this is a shared variable that holds a tensor."""

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
    def dumps(self, objects: Any, known: Mapping[SharedVariable, int]) -> bytes | memoryview:
        """Pickle objects with compiled functions in them.

        `known` maps a shared variable to the number by which it travels; others travel whole.
        """

    @abstractmethod
    def loads(self, payload: Buffer, known: Sequence[SharedVariable]) -> Any:
        """Unpickle what `dumps` made; `known` is the list of shared variables by number."""

    # Calls

    @abstractmethod
    def call(
        self, compiled: Compiled, arguments: Sequence[Array], subset: Sequence[int] | None = None
    ) -> list[Array]:
        """Call a compiled function and return the list of its outputs."""

    # Shared variables

    @abstractmethod
    def storage(self, shared: SharedVariable) -> Array:
        """Return the very array that holds the shared variable's value now."""

    @abstractmethod
    def store(self, shared: SharedVariable, array: Array) -> None:
        """Make this very array the shared variable's storage."""

    @abstractmethod
    def write(self, shared: SharedVariable, value: np.ndarray) -> None:
        """Copy a NumPy array into a shared variable, in place where it has the shape."""

    @abstractmethod
    def take(self, array: Array, rows: Rows) -> Array:
        """Return rows of an array of the engine's own type."""

    @abstractmethod
    def to_host(self, array: Array) -> np.ndarray:
        """Return the array itself if it is NumPy's, else a copy that is."""

    @abstractmethod
    def to_device(self, value: np.ndarray) -> Array:
        """Return a new array of the engine's own type with the values of a NumPy array."""

    @abstractmethod
    def read(self, array: Array, out: np.ndarray) -> None:
        """Copy an array into a C-contiguous NumPy array of the same shape and dtype."""

    @abstractmethod
    def export(self, shared: SharedVariable) -> np.ndarray:
        """Return the value as a NumPy array, which may be the storage itself.

        Of a random stream, too: its state as numbers.
        """

    @abstractmethod
    def restore(self, shared: SharedVariable, array: np.ndarray) -> None:
        """Take a value that `export` returned, as a copy."""

    # Random streams

    @abstractmethod
    def random_streams(self, compiled: Compiled) -> list[SharedVariable]:
        """Return the shared variables that are states of random streams."""

    @abstractmethod
    def seed(self, streams: Any, seed: int | None) -> list[SharedVariable]:
        """Seed the compiler's random streams anew; return the shared variables with their states."""

    @abstractmethod
    def jump(self, shared: SharedVariable, index: int) -> None:
        """Move the state of a random stream to the `index`-th of its independent substreams."""
