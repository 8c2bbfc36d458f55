"""Which functions and shared variables a world has, their numbers, and which the workers have."""

from __future__ import annotations

from typing import Any

from synkhronos._typing import SharedVariable
from synkhronos.world.here import Here


class Registry:
    """The functions and shared variables of a world, as the master knows them.

    Every rank knows them by their numbers, which count them in the order of their registration.

    Attributes
    ----------
    functions : list of Function
        The script's functions, by number.
    numbers : dict
        The number of each shared variable.
    replicated_functions, replicated_shareds : int
        How many of them, the first ones, the workers have.
    unsent : dict
        The functions that could not be sent to the workers, by number, and why.
    """

    def __init__(self) -> None:
        self.functions: list[Any] = []
        self.numbers: dict[SharedVariable, int] = {}
        self._shareds: list[SharedVariable] = []
        self.forget_workers()

    def forget_workers(self) -> None:
        """Note that there are no workers which have anything."""
        self.replicated_functions = self.replicated_shareds = 0
        self.unsent: dict[int, str] = {}

    def attach(self, here: Here) -> None:
        """Make these functions and shared variables those of the master's state."""
        self._replicas = here.functions = [function.replica for function in self.functions]
        here.shareds = self._shareds

    def add_shared(self, shared: SharedVariable) -> int:
        """Return the number of a shared variable, a new one if it has none."""
        if shared not in self.numbers:
            self.numbers[shared] = len(self._shareds)
            self._shareds.append(shared)
        return self.numbers[shared]

    def add_function(self, function: Any) -> None:
        """Register a function, whose ``replica`` has the next number."""
        self.functions.append(function)
        self._replicas.append(function.replica)

    def new_shareds(self) -> list[SharedVariable]:
        """Return the shared variables that the workers do not have."""
        return self._shareds[self.replicated_shareds :]

    def new_replicas(self) -> list[Any]:
        """Return the replicas of the functions that the workers do not have."""
        return self._replicas[self.replicated_functions :]

    def mark_replicated(self, functions: int, shareds: int) -> None:
        """Note that the workers have the first so many functions and shared variables."""
        self.replicated_functions, self.replicated_shareds = functions, shareds
