"""For extensions: what a step needs that is several calls and collectives in a block of `fuse`.

Scripts do not need it. Apart from this, extensions use the public names of the library only.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping, Sequence

from synkhronos._typing import Batch, SharedVariable
from synkhronos.arrays.data import Data
from synkhronos.functions.call import CallFunction
from synkhronos.functions.call_plan import CallPlan, are_unmoved
from synkhronos.functions.comparing.serial_comparison import Comparison, check_commands
from synkhronos.functions.function import Function
from synkhronos.stores.handle import Handle
from synkhronos.world.fuse import RecordedCalls, fuse
from synkhronos.world.turn import Turn


def turn_of(function: Function) -> Turn:
    """Return the turn that the calls of a function take.

    ``with turn_of(function):`` takes it for several calls, between which no other thread makes one.
    """
    return function.turn


class RepeatedStep:
    """A step that is taken again and again. On the same data it is a plan, and only rows are sent.

    Parameters
    ----------
    functions : list of Function
        The functions that the step calls, in order; there are collectives only after the one with rows.
    place : int
        The place of the function that is called on rows.
    may_repeat : bool
        Whether the step on other rows differs in the call of this function alone.
    """

    def __init__(self, functions: Sequence[Function], place: int, may_repeat: bool = True) -> None:
        self._functions, self._place, self._may_repeat = functions, place, may_repeat
        self._recorded: RecordedCalls | None = None
        self._plan: CallPlan | None = None  # of the function that has rows
        self._handles: list[Handle] = []  # to the data of the recorded step

    def take(
        self,
        make_calls: Callable[[], Any],
        values: Sequence[Any],
        batch: Batch | None,
        has_options: bool,
    ) -> list[Any]:
        """Return the results of the calls of a step. Nothing is checked that has been checked before.

        Parameters
        ----------
        make_calls : callable
            Makes the calls of the step.
        values : list
            The value of each input.
        batch : batch or None
            The rows to use.
        has_options : bool
            Whether the call has options besides the batch.
        """
        with self._functions[self._place].turn:
            if self._recorded is not None and not has_options:
                results = self._taken_again(values, batch)
                if results is not None:
                    return results
            self._recorded = None
            may_repeat = self._may_repeat and not has_options and not self._is_observed()
            with fuse() as block:
                make_calls()
            if may_repeat and all([_is_in_store(value) for value in values]):
                self._plan = self._functions[self._place].plan
                self._handles = [value.last_handle for value in values]
                self._recorded = block.recorded
            return block.results()

    def _taken_again(self, values, batch):
        """Return the results of the plan on a batch; None if the step has to be recorded."""
        if self._is_observed() or not self._recorded.is_valid():
            return None
        if not are_unmoved(values, self._handles):
            return None
        command = self._plan.on_batch(batch)
        return None if command is None else self._recorded.run_with(self._place, command.change)

    def _is_observed(self):
        """Whether the next call of a function observes something, so that it differs from later ones."""
        for function in self._functions:  # noqa: SIM110 - any() would take longer
            if function.watch is not None:
                return True
        return False


def _is_in_store(value):
    return type(value) is Data and value.last_handle is not None


def reduces(
    function: Function, reduced: Mapping[SharedVariable, tuple[str, str]], is_doubtful: bool = False
) -> None:
    """Take note of the variables that a step reduces after each call of a function.

    Parameters
    ----------
    function : Function
    reduced : dict
        What messages call each variable, and the operation.
    is_doubtful : bool
        Whether a warning has already said that the step differs from the serial one.
    """
    world = function._world
    if world is None:  # a copy that programs use
        return
    numbers = world.registry.numbers
    function.reduced = {numbers[shared]: op for shared, (_, op) in reduced.items()}
    if function.verification is not None:
        named = {numbers[shared]: what for shared, (what, _) in reduced.items()}
        function.verification.add(named, is_doubtful)


def verify_step(take_step: Callable[[], Any]) -> None:
    """Verify the calls of a step as first calls are verified, without running it.

    Parameters
    ----------
    take_step : callable
        Makes the calls of the step.
    """
    with fuse() as block:
        block.runs = False
        take_step()


def compare_step(
    function: Function,
    take_step: Callable[[], Any],
    outputs: Mapping[str, tuple[int, int]],
    variables: Iterable[SharedVariable],
    rtol: float | None,
    atol: float | None,
) -> Comparison:
    """Compare a step with the same step on one rank. Nothing changes.

    Parameters
    ----------
    function : Function
        The function by which messages call the step.
    take_step : callable
        Makes the calls of the step.
    outputs : dict
        For each output of the step by name: which of the calls of functions returns it, and its number
        among the outputs of this call.
    variables : iterable of shared variables
        Those that the step updates.
    rtol, atol
        As for `Function.check`.

    Raises
    ------
    MismatchError
        If an output or a variable differs.
    """
    found: list[Comparison] = []

    def compare(commands):
        calls = [place for place, one in enumerate(commands) if isinstance(one.plain, CallFunction)]
        placed = {name: (calls[call], number) for name, (call, number) in outputs.items()}
        world = function._usable_world()
        found.append(check_commands(world, function, commands, placed, variables, rtol, atol))

    with function.turn, fuse() as block:
        block.instead = compare
        take_step()
    return found[0]
