"""For extensions: what a step needs that is several calls and collectives in a block of `fuse`.

Scripts do not need it. Apart from this, extensions use the public names of the library only.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping

from synkhronos._typing import SharedVariable
from synkhronos.functions.call import CallFunction
from synkhronos.functions.comparing.serial_comparison import Comparison, check_commands
from synkhronos.functions.function import Function
from synkhronos.world.fuse import fuse
from synkhronos.world.turn import Turn


def turn_of(function: Function) -> Turn:
    """Return the turn that the calls of a function take.

    ``with turn_of(function):`` takes it for several calls, between which no other thread makes one.
    """
    return function.turn


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
