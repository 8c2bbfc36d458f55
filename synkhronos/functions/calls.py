"""Calls of functions, with collectives between them, that are run without effects to be compared."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos.arithmetic.comparison import Difference
from synkhronos.functions.agreement import agreement_of
from synkhronos.functions.analysis import analysis_of
from synkhronos.functions.call import CallFunction
from synkhronos.functions.copies import without_effects
from synkhronos.functions.packed import NO_ARRAY, unpack
from synkhronos.functions.serial import Alone, Perturbed, SerialCall
from synkhronos.functions.trial import SliceableRows, Tolerance, Trial, sampled
from synkhronos.stores.handle import Handle
from synkhronos.world.fuse import FusedCommand
from synkhronos.world.here import Command
from synkhronos.world.world import World


class Called(NamedTuple):
    """A command and the function that it calls, which for a collective is None."""

    function: Any
    command: Any


def called(world: World, command: Command) -> Called:
    """Return a recorded command with its function."""
    command = command.plain
    is_call = isinstance(command, CallFunction)
    return Called(world.registry.functions[command.number] if is_call else None, command)


def calls_until(
    world: World, commands: Sequence[Command], command: Command, has_reductions: bool
) -> tuple[list[Called], int]:
    """Return the calls of a block up to one of them, or to the last reduction, and its place."""
    each = [called(world, one) for one in commands]
    place = next(position for position, one in enumerate(each) if one.command is command)
    last = max([place, *(position for position, one in enumerate(each) if one.function is None)])
    return each[: (last if has_reductions else place) + 1], place


class OnOneRank(NamedTuple):
    """What calls give on one rank: for each call its outputs, and new values by number."""

    outputs: list[list[np.ndarray | None]]
    news: dict[int, np.ndarray]


class ByRank(NamedTuple):
    """An output of a call on all ranks.

    Attributes
    ----------
    values : list of numpy.ndarray or None
        The values of the ranks that have rows; or one, if the communicator has reduced them or there is
        only the master's.
    weights : list of int
        The numbers of rows of these ranks.
    """

    values: list[np.ndarray | None]
    weights: list[int]


class OnAllRanks(NamedTuple):
    """What calls give on all ranks.

    Attributes
    ----------
    outputs : list of list of ByRank
        The outputs of each call.
    news : list of dict
        For each rank, how much the new values differ from the serial ones, and the values, by number;
        see `Trial`.
    """

    outputs: list[list[ByRank]]
    news: list[dict[int, tuple[Difference | None, np.ndarray | None]]]


class Calls:
    """Some calls in their order.

    Parameters
    ----------
    world : World
    called : list of Called

    Attributes
    ----------
    updated : list of int
        The variables that the calls change.
    tensors : list of int
        Those of them whose new values can be compared.
    sources : list of list of set
        For each call and output, the variables from whose values before the calls it is computed.
    update_sources : dict of set
        The same for the updated variables.
    """

    def __init__(self, world: World, called: Sequence[Called]) -> None:
        self._world, self.called = world, list(called)
        self.sources: list[list[set[int]]] = []
        self.update_sources: dict[int, set[int]] = {}
        for function, command in called:
            if function is None:
                self.sources.append([])
                for number in command.numbers:
                    former = self.update_sources.get(number, {number})
                    self.update_sources[number] = set() if command.takes_master else former
            else:
                self._follow(analysis_of(world, function))
        self.updated = list(self.update_sources)
        streams, here = agreement_of(world).streams, world.here
        self.tensors = [
            number
            for number in self.updated
            if number not in streams and here.engine.is_tensor(here.shareds[number])
        ]

    def _follow(self, analysis):
        numbers, former = self._world.registry.numbers, self.update_sources

        def of(dependence):
            each = [numbers[shared] for shared in dependence.shareds]
            return set().union(*(former.get(number, {number}) for number in each))

        self.sources.append([of(output) for output in analysis.outputs])
        news = {numbers[shared]: of(new) for shared, new in analysis.updates.items()}
        self.update_sources = {**former, **news}

    @property
    def used(self) -> set[int]:
        """The variables from whose values results are computed."""
        outputs = [one for each in self.sources for one in each]
        return set().union(*outputs, *self.update_sources.values())

    def alone(self, compared: Sequence[int], most: int | None, perturbed: bool = False) -> OnOneRank:
        """Run the calls on the master alone; return the new values of the compared variables.

        At most `most` elements of each are returned. If `perturbed`, floating-point rows differ by a
        few units in the last place.
        """
        world, outputs = self._world, []
        here = (Perturbed if perturbed else Alone)(world.here)
        commands = [self._serial(command) for _, command in self.called]
        with without_effects(here, self.updated):
            for command in commands:
                result = command.run(here)
                is_call = isinstance(command, SerialCall)
                outputs.append([_copied(here, one) for one in result[1:]] if is_call else [])
            exported = {one: here.engine.export(here.shareds[one]) for one in compared}
            news = {one: sampled(new, most) for one, new in exported.items()}
        return OnOneRank(outputs, news)

    def _serial(self, command):
        replica = self._world.here.functions.get(getattr(command, "number", None))
        if replica is None:
            return command.exact()
        return SerialCall.of(command, self._sliceable_rows(command, replica.sliceable))

    def _sliceable_rows(self, call, numbers):
        """Return the rows of all ranks of each sliceable variable."""
        if not numbers:
            return {}
        here = self._world.here
        by_rank = self._world.run(SliceableRows(numbers, call.batch_s, call.most.by_rank))
        rows = [np.concatenate([unpack(here, one) for one in each]) for each in zip(*by_rank)]
        on_host = [isinstance(here.engine.storage(here.shareds[one]), np.ndarray) for one in numbers]
        rows = [one if host else here.engine.to_device(one) for one, host in zip(rows, on_host)]
        return dict(zip(numbers, rows))

    def together(
        self,
        compared: Sequence[int],
        serial: Mapping[int, Handle],
        tolerance: Tolerance,
        most: int | None,
    ) -> OnAllRanks:
        """Run the calls on all ranks; see `Trial`."""
        command: Command = FusedCommand([command.exact() for _, command in self.called])
        trial = Trial(command, self.updated, compared, serial, tolerance, most)
        returned, news = zip(*self._world.run(trial))
        # All values are copied now, since the next command frees what the ranks have sent.
        here, results = self._world.here, zip(*returned)
        outputs = [
            [] if function is None else self._by_rank(each)
            for (function, _), each in zip(self.called, results)
        ]
        copied = [
            {one: (amount, _copied(here, new)) for one, (amount, new) in each.items()} for each in news
        ]
        return OnAllRanks(outputs, copied)

    def _by_rank(self, results):
        """Return the outputs of a call, of which each rank has returned its rows and its values."""
        here = self._world.here
        active = [result for result in results if result[0]]
        weights = [n_rows for n_rows, *_ in active]
        found = []
        for place in range(1, max(map(len, results))):
            values = [result[place] for result in active]
            if any(value is None for value in values):
                values = [results[here.master_rank][place]]
            found.append(ByRank([_copied(here, value) for value in values], weights))
        return found


def _copied(here, packed):
    """Return a copy of an array that has been sent; None if there is none."""
    return None if packed is None or packed is NO_ARRAY else np.array(unpack(here, packed))
