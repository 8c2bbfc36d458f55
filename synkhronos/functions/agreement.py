"""Which replicas of shared variables are meant to be equal, as far as the master knows.

Collectives, `scatter` and `set_value` of one rank report here what they do. So does a shared variable
whose value the script sets with Theano's own ``set_value``, which changes only the master's replica.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, FrozenSet, Iterable, Iterator, Mapping, Sequence, Tuple

from synkhronos._text import listed
from synkhronos._typing import SharedVariable
from synkhronos.world.world import World

_HARMLESS = 8  # values set on the master without effect after which they are no longer tracked

#: Whether new values are computed from rows, and the numbers of the variables they are computed from
_Source = Tuple[bool, FrozenSet[int]]


class Agreement:
    """What is known about the replicas in one world. Variables are represented by their numbers.

    Attributes
    ----------
    scattered : set of int
        Variables whose replicas hold different rows.
    assigned : set of int
        Variables that were set on a single rank on purpose.
    combined : set of int
        Variables that a collective has combined or compared after they were updated: the script knows
        that their replicas may differ.
    local : set of int
        Variables that have been updated, since they were last equal, from values that differ by rank.
    set_on_master : set of int
        Variables that the script has set, since they were last equal, on the master only.
    streams, sliceable : set of int
        States of random streams, and variables that a function slices. They are meant to differ.
    objects : set of int
        Variables whose values are not tensors, such as sparse matrices.
    suspected : dict
        What the warning about variables that differed will say, unless a collective combines them: an
        object whose ``warning()`` returns a function that issues it.
    reported : set of int
        Variables for which a warning was issued.
    stale : set of int
        Those of them that were set on the master only, until they are equal again.
    sources : dict
        For each variable by number, the sources of its new values in the functions called so far: a set
        of pairs of whether they used rows, and the numbers of variables.
    readers, updaters : dict
        The watches of the functions that read or update a variable, by its number.
    """

    def __init__(self) -> None:
        self.scattered: set[int] = set()
        self.assigned: set[int] = set()
        self.combined: set[int] = set()
        self.local: set[int] = set()
        self.set_on_master: set[int] = set()
        self.streams: set[int] = set()
        self.sliceable: set[int] = set()
        self.objects: set[int] = set()
        self.suspected: dict[int, Any] = {}
        self.reported: set[int] = set()
        self.stale: set[int] = set()
        self.sources: dict[int, set[_Source]] = {}
        self.readers: dict[int, weakref.WeakSet[Any]] = {}
        self.updaters: dict[int, weakref.WeakSet[Any]] = {}
        self._harmless: dict[int, int] = {}
        self._world: weakref.ref[World] | None = None

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

    def renew(self) -> None:
        """Record that all replicas are equal, in new workers."""
        groups = self.scattered, self.assigned, self.local, self.set_on_master, self.stale
        for numbers in (*groups, self.suspected):
            numbers.clear()

    def close(self) -> None:
        """Pass open suspicions to the world as remarks, and stop tracking values."""
        world = None if self._world is None else self._world()
        if world is None:
            return
        for suspicion in dict.fromkeys(self.suspected.values()):
            world.remark(suspicion.warning())
        for shared in world.here.shareds.values():
            world.here.engine.notice_writes(shared, None)

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the entries of variables that were dropped, except for warnings that are still due."""
        dropped = set(numbers)
        for number in self.sources.keys() - dropped:
            self.sources[number] = {self._without(dropped, number, one) for one in self.sources[number]}
        for group in vars(self).values():
            if group is self.suspected:
                continue
            if isinstance(group, set):
                group -= dropped
            elif isinstance(group, dict):
                for number in dropped & group.keys():
                    del group[number]

    def _without(self, dropped: set[int], number: int, source: _Source) -> _Source:
        """Return a source of a variable without dropped variables, but with their effects."""
        from_rows, shareds = source
        gone = shareds & dropped - {number}
        if any(self.is_stale(one) for one in gone - (self.combined - self.stale)):
            self.stale.add(number)
        differs = any(
            one in self.different
            or (one not in self.combined and self._was_made_to_differ(one, {number, one}))
            for one in gone
        )
        return from_rows or differs, shareds - dropped

    # What calls report

    def updated_from(self, sources: Mapping[int, tuple[bool, set[int]]]) -> None:
        """Record the sources of new values in a function, by the number of the updated variable."""
        for number, (from_rows, shareds) in sources.items():
            self.sources.setdefault(number, set()).add((from_rows, frozenset(shareds)))

    def differs_by_calls(self, number: int) -> bool:
        """Whether the functions called so far can have made the replicas of a variable differ."""
        return self._was_made_to_differ(number, {number})

    def _was_made_to_differ(self, number: int, seen: set[int]) -> bool:
        different = self.different
        for one in self._reached(number, self.combined, seen):
            for from_rows, shareds in self.sources.get(one, ()):
                if from_rows or not different.isdisjoint(shareds - seen):
                    return True
        return False

    def is_stale(self, number: int) -> bool:
        """Whether a variable is stale, or was computed from a stale variable."""
        return not self.stale.isdisjoint(self._reached(number, self.combined - self.stale, {number}))

    def _reached(self, number: int, excluded: set[int], seen: set[int]) -> Iterator[int]:
        """Iterate over a variable and those from which it was computed, each once.

        Parameters
        ----------
        number : int
            The variable.
        excluded : set of int
            Variables at which the search stops, except for the first one.
        seen : set of int
            Variables that are left out. Those that are found are added.
        """
        waiting = [number]
        while waiting:
            one = waiting.pop()
            yield one
            seen.add(one)
            for _, shareds in self.sources.get(one, ()):
                new = shareds - seen - excluded
                seen |= new
                waiting += new

    def equalized(self, numbers: Sequence[int]) -> None:
        """Record that a collective has made the replicas equal."""
        self.compared(numbers)
        self.restored(numbers)

    def restored(self, numbers: Iterable[int]) -> None:
        """Record that replicas are equal."""
        groups = self.set_on_master, self.local, self.scattered, self.assigned, self.stale
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
            self.set_on_master.discard(number)

    def changed_on_master(self, numbers: Iterable[int]) -> None:
        """Record that only the master's replicas have been set."""
        for number in numbers:
            if number not in self.reported:
                self.set_on_master.add(number)
                for watch in self.readers.get(number, ()):
                    watch.wake()

    def was_harmless(self, world: World, number: int) -> None:
        """Record that a value set on the master equalled the value on the other ranks."""
        self.set_on_master.discard(number)
        self._harmless[number] = self._harmless.get(number, 0) + 1
        if self._harmless[number] == _HARMLESS:
            world.here.engine.notice_writes(world.here.shareds[number], None)

    def watch(self, world: World, shareds: Iterable[SharedVariable]) -> None:
        """Notice when the script sets one of these variables."""
        self._world = weakref.ref(world)
        for shared in shareds:
            number = world.registry.numbers[shared]
            if not world.here.engine.is_tensor(shared):
                self.objects.add(number)
            world.here.engine.notice_writes(shared, functools.partial(_notice, self._world, number))


def _notice(reference: weakref.ref[World], number: int) -> None:
    world = reference()
    # Variables that are not replicated yet will be replicated with the new value.
    if world is None or world.closed or number >= world.registry.replicated:
        return
    agreement = agreement_of(world)
    # In a program, the other ranks may do the same, and afterwards only variables that are meant to be
    # equal can be compared.
    if not (world.in_program and number in agreement.incomparable | agreement.sliceable):
        agreement.changed_on_master([number])


def agreement_of(world: World) -> Agreement:
    """Return the `Agreement` of a world."""
    return world.part(Agreement)


def expected_equal(world: World) -> list[int]:
    """Return the numbers of the replicated tensors, without streams and a rank's own rows."""
    agreement = agreement_of(world)
    excluded = agreement.scattered | agreement.streams | agreement.sliceable
    return [
        number
        for number, shared in world.here.shareds.items()
        if number < world.registry.replicated
        and number not in excluded
        and world.here.engine.is_tensor(shared)
    ]


def label(world: World, number: int) -> str:
    """Return how messages refer to a shared variable; variables with equal names are numbered."""
    names = {each: shared.name or str(shared) for each, shared in world.here.shareds.items()}
    same = [each for each, name in names.items() if name == names[number]]
    return names[number] if len(same) == 1 else f"{names[number]} #{same.index(number) + 1}"


def labels(world: World, numbers: Iterable[int]) -> str:
    """Return how messages refer to several shared variables."""
    return listed(label(world, number) for number in numbers)
