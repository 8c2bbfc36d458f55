"""Plans: commands that are run again and again. Every rank is sent a plan once, and prepares it once.

Later runs send the number of the plan, and a change: the rows of a call, for example.
The sent form of a command is one of these:

=============================  ==============================================================
Sent                           Command
=============================  ==============================================================
a `Command`                    itself
``(number,)``                  a plan that the rank has; only the number's eight bytes are sent
``(number, change)``           a plan that the rank has, with a change
``(number, change, command)``  a plan that the rank may not have
a list of sent forms           a block of commands, in order
=============================  ==============================================================

Tuples and lists, because they are pickled faster than objects, by 20 microseconds when a gradient has
emptied the processor's caches.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable

from synkhronos.stores.required_rows import RequiredRows
from synkhronos.world.rank_state import PLAN_NUMBER, Command, RankState
from synkhronos.world.registry import Registry


class Plan(Command):
    """A command that is sent once, and then run by its number.

    The ranks drop it when the script has no reference to it any more.

    Parameters
    ----------
    registry : Registry
        The registry that numbers it.
    command : Command
        The command that is sent.
    """

    change: Any = None  # as in `ChangedPlan`

    def __init__(self, registry: Registry, command: Command) -> None:
        self.command = command
        self.number = registry.add_plan(self)
        self._registry = registry
        self._generation: int | None = None  # of the workers that have it
        self.needs = command.needs  # type: ignore[method-assign]  # saves a call
        self._payload = PLAN_NUMBER.pack(self.number)

    @property
    def is_sent(self) -> bool:
        """Whether all workers have it."""
        return self._generation == self._registry.generation

    def sent(self, change: Any = None) -> tuple:
        if self._generation == self._registry.generation:
            return self.number, change
        return self.number, change, self.command

    def packed(self) -> bytes:
        return self._payload if self._generation == self._registry.generation else super().packed()

    def mark_sent(self) -> None:
        self._generation = self._registry.generation

    def run(self, state: RankState) -> Any:
        return state.plans.run(state, self.number, None, self.command)

    @property
    def plain(self) -> Command:
        return self.command

    def describe(self, state: RankState) -> str:
        return self.command.describe(state)


class ChangedPlan(Command):
    """A run of a plan, changed as in `Command.changed`."""

    _plain: Command | None = None

    def __init__(self, plan: Plan, change: Any) -> None:
        self.plan, self.change = plan, change

    def sent(self) -> tuple:
        return self.plan.sent(self.change)

    def mark_sent(self) -> None:
        self.plan.mark_sent()

    def run(self, state: RankState) -> Any:
        return state.plans.run(state, self.plan.number, self.change, self.plan.command)

    @property
    def needs(self) -> Callable[[range, int], Iterable[RequiredRows]]:
        return self.plain.needs

    @property
    def plain(self) -> Command:
        if self._plain is None:
            self._plain = self.plan.command.changed(self.change)
        return self._plain

    def describe(self, state: RankState) -> str:
        return self.plan.command.describe(state)
