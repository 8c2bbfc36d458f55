"""Schedules: what is repeated is compiled once, sent once, and bound by each rank once.

The first time, the master checks the arguments of a call, a collective or a training step, and compiles
them to a `Schedule`: commands, with the arrays that they take rows of. As long as the schedule is
current, a repetition sends its number, and a change: the rows of a call, for example.
"""

from __future__ import annotations

import pickle
from typing import Any, Iterable, Sequence

from synkhronos.stores.required_rows import RequiredRows
from synkhronos.world.rank_state import SCHEDULE_NUMBER, Command, RankState
from synkhronos.world.world import World


class Schedule:
    """What every rank does in a call, a collective or a step that is repeated.

    The ranks drop it when the script has no reference to it any more.

    Parameters
    ----------
    world : World
        The world whose ranks have it.
    command : Command
        The command, without its observers.
    values : list of Data
        The arguments of the call or step.
    is_whole : bool
        Whether the command is on all rows, without a batch.

    Attributes
    ----------
    is_sent : bool
        Whether all ranks have it.
    """

    def __init__(
        self, world: World, command: Command, values: Sequence[Any] = (), is_whole: bool = True
    ) -> None:
        self.command = command
        self.number = world.registry.add_schedule(self)
        self.is_sent = False
        # The world itself would be kept in a cycle.
        self._registry, self._version = world.registry, world.registry.version
        self._size = world.size
        self._handles, self._is_whole = [value.last_handle for value in values], is_whole

    def again(self, values: Sequence[Any] = (), batch: Any = None) -> ScheduledRun | None:
        """Return a run on a batch of these values, or None if they have to be checked and compiled.

        Functions or variables may have been added or dropped, the workers replaced, the world closed;
        a `Data` may be another one or have moved; and the next call of a function may be observed.

        Raises
        ------
        TypeError, IndexError
            For a wrong batch.
        ValueError
            If the script has changed the layout of an array.
        """
        if self._version is not self._registry.version or len(values) != len(self._handles):
            return None
        for value, handle in zip(values, self._handles):
            if getattr(value, "last_handle", None) is not handle:
                return None
            if value.is_shown:
                value.check_layout()
        change = None
        if batch is not None or not self._is_whole:
            change = self.command.change_to(batch, self._size)
            if change is None:
                return None
        return ScheduledRun(self, change)


class ScheduledRun(Command):
    """A run of a schedule, changed as in `Command.changed`."""

    _plain: Command | None = None

    def __init__(self, schedule: Schedule, change: Any = None) -> None:
        self.schedule, self.change = schedule, change
        if change is None:  # for other machines, equal needs are found once
            self.needs = schedule.command.needs  # type: ignore[method-assign]

    def sent(self) -> tuple[Any, ...]:
        schedule = self.schedule
        if not schedule.is_sent:
            return schedule.number, self.change, schedule.command
        return (schedule.number,) if self.change is None else (schedule.number, self.change)

    def packed(self) -> bytes:
        schedule = self.schedule
        if schedule.is_sent and self.change is None:
            return SCHEDULE_NUMBER.pack(schedule.number)
        return pickle.dumps(self.sent(), pickle.HIGHEST_PROTOCOL)

    def mark_sent(self) -> None:
        self.schedule.is_sent = True

    def run(self, state: RankState) -> Any:
        schedule, schedules = self.schedule, state.schedules
        bound = schedules.bound.get(schedule.number)
        if bound is None:
            bound = schedules.bind(state, schedule.number, schedule.command)
        return bound(self.change)

    def needs(self, ranks: range, size: int) -> Iterable[RequiredRows]:
        return self.plain.needs(ranks, size)

    @property
    def plain(self) -> Command:
        if self._plain is None:
            self._plain = self.schedule.command.changed(self.change)
        return self._plain

    def describe(self, state: RankState) -> str:
        return self.schedule.command.describe(state)
