"""Which replicas of shared variables are meant to be equal, as far as the master knows, and which are.

Collectives, `scatter` and `set_value` of one rank report here what they do, and ``changes`` what the
script changes on the master. Every rank returns digests and samples of its replicas.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from synkhronos._text import listed
from synkhronos.arithmetic.comparison import difference, digest, rounding, sample
from synkhronos.stores.handle import RequiredRows
from synkhronos.world.rank_state import Ask, Command, RankState
from synkhronos.world.world import World


class ReplicaTracker:
    """What is known about the replicas in one world. Variables are represented by their numbers.

    Attributes
    ----------
    carried : set of int
        Variables of steps: a value that the script sets on the master is sent to all ranks.
    own : set of int
        Variables of which each rank keeps its own value in a step, as the script has stated.
    scattered : set of int
        Variables whose replicas hold different rows.
    assigned : set of int
        Variables that were set on a single rank on purpose.
    combined : set of int
        Variables that a collective has combined or compared after they were updated: the script knows
        that their replicas may differ.
    local : set of int
        Variables that have been updated, since they were last equal, from values that differ by rank.
    changed : set of int
        Variables that the script has changed on the master since the last command.
    set_on_master : set of int
        Variables that are not carried, and that the script has changed, since they were last equal, on
        the master only.
    streams, sliceable : set of int
        States of random streams, and variables that a function slices. They are meant to differ.
    objects : set of int
        Variables whose values are not tensors, such as sparse matrices.
    suspected : dict
        What the warning about variables that differed will say, unless a collective combines them: an
        object whose ``remark()`` has the world issue it.
    reported : set of int
        Variables for which a warning was issued.
    stale : set of int
        Those of them that were changed on the master only, and variables computed from them, until they
        are equal again.
    readers, updaters : dict
        The watches of the functions that read or update a variable, by its number.
    """

    def __init__(self) -> None:
        self.carried: set[int] = set()
        self.own: set[int] = set()
        self.scattered: set[int] = set()
        self.assigned: set[int] = set()
        self.combined: set[int] = set()
        self.local: set[int] = set()
        self.changed: set[int] = set()
        self.set_on_master: set[int] = set()
        self.streams: set[int] = set()
        self.sliceable: set[int] = set()
        self.objects: set[int] = set()
        self.suspected: dict[int, Any] = {}
        self.reported: set[int] = set()
        self.stale: set[int] = set()
        self.readers: dict[int, weakref.WeakSet[Any]] = {}
        self.updaters: dict[int, weakref.WeakSet[Any]] = {}

    @property
    def different(self) -> set[int]:
        """The variables whose replicas are meant to differ.

        Rows are not meant to differ if the script has set them on the master, but not on other ranks.
        """
        meant = self.scattered | self.assigned | self.streams | self.sliceable
        return meant - (self.sliceable & self.set_on_master)

    @property
    def incomparable(self) -> set[int]:
        """The variables whose replicas cannot be compared."""
        return self.streams | self.objects

    def to_carry(self, numbers: Iterable[int]) -> set[int]:
        """Return those of some variables whose values are sent to all ranks."""
        apart = self.own | self.scattered | self.assigned | self.sliceable
        return (self.carried & set(numbers)) - apart

    def renew(self) -> None:
        """Record that all replicas are equal, in new workers."""
        groups = self.scattered, self.assigned, self.local, self.changed, self.set_on_master, self.stale
        for numbers in (*groups, self.suspected):
            numbers.clear()

    def close(self) -> None:
        """Pass open suspicions to the world as remarks."""
        for suspicion in dict.fromkeys(self.suspected.values()):
            suspicion.remark()

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the entries of variables that were dropped, except for warnings that are still due."""
        dropped = set(numbers)
        for group in vars(self).values():
            if group is self.suspected:
                continue
            if isinstance(group, set):
                group -= dropped
            elif isinstance(group, dict):
                for number in dropped & group.keys():
                    del group[number]

    # What calls report

    def updated_from(self, sources: Mapping[int, tuple[bool, set[int]]]) -> None:
        """Record that a function has computed new values from others, by the number of the variable."""
        if self.stale:
            self.stale.update(
                number for number, (_, shareds) in sources.items() if not self.stale.isdisjoint(shareds)
            )

    def equalized(self, numbers: Sequence[int], results: Any = None) -> None:
        """Record that a collective, which may have had some results, has made the replicas equal."""
        if not self.combined.issuperset(numbers):
            self.compared(numbers)
        self.restored(numbers)

    def restored(self, numbers: Iterable[int]) -> None:
        """Record that replicas are equal."""
        groups = (
            self.changed, self.set_on_master, self.local, self.scattered, self.assigned, self.stale
        )  # fmt: skip
        if self.suspected or any(groups):
            for number in numbers:
                self.suspected.pop(number, None)
                for group in groups:
                    group.discard(number)

    def compared(self, numbers: Sequence[int]) -> None:
        """Record that the script has combined or asked for the values of several ranks.

        This says nothing about variables that no function has updated yet.
        """
        if self.combined.issuperset(numbers):
            return
        for number in numbers:
            if any(watch.calls for watch in self.updaters.get(number, ())):
                self.combined.add(number)
                self.suspected.pop(number, None)

    def set_apart(self, numbers: Iterable[int], scattered: bool) -> None:
        """Record that each rank has been given its own rows, or one rank its own value."""
        (self.scattered if scattered else self.assigned).update(numbers)
        for number in numbers:
            self.suspected.pop(number, None)
            self.changed.discard(number)
            self.set_on_master.discard(number)

    def changed_on_master(self, numbers: Iterable[int]) -> None:
        """Record that only the master's replicas have been changed."""
        for number in numbers:
            if number not in self.reported:
                self.set_on_master.add(number)
                for watch in self.readers.get(number, ()):
                    watch.wake()


def replica_tracker_of(world: World) -> ReplicaTracker:
    """Return the `ReplicaTracker` of a world."""
    return world.part(ReplicaTracker)


def expected_equal(world: World) -> list[int]:
    """Return the numbers of the replicated tensors, without streams and a rank's own rows."""
    agreement = replica_tracker_of(world)
    excluded = agreement.scattered | agreement.streams | agreement.sliceable
    return [
        number
        for number, shared in world.rank_state.shareds.items()
        if number < world.registry.replicated
        and number not in excluded
        and world.rank_state.engine.is_tensor(shared)
    ]


def label(world: World, number: int) -> str:
    """Return how messages refer to a shared variable; variables with equal names are numbered."""
    names = {each: shared.name or str(shared) for each, shared in world.rank_state.shareds.items()}
    same = [each for each, name in names.items() if name == names[number]]
    return names[number] if len(same) == 1 else f"{names[number]} #{same.index(number) + 1}"


def labels(world: World, numbers: Iterable[int]) -> str:
    """Return how messages refer to several shared variables."""
    return listed(label(world, number) for number in numbers)


# Digests and samples of replicas, by which they are compared


_MOST = 1 << 20  # bytes that a rank returns as samples
_MOST_OF_ONE = 1 << 14  # elements of one variable


def digests(state: RankState, numbers: Sequence[int]) -> list[bytes]:
    """Return digests of this rank's replicas."""
    return [digest(state.engine.export(state.shareds[number])) for number in numbers]


def samples(state: RankState, numbers: Sequence[int]) -> list[tuple[Any, np.ndarray]]:
    """Return the shape and some elements of each of this rank's replicas."""
    return [_sample(state, number, len(numbers)) for number in numbers]


def _sample(state: RankState, number: int, n_samples: int) -> tuple[Any, np.ndarray]:
    array = state.engine.storage(state.shareds[number])
    if array is None:  # an operation has returned None for its update
        return None, np.zeros(0)
    limit = max(1, _MOST // n_samples // array.dtype.itemsize)
    part = sample(array, min(limit, _MOST_OF_ONE))
    return tuple(array.shape), np.array(state.engine.to_host(part))


@dataclasses.dataclass(eq=False, repr=False)
class Observed(Command):
    """A call, and digests or samples of replicas before and after it.

    Parameters
    ----------
    look : callable
        `digests` or `samples`.
    before, after : list of int
        The shared variables to look at, by number.
    call : Command
        The call.
    """

    look: Callable[[RankState, Sequence[int]], list[Any]]
    before: Sequence[int]
    call: Command
    after: Sequence[int] = ()

    @property
    def plain(self) -> Command:
        return self.call

    def needs(self, ranks: range, size: int) -> Iterable[RequiredRows]:
        return self.call.needs(ranks, size)

    def run(self, state: RankState) -> tuple[Any, list[Any], list[Any]]:
        """Return the result of the call, and the digests or samples before and after it."""
        before = self.look(state, self.before)
        returned = self.call.run(state)
        return returned, before, self.look(state, self.after)


def find_different(world: World, numbers: Sequence[int]) -> dict[int, list[int]]:
    """Return the variables whose replicas differ now, with the ranks that differ from the master."""
    return ranks_that_differ(world, numbers, world.run(Ask(digests, numbers)))


def ranks_that_differ(
    world: World, numbers: Sequence[int], by_rank: Sequence[Sequence[bytes]]
) -> dict[int, list[int]]:
    """Return the variables whose digests differ, with the ranks that differ from the master."""
    found = {}
    for number, own, *each in zip(numbers, by_rank[world.master_rank], *by_rank):
        ranks = [rank for rank, other in enumerate(each) if other != own]
        if ranks:
            found[number] = ranks
    return found


def largest_difference(by_rank: Sequence[tuple[Any, np.ndarray]], master: int) -> float | None:
    """Return by how much samples differ from the master's; None if they do not beyond rounding."""
    shape, own = by_rank[master]
    largest = None
    for other_shape, other in by_rank:
        if other_shape != shape:
            return np.inf
        amount = difference(other, own).absolute
        if amount > rounding(own):
            largest = max(amount, largest or 0)
    return largest
