"""Values that the script changes on the master between calls, and how they reach the other ranks.

A variable of a step is one variable to the script. So what the script changes is sent to all ranks
before the next command: values that it has set, that a function of its own has updated, or that it has
written into the array of a variable. Where other functions use a variable, a warning follows instead.

Writing into an array cannot be noticed when it happens. So the contents of arrays to which the script
has a reference are compared, by checksums, before each command, and other arrays if the script has read
the variable since the last command.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any, Callable, Iterable, Mapping, Sequence

import numpy as np

from synkhronos._errors import warn
from synkhronos._typing import SharedVariable
from synkhronos.arithmetic.comparison import checksum, sample
from synkhronos.arrays.data import as_data
from synkhronos.functions.replica_tracker import labels, replica_tracker_of
from synkhronos.host.log import logger
from synkhronos.stores.handle import Handle, RequiredRows
from synkhronos.world.rank_state import Command, RankState
from synkhronos.world.world import World, current_world, with_call_lock

_WHOLE = 1 << 22  # bytes of an array that are compared before each command
_SAMPLED = 1 << 14  # elements of a larger array
_IN_PARTS = 1 << 30  # bytes of an array of which more than a sample is compared


@dataclasses.dataclass(eq=False, repr=False)
class Carry(Command):
    """Set the replicas of the workers to values of the master, whose own arrays remain in place.

    Parameters
    ----------
    handles : dict of Handle
        Stored arrays, by the number of the variable.
    states : dict
        States of random streams, from which each rank moves ahead to its own.
    objects : dict
        Other values.
    """

    handles: Mapping[int, Handle]
    states: Mapping[int, Any]
    objects: Mapping[int, Any]

    def needs(self, ranks: range, size: int) -> list[RequiredRows]:
        return [RequiredRows(handle) for handle in self.handles.values()]

    def run(self, state: RankState) -> None:
        if state.is_master:
            return
        for number, handle in self.handles.items():
            state.engine.write(state.shareds[number], state.store.get(handle))
        for number, value in [*self.states.items(), *self.objects.items()]:
            state.engine.store(state.shareds[number], value)
        for number in self.states:
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


class Changes:
    """What the script changes on the master between calls, in one world."""

    def __init__(self) -> None:
        self._contents: dict[int, _Contents] = {}  # of arrays that the script may be writing into
        self._reference: Callable[[], World | None] = lambda: None
        self._is_logged = False

    @property
    def _world(self) -> World:
        return self._reference()  # type: ignore[return-value]  # it has called

    def begin(self, world: World, numbers: Iterable[int]) -> None:
        """Notice from now on when the script changes some variables, which all ranks have now."""
        self._reference, engine = weakref.ref(world), world.rank_state.engine
        for number in numbers:
            notify = functools.partial(_notice, self._reference, number)
            engine.notice_changes(world.rank_state.shareds[number], notify)
        self.look(numbers)

    def close(self) -> None:
        """Stop noticing changes."""
        world = self._reference()
        if world is not None:
            world.before_command = world.after_command = None
            for shared in world.rank_state.shareds.values():
                world.rank_state.engine.notice_changes(shared, None)

    def renew(self) -> None:
        """Forget all changes: new workers have the values of the master."""
        self._contents.clear()

    def forget(self, numbers: Iterable[int]) -> None:
        """Forget variables that were dropped."""
        for number in numbers:
            self._contents.pop(number, None)

    # What the script does

    def changed(self, numbers: Iterable[int]) -> None:
        """Record that the script has changed variables on the master."""
        replica_tracker_of(self._world).changed.update(numbers)
        self._continue()

    def notice(self, number: int, how: str) -> None:
        """Record that the script has changed a variable, or may be about to."""
        world, agreement = self._world, replica_tracker_of(self._world)
        if world.in_program:
            # The other ranks may do the same. Variables that are meant to be equal are compared later.
            apart = agreement.carried | agreement.incomparable | agreement.sliceable
            if how != "set" or number in apart:
                return
        if how == "read":
            self._notice_read(number)
        elif how == "set" or number not in agreement.streams:  # these are independent in any case
            self.changed([number])

    def _notice_read(self, number: int) -> None:
        """Record the contents of an array before the script gets it."""
        world, agreement = self._world, replica_tracker_of(self._world)
        array, contents = self._value(number), self._contents.get(number)
        if array is None or number in agreement.changed:
            return
        if contents is None and isinstance(array, np.ndarray) and array in world.rank_state.store:
            # References to it, and to views of it, could not be counted.
            array = array.copy()
            world.rank_state.engine.store(world.rank_state.shareds[number], array)
        if contents is not None and not contents.in_full and contents.changed_part(array) is not None:
            agreement.changed.add(number)
        if contents is None or not contents.in_full:
            contents = self._contents[number] = _Contents(array, in_full=True)
        contents.was_read = True
        self._continue()

    # Between calls

    def _value(self, number: int) -> Any:
        """Return the array of a variable in the memory of the process, or its object; None of others."""
        world, agreement = self._world, replica_tracker_of(self._world)
        if number not in world.rank_state.shareds or number in agreement.streams:
            return None
        value = world.rank_state.engine.storage(world.rank_state.shareds[number])
        return value if isinstance(value, np.ndarray) or number in agreement.objects else None

    def _is_borrowed(self, number: int) -> bool:
        value = self._value(number)
        if value is None or (isinstance(value, np.ndarray) and value in self._world.rank_state.store):
            return False
        del value  # it would count as the script's
        return self._world.rank_state.engine.is_borrowed(self._world.rank_state.shareds[number])

    def look(self, numbers: Iterable[int]) -> None:
        """Record the contents of the arrays of those variables to which the script has a reference."""
        for number in numbers:
            self._contents.pop(number, None)
            if self._is_borrowed(number):
                in_full = number not in replica_tracker_of(self._world).updaters
                self._contents[number] = _Contents(self._value(number), in_full)
        self._continue()

    def _continue(self) -> None:
        world = self._world
        is_due = self._contents or replica_tracker_of(world).changed
        world.before_command = self.settle if is_due else None
        world.after_command = self._look_again if self._contents else None

    def _look_again(self) -> None:
        """Record the contents of arrays that a command may have changed."""
        updaters = replica_tracker_of(self._world).updaters
        self.look(
            [
                number
                for number, contents in self._contents.items()
                if number in updaters or not contents.are_of(self._value(number))
            ]
        )

    def settle(self) -> None:
        """Send what the script has changed to all ranks, or have the next call warn of it."""
        world, agreement = self._world, replica_tracker_of(self._world)
        late, kept = set(), dict(world.rank_state.shareds)  # so that Python frees none meanwhile
        self.forget(self._contents.keys() - kept.keys())
        agreement.changed.intersection_update(kept)
        for number, contents in list(self._contents.items()):
            part = contents.changed_part(self._value(number))
            if part is not None:
                agreement.changed.add(number)
                late |= {number} if part else set()
            elif not self._is_borrowed(number):
                del self._contents[number]
        changed = set(agreement.changed)
        carried = sorted(agreement.to_carry(changed))
        agreement.changed_on_master(changed.difference(carried))
        world.before_command = world.after_command = None
        try:
            if carried:
                self._carry(carried)
            agreement.changed -= changed
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
        world, agreement = self._world, replica_tracker_of(self._world)
        values = {
            item: world.rank_state.engine.storage(world.rank_state.shareds[item]) for item in numbers
        }
        states = {number: values.pop(number) for number in numbers if number in agreement.streams}
        objects = {
            item: values.pop(item)
            for item in [*values]
            if item in agreement.objects or values[item] is None
        }
        datas = {
            item: as_data(world, world.rank_state.engine.to_host(value))
            for item, value in values.items()
        }
        values.clear()  # references would count as the script's
        if not self._is_logged:
            self._is_logged = True
            logger.info(
                "the script has changed %s: such changes are sent to all ranks before the next call",
                labels(world, numbers),
            )
        handles = {item: data.handle() for item, data in datas.items()}
        world.run(Carry(handles, states, objects))
        agreement.restored(numbers)


def _notice(reference: Callable[[], World | None], number: int, how: str) -> None:
    world = reference()
    # Variables that are not replicated yet will be replicated with the new value.
    if world is not None and not world.closed and number < world.registry.replicated:
        world.part(Changes).notice(number, how)


def carry(world: World, shareds: Iterable[SharedVariable], own: Iterable[SharedVariable] = ()) -> None:
    """Have what the script changes reach all ranks, except for variables that each rank has its own of.

    Parameters
    ----------
    shareds : iterable of shared variables
        The variables that a step uses.
    own : iterable of shared variables
        Those of which each rank keeps its own value.
    """
    if world.size > 1:
        agreement, numbers = replica_tracker_of(world), world.registry.numbers
        agreement.carried.update(numbers[shared] for shared in shareds)
        agreement.own.update(numbers[item] for item in own)


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
        world.run(Carry({}, states, {}))
