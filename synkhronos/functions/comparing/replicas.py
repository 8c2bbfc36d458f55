"""Digests and samples of replicas, which every rank returns, and which replicas differ by them."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Iterable, Sequence

import numpy as np

from synkhronos.arithmetic.comparison import difference, digest, rounding, sample
from synkhronos.stores.handle import RequiredRows
from synkhronos.world.rank_state import Command, RankState
from synkhronos.world.world import World

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
    """A call, and digests or samples of replicas before and after it; or these without a call.

    Parameters
    ----------
    look : callable
        `digests` or `samples`.
    before, after : list of int
        The shared variables to look at, by number.
    call : Command or None
        The call.
    """

    look: Callable[[RankState, Sequence[int]], list[Any]]
    before: Sequence[int]
    call: Command | None = None
    after: Sequence[int] = ()

    @property
    def plain(self) -> Command:
        return self if self.call is None else self.call

    def needs(self, ranks: range, size: int) -> Iterable[RequiredRows]:
        return () if self.call is None else self.call.needs(ranks, size)

    def run(self, state: RankState) -> tuple[Any, list[Any], list[Any]]:
        """Return the result of the call, and the digests or samples before and after it."""
        before = self.look(state, self.before)
        returned = None if self.call is None else self.call.run(state)
        return returned, before, self.look(state, self.after)


def find_different(world: World, numbers: Sequence[int]) -> dict[int, list[int]]:
    """Return the variables whose replicas differ now, with the ranks that differ from the master."""
    _, by_rank, _ = zip(*world.run(Observed(digests, numbers)))
    return ranks_that_differ(world, numbers, by_rank)


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
