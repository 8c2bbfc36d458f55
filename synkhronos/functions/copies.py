"""Compiling, and the parts of which copies and pickles of a function are made."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple

from synkhronos._errors import SynkhronosError
from synkhronos._typing import Compiled, SharedVariable
from synkhronos.engines.base import check_swap
from synkhronos.functions.replica import Replica
from synkhronos.functions.replica_tracker import labels, replica_tracker_of
from synkhronos.functions.replicate import replicate
from synkhronos.functions.signature import Input
from synkhronos.host import compiler
from synkhronos.host.log import logger
from synkhronos.host.progress import Progress
from synkhronos.world.rank_state import Ask, RankState
from synkhronos.world.world import World


class Parts(NamedTuple):
    """A function, without its processes.

    Attributes
    ----------
    name : str
        The name of the function.
    replica : Replica
        With shared variables in the place of their numbers, and without a number of its own.
    inputs : list of Input
        The inputs.
    update_modes : list of str or None
        The operation that accumulates each update over slices.
    not_accumulated : list of str
        For each update that cannot accumulate over slices, a sentence that says why.
    form : list of str or bool
        The form of the result.
    """

    name: str | None
    replica: Any
    inputs: list[Input]
    update_modes: list[str | None]
    not_accumulated: list[str]
    form: list[str] | bool

    def __repr__(self) -> str:
        return f"<synkhronos.Function {self.name}>"

    def converted(
        self, convert: Callable[[Any], Any], shared_of: Callable[[Any], Any] = lambda shared: shared
    ) -> Parts:
        """Return the parts with other forms of the compiled functions, and other shared variables."""
        replica, window = self.replica, self.replica.window
        changed = replica._replace(
            compiled=convert(replica.compiled),
            window=None if window is None else window._replace(lengths=convert(window.lengths)),
            sliceable=list(map(shared_of, replica.sliceable)),
            updates=[(shared_of(shared), op) for shared, op in replica.updates],
            joint=frozenset(map(shared_of, replica.joint)),
        )
        return self._replace(replica=changed)


def replica_of(world: World, parts: Parts) -> Replica:
    """Return the master's replica of a new function, with numbers for it and its variables."""
    register = world.registry.add_shared
    for shared in world.rank_state.engine.shareds(parts.replica.compiled):
        register(shared)
    replica: Replica = parts.converted(lambda compiled: compiled, register).replica
    return replica._replace(number=world.registry.new_number())


def swapped(
    world: World,
    parts: Parts,
    swap: Mapping[SharedVariable, SharedVariable],
    delete_updates: bool,
    name: str,
    profile: Any,
) -> Parts:
    """Return the parts of a function with other shared variables, and perhaps without updates."""
    engine = world.rank_state.engine

    def copied(compiled: Compiled) -> Compiled:
        own = engine.shareds(compiled)
        of_it = {old: new for old, new in swap.items() if old in own}
        is_function = compiled is parts.replica.compiled
        options = {"name": name, "profile": profile} if is_function else {}
        return engine.copy(compiled, of_it, delete_updates, **options)

    with compiling(world, name):
        parts = parts._replace(name=name).converted(copied, lambda shared: swap.get(shared, shared))
    if not delete_updates:
        return parts
    replica = parts.replica._replace(updates=[], joint=frozenset())
    return parts._replace(replica=replica, update_modes=[], not_accumulated=[])


def checked_swap(world: World, function: Any, swap: Any) -> dict[SharedVariable, SharedVariable]:
    """Return the argument `swap` of a copy of a function as a dict, or raise an error."""
    own = function.get_shared()
    names = labels(world, [world.registry.numbers[item] for item in own])
    return check_swap(swap, repr(function), own, names, world.rank_state.engine.is_shared)


def check_one_value(world: World, function: Any) -> None:
    """Raise if other ranks have other values on purpose, as a pickle has the values of the master."""
    agreement, numbers = replica_tracker_of(world), world.registry.numbers
    apart = [numbers[item] for item in function.get_shared()]
    apart = [item for item in apart if item in agreement.scattered | agreement.assigned]
    if apart:
        raise SynkhronosError(
            f"{function!r} cannot be pickled: a pickle has the values of the master, but each rank has "
            f"its own value of {labels(world, apart)}; leave the function out, and save the values of "
            f"all ranks with synk.save()"
        )


def _duplicate(state: RankState, numbers: Mapping[int, int]) -> None:
    """Give a worker copies of its replicas: the number of the copy, by the number of the variable."""
    if not state.is_master:
        for number, new in numbers.items():
            state.shareds[new] = state.engine.duplicate(state.shareds[number])


def duplicate_replicas(world: World, pairs: Iterable[tuple[SharedVariable, SharedVariable]]) -> None:
    """Register copies of shared variables, whose values every rank copies from its own replica."""
    registry = world.registry
    new = [(old, copy) for old, copy in pairs if copy not in registry.numbers]
    if not new:
        return
    have_workers = world.started and world.size > 1
    if have_workers:
        replicate(world)  # so that the copies have the next numbers
    numbers = {registry.numbers[old]: registry.add_shared(copy) for old, copy in new}
    if have_workers:
        world.run(Ask(_duplicate, numbers))
        registry.mark_replicated(list(numbers.values()))
        replica_tracker_of(world).begin(world, list(numbers.values()))
    agreement = replica_tracker_of(world)
    for group in (agreement.scattered, agreement.assigned):
        group.update([numbers[number] for number in group.intersection(numbers)])


@contextlib.contextmanager
def compiling(world: World, name: str) -> Iterator[None]:
    """Show that a function is being compiled, if this takes long, and log the time it took."""
    called = f"function {world.registry.n_functions + 1} ({os.path.basename(name)})"
    remark = (
        f"the first time this can take minutes; later the code is taken from {compiler.TITLE}'s cache"
    )
    start = time.perf_counter()
    with world.part(Progress).show(f"compiling {called}", remark):
        yield
    logger.info("%s compiled in %.3f s", called, time.perf_counter() - start)
