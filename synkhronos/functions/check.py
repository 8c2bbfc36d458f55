"""Calls compared with the same calls on one rank, from the same state, when the script asks for it."""

from __future__ import annotations

from typing import Any, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos import _html
from synkhronos._errors import MismatchError
from synkhronos._typing import SharedVariable
from synkhronos.functions.agreement import label
from synkhronos.functions.call import CallFunction
from synkhronos.functions.calls import Called, Calls, called
from synkhronos.functions.compare import Compare, Compared, tolerance_of
from synkhronos.functions.replicate import replicate
from synkhronos.world.here import Command
from synkhronos.world.world import World


class Comparison(NamedTuple):
    """What `Function.check` compared.

    Attributes
    ----------
    differences : dict
        The largest absolute difference of each output and each updated shared variable, by its name. All
        are within the tolerances.
    not_compared : dict
        The reason for each output and updated variable that cannot be compared, by its name.
    """

    differences: dict[str, float]
    not_compared: dict[str, str]

    def _repr_html_(self) -> str:
        rows = [(name, f"largest difference {most:g}") for name, most in self.differences.items()]
        rows += [(name, f"not compared: {why}") for name, why in self.not_compared.items()]
        return _html.table("Comparison with the serial function", rows)


def check_call(
    world: World, function: Any, command: CallFunction, rtol: float | None, atol: float | None
) -> Comparison:
    """Compare all of a call with the same call on one rank; see `Function.check`."""
    indices = range(len(function.output_modes)) if command.subset is None else command.subset
    outputs = {f"output {index}": (0, index) for index in indices}
    tolerances = _check_tolerances(rtol, atol)
    replicate(world)
    calls = Calls(world, [Called(function, command)])
    compared = Compared(outputs, _named(world, calls.tensors), function.reduced)
    return _checked(world, function, calls, compared, *tolerances)


def check_commands(
    world: World,
    function: Any,
    commands: Sequence[Command],
    outputs: Mapping[str, tuple[int, int]],
    variables: Iterable[SharedVariable],
    rtol: float | None,
    atol: float | None,
) -> Comparison:
    """Compare the commands of a step with the same commands on one rank; see `compare_step`."""
    tolerances = _check_tolerances(rtol, atol)
    replicate(world)
    calls = Calls(world, [called(world, one) for one in commands])
    numbers = {world.registry.numbers[shared] for shared in variables}
    compared = Compared(outputs, _named(world, [one for one in calls.tensors if one in numbers]))
    return _checked(world, function, calls, compared, *tolerances)


def _named(world, numbers):
    return {number: f"shared variable {label(world, number)}" for number in numbers}


def _checked(world, function, calls, compared, rtol, atol):
    found = Compare(world, calls, compared, tolerance_of(world, calls, rtol, atol))
    found.run(everywhere=True)
    if found.complaints:
        text = found.text(function, "the serial function")
        raise MismatchError(text, [one.what for one in found.complaints])
    return Comparison(found.differences, found.not_compared)


def _check_tolerances(rtol, atol):
    """Return the tolerances, or raise if one is not a finite number of at least 0."""
    relative = None if rtol is None else _check_tolerance(rtol, "rtol")
    return relative, 0.0 if atol is None else _check_tolerance(atol, "atol")


def _check_tolerance(value, name):
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise TypeError(f"check: {name}: expected a number, got {value!r}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"check: {name}: expected a finite number, 0 or more, got {value}")
    return float(value)
