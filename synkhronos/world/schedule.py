"""Schedules: what is repeated is compiled once, sent once, and bound by each rank once.

The first time, the master checks the arguments of a call, a collective or a training step, and compiles
them to a `Schedule`: commands, with the arrays that they take rows of. As long as the schedule is
current, a repetition sends its number, and a change: the rows of a call, for example. The sent form of a
command is one of these:

=============================  ==============================================================
Sent                           Command
=============================  ==============================================================
a `Command`                    itself
``(number,)``                  a schedule of the rank; only the number's eight bytes are sent
``(number, change)``           a schedule of the rank, with a change
``(number, change, command)``  a schedule that the rank may not have
a list of sent forms           a block of commands, in order
=============================  ==============================================================

Tuples and lists, because they are pickled faster than objects, by 20 microseconds when a gradient has
emptied the processor's caches.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

from synkhronos.stores.handle import RequiredRows
from synkhronos.world.rank_state import SCHEDULE_NUMBER, Command, RankState
from synkhronos.world.world import World


class Schedule(Command):
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
    """

    change: Any = None  # as in `ChangedRun`

    def __init__(
        self, world: World, command: Command, values: Sequence[Any] = (), is_whole: bool = True
    ) -> None:
        self.command = command
        self.number = world.registry.add_schedule(self)
        self.needs = command.needs  # type: ignore[method-assign]  # saves a call
        self._payload = SCHEDULE_NUMBER.pack(self.number)
        self._is_sent = False  # whether all ranks have it
        # The world itself would be kept in a cycle.
        self._registry, self._version = world.registry, world.registry.version
        self._size = world.size
        self._handles, self._is_whole = [value.last_handle for value in values], is_whole

    def is_current(self, values: Sequence[Any] = ()) -> bool:
        """Whether these values would be compiled to the same schedule.

        Functions or variables may have been added or dropped, the workers replaced, the world closed;
        a `Data` may be another one or have moved; and the next call of a function may be observed.

        Raises
        ------
        ValueError
            If the script has changed the layout of an array.
        """
        if self._version is not self._registry.version or len(values) != len(self._handles):
            return False
        for value, handle in zip(values, self._handles):
            if getattr(value, "last_handle", None) is not handle:
                return False
            if value.is_shown:
                value.check_layout()
        return True

    def again(self, values: Sequence[Any] = (), batch: Any = None) -> Schedule | ChangedRun | None:
        """Return a run on a batch of these values, or None if they have to be checked and compiled.

        Raises
        ------
        TypeError, IndexError
            For a wrong batch.
        ValueError
            As `is_current`.
        """
        if not self.is_current(values):
            return None
        if batch is None and self._is_whole:
            return self
        change = self.command.change_to(batch, self._size)
        return None if change is None else ChangedRun(self, change)

    def sent(self, change: Any = None) -> tuple:
        return (self.number, change) if self._is_sent else (self.number, change, self.command)

    def packed(self) -> bytes:
        return self._payload if self._is_sent else super().packed()

    def mark_sent(self) -> None:
        self._is_sent = True

    def run(self, state: RankState, change: Any = None) -> Any:
        return state.schedules.run(state, self.number, change, self.command)

    @property
    def plain(self) -> Command:
        return self.command

    def describe(self, state: RankState) -> str:
        return self.command.describe(state)


class ChangedRun(Command):
    """A run of a schedule, changed as in `Command.changed`."""

    _plain: Command | None = None

    def __init__(self, schedule: Schedule, change: Any) -> None:
        self.schedule, self.change = schedule, change

    def sent(self) -> tuple:
        return self.schedule.sent(self.change)

    def mark_sent(self) -> None:
        self.schedule.mark_sent()

    def run(self, state: RankState) -> Any:
        return self.schedule.run(state, self.change)

    def needs(self, ranks: range, size: int) -> Iterable[RequiredRows]:
        return self.plain.needs(ranks, size)

    @property
    def plain(self) -> Command:
        if self._plain is None:
            self._plain = self.schedule.command.changed(self.change)
        return self._plain

    def describe(self, state: RankState) -> str:
        return self.schedule.describe(state)


class FusedCommand(Command):
    """Several commands, run in order. A change ``(place, change)`` changes the command in this place.

    Parameters
    ----------
    commands : list of Command
        The commands.
    place : int
        The place of the command that takes the rows of a batch.
    """

    def __init__(self, commands: Sequence[Command], place: int = 0) -> None:
        self.commands, self.place = commands, place

    def sent(self) -> list[Any]:
        return [command.sent() for command in self.commands]

    def mark_sent(self) -> None:
        for command in self.commands:
            command.mark_sent()

    def changed(self, change: tuple[int, Any] | None) -> FusedCommand:
        if change is None:
            return self
        commands = list(self.commands)
        commands[change[0]] = commands[change[0]].changed(change[1])
        return FusedCommand(commands, self.place)

    def change_to(self, batch: Any, size: int) -> tuple[int, Any] | None:
        change = self.commands[self.place].change_to(batch, size)
        return None if change is None else (self.place, change)

    def bind(self, state: RankState) -> Callable[[tuple[int, Any] | None], list[Any]]:
        bound = [command.bind(state) for command in self.commands]

        def run(change: tuple[int, Any] | None) -> list[Any]:
            place, part = (-1, None) if change is None else change
            return [item(part if at == place else None) for at, item in enumerate(bound)]

        return run

    def run(self, state: RankState) -> list[Any]:
        return [command.run(state) for command in self.commands]

    def warm_caches(self, state: RankState, change: tuple[int, Any] | None = None) -> None:
        place, part = (0, None) if change is None else change
        for command in self.commands[:1]:  # its work empties the caches again
            command.warm_caches(state, None if place else part)

    def needs(self, ranks: range, size: int) -> list[RequiredRows]:
        return [need for command in self.commands for need in command.needs(ranks, size)]

    def title(self, state: RankState) -> str:
        return " + ".join(command.title(state) for command in self.commands)

    def describe(self, state: RankState) -> str:
        return " + ".join(command.describe(state) for command in self.commands)
