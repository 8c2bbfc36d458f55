"""Calls on all ranks compared with the same calls on one rank: the differences, and their causes."""

from __future__ import annotations

import functools
from typing import Any, Callable, Collection, Iterable, Mapping, NamedTuple, Sequence

import numpy as np

from synkhronos import _html
from synkhronos._checks import check_number
from synkhronos._errors import MismatchError
from synkhronos._typing import AnyArray, SharedVariable
from synkhronos.arithmetic.comparison import DIFFERENT_SHAPE, Tolerance, difference
from synkhronos.arithmetic.operations import GATHER, OPERATIONS
from synkhronos.engines.analysis.difference_causes import EXPLANATIONS
from synkhronos.engines.base import PARTLY_SUM
from synkhronos.functions.analysis import analysis_of, causes_of
from synkhronos.functions.call import check_all_are_none
from synkhronos.functions.comparing.trial_runs import ByRank, Called, Calls, Key, called
from synkhronos.functions.replica_tracker import find_different, label, labels, replica_tracker_of
from synkhronos.functions.replicate import replicate
from synkhronos.world.rank_state import Command
from synkhronos.world.world import World

#: How much larger a difference may be than that which a change of the last bits of the rows makes
_NOISE = 32


class Comparison(NamedTuple):
    """The result of `Function.check`.

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


class ToCompare(NamedTuple):
    """The outputs and variables of calls that are compared.

    Attributes
    ----------
    outputs : dict
        The number of the call and the index of the output, by the name of the output in messages.
    variables : dict
        The names of the updated variables in messages, by number.
    reduced : dict
        The operations by which variables are reduced after the calls, by number. The reductions of these
        variables are compared, and of other variables the value of each rank.
    of_step : bool
        Whether these are the calls of a training step, with its reductions.
    """

    outputs: Mapping[str, tuple[int, int]]
    variables: Mapping[int, str]
    reduced: Mapping[int, str] = {}
    of_step: bool = False


class Reason(NamedTuple):
    """Why a result differs, and what to do; or that no reduction would make it right."""

    text: str
    is_found: bool = True


class Complaint(NamedTuple):
    """A result that differs.

    Attributes
    ----------
    what : str
        The name of the result in messages.
    how : str
        How it differs.
    why : callable
        Returns why.
    value : numpy.ndarray or None
        The value, or the master's value; None if there is none.
    key : (int, int) or int
        Of the result.
    """

    what: str
    how: str
    why: Callable[[], Reason]
    value: AnyArray | None
    key: Key


class SerialComparison:
    """One comparison.

    Parameters
    ----------
    calls : Calls
        The calls.
    compared : ToCompare
        The results that are compared.
    rtol, atol
        As for `Function.check`; by default, what rounding may change with the dtypes of the operands.

    Attributes
    ----------
    differences, not_compared : dict
        As of `Comparison`.
    complaints : list of Complaint
        The results that differ by more.
    """

    def __init__(
        self,
        world: World,
        calls: Calls,
        compared: ToCompare,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        self._world, self._calls, self._compared = world, calls, compared
        self._tolerance = Tolerance(rtol, atol or 0.0, calls.dtypes)
        self.differences: dict[str, float] = {}
        self.not_compared: dict[str, str] = {}
        self.complaints: list[Complaint] = []

    def run(self, everywhere: bool) -> None:
        """Compare; the new values of all ranks if `everywhere`, otherwise a sample of the master's."""
        numbers, self._everywhere = list(self._compared.variables), everywhere
        self._serial = self._calls.on_one_rank(numbers, everywhere)
        self._found = self._calls.on_all_ranks(numbers, everywhere)
        for what, (position, index) in self._compared.outputs.items():
            self._compare_output(what, position, index)
        for number, what in self._compared.variables.items():
            self._compare_variable(what, number)

    def text(self, function: Any, other: str) -> str:
        """Return the complaints about a call of a function as text."""
        found = [(complaint, complaint.why()) for complaint in self.complaints]
        lines = [
            f"- {item.what} {item.how}" + (reason.text and f"; {reason.text}") for item, reason in found
        ]
        if not all(reason.is_found for _, reason in found):
            lines.append(self._of_graph(function))
        where = how_called(self._world, self._calls.called)
        return "\n".join([f"{function!r}: {where} the call differs from {other}:", *lines])

    def _of_graph(self, function: Any) -> str:
        outputs, updates = causes_of(self._world, function)
        none: frozenset[str] = frozenset()
        # Gradients have the causes of their losses, and further causes that are harmless.
        suspects = none.union(*[output.possible for output in outputs])
        suspects = suspects or none.union(*[update.possible for update in updates.values()])
        if not suspects and self._calls.are_in_slices and function.replica.has_collectives:
            return "Collectives in the graph combine only one slice at a time: leave out num_slices."
        return causes_in_words(suspects)

    @property
    def is_stale(self) -> bool:
        """Whether results differ since replicas did before the calls."""
        return bool(self.complaints and self.out_of_sync)

    def forgive_rounding(self) -> None:
        """Withdraw complaints about results that change as much if the rows are rounded otherwise."""
        if not self.complaints:
            return
        numbers = list(self._compared.variables)
        perturbed = self._calls.on_one_rank(numbers, self._everywhere, perturbed=True)
        self.complaints = [item for item in self.complaints if not self._is_rounding(item, perturbed)]

    def _is_rounding(self, complaint: Complaint, perturbed: dict[Key, Any]) -> bool:
        serial, other, value = self._serial[complaint.key], perturbed[complaint.key], complaint.value
        if value is None or not value.shape == serial.shape == other.shape:
            return False
        noise, amount = difference(other, serial).absolute, difference(value, serial).absolute
        return not np.isfinite(serial).all() or amount <= _NOISE * noise

    # What can be compared

    def _can_compare(self, what: str, sources: set[int]) -> bool:
        """Note why a result cannot be compared, if its sources differ from rank to rank."""
        world, agreement = self._world, replica_tracker_of(self._world)
        if world.size == 1 and not self._calls.are_in_slices:
            return True
        if sources & agreement.streams:
            self.not_compared[what] = "it depends on random numbers, which each rank draws for itself"
            return False
        own = sources & (agreement.scattered | agreement.sliceable)
        if own and own & self.out_of_sync:
            named = labels(world, sorted(own & self.out_of_sync))
            self.not_compared[what] = f"it depends on {named}, which differs by rank"
            return False
        return True

    @functools.cached_property
    def out_of_sync(self) -> set[int]:
        """The variables that the results depend on whose replicas differ before the calls."""
        world, shareds = self._world, self._world.rank_state.shareds
        known = self._calls.used - replica_tracker_of(world).streams
        used = sorted(item for item in known if world.rank_state.engine.is_tensor(shareds[item]))
        return {*find_different(world, used)}

    def _stale(self, sources: set[int]) -> Reason | None:
        """Return the reason if replicas already differed before the calls."""
        stale = sorted(sources & self.out_of_sync)
        if not stale:
            return None
        return Reason(
            f"the replicas of {labels(self._world, stale)} differed before the call: make them "
            f"equal with synk.broadcast()"
        )

    # Outputs

    def _compare_output(self, what: str, position: int, index: int) -> None:
        key, (function, _) = (position, index), self._calls.called[position]
        mode, serial, found = function.output_modes[index], self._serial[key], self._found[key]
        if mode is None and function.replica.has_rows:
            self.not_compared[what] = "it is the master's own value (op None)"
            return
        if serial is None or any(item is None for item in found.values):
            self._compare_no_arrays(function, key, what, serial, found)
            return
        if mode == GATHER and not serial.ndim:
            self.not_compared[what] = "it is one number per rank (op 'gather')"
            return
        sources = self._calls.sources[position][index]
        if not self._can_compare(what, sources):
            return
        value = _combined(function, index, found)
        if self._agrees(what, value, serial):
            return
        why = lambda: self._stale(sources) or self._why_output(function, index, serial, found)  # noqa: E731
        how = how_output_differs(value, serial, found)
        self.complaints.append(Complaint(what, how, why, value, key))

    def _compare_no_arrays(
        self, function: Any, key: tuple[int, int], what: str, serial: AnyArray | None, found: ByRank
    ) -> None:
        """Compare an output for which an operation has returned None."""
        are_none = [value is None for value in found.values]
        if any(are_none):
            check_all_are_none(function, key[1], are_none, found.ranks)
        if serial is None and all(are_none):
            self.differences[what] = 0.0
            return
        how = "is not None, but the serial output is"
        if serial is not None:
            how = "is None, but the serial output is not"
        self.complaints.append(Complaint(what, how, lambda: Reason(""), None, key))

    def _agrees(self, what: str, value: AnyArray | None, serial: AnyArray) -> bool:
        """Whether a value agrees with the serial one; note how much they differ."""
        if value is None or not self._tolerance.allows(value, serial):
            return False
        most = difference(value, serial).absolute
        self.differences[what] = max(most, self.differences.get(what, 0.0))
        return True

    # Variables

    def _compare_variable(self, what: str, number: int) -> None:
        sources = self._calls.update_sources[number]
        if not self._can_compare(what, sources):
            return
        serial, found = self._serial[number], self._found[number]
        values, weights = found.values, found.weights
        op = self._compared.reduced.get(number)
        if op is not None and self._agrees(what, combined(op, values, weights), serial):
            return
        wrong = [rank for rank, value in enumerate(values) if not self._agrees(what, value, serial)]
        if not wrong:
            return
        how = self._how_variable_differs(values, wrong, serial)
        why = lambda: self._stale(sources) or self._why_variable(values, weights, serial)  # noqa: E731
        master = values[0] if len(values) == 1 else values[self._world.master_rank]
        self.complaints.append(Complaint(what, how, why, master, number))

    def _how_variable_differs(
        self, values: Sequence[AnyArray], wrong: Sequence[int], serial: AnyArray
    ) -> str:
        most = max((difference(value, serial) for value in values), key=lambda item: item.absolute)
        how = f"in its shape, serially {serial.shape}" if most is DIFFERENT_SHAPE else most
        if len(values) == 1:  # that of the master, as all ranks have it after a reduction
            return f"differs {how}"
        return f"the new value differs {how} on rank(s) {', '.join(map(str, wrong))}"

    # The usual reasons why a result differs, found by trying alternatives

    def _why_output(self, function: Any, index: int, serial: AnyArray, found: ByRank) -> Reason:
        if analysis_of(self._world, function).extents[index] == PARTLY_SUM:
            return Reason(
                "it contains a sum over the rows, and terms that do not depend on their number: divide "
                "the sum by the number of rows, or make the terms separate outputs"
            )
        mode, values, weights = function.output_modes[index], found.values, found.weights
        others = ("sum", GATHER, "avg", "max", "min", "prod") if len(values) > 1 else ()
        for op in others:
            if op != mode and self._tolerance.allows(combined(op, values, weights), serial):
                what = "the concatenation" if op == GATHER else f"the {op}"
                return Reason(
                    f"its op is {mode!r}, but {what} of the ranks' values equals the serial value: give "
                    f"it as (output, {op!r})"
                )
        text = f"its op is {mode!r}, but no op gives the serial value"
        if others and serial.dtype.kind in "fiu":
            exact = combined(mode, [np.asarray(value, np.float64) for value in values], weights)
            if exact is not None and _is_inexact(serial, exact, sum(weights)):
                return Reason(
                    f"{text}. The serial value may be the wrong one: {serial.dtype} is too narrow for a "
                    f"sum of this many rows, or of this size; compare with a graph in float64 or int64"
                )
        return Reason(text, False)

    def _why_variable(
        self, values: Sequence[AnyArray], weights: Sequence[int], serial: AnyArray
    ) -> Reason:
        allows, size = self._tolerance.allows, self._world.size
        if len(values) == 1:  # reduced
            [value] = values
            if allows(np.multiply(value, size, dtype=value.dtype), serial):
                return Reason(
                    "the serial value is the sum of the ranks' values, not their average: the loss is a "
                    "sum over the rows, perhaps divided by a number; make it a mean, or give "
                    "loss_op='sum'"
                )
            if allows(np.divide(value, size).astype(value.dtype), serial):
                return Reason(
                    "the serial value is the average of the ranks' values, not their sum: the loss is a "
                    "mean over the rows; leave out loss_op='sum'"
                )
            return Reason("no reduction of the ranks' values gives the serial one", False)
        if self._compared.of_step:
            text = "the gradient, or what else is reduced for it, is not the serial one"
            return Reason(text, False)
        why = "each rank updates it from its own rows"
        for op, call in (
            ("avg", "synk.all_reduce(variable, weights=function)"),
            ("sum", "synk.all_reduce(variable, 'sum')"),
        ):
            if allows(combined(op, values, weights), serial):
                return Reason(
                    f"{why}; their {op} equals the serial value: call {call} after each call, or build "
                    f"a training step with synkhronos.extensions.train.make_train_function()"
                )
        return Reason(
            f"{why}, and neither their average nor their sum equals the serial value. A training step "
            f"has to average the gradients, not the parameters: build it with "
            f"synkhronos.extensions.train.parallel_function() or make_train_function(), or call "
            f"synk.all_reduce() on the gradients"
        )


def _combined(function: Any, index: int, found: ByRank) -> AnyArray | None:
    """Return the output of a call, from the values of all ranks; None if they cannot be combined."""
    mode, replica = function.output_modes[index], function.replica
    value = found.values[0]
    if len(found.values) > 1:
        value = combined(mode, found.values, found.weights, replica.output_axes[index])
    return None if value is None else np.asarray(value, replica.output_dtypes[index])


def how_output_differs(value: AnyArray | None, serial: AnyArray, found: ByRank) -> str:
    """Say how an output differs; its combined value is None if the values have no common shape."""
    if value is None:
        shapes = ", ".join([str(array.shape) for array in found.values])
        return f"cannot be combined, as the ranks' values have the shapes {shapes}"
    if value.shape != serial.shape:
        return f"has the shape {value.shape}, not {serial.shape}"
    return f"differs {difference(value, serial)}"


def how_called(world: World, called: Sequence[Called]) -> str:
    """Return the number of ranks of calls, and the number of slices if there are several."""
    slices = max(getattr(item.command, "num_slices", 1) for item in called)
    return f"on {world.size} rank(s)" + (f", in {slices} slices," if slices > 1 else "")


def causes_in_words(suspects: Collection[str]) -> str:
    """Return the causes to look for if no reduction gives a serial value.

    Parameters
    ----------
    suspects : collection of str
        The causes in the graph, as of `synkhronos.engines.analysis.difference_causes`.
    """
    found = "; ".join(EXPLANATIONS[item] for item in EXPLANATIONS if item in suspects or not suspects)
    return f"The graph has {found}." if suspects else f"Usual reasons: {found}."


def combined(
    op: str, values: Sequence[AnyArray], weights: Sequence[int], axis: int = 0
) -> AnyArray | None:
    """Return the reduction or concatenation of values; None if it is not possible."""
    shapes = {value.shape for value in values}
    if op == GATHER:
        if values[0].ndim <= axis or len({shape[:axis] + shape[axis + 1 :] for shape in shapes}) > 1:
            return None
        joined: AnyArray = np.concatenate(values, axis)
        return joined
    if len(shapes) > 1 or not OPERATIONS[op].is_defined_for(values[0].dtype):
        return None
    return OPERATIONS[op].reduce(values, weights)


def _is_inexact(serial: AnyArray, exact: AnyArray, n_rows: int) -> bool:
    """Whether a serial sum may have lost this much, as its dtype is narrow.

    The gradient of indexing adds rows one by one. Numba computes products of integers in floating point.
    """
    if exact.shape != serial.shape:
        return False
    if serial.dtype.kind == "f":
        lost = np.abs(exact - serial)
        return bool((lost <= np.abs(exact) * n_rows * np.finfo(serial.dtype).eps / 2).all())
    digits = 53 if serial.dtype.itemsize == 8 else 24
    return bool(np.abs(exact).max(initial=0) > min(np.iinfo(serial.dtype).max, 2.0**digits))


# What the script asks for


def check_call(
    world: World,
    function: Any,
    commands: Sequence[Command],
    outputs: Mapping[str, tuple[int, int]],
    updated: Iterable[SharedVariable] | None,
    rtol: float | None,
    atol: float | None,
) -> Comparison:
    """Compare a call, or the commands of a step, with the same on one rank.

    Parameters
    ----------
    outputs : dict
        As of `ToCompare`.
    updated : iterable of shared variables or None
        The variables that a step updates; None for a call, whose new values are all compared.
    rtol, atol
        As for `Function.check`.
    """
    rtol, atol = _checked_tolerance(rtol, "rtol"), _checked_tolerance(atol, "atol")
    replicate(world)
    calls = Calls(world, [called(world, command) for command in commands])
    numbers = None if updated is None else {world.registry.numbers[shared] for shared in updated}
    named = {
        number: f"shared variable {label(world, number)}"
        for number in calls.tensors
        if numbers is None or number in numbers
    }
    reduced = function.reduced if updated is None else {}
    compared = ToCompare(outputs, named, reduced, of_step=updated is not None)
    found = SerialComparison(world, calls, compared, rtol, atol)
    found.run(everywhere=True)
    if found.complaints:
        text = found.text(function, "the serial function")
        raise MismatchError(text, [complaint.what for complaint in found.complaints])
    return Comparison(found.differences, found.not_compared)


def _checked_tolerance(value: float | None, name: str) -> float | None:
    number = 0.0 if value is None else check_number(value, f"check: {name}")
    if not 0 <= number < float("inf"):
        raise ValueError(f"check: {name}: expected a finite number, 0 or more, got {value}")
    return None if value is None else number
