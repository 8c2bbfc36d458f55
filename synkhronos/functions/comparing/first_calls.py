"""The first calls of a function or step, compared with the same calls on one rank, in one piece.

Calls after the first are compared if the graph has a reason for which other rows may differ. Only a few
rows are used, which one rank computes alone, and then all ranks together. If the results agree, those
that the graph shows to differ on other rows are reported nevertheless. Outputs whose operation the
script has stated are not compared, and neither are variables that each rank updates from its own rows:
they may be combined later. Results that depend on random numbers cannot be compared, as each rank draws
its own.
"""

from __future__ import annotations

import collections
from typing import Any, Hashable, Mapping, Sequence

from synkhronos._errors import MismatchError, WorldBrokenError, warn
from synkhronos._text import listed
from synkhronos.engines.analysis.difference_causes import SPACED
from synkhronos.engines.base import Causes
from synkhronos.functions.analysis import causes_of
from synkhronos.functions.call import CallFunction
from synkhronos.functions.comparing.reasons import of_graph
from synkhronos.functions.comparing.serial_comparison import (
    SerialComparison,
    ToCompare,
    how_called,
)
from synkhronos.functions.comparing.trial_runs import Called, Calls, calls_until
from synkhronos.functions.replica_tracker import replica_tracker_of
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.host.log import logger
from synkhronos.world.world import ALWAYS, RAISE, World

#: Rows of each rank that are used at most, and at least if the call has them and takes a short time
_MOST, _LEAST = 32, 4
_SMALL = 4 << 20  # bytes of shared variables with which it does
#: Calls that are compared, those after the first if the graph may make other rows differ
COMPARED = (1, 2, 4, 8)
_LINEAR = ("avg", "sum")  # the operations for what is linear in means or sums over the rows


class Verification:
    """The comparison in the first call of a function, or of the functions of a step.

    Parameters
    ----------
    compared : ToCompare
        The outputs and variables that are compared.
    """

    def __init__(self, world: World, compared: ToCompare) -> None:
        self._world, self._compared = world, compared
        self._calls: collections.Counter[Hashable] = collections.Counter()
        self._reduced: dict[int, str] = {}
        self._is_reported = False
        self._reported: set[str] = set()
        self._causes: tuple[list[Causes], dict[int, Causes]] | None = None

    def before(self, function: Any, command: CallFunction) -> None:
        """Verify a call that is about to be made; inside `fuse`, when the block ends."""
        world = self._world
        if world.size == 1 and command.num_slices == 1:
            return
        if world.rank_state.log is not None:  # `profile` measures only the calls themselves
            return
        if self._is_reported and world.options.verify != RAISE:
            return
        if world.options.verify != ALWAYS and not self._is_due(function, command):
            return
        if world.is_recording:
            world.recorder.observers.append(
                lambda commands: self._verify(
                    *calls_until(world, commands, command, bool(self._reduced))
                )
            )
        else:
            self._verify([Called(function, command)], 0)

    def _is_due(self, function: Any, command: CallFunction) -> bool:
        """Whether a call is the first of its kind, or an early one with its number of rows."""
        kind = self._world.size, command.options
        with_rows = *kind, None if command.rows is None else len(command.rows)
        self._calls.update([kind, with_rows])
        if self._calls[kind] == 1 or not self._possible(function):
            return self._calls[kind] == 1
        return self._calls[with_rows] in COMPARED

    def _causes_of(self, function: Any) -> tuple[list[Causes], dict[int, Causes]]:
        if self._causes is None:
            self._causes = causes_of(self._world, function)
        return self._causes

    def _possible(self, function: Any) -> frozenset[str]:
        """Return the causes in the graph for which results may differ."""
        outputs, updates = self._causes_of(function)
        return frozenset().union(*[causes.possible for causes in [*outputs, *updates.values()]])

    def add(self, variables: Mapping[int, str], is_doubtful: bool) -> None:
        """Compare these variables, too, where they are reduced. They are names for messages, by number.

        If a warning has already said that the step differs (`is_doubtful`), it is not repeated.
        """
        self._reduced, self._is_reported = dict(variables), is_doubtful

    def _verify(self, called: Sequence[Called], place: int) -> None:
        """Compare calls that are about to be made, and warn if they differ, or raise an error."""
        function = called[place].function
        is_like_serial = all([item.command.is_like_serial for item in called])
        found = self._found(called, place) if is_like_serial else None
        names = [] if found is None else [complaint.what for complaint in found.complaints]
        text = found.text(function, "one process") if found is not None and names else ""
        if not names:
            names, causes = self._doubtful(called[place])
            text = (
                f"{function!r}: {how_called(self._world, called)} the call may equal one process on "
                f"these rows, but differs on others, in {listed(names)}. {of_graph(causes)}"
            )
        if set(names) <= self._reported:
            return
        self._reported.update(names)
        if self._world.options.verify == RAISE:
            raise MismatchError(text, names)
        warn(text)

    def _doubtful(self, called: Called) -> tuple[list[str], set[str]]:
        """Return the results that certainly differ on some rows, and the causes in the graph."""
        function, subset = called.function, called.command.subset
        outputs, updates = self._causes_of(function)
        of_outputs = {
            what: outputs[index].certain
            for what, (_, index) in self._compared.outputs.items()
            if outputs and (subset is None or index in subset)
            if function.output_modes[index] in _LINEAR
        }
        of_updates: dict[str, frozenset[str]] = {}
        for number, what in self._reduced.items():
            if number in updates and function.reduced[number] in _LINEAR:
                of_updates[what] = of_updates.get(what, frozenset()) | updates[number].certain
        # Gradients have the causes of their losses, and further ones.
        causes = set().union(*of_outputs.values()) or set().union(*of_updates.values())
        return [what for what, found in [*of_outputs.items(), *of_updates.items()] if found], causes

    def _found(self, called: Sequence[Called], place: int) -> SerialComparison | None:
        """Return the comparison; None if nothing can be compared, or nothing differs beyond rounding."""
        # The shares of a few rows have other lengths.
        is_spaced = SPACED in self._possible(called[place].function)
        few = called if is_spaced else _on_few_rows(self._world, called)
        try:
            try:
                return self._compared_on(few, place)
            except (WorldBrokenError, MemoryError):
                raise
            except Exception as error:  # the graph may need as many rows as the script gives
                reraise_if_handlers(error)
                return self._compared_on(called, place)
        except WorldBrokenError:
            raise
        except Exception as error:  # the call itself reports what is wrong
            reraise_if_handlers(error)
            logger.info("not verified: %s: %s", type(error).__name__, error)
            return None

    def _compared_on(self, called: Sequence[Called], place: int) -> SerialComparison | None:
        calls = Calls(self._world, called)
        compared = self._comparable(calls, place)
        if not compared.outputs and not compared.variables:
            return None
        found = SerialComparison(self._world, calls, compared)
        found.run(everywhere=False)
        found.forgive_rounding()
        return None if found.is_stale else found

    def _comparable(self, calls: Calls, place: int) -> ToCompare:
        """Leave out results that depend on random numbers or on variables that differ on purpose."""
        different = replica_tracker_of(self._world).different

        def is_same(sources: set[int]) -> bool:
            return not sources & different

        commands = [item.command for item in calls.called if item.function is None]
        reduced = {number for command in commands for number in command.numbers}
        variables = {item: what for item, what in self._reduced.items() if item in reduced}
        variables.update(self._compared.variables)
        subset = calls.called[place].command.subset
        return ToCompare(
            {
                what: (place, index)
                for what, (_, index) in self._compared.outputs.items()
                if is_same(calls.sources[place][index]) and (subset is None or index in subset)
            },
            {item: what for item, what in variables.items() if is_same(calls.update_sources[item])},
        )


def _on_few_rows(world: World, called: Sequence[Called]) -> list[Called]:
    """Return the calls on rows that take less time than the calls themselves."""
    engine, size = world.rank_state.engine, world.size
    rows = [getattr(item.command, "rows", None) for item in called if item.function is not None]
    lengths = [len(each) for each in rows if each is not None]
    own = -(-max(lengths) // size) if lengths else _MOST
    shareds = {shared for item in called if item.function for shared in item.function.get_shared()}
    tensors = [engine.storage(shared) for shared in shareds if engine.is_tensor(shared)]
    is_short = sum(tensor.size * tensor.dtype.itemsize for tensor in tensors) <= _SMALL
    # One rank computes `size` times as many rows, and then all compute these: half of a call or less.
    by_rank = max(1, min(own, _LEAST) if is_short else 1, min(_MOST, own // (2 * (size + 1))))
    by_rank = max(by_rank, *[getattr(item.command, "num_slices", 1) for item in called])
    return [
        item._replace(command=item.command.on_few(by_rank, size)) if item.function else item
        for item in called
    ]
