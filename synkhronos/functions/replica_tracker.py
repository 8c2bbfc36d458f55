"""Which replicas of shared variables are meant to be equal, which are, and what the script changes.

Collectives, `scatter` and `set_value` of one rank report here what they do. Every rank returns digests
and samples of its replicas.

A variable of a step is one variable to the script. So what the script changes on the master between
calls is sent to all ranks before the next command: values that it has set, that a function of its own
has updated, or that it has written into the array of a variable. Where other functions use a variable, a
warning follows instead.

Writing into an array cannot be noticed when it happens. So the contents of arrays to which the script
has a reference are compared, by checksums, before each command, and other arrays if the script has read
the variable since the last command.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from synkhronos._errors import warn
from synkhronos._text import listed
from synkhronos._typing import AnyArray
from synkhronos.arithmetic.comparison import checksum, difference, digest, rounding, sample
from synkhronos.arrays.data import as_data
from synkhronos.host.log import logger
from synkhronos.stores.handle import Handle
from synkhronos.world.rank_state import Ask, Command, FusedCommand, RankState
from synkhronos.world.world import World, current_world, with_call_lock

_WHOLE = 1 << 22  # bytes of an array that are compared before each command
_SAMPLED = 1 << 14  # elements of a larger array
_IN_PARTS = 1 << 30  # bytes of an array of which more than a sample is compared


def carry_values(state: RankState, values: Mapping[int, Any], streams: Collection[int]) -> None:
    """Set the replicas of the workers to values of the master, whose own arrays remain in place.

    Parameters
    ----------
    values : dict
        The handle of an array, or another value, by the number of the variable.
    streams : collection of int
        The variables with states of random streams, from which each rank moves ahead to its own.
    """
    if state.is_master:
        return
    for number, value in values.items():
        if isinstance(value, Handle):
            state.engine.write(state.shareds[number], state.store.get(value))
        else:
            state.engine.store(state.shareds[number], value)
        if number in streams:
            state.engine.jump(state.shareds[number], state.stream_index)


class _Contents:
    """What an array or another object contained, by checksums.

    An array of more than `_WHOLE` bytes has one of a sample and, if `in_full`, one of each part.

    Attributes
    ----------
    was_read : bool
        Whether the next comparison is of all parts, and not only of the sample and one part.
    """

    was_read = False

    def __init__(self, value: Any, in_full: bool) -> None:
        is_array = isinstance(value, np.ndarray)
        self._array = weakref.ref(value) if is_array else None
        self.in_full = not is_array or value.nbytes <= (_IN_PARTS if in_full else _WHOLE)
        self._sums = [checksum(part) for part in self._parts(value)]
        self._next = 0

    def _parts(self, array: Any) -> list[Any]:
        if self._array is None or array.nbytes <= _WHOLE:
            return [array]
        parts = [sample(array, _SAMPLED)]
        if self.in_full:
            flat = (array.T if array.flags.f_contiguous else array).reshape(-1)
            step = _WHOLE // array.itemsize
            parts += [flat[start : start + step] for start in range(0, flat.size, step)]
        return parts

    def are_of(self, array: Any) -> bool:
        if self._array is None:  # the contents of an object count
            return not isinstance(array, np.ndarray)
        return array is not None and self._array() is array

    def changed_part(self, array: Any) -> int | None:
        """Return the number of a part that has changed, 0 for the sample or a whole value."""
        if array is None or not self.are_of(array):
            return 0
        parts = self._parts(array)
        chosen = list(range(len(parts)))
        if len(parts) > 1 and not self.was_read:
            self._next = self._next % (len(parts) - 1) + 1
            chosen = [0, self._next]
        was_read, self.was_read = self.was_read, False
        found = [item for item in chosen if checksum(parts[item]) != self._sums[item]]
        return None if not found else 0 if was_read else found[0]


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
        self._until_equal = (
            self.changed, self.set_on_master, self.local, self.scattered, self.assigned, self.stale
        )  # fmt: skip
        self._contents: dict[int, _Contents] = {}  # of arrays that the script may be writing into
        self._reference: Callable[[], World | None] = lambda: None
        self._is_logged = False

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
        for numbers in (*self._until_equal, self.suspected, self._contents):
            numbers.clear()

    def close(self) -> None:
        """Pass open suspicions to the world as remarks, and stop noticing changes."""
        for suspicion in dict.fromkeys(self.suspected.values()):
            suspicion.remark()
        world = self._reference()
        if world is not None:
            world.before_command = world.after_command = None
            for shared in world.rank_state.shareds.values():
                world.rank_state.engine.notice_changes(shared, None)

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
        if self.suspected or any(self._until_equal):
            for number in numbers:
                self.suspected.pop(number, None)
                for group in self._until_equal:
                    group.discard(number)

    def compared(self, numbers: Sequence[int]) -> None:
        """Record that the script has combined or asked for the values of several ranks.

        This says nothing about variables that no function has updated yet.
        """
        for number in numbers:
            if any([watch.calls for watch in self.updaters.get(number, ())]):
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

    # What the script does

    def begin(self, world: World, numbers: Iterable[int]) -> None:
        """Notice from now on when the script changes some variables, which all ranks have now."""
        self._reference, engine = weakref.ref(world), world.rank_state.engine
        for number in numbers:
            notify = functools.partial(_notice, self._reference, number)
            engine.notice_changes(world.rank_state.shareds[number], notify)
        self.look(numbers)

    @property
    def _world(self) -> World:
        return self._reference()  # type: ignore[return-value]  # it has called `begin`

    def note_changed(self, numbers: Iterable[int]) -> None:
        """Record that the script has changed variables on the master."""
        self.changed.update(numbers)
        self._continue()

    def notice(self, number: int, how: str) -> None:
        """Record that the script has changed a variable, or may be about to."""
        if self._world.in_program:
            # The other ranks may do the same. Variables that are meant to be equal are compared later.
            apart = self.carried | self.incomparable | self.sliceable
            if how != "set" or number in apart:
                return
        if how == "read":
            self._notice_read(number)
        elif how == "set" or number not in self.streams:  # these are independent in any case
            self.note_changed([number])

    def _notice_read(self, number: int) -> None:
        """Record the contents of an array before the script gets it."""
        state = self._world.rank_state
        array, contents = self._value(number), self._contents.get(number)
        if array is None or number in self.changed:
            return
        if contents is None and isinstance(array, np.ndarray) and array in state.store:
            # References to it, and to views of it, could not be counted.
            array = array.copy()
            state.engine.store(state.shareds[number], array)
        if contents is not None and not contents.in_full and contents.changed_part(array) is not None:
            self.changed.add(number)
        if contents is None or not contents.in_full:
            contents = self._contents[number] = _Contents(array, in_full=True)
        contents.was_read = True
        self._continue()

    # Between calls

    def _value(self, number: int) -> Any:
        """Return the array of a variable in the memory of the process, or its object; None of others."""
        state = self._world.rank_state
        if number not in state.shareds or number in self.streams:
            return None
        value = state.engine.storage(state.shareds[number])
        return value if isinstance(value, np.ndarray) or number in self.objects else None

    def _is_borrowed(self, number: int) -> bool:
        value, state = self._value(number), self._world.rank_state
        if value is None or (isinstance(value, np.ndarray) and value in state.store):
            return False
        del value  # it would count as the script's
        return state.engine.is_borrowed(state.shareds[number])

    def look(self, numbers: Iterable[int]) -> None:
        """Record the contents of the arrays of those variables to which the script has a reference."""
        for number in numbers:
            self._contents.pop(number, None)
            if self._is_borrowed(number):
                in_full = number not in self.updaters
                self._contents[number] = _Contents(self._value(number), in_full)
        self._continue()

    def _continue(self) -> None:
        world = self._world
        is_due = self._contents or self.changed
        world.before_command = self.settle if is_due else None
        world.after_command = self._look_again if self._contents else None

    def _look_again(self) -> None:
        """Record the contents of arrays that a command may have changed."""
        self.look([
            number
            for number, contents in self._contents.items()
            if number in self.updaters or not contents.are_of(self._value(number))
        ])  # fmt: skip

    def settle(self) -> None:
        """Send what the script has changed to all ranks, or have the next call warn of it."""
        world = self._world
        late, kept = set(), dict(world.rank_state.shareds)  # so that Python frees none meanwhile
        self.forget(self._contents.keys() - kept.keys())
        self.changed.intersection_update(kept)
        for number, contents in list(self._contents.items()):
            part = contents.changed_part(self._value(number))
            if part is not None:
                self.changed.add(number)
                late |= {number} if part else set()
            elif not self._is_borrowed(number):
                del self._contents[number]
        changed = set(self.changed)
        apart = self.own | self.scattered | self.assigned | self.sliceable
        carried = sorted((self.carried & changed) - apart)
        self.changed_on_master(changed.difference(carried))
        world.before_command = world.after_command = None
        try:
            if carried:
                self._carry(carried)
            self.changed -= changed
        finally:
            self._continue()
        self.look(changed)
        if late:
            warn(
                f"{labels(world, late)}: the script has written into the array of this large variable, "
                f"which was noticed only now: the other ranks may have used the old values in the last "
                f"calls. Call set_value() or synk.broadcast(variable) after writing"
            )

    def _carry(self, numbers: Sequence[int]) -> None:
        world = self._world
        engine, datas = world.rank_state.engine, []
        values: dict[int, Any] = {}
        for number in numbers:
            value = engine.storage(world.rank_state.shareds[number])
            if number not in self.incomparable and value is not None:
                datas.append(as_data(world, engine.to_host(value)))
                value = datas[-1].handle()
            values[number] = value
        del value  # a reference would count as the script's
        if not self._is_logged:
            self._is_logged = True
            logger.info(
                "the script has changed %s: such changes are sent to all ranks before the next call",
                labels(world, numbers),
            )
        handles = [data.handle() for data in datas]
        world.run(Ask(carry_values, values, self.streams.intersection(numbers), handles=handles))
        self.restored(numbers)


def _notice(reference: Callable[[], World | None], number: int, how: str) -> None:
    world = reference()
    # Variables that are not replicated yet will be replicated with the new value.
    if world is not None and not world.closed and number < world.registry.replicated:
        replica_tracker_of(world).notice(number, how)


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


def samples(state: RankState, numbers: Sequence[int]) -> list[tuple[Any, AnyArray]]:
    """Return the shape and some elements of each of this rank's replicas."""
    return [_sample(state, number, len(numbers)) for number in numbers]


def _sample(state: RankState, number: int, n_samples: int) -> tuple[Any, AnyArray]:
    array = state.engine.storage(state.shareds[number])
    if array is None:  # an operation has returned None for its update
        return None, np.zeros(0)
    limit = max(1, _MOST // n_samples // array.dtype.itemsize)
    part = sample(array, min(limit, _MOST_OF_ONE))
    return tuple(array.shape), np.array(state.engine.to_host(part))


class Observed(FusedCommand):
    """A call, in the place of the rows, and what is asked about replicas before and after it."""

    @property
    def plain(self) -> Command:
        return self.commands[self.place]


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


def largest_difference(by_rank: Sequence[tuple[Any, AnyArray]], master: int) -> float | None:
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


# Random streams


@with_call_lock
def reseed(streams: Any, seed: int | None = None) -> None:
    """Seed random streams on every rank, as ``streams.seed(seed)`` does on the master.

    The streams of the ranks remain independent. The ranks then draw the same numbers as in a new run
    whose streams were created with this seed.

    Parameters
    ----------
    streams : MRG_RandomStreams or RandomStreams
        The streams to seed. With PyTensor, a ``RandomStream``, a shared random generator, or a list of
        shared generators.
    seed : int, optional
        By default, the seed with which the streams were created.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    RuntimeError
        Inside a ``fuse()`` block, whose calls would run after the seeding.
    TypeError
        If `streams` is not an object of one of these classes, or `seed` is not an int.

    Examples
    --------
    >>> import synkhronos as synk
    >>> from theano.sandbox.rng_mrg import MRG_RandomStreams
    >>> synk.fork(2, use_gpu=False)
    2
    >>> streams = MRG_RandomStreams(1)
    >>> draw = synk.function([], (streams.uniform((2,)), "gather"))
    >>> first = draw()
    >>> synk.reseed(streams, 1)
    >>> bool((draw() == first).all())
    True
    >>> synk.close()
    """
    world = current_world()
    world.check_usable()
    if world.is_recording:
        raise RuntimeError("reseed(): call it before or after the fuse() block, not inside")
    if isinstance(seed, (bool, float, str)):
        raise TypeError(f"reseed: seed: expected an int, or None, got {seed!r}")
    state = world.rank_state
    seeded = state.engine.seed(streams, seed)
    # Streams that are not replicated yet will be replicated with the master's new states.
    registry = world.registry
    states = {
        registry.numbers[shared]: state.engine.storage(shared)
        for shared in seeded
        if registry.numbers.get(shared, registry.replicated) < registry.replicated
    }
    if states:
        replica_tracker_of(world).restored(states)
        world.run(Ask(carry_values, states, [*states]))
