"""What an engine must do: compile and call graphs, and reach the storage of shared variables.

Everything else in the package knows graphs only through these methods. An engine knows nothing of
processes.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np


class TensorType(NamedTuple):
    """What is known of a variable before it has a value."""

    dtype: np.dtype
    ndim: int
    broadcastable: tuple  # a bool an axis: whether its extent is 1 always


class Engine(ABC):
    """A graph compiler.

    *variable*, *shared* (variable) and *compiled* (function) are the compiler's own objects.
    """

    @abstractmethod
    def setup(self, device):
        """Bind this process to a device."""

    @abstractmethod
    def before_fork(self):
        """Called as other processes are about to inherit this one's state."""

    # Graphs

    @abstractmethod
    def type_of(self, variable):
        """Return the `TensorType` of a variable; a ``TypeError`` if it is not a tensor variable."""

    @abstractmethod
    def is_shared(self, variable):
        """Whether this is a shared variable that holds a tensor."""

    @abstractmethod
    def build(self, inputs, outputs, updates, givens, sliceable, **kwargs):
        """Compile a function.

        Parameters
        ----------
        inputs, outputs : list of variables
        updates : list of (shared, variable)
        givens : as the compiler takes them
        sliceable : list of shared variables
            The compiled function takes the rows to use of each as a further argument, after
            `inputs`, instead of reading the shared variable.
        """

    @abstractmethod
    def shareds(self, compiled):
        """Return the shared variables that a compiled function reads or updates, in fixed order."""

    @abstractmethod
    def updated(self, compiled):
        """Return the shared variables that a compiled function updates, also those by default."""

    @abstractmethod
    def reads(self, compiled, shared):
        """Whether a compiled function reads, and so may also write to, a variable that it updates."""

    @abstractmethod
    def dumps(self, objects, known):
        """Pickle objects with compiled functions in them.

        `known` maps a shared variable to the number by which it travels; others travel whole.
        """

    @abstractmethod
    def loads(self, payload, known):
        """Unpickle what `dumps` made; `known` is the list of shared variables by number."""

    # Calls

    @abstractmethod
    def call(self, compiled, arguments, subset=None):
        """Call a compiled function and return the list of its outputs."""

    @abstractmethod
    def condition(self, variable, value):
        """Return `value` as the compiler would take it for `variable`, or raise ``TypeError``."""

    # Shared variables

    @abstractmethod
    def storage(self, shared):
        """Return the very array that holds the shared variable's value now."""

    @abstractmethod
    def store(self, shared, array):
        """Make this very array the shared variable's storage."""

    @abstractmethod
    def random_streams(self, compiled):
        """Return the shared variables that are states of random streams."""

    @abstractmethod
    def jump(self, shared, index):
        """Move the state of a random stream to the `index`-th of its independent substreams."""
