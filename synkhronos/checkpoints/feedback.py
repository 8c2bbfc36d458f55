"""The state of wire formats in checkpoints: error feedback, and the factors of `PowerSGD`.

The state belongs to a variable, a format and a machine. Only the leader of a machine has it, or the
progress process of the machine, for a vector that is reduced in buckets while the ranks compute.

If the number of machines is unchanged, each machine gets its own state. Otherwise the first machine gets
the sum of the parts that had not been sent, and the others nothing. The state is in units of the result,
so only the sum matters.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any, Iterator, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos.arithmetic.partition import Buckets
from synkhronos.checkpoints.manifest import Feedback, Key, label
from synkhronos.comms.formats import Format, from_json, make_wire, to_json
from synkhronos.comms.wires import Kept, Wire, kept_by, lengths, restore
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.stores.handle import RequiredRows
from synkhronos.world.rank_state import Ask, Command, RankState

if TYPE_CHECKING:
    from synkhronos.checkpoints.archive import Reader
    from synkhronos.stores.handle import Handle
    from synkhronos.world.world import World

_logger = logging.getLogger("synkhronos")


class Owner(NamedTuple):
    """The variable and the format to which kept state belongs.

    Attributes
    ----------
    number : int
        The number of the shared variable.
    wire : Format
        The format of the reductions.
    buckets : Buckets or None
        The buckets in which the progress processes reduce it, if they keep the state.
    """

    number: int
    wire: Format
    buckets: Buckets | None

    def new_wires(self, state: RankState) -> tuple[list[Wire], list[int]]:
        """Return new wires like those that keep the state, and the sizes of their arrays."""
        if self.buckets is not None:
            return [make_wire(self.wire, item) for item in self.buckets.shapes], self.buckets.sizes()
        shape = state.engine.storage(state.shareds[self.number]).shape
        return [make_wire(self.wire, state.pieces(self.number, shape))], [math.prod(shape)]

    def kept(self, state: RankState) -> Kept:
        """Return the state that this leader keeps."""
        if self.buckets is not None:
            of_progress_process: Kept = state.overlap.kept(self.buckets)
            return of_progress_process
        found = state.wires.get((self.number, self.wire))
        return kept_by([] if found is None else found[1:])

    def keep(self, state: RankState, kept: Kept) -> None:
        """Let this leader keep the given state."""
        if self.buckets is not None:
            state.overlap.keep(self.buckets, kept)
            return
        shape = state.engine.storage(state.shareds[self.number]).shape
        restore([state.wire(self.number, self.wire, shape)], [math.prod(shape)], kept)


def _find(state: RankState, owner: Owner) -> tuple[int, list[int], int, int] | None:
    """Return, on each leader, its machine, the counts, and the lengths of the vectors."""
    if state.transport.is_leader:
        kept = owner.kept(state)
        return state.transport.machine, kept.counts, kept.rest.size, kept.factors.size
    return None


def _send(state: RankState, owner: Owner) -> Any:
    """Send the state of each leader to the master. The factors, equal everywhere, are the master's."""
    if state.is_master:
        return owner.kept(state)[1:]
    return state.send(owner.kept(state).rest) if state.transport.is_leader else None


def _leaders(state: RankState) -> int | None:
    """Return the machine of each rank that is a leader."""
    return state.transport.machine if state.transport.is_leader else None


class _Keep(Command):
    """Let the leaders keep the given state.

    Parameters
    ----------
    owner : Owner
        The variable and the format of the state.
    counts : list of int
        How often the variable, or each bucket, was reduced.
    rests : dict
        By rank, a handle to the part that was not sent. Leaders that are not in it get zeros.
    factors : Handle or None
        A handle to the state that is the same on all machines.
    """

    def __init__(
        self, owner: Owner, counts: list[int], rests: Mapping[int, Handle], factors: Handle | None
    ) -> None:
        self.owner, self.counts, self.rests, self.factors = owner, counts, rests, factors

    def needs(self, ranks: range, size: int) -> list[RequiredRows]:
        own = [self.rests[rank] for rank in ranks if rank in self.rests]
        return [RequiredRows(handle) for handle in (*own, self.factors) if handle is not None]

    def run(self, state: RankState) -> None:
        if state.transport.is_leader:
            handles = self.rests.get(state.rank), self.factors
            arrays = [np.empty(0) if handle is None else state.store.get(handle) for handle in handles]
            self.owner.keep(state, Kept(self.counts, *arrays))


# Saving


def find(world: World, numbers: Sequence[int], keys: dict[int, Key]) -> list[tuple[Owner, Feedback]]:
    """Return the state of the machines for shared variables with these numbers, with descriptions."""
    found: list[tuple[Owner, Feedback]] = []
    state = world.rank_state
    for owner in _of_leaders(state, numbers) + _of_progress_processes(state, numbers):
        by_machine = sorted(item for item in world.run(Ask(_find, owner)) if item is not None)
        _, counts, rest, factors = by_machine[0]
        # If the counts differ, a collective has failed, and all start afresh.
        if rest and all(item[1] == counts for item in by_machine):
            first = f"kept_{len(found)}"
            members = [f"{first}_machine_{machine}" for machine, *_ in by_machine]
            described = Feedback(
                *keys[owner.number], to_json(owner.wire), owner.buckets is not None, counts, members,
                f"{first}_factors" if factors else None,
            )  # fmt: skip
            found.append((owner, described))
    return found


def _of_leaders(state: RankState, numbers: Sequence[int]) -> list[Owner]:
    return [
        Owner(number, wire, None)
        for (number, wire), (_, kept) in state.wires.items()
        if number in numbers and kept.count
    ]


def _of_progress_processes(state: RankState, numbers: Sequence[int]) -> list[Owner]:
    """Return the variables and formats for which progress processes may keep state."""
    if state.overlap is None:
        return []
    found = [(number, state.engine.buckets_of(state.shareds[number])) for number in numbers]
    return [
        Owner(number, buckets.wire, buckets)
        for number, buckets in found
        if buckets is not None and buckets.wire is not None
    ]


def arrays(world: World, owner: Owner, described: Feedback) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays that `find` has found, with their names in the file."""
    machines = world.run(Ask(_leaders))
    sent = world.run(Ask(_send, owner))
    rest, factors = sent[world.master_rank]
    for rank, machine in enumerate(machines):
        if machine is not None:
            own = rest if rank == world.master_rank else world.rank_state.store.get(sent[rank])
            yield described.members[machine], own
    if described.factors is not None:
        yield described.factors, factors


# Loading


class Given(NamedTuple):
    """The state in a file for the machines of a world: arguments of `_Keep`, with arrays by machine."""

    owner: Owner
    counts: list[int]
    rests: list[np.ndarray]
    factors: np.ndarray | None


def read(world: World, reader: Reader, saved: Sequence[Feedback], by_key: dict[Key, int]) -> list[Given]:
    """Read the state that the machines of this world will keep. It changes nothing.

    State that does not fit, such as the state of another format, is left out.
    """
    state = world.rank_state
    if not state.comm.over_cpu.has_wires:
        return []
    machines = sum(item is not None for item in world.run(Ask(_leaders)))
    found = {}
    for item in saved:
        with reader.interpreting():
            number, wire = by_key[item.key], from_json(item.wire)
        buckets = state.engine.buckets_of(state.shareds[number]) if item.in_buckets else None
        owner = Owner(number, wire, buckets)
        if item.in_buckets and (buckets is None or buckets.wire != wire or state.overlap is None):
            sizes = None
        else:
            sizes = _sizes(state, owner, item.counts)
        if sizes is None:
            _logger.warning(
                "load: what %r has kept for %s does not fit it any more, so it begins anew",
                wire, label(item.key),
            )  # fmt: skip
            continue
        found[owner] = _given(world, reader, owner, item, sizes, machines)
    return list(found.values())


def _sizes(state: RankState, owner: Owner, counts: Sequence[int]) -> tuple[int, int] | None:
    """Return the lengths of the vectors of each machine; None if the variable has changed."""
    try:
        return lengths(*owner.new_wires(state), counts)
    except ValueError as error:
        reraise_if_handlers(error)
        return None


def _given(
    world: World,
    reader: Reader,
    owner: Owner,
    described: Feedback,
    sizes: tuple[int, int],
    machines: int,
) -> Given:
    def vector(member: str, size: int) -> np.ndarray:
        with reader.interpreting():
            array = reader.read(member, world.rank_state.store.empty)
            if (array.shape, array.dtype) != ((size,), np.dtype(np.float32)):
                raise ValueError(f"array {member} is {array.dtype} {array.shape}, not float32 ({size},)")
        return array

    rests: list[np.ndarray] = []
    for member in described.members:
        rest = vector(member, sizes[0])
        if len(described.members) == machines or not rests:
            rests.append(rest)
        else:
            rests[0] += rest
    factors = None if described.factors is None else vector(described.factors, sizes[1])
    return Given(owner, described.counts, rests, factors)


def restore_all(world: World, given: Sequence[Given], numbers: Sequence[int]) -> None:
    """Let the machines keep the state; progress processes start afresh for other vectors."""
    if not world.rank_state.comm.over_cpu.has_wires:
        return
    owners = [variable.owner for variable in given]
    anew = [
        Given(owner, [0] * len(owner.buckets.shapes), [], None)
        for owner in _of_progress_processes(world.rank_state, numbers)
        if owner.buckets is not None and owner not in owners
    ]
    leaders = {machine: rank for rank, machine in enumerate(world.run(Ask(_leaders)))}
    store = world.rank_state.store
    for owner, counts, rests, factors in [*given, *anew]:
        handles = {leaders[machine]: store.put(rest) for machine, rest in enumerate(rests)}
        world.run(_Keep(owner, counts, handles, None if factors is None else store.put(factors)))
