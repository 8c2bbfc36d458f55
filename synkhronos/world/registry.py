"""The functions and shared variables of a world, their numbers, and which of them are replicated."""

from __future__ import annotations

from typing import Any

from synkhronos._typing import SharedVariable
from synkhronos.world.here import Here


class Registry:
    """The master's list of the functions and shared variables of a world.

    Every rank refers to them by number, in the order of their registration.

    Attributes
    ----------
    functions : list of Function
        The script's functions, by number.
    numbers : dict
        The number of each shared variable.
    replicated_functions, replicated_shareds : int
        How many functions and shared variables, from the first on, the workers have.
    unsent : dict
        The reason for each function, by number, that could not be sent to the workers.
    """

    def __init__(self) -> None:
        self.functions: list[Any] = []
        self.numbers: dict[SharedVariable, int] = {}
        self._shareds: list[SharedVariable] = []
        self.forget_workers()

    def forget_workers(self) -> None:
        """Record that nothing is replicated."""
        self.replicated_functions = self.replicated_shareds = 0
        self.unsent: dict[int, str] = {}

    def attach(self, here: Here) -> None:
        """Let the state of the master use the lists of this registry."""
        self._replicas = here.functions = [function.replica for function in self.functions]
        here.shareds = self._shareds

    def add_shared(self, shared: SharedVariable) -> int:
        """Return the number of a shared variable, after registering it if necessary."""
        if shared not in self.numbers:
            self.numbers[shared] = len(self._shareds)
            self._shareds.append(shared)
        return self.numbers[shared]

    def add_function(self, function: Any) -> None:
        """Register a function, whose ``replica`` has the next number."""
        self.functions.append(function)
        self._replicas.append(function.replica)

    def new_shareds(self) -> list[SharedVariable]:
        """Return the shared variables that are not replicated yet."""
        return self._shareds[self.replicated_shareds :]

    def new_replicas(self) -> list[Any]:
        """Return the master's replicas of the functions that are not replicated yet."""
        return self._replicas[self.replicated_functions :]

    def mark_replicated(self, functions: int, shareds: int) -> None:
        """Record how many functions and shared variables, from the first on, are replicated."""
        self.replicated_functions, self.replicated_shareds = functions, shareds
