"""The functions and shared variables of a world, their numbers, and which of them are replicated."""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from typing import Any, Iterable, Sequence

from synkhronos._typing import SharedVariable
from synkhronos.host import heap
from synkhronos.world.rank_state import RankState

_MANY_SCHEDULES = 32


class Registry:
    """The master's record of the functions and shared variables of a world.

    Every rank refers to them by number, in the order of their registration. The registry does not keep
    them alive: the workers drop all objects that the script drops.

    Attributes
    ----------
    functions : weakref.WeakValueDictionary
        The script's functions, by number.
    numbers : weakref.WeakKeyDictionary
        The number of each shared variable.
    replicated : int
        The workers have the functions and shared variables whose numbers are smaller.
    n_functions : int
        How many functions have been registered.
    version : object
        Another object after each change after which a schedule may be outdated: functions and variables
        that are new or dropped, new workers, the end of the world, and calls that are to be observed.
    dropped, dropped_schedules : list of int
        The numbers of objects that the script has dropped since the ranks were last told.
    has_dropped : bool
        Whether the ranks have to be told now of dropped objects.
    token : bytes
        Identifies the world to all ranks.
    is_sending : bool
        Whether pickles are for the workers now, which need only specifications of functions.
    unsent : dict
        The reason for each function, by number, that could not be sent to the workers.
    """

    def __init__(self) -> None:
        self.functions: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.numbers: weakref.WeakKeyDictionary[SharedVariable, int] = weakref.WeakKeyDictionary()
        self._shareds: weakref.WeakValueDictionary[int, SharedVariable] = weakref.WeakValueDictionary()
        self._replicas: dict[int, Any] = {}
        self._count = itertools.count()
        self._newest = -1  # the largest number so far
        self.token = os.urandom(8)
        self.n_functions = 0
        self.is_sending = False
        self._has_cycles = False  # whether dropped functions wait for Python's collector
        self.forget_workers()

    def forget_workers(self) -> None:
        """Record that nothing is replicated."""
        self.replicated = 0
        self.outdate_schedules()
        self.dropped: list[int] = []
        self.dropped_schedules: list[int] = []
        self.has_dropped = False
        self.unsent: dict[int, str] = {}

    def outdate_schedules(self) -> None:
        """Have what is repeated compiled again."""
        self.version = object()  # unlike a number, it is changed in one step

    def attach(self, state: RankState) -> None:
        """Let the state of the master use the dictionaries of this registry."""
        state.functions, state.shareds = self._replicas, self._shareds
        self._kept = state.schedules, state.bound

    def new_number(self) -> int:
        """Return the next number."""
        number = next(self._count)
        self.outdate_schedules()
        self._newest = max(number, self._newest)
        return number

    def add_shared(self, shared: SharedVariable) -> int:
        """Return the number of a shared variable, after registering it if necessary."""
        number = self.numbers.get(shared)
        if number is None:
            number = self.numbers[shared] = self.new_number()
            self._shareds[number] = shared
            weakref.finalize(shared, self._drop, number).atexit = False
        return number

    def add_function(self, function: Any) -> None:
        """Register a function, whose ``replica`` has a new number."""
        number = function.replica.number
        self.functions[number] = function
        self.n_functions += 1
        self._replicas[number] = function.replica
        weakref.finalize(function, self._drop, number).atexit = False

    def add_schedule(self, schedule: Any) -> int:
        """Return a number for a schedule, which the ranks get when it is run for the first time."""
        number = next(self._count)
        if len(self.dropped_schedules) >= _MANY_SCHEDULES:  # which are told together
            self.has_dropped = True
        # A schedule keeps the replica of its function, and so the variables. These methods are in C: an
        # exception that a signal handler raises in a function of Python would be lost.
        for kept in self._kept:
            weakref.finalize(schedule, kept.pop, number, None).atexit = False
        weakref.finalize(schedule, self.dropped_schedules.append, number).atexit = False
        return number

    def number_of(self, function: Any) -> int | None:
        """Return the number of a function; None if it belongs to another world or is a copy."""
        replica: Any = getattr(function, "replica", None)  # a copy has none
        is_known = replica is not None and self.functions.get(replica.number) is function
        return replica.number if is_known else None

    def _drop(self, number: int) -> None:
        # This runs at any time, possibly while another thread uses the registry: each line is atomic.
        if self._replicas.pop(number, None) is not None:
            self._has_cycles = True
        self.unsent.pop(number, None)
        self.outdate_schedules()
        self.dropped.append(number)
        self.has_dropped = True

    @property
    def may_have_new(self) -> bool:
        """Whether there may be functions or shared variables that are not replicated yet."""
        return self._newest >= self.replicated

    def new_shareds(self) -> dict[int, SharedVariable]:
        """Return the shared variables that are not replicated yet, by number."""
        return {number: shared for number, shared in self._shareds.items() if number >= self.replicated}

    def new_functions(self) -> list[Any]:
        """Return the functions that are not replicated yet."""
        return [function for number, function in self.functions.items() if number >= self.replicated]

    def collect(self) -> None:
        """Free the shared variables that only dropped functions kept alive."""
        if self._has_cycles:
            self._has_cycles = False
            _collect()

    def mark_replicated(self, new: Sequence[int]) -> None:
        """Record that the workers have the objects with these numbers, which are the latest."""
        self.replicated = max(new, default=self.replicated - 1) + 1


def drop(state: RankState, numbers: Sequence[int], schedules: Iterable[int]) -> None:
    """Free the functions, shared variables and schedules that the script has dropped, by number."""
    for number in schedules:
        state.schedules.pop(number, None)
        state.bound.pop(number, None)
    if not numbers:
        return
    state.forget(numbers)
    if state.is_master:
        return
    for number in numbers:
        state.functions.pop(number, None)
    shareds = [state.shareds.pop(number) for number in numbers if number in state.shareds]
    # Objects of the script, which a forked worker has inherited, may still refer to them.
    state.engine.release(shareds, state.shareds.values())
    del shareds
    _collect()


def _collect() -> None:
    """Free dropped objects: compiled functions contain reference cycles."""
    gc.collect()
    heap.trim()
