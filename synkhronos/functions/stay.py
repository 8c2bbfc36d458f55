"""For extensions: workers that stay in a function of an extension while the script goes on.

The next command of the world has them leave it. So nothing else differs for the script.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Iterable, Sequence, TypeVar

from synkhronos._typing import Compiled, SharedVariable
from synkhronos.arrays.data import Data
from synkhronos.functions.function import Function
from synkhronos.functions.replicate import replicate
from synkhronos.stores.handle import Handle, RequiredRows
from synkhronos.world.rank_state import Command, RankState
from synkhronos.world.world import World, current_world

_Part = TypeVar("_Part")


@dataclasses.dataclass(eq=False, repr=False)
class Stay(Command):
    """Calls a function on a worker, which returns when it is told to.

    Parameters
    ----------
    serve : callable
        It belongs to a module. See `Workers.stay`.
    uses : list of (int, list of Handle)
        The numbers of functions, and arrays.
    arguments : tuple
        Others.
    """

    serve: Callable[..., Any]
    uses: Sequence[tuple[int, list[Handle]]]
    arguments: tuple

    def needs(self, ranks: range, size: int) -> list[RequiredRows]:
        return [RequiredRows(handle) for _, handles in self.uses for handle in handles]

    def run(self, state: RankState) -> None:
        uses = [
            (state.functions[number].compiled, [state.store.get(handle) for handle in handles])
            for number, handles in self.uses
        ]
        self.serve(state.rank, state.transport.check, uses, *self.arguments)


class Workers:
    """The workers of a world whose ranks share their memory.

    Parameters
    ----------
    world : World
        The world.

    Attributes
    ----------
    size, rank : int
        The number of ranks, and the rank of the script's process.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.size, self.rank = world.size, world.master_rank

    def part(self, kind: type[_Part]) -> _Part:
        """Return the world's only object of a class; see `World.part`."""
        return self._world.part(kind)

    def stay(
        self,
        serve: Callable[..., Any],
        uses: Sequence[tuple[Function, Sequence[Data]]],
        arguments: tuple,
        leave: Callable[[], None],
    ) -> None:
        """Have each worker call ``serve(rank, check, uses, *arguments)``, and go on.

        Parameters
        ----------
        serve : callable
            A function of a module. Instead of each function and its data, it gets the compiled function
            and arrays. It calls ``check()`` several times per second, which may raise, and returns soon
            after `leave` was called.
        uses : list of (Function, list of Data)
            The functions and their data.
        arguments : tuple
            Others, which are pickled.
        leave : callable
            Called once, before the next command or the end of the world.
        """
        replicate(self._world)
        sent = [(item.replica.number, [each.handle() for each in datas]) for item, datas in uses]
        self._world.stay(Stay(serve, sent, arguments), leave)

    def check(self, waited: float) -> None:
        """Raise if it is useless to wait for the workers, after these seconds of waiting.

        Raises
        ------
        WorldBrokenError
            If a worker died or the timeout expired. All workers are ended first.
        """
        self._world.check_waiting(waited)


def workers_of(function: Function) -> Workers | None:
    """Return the workers that have a function, or None if they cannot stay in a command."""
    world = function._usable_world()
    return Workers(world) if world.transport.can_stay else None


def call_on_change(
    function: Function, shareds: Iterable[SharedVariable], call: Callable[[], None]
) -> None:
    """Have a function called whenever the script has given one of some variables a new value.

    Parameters
    ----------
    function : Function
        A function of the world with whose engine the variables are used.
    shareds : iterable of shared variables
        Variables that the world's functions do not use.
    call : callable
        Called without arguments, after what was asked for before.
    """
    engine = function._usable_world().rank_state.engine
    for shared in shareds:
        container: Any = getattr(shared, "container", None)
        before = getattr(container, "notify", None)

        def notify(how: str, before: Callable[[str], None] | None = before) -> None:
            if before is not None:
                before(how)
            if how != "read":
                call()

        engine.notice_changes(shared, notify)


def compiled_of(function: Function) -> Compiled:
    """Return the compiled function of this rank, also in a program."""
    if function._world is None:
        return current_world().rank_state.functions[function.specification.number].compiled
    return function.replica.compiled
