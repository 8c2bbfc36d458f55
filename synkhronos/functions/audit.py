"""``fork(check=True)``: every call also compares the replicas, before and after it.

Before the call, the variables on whose values its results depend must be equal on all ranks. After the
call, all variables must be equal except variables that were last updated from values that differ by
rank: a rank's own rows, random numbers, or other such variables. These must be equal again before their
values are used.
"""

from __future__ import annotations

from typing import Any, Iterable

from synkhronos._errors import MismatchError
from synkhronos._typing import Finish
from synkhronos.engines.base import Analysis
from synkhronos.functions.agreement import (
    agreement_of,
    digests,
    expected_equal,
    labels,
    ranks_that_differ,
)
from synkhronos.functions.analysis import sources, uses
from synkhronos.stores.required_rows import Need
from synkhronos.world.here import Command, Here
from synkhronos.world.world import World


class Audited(Command):
    """A call, and digests of replicas before and after it."""

    def __init__(self, call: Command, before: list[int], after: list[int]) -> None:
        self.call, self.before, self.after = call, before, after

    @property
    def plain(self) -> Command:
        return self.call

    def needs(self, ranks: range, size: int) -> Iterable[Need]:
        return self.call.needs(ranks, size)

    def run(self, here: Here) -> tuple:
        before = digests(here, self.before)
        returned = self.call.run(here)
        return returned, before, digests(here, self.after)


class Audit:
    """Checks every call of one function; it takes the place of a `Watch`."""

    def __init__(self, world: World, function: Any, analysis: Analysis) -> None:
        self._world = world
        self._name = repr(function)
        self._used, _ = uses(world, function, analysis)
        self._updates = sources(world, function, analysis)

    def observe(self, call: Command, finish: Finish) -> tuple[Command, Finish]:
        """Return what to submit in place of a call: one that also returns digests."""
        world, agreement = self._world, agreement_of(self._world)
        before = sorted(self._used - agreement.different)
        for number, (from_rows, shareds) in self._updates.items():
            own = from_rows or shareds & (agreement.different | agreement.local)
            (agreement.local.add if own else agreement.local.discard)(number)
        after = [one for one in expected_equal(world) if one not in agreement.local | agreement.assigned]

        def finish_observed(results):
            results, before_by_rank, after_by_rank = zip(*results)
            self._compare("before", before, before_by_rank)
            self._compare("after", after, after_by_rank)
            return finish(results)

        return Audited(call, before, after), finish_observed

    def _compare(self, when, numbers, by_rank):
        found = ranks_that_differ(by_rank, self._world.master_rank)
        if not found:
            return
        different = [numbers[position] for position in found]
        ranks = sorted({rank for each in found.values() for rank in each})
        remedy = (
            "call synk.broadcast() on what was set on one rank only; combine what is updated from a "
            "rank's own rows before it is used, with synk.all_reduce() or in "
            "synkhronos.extensions.train.make_train_function()"
        )
        raise MismatchError(
            f"{self._name}: {when} this call the replicas of {labels(self._world, different)} differ "
            f"from the master's on rank(s) {', '.join(map(str, ranks))}; {remedy}",
            [labels(self._world, [number]) for number in different],
        )
