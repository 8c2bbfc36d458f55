"""Which replicas of shared variables are meant to be equal, as far as the master knows.

Collectives, `scatter` and `set_value` of one rank report here what they do, and ``changes`` what the
script changes on the master.
"""

from __future__ import annotations

import weakref
from typing import Any, Iterable, Mapping, Sequence

from synkhronos._text import listed
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
