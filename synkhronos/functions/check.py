"""`Function.check`: a call compared with the serial function on the same rows and the same state.

The master runs the Theano function on all rows. Then one command runs the call on every rank, compares
the new values of shared variables with the serial values, and restores everything: functions work on
copies of the variables they update, and afterwards the original arrays hold the values again.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy as np

from synkhronos import _html
from synkhronos._errors import MismatchError
from synkhronos.arithmetic.comparison import difference
from synkhronos.arithmetic.operations import GATHER
from synkhronos.arithmetic.partition import take_along
from synkhronos.functions import outputs, reasons
from synkhronos.functions.agreement import agreement_of, label, labels, ranks_that_differ
from synkhronos.functions.analysis import analyze
from synkhronos.functions.call import CallFunction
from synkhronos.functions.copies import on_copies
from synkhronos.functions.packed import unpack
from synkhronos.functions.replica import serial_arguments
from synkhronos.functions.trial import DIFFERENT_SHAPE, SliceableRows, Tolerance, Trial
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


def check(
    world: World,
    function: Any,
    call: CallFunction,
    arrays: Sequence[np.ndarray],
    rtol: float | None,
    atol: float,
) -> Comparison:
    """Compare a call with the serial function; see `Function.check`."""
    shareds = function.get_shared()
    types = [one.type for one in function.inputs]
    types += [world.here.engine.type_of(one) for one in shareds if world.here.engine.is_tensor(one)]
    tolerance = Tolerance(rtol, atol, [one.dtype for one in types])
    return _Check(world, function, call, arrays, tolerance).run()


def check_tolerance(value: float, name: str) -> float:
    """Return a tolerance, or raise if it is not a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise TypeError(f"check: {name}: expected a number, got {value!r}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"check: {name}: expected a finite number, 0 or more, got {value}")
    return float(value)


class _Check:
    """One comparison of a function's call with the serial function.

    Parameters
    ----------
    world : World
    function : Function
    call : CallFunction
    arrays : list of numpy.ndarray
        The whole inputs.
    tolerance : Tolerance
    """

    def __init__(self, world, function, call, arrays, tolerance):
        self.world, self.function, self.call = world, function, call
        self.arrays, self.tolerance = arrays, tolerance
        self.subset = range(len(function.output_modes)) if call.subset is None else call.subset
        self.analysis = analyze(world, function)
        self.updated = [world.registry.numbers[shared] for shared in self.analysis.updates]
        self.not_compared: dict[str, str] = {}
        self.differences: dict[str, float] = {}
        self.complaints: list[str] = []
        self.names: list[str] = []
        self.out_of_sync: set[int] = set()

    def run(self):
        """Compare, and return what was compared, or raise `MismatchError`."""
        world = self.world
        serial_outputs, serial_news = self._run_serially()
        handles = {number: world.here.store.put(new) for number, new in serial_news.items()}
        used = self._used()
        trial = Trial(self.call, self.updated, handles, used, self.tolerance)
        results, news, before = zip(*world.run(trial))
        self.out_of_sync = {used[one] for one in ranks_that_differ(before, world.master_rank)}
        by_rank = self._values_by_rank(results)
        weights = [n_rows for n_rows, *_ in results]
        active = [n_rows for n_rows in weights if n_rows]
        values = outputs.collect(world, self.function, results, self.call.subset)
        for position, index in enumerate(self.subset):
            each = by_rank[position], active
            self._compare_output(index, values[position], serial_outputs[position], each)
        for number, serial in serial_news.items():
            found = [self._fetched(each[number]) for each in news]
            self._compare_update(number, found, serial, weights)
        if self.complaints:
            listed = "\n".join(f"- {one}" for one in self.complaints)
            raise MismatchError(
                f"{self.function!r}: on {world.size} rank(s) the call differs from the serial "
                f"function:\n{listed}",
                self.names,
            )
        return Comparison(self.differences, self.not_compared)

    # The serial function

    def _run_serially(self):
        """Return the outputs of the serial function and the new values, by number, as NumPy arrays."""
        here, replica = self.world.here, self.function.replica
        inputs, rows = list(self._whole_inputs()), self._sliceable_rows()
        arguments = serial_arguments(here.engine, replica, inputs, rows)
        shareds = [here.shareds[number] for number in self.updated]
        streams = agreement_of(self.world).streams
        with on_copies(here, shareds):
            computed = here.engine.call(replica.compiled, arguments, self.call.subset)
            hosted = [here.engine.to_host(value) for value in computed]
            values = [None if value is None else np.array(value) for value in hosted]
            news = {
                number: np.array(here.engine.export(shared))
                for number, shared in zip(self.updated, shareds)
                if here.engine.is_tensor(shared) and number not in streams
            }
        return values, news

    def _whole_inputs(self):
        rows = self.call.rows
        splits = self.call.splits or [None] * len(self.arrays)
        for split, array in zip(splits, self.arrays):
            if split is None:
                yield array
            elif split.minibatch:
                yield take_along(array, range(len(rows)), split.axis)
            else:
                yield take_along(array, rows, split.axis)

    def _sliceable_rows(self):
        """Return, for each sliceable variable, the rows of all ranks together."""
        world, numbers = self.world, self.function.replica.sliceable
        if not numbers:
            return []
        by_rank = world.run(SliceableRows(numbers, self.call.batch_s))
        rows = [np.concatenate([unpack(world.here, one) for one in each]) for each in zip(*by_rank)]
        engine = world.here.engine
        on_host = [isinstance(engine.storage(world.here.shareds[one]), np.ndarray) for one in numbers]
        return [one if host else engine.to_device(one) for one, host in zip(rows, on_host)]

    # What can be compared

    def _can_compare(self, what, shareds):
        """Note why a result cannot be compared, if it depends on what differs from rank to rank."""
        world, agreement = self.world, agreement_of(self.world)
        if world.size == 1:
            return True
        numbers = [world.registry.numbers[one] for one in shareds if one in world.registry.numbers]
        if any(number in agreement.streams for number in numbers):
            self.not_compared[what] = "it depends on random numbers, which each rank draws for itself"
            return False
        own = sorted(self.out_of_sync & (agreement.scattered | agreement.sliceable) & set(numbers))
        if own:
            self.not_compared[what] = f"it depends on {labels(world, own)}, which differs by rank"
        return not own

    def _used(self):
        """Return the numbers of the variables whose replicas have to be equal before the call."""
        world, numbers = self.world, self.world.registry.numbers
        dependences = [*self.analysis.outputs, *self.analysis.updates.values()]
        read = {one for each in dependences for one in each.shareds if world.here.engine.is_tensor(one)}
        return sorted({numbers[one] for one in read} - agreement_of(world).streams)

    # Outputs

    def _values_by_rank(self, results):
        """Return, for each output, copies of the values of the ranks with rows; None if not all sent."""
        sent = [values for n_rows, *values in results if n_rows]
        by_rank = []
        for values in zip(*sent):
            known = not any(value is None for value in values)
            by_rank.append(
                [np.array(unpack(self.world.here, value)) for value in values] if known else None
            )
        return by_rank

    def _compare_output(self, index, value, serial, each):
        what = f"output {index}"
        mode = self.function.output_modes[index]
        if mode is None:
            self.not_compared[what] = "it is the master's own value (op None)"
            return
        if value is None or serial is None:
            if value is serial:
                self.differences[what] = 0.0
            else:
                one, other = ("", " not") if value is None else (" not", "")
                self._complain(what, f"is{one} None, but the serial output is{other}")
            return
        if mode == GATHER and not serial.ndim:
            self.not_compared[what] = "it is one number per rank (op 'gather')"
            return
        dependence = self.analysis.outputs[index]
        if not self._can_compare(what, dependence.shareds):
            return
        value = np.asarray(value)
        same_shape = value.shape == serial.shape
        amount = difference(value, serial) if same_shape else DIFFERENT_SHAPE
        if same_shape and self.tolerance.allows(value, serial):
            self.differences[what] = amount.absolute
            return
        reason = self._stale(dependence) or reasons.of_output(
            mode, *each, serial, self.tolerance.allows
        )
        found = f"differs {amount}" if same_shape else f"has the shape {value.shape}, not {serial.shape}"
        self._complain(what, f"{found}; {reason}")

    # Updates

    def _fetched(self, found):
        amount, value = found
        return amount, None if value is None else np.asarray(unpack(self.world.here, value))

    def _compare_update(self, number, found, serial, weights):
        what = f"shared variable {label(self.world, number)}"
        dependence = self.analysis.updates[self.world.here.shareds[number]]
        if not self._can_compare(what, dependence.shareds):
            return
        wrong = [rank for rank, (_, value) in enumerate(found) if value is not None]
        largest = max(amount for amount, _ in found)
        if not wrong:
            self.differences[what] = largest.absolute
            return
        values = [serial if value is None else value for _, value in found]
        reason = self._stale(dependence) or reasons.of_update(
            values, weights, serial, self.tolerance.allows
        )
        ranks = ", ".join(map(str, wrong))
        same_shape = all(value.shape == serial.shape for value in values)
        how = str(largest) if same_shape else f"in its shape, serially {serial.shape}"
        self._complain(what, f"the new value differs {how} on rank(s) {ranks}; {reason}")

    def _stale(self, dependence):
        """Return the reason if replicas already differed before the call."""
        numbers = self.world.registry.numbers
        stale = [numbers[one] for one in dependence.shareds if numbers.get(one) in self.out_of_sync]
        if not stale:
            return None
        return (
            f"the replicas of {labels(self.world, sorted(stale))} differed before the call: make them "
            f"equal with synk.broadcast()"
        )

    def _complain(self, what, text):
        self.names.append(what)
        self.complaints.append(f"{what} {text}")
