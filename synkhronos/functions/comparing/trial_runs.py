"""Runs of calls, with collectives between them, that are compared: on one rank alone, and on all.

A rank runs them on copies of the variables that they update, so that its state does not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from typing import Any, Iterable, Iterator, Mapping, NamedTuple, Sequence, Tuple, Union

import numpy as np

from synkhronos._typing import Batch
from synkhronos.arithmetic.comparison import sample
from synkhronos.arithmetic.partition import select
from synkhronos.comms.base import SingleRankCommunicator
from synkhronos.engines.base import Analysis, Sources
from synkhronos.functions.analysis import analysis_of
from synkhronos.functions.call import NO_ARRAY, CallFunction, unpack
from synkhronos.functions.replica import on_copies
from synkhronos.functions.replica_tracker import replica_tracker_of
from synkhronos.stores.handle import Handle, RequiredRows
from synkhronos.world import generators
from synkhronos.world.rank_state import Ask, Command, FusedCommand, RankState
from synkhronos.world.world import World

_ULPS = 4  # by how much `Perturbed` changes a number
_SAMPLE = 1 << 20  # elements of a variable


@contextlib.contextmanager
def without_effects(state: RankState, numbers: Sequence[int]) -> Iterator[None]:
    """Undo the changes of shared variables, generators and numbers of rows by calls in the block.

    In the block, no reduction begins before its call: that would change the state of wire formats.
    """
    states, rows = generators.states(), dict(state.rows)
    overlap, state.overlap = state.overlap, None
    try:
        with on_copies(state, [state.shareds[number] for number in numbers]):
            yield
    finally:
        state.overlap = overlap
        state.rows.clear()
        state.rows.update(rows)
        generators.restore(states)


# One rank alone: the master, with the rows of all ranks

_GROUP: Any = types.SimpleNamespace(rank=0, size=1)


class SerialRank(RankState):
    """The state of the master as the only rank: the same replicas, store and engine.

    Parameters
    ----------
    state : RankState
        The state of the master.
    """

    rows_of: Mapping[int, Any] = {}  # the rows of all ranks of sliceable shared variables, by number

    def __init__(self, state: RankState) -> None:
        vars(self).update(vars(state))
        self.rank = self.master_rank = 0
        self.size, self.is_master = 1, True
        self.comm, self.overlap, self.log = SingleRankCommunicator(_GROUP), None, None
        self.rows, self.peers, self.wires, self.sent = {}, {}, {}, []

    def sliceable(self, number: int) -> Any:
        return self.rows_of[number]


class Perturbed(SerialRank):
    """The same, where floating-point rows differ by a few units in the last place.

    By how much the results change shows how they magnify rounding.
    """

    def take(self, key: Any, source: Any, rows: Any, axis: int = 0) -> Any:
        taken = super().take(key, source, rows, axis)
        if not isinstance(taken, np.ndarray) or taken.dtype.kind not in "fc":
            return taken
        signs = np.random.RandomState(0).choice([-_ULPS, _ULPS], taken.shape)
        return taken * (1 + np.finfo(taken.dtype).eps * signs).astype(taken.dtype)


# All ranks


@dataclasses.dataclass(eq=False, repr=False)
class Trial(Command):
    """Calls whose effects are undone, which returns their results, and the new values of variables.

    Parameters
    ----------
    calls : Command
        The calls, as one command.
    updated : list of int
        The variables that the calls update.
    compared : list of int
        Those whose new values are returned: by the master, or by every rank.
    everywhere : bool
        Whether every rank returns all of them; otherwise the master returns samples.
    """

    calls: Command
    updated: Sequence[int]
    compared: Sequence[int]
    everywhere: bool

    def needs(self, ranks: range, size: int) -> Iterable[RequiredRows]:
        return self.calls.needs(ranks, size)

    def run(self, state: RankState) -> tuple[Any, list[Any]]:
        with without_effects(state, self.updated):
            returned = self.calls.run(state)
            numbers = self.compared if state.is_master or self.everywhere else ()
            values = [new_value(state, number, self.everywhere) for number in numbers]
            return returned, [value if state.is_master else state.send(value) for value in values]


def new_value(state: RankState, number: int, is_whole: bool) -> np.ndarray:
    """Return a copy of the value of a variable, or of some of its elements, evenly spaced."""
    array = state.engine.export(state.shareds[number])
    return np.array(array if is_whole else sample(array, _SAMPLE))


def sliceable_rows(
    state: RankState, numbers: Sequence[int], batch_s: Sequence[Batch | None] | None, most: int | None
) -> list[np.ndarray | Handle]:
    """Send the rows of sliceable shared variables that this rank would use, `most` of each."""
    batch, sent = None if batch_s is None else batch_s[state.rank], []
    for number in numbers:
        array = state.sliceable(number)
        own = select(batch, len(array), "batch_s")[:most]
        rows = state.engine.to_host(state.engine.take(array, own))
        sent.append(np.array(rows) if state.is_master else state.send(np.array(rows)))
    return sent


# Both


class Called(NamedTuple):
    """A command and the function that it calls, which for a collective is None."""

    function: Any
    command: Any


def called(world: World, command: Command) -> Called:
    """Return a recorded command with its function."""
    plain = command.plain
    if isinstance(plain, CallFunction):
        return Called(world.registry.functions[plain.number], plain)
    return Called(None, plain)


def calls_until(
    world: World, commands: Sequence[Command], command: Command, has_reductions: bool
) -> tuple[list[Called], int]:
    """Return the calls of a block up to one of them, or to the last reduction, and its place."""
    each = [called(world, item) for item in commands]
    place = next(position for position, item in enumerate(each) if item.command is command)
    last = max([place, *(position for position, item in enumerate(each) if item.function is None)])
    return each[: (last if has_reductions else place) + 1], place


#: What is compared: an output, by the places of its call and of itself; or a variable, by its number
Key = Union[Tuple[int, int], int]


class ByRank(NamedTuple):
    """A result of calls on all ranks.

    Attributes
    ----------
    values : list of numpy.ndarray or None
        An output: the values of the ranks that have rows; or one, if the communicator has reduced them
        or there is only the master's. A variable: its new values on all ranks, or on the master.
    weights : list of int
        The numbers of rows of the ranks that have rows.
    ranks : list of int
        These ranks.
    """

    values: list[Any]
    weights: list[int]
    ranks: list[int]


class Calls:
    """Some calls in their order.

    Parameters
    ----------
    called : list of Called
        The calls, in order.

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
        streams, state = replica_tracker_of(world).streams, world.rank_state
        self.tensors = [
            number
            for number in self.updated
            if number not in streams and state.engine.is_tensor(state.shareds[number])
        ]

    def _follow(self, analysis: Analysis) -> None:
        numbers, former = self._world.registry.numbers, self.update_sources

        def of(dependence: Sources) -> set[int]:
            each = [numbers[shared] for shared in dependence.shareds]
            return set().union(*(former.get(number, {number}) for number in each))

        self.sources.append([of(output) for output in analysis.outputs])
        news = {numbers[shared]: of(new) for shared, new in analysis.updates.items()}
        self.update_sources = {**former, **news}

    @property
    def dtypes(self) -> set[Any]:
        """The dtypes of the inputs and shared variables of the functions."""
        engine = self._world.rank_state.engine
        functions = {item.function for item in self.called} - {None}
        found = {variable.type.dtype for function in functions for variable in function.inputs}
        shareds = {shared for function in functions for shared in function.get_shared()}
        found.update(engine.type_of(shared).dtype for shared in shareds if engine.is_tensor(shared))
        return found - {None}

    @property
    def are_in_slices(self) -> bool:
        """Whether a rank computes one of the calls in slices."""
        return any(getattr(command, "num_slices", 1) > 1 for _, command in self.called)

    @property
    def used(self) -> set[int]:
        """The variables from whose values results are computed."""
        outputs = [item for each in self.sources for item in each]
        return set().union(*outputs, *self.update_sources.values())

    def on_one_rank(
        self, compared: Sequence[int], everywhere: bool, perturbed: bool = False
    ) -> dict[Key, Any]:
        """Run the calls on the master alone; return the outputs, and the new values of variables.

        If `perturbed`, floating-point rows differ by a few units in the last place.
        """
        found: dict[Key, Any] = {}
        state = (Perturbed if perturbed else SerialRank)(self._world.rank_state)
        commands = [self._serial(command) for _, command in self.called]
        with without_effects(state, self.updated):
            for place, (command, rows_of) in enumerate(commands):
                state.rows_of = rows_of
                result = command.run(state)
                if isinstance(command, CallFunction):
                    for index, packed in zip(self._outputs_of(place), result[1:]):
                        found[place, index] = _copied(state, packed)
            for number in compared:
                found[number] = new_value(state, number, everywhere)
        return found

    def _outputs_of(self, place: int) -> Sequence[int]:
        """Return the numbers of the outputs that a call returns."""
        function, command = self.called[place]
        return command.chosen(range(len(function.output_modes)))

    def _serial(self, command: Any) -> tuple[Command, dict[int, Any]]:
        """Return a command in one piece on the rows of all ranks, and those of sliceable variables."""
        if not isinstance(command, CallFunction):
            return command.exact(), {}
        most = None if command.most is None else command.most * self._world.size
        replica = self._world.rank_state.functions[command.number]
        return (
            dataclasses.replace(command, batch_s=None, num_slices=1, most=most),
            self._sliceable_rows(command, replica.sliceable),
        )

    def _sliceable_rows(self, call: CallFunction, numbers: Sequence[int]) -> dict[int, Any]:
        """Return the rows of all ranks of each sliceable variable."""
        if not numbers:
            return {}
        state = self._world.rank_state
        by_rank = self._world.run(Ask(sliceable_rows, numbers, call.batch_s, call.most))
        rows = [np.concatenate([unpack(state, item) for item in each]) for each in zip(*by_rank)]
        on_host = [isinstance(state.engine.storage(state.shareds[item]), np.ndarray) for item in numbers]
        rows = [row if host else state.engine.to_device(row) for row, host in zip(rows, on_host)]
        return dict(zip(numbers, rows))

    def on_all_ranks(self, compared: Sequence[int], everywhere: bool) -> dict[Key, ByRank]:
        """Run the calls on all ranks; see `Trial`."""
        command: Command = FusedCommand([command.exact() for _, command in self.called])
        trial = Trial(command, self.updated, compared, everywhere)
        returned, news = zip(*self._world.run(trial))
        # All values are copied now, since the next command frees the memory in which they were sent.
        state, size = self._world.rank_state, self._world.size
        found: dict[Key, ByRank] = {}
        for place, results in enumerate(zip(*returned)):
            if self.called[place].function is not None:
                found.update(self._by_rank(place, results))
        weights = [item.weights for item in found.values() if len(item.weights) == size] or [[1] * size]
        by_rank = news if everywhere else [news[state.master_rank]]
        for number, values in zip(compared, zip(*by_rank)):
            copies = [_copied(state, value) for value in values]
            found[number] = ByRank(copies, weights[0], [*range(size)])
        return found

    def _by_rank(self, place: int, results: Sequence[Any]) -> Iterator[tuple[Key, ByRank]]:
        """Yield the outputs of a call, of which each rank has returned its rows and its values."""
        state = self._world.rank_state
        ranks = [rank for rank, (n_rows, *_) in enumerate(results) if n_rows]
        weights = [results[rank][0] for rank in ranks]
        for position, index in enumerate(self._outputs_of(place), 1):
            values = [results[rank][position] for rank in ranks]
            if any(value is None for value in values):
                values = [results[state.master_rank][position]]
            yield (place, index), ByRank([_copied(state, value) for value in values], weights, ranks)


def _copied(state: RankState, packed: Any) -> np.ndarray | None:
    """Return a copy of an array that has been sent; None if there is none."""
    return None if packed is None or packed is NO_ARRAY else np.array(unpack(state, packed))
