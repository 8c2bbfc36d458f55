"""A training step on all ranks, the phases of a plan, as one command; and the same in one process.

The ranks draw other random numbers than one process would, so a step that draws cannot be compared with
the serial step. `with_fixed_draws` replaces these numbers by numbers that follow from the rows.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, NoReturn, Sequence

import numpy

import synkhronos as synk
from synkhronos._text import listed
from synkhronos.engines import names
from synkhronos.engines.analysis.graphs import Dependence, draws_in, inputs_first, operands_with
from synkhronos.engines.names import SharedVariable, Variable, package
from synkhronos.engines.names import tensor as tt
from synkhronos.extensions.steps.arguments import MISSING
from synkhronos.extensions.steps.definition import Definition
from synkhronos.extensions.steps.losses import AllRows, with_statistics
from synkhronos.extensions.steps.plan import Plan
from synkhronos.functions.steps import RepeatedStep, compare_step, reduces, shares


class _Phase(NamedTuple):
    """A function of a step, and the numbers of the step's inputs that it has."""

    function: synk.Function
    indices: list[int]


class _Builder:
    """Builds the functions of a step."""

    def __init__(self, definition: Definition) -> None:
        self._inputs, self._givens = definition.inputs, definition.givens
        self._broadcast = definition.broadcast
        self._parents = operands_with(self._givens)
        self._keywords = dict(definition.options)
        self._name = self._keywords.pop("name", None)
        excluded = self._keywords.get("no_default_updates", False)
        if definition.defaults and excluded is not True:
            self._keywords["no_default_updates"] = [*(excluded or ()), *definition.defaults]

    def used(self, variables: Sequence[Variable], updates: Sequence[tuple[Any, ...]]) -> set[Variable]:
        """Return all variables that some variables and updates are computed from."""
        return set(inputs_first([*variables, *(new for _, new, *_ in updates)], self._parents))

    def build(
        self,
        name: str,
        outputs: Sequence[tuple[Any, Variable]],
        updates: Sequence[tuple[Any, ...]],
        has_rows: bool = False,
        indices: Sequence[int] | None = None,
        sliceable: Sequence[SharedVariable] = (),
        **keywords: Any,
    ) -> _Phase:
        """Build a function. Without rows, no input selects any.

        Parameters
        ----------
        outputs : list of (output, variable)
            Outputs as ``synk.function`` takes them, and their variables.
        indices : list of int, optional
            The numbers of the inputs; by default, of the inputs that are used.
        """
        used = self.used([variable for _, variable in outputs], updates)
        if indices is None:
            indices = [i for i, item in enumerate(self._inputs.variables) if item in used]
        own: list[int] = []
        whole: list[int] = []
        for index in indices:
            variable = self._inputs.variables[index]
            is_whole = variable in self._broadcast
            is_whole = is_whole or not (has_rows or getattr(variable.type, "ndim", 0) > 0)
            (whole if is_whole else own).append(index)
        function = synk.function(
            [self._inputs.given[index] for index in own],
            [output for output, _ in outputs],
            bcast_inputs=[self._inputs.given[index] for index in whole],
            updates=updates,
            givens=[(old, new) for old, new in self._givens.items() if old in used],
            sliceable_shareds=sliceable,
            name=name if self._name is None else f"{self._name}: {name}",
            **{**self._keywords, **keywords},
        )
        return _Phase(function, [*own, *whole])


class Step:
    """A training step. Its calls take data as `StepInputs.match` returns it.

    Attributes
    ----------
    functions : list of Function
        The functions that a call runs, in their order.
    name : str or None
        The name that was given.
    """

    def __init__(self, definition: Definition) -> None:
        self._definition: Definition | None = definition
        counter, all_rows = _Builder(definition), AllRows(definition)
        definition = with_statistics(definition, all_rows)
        plan = Plan(definition, all_rows)
        self._with_fixed_draws: Step | None = None
        self.name: str | None = definition.options.get("name")
        inputs, wire = definition.inputs, definition.wire
        self._inputs, self._places, self._streams = inputs, plan.places, plan.streams
        self._reduced = _reductions(plan, wire)
        row_updates = _overlapped(plan, wire) if definition.overlap else plan.row_updates
        builder = _Builder(definition)
        row_outputs = [(spec.given, spec.variable) for spec in plan.row_outputs]
        first = builder.used([variable for _, variable in row_outputs], row_updates)
        elsewhere = builder.used(plan.outputs, plan.updates) | counter.used([], plan.counting)
        # An unused input is passed to the first function, and so to the compiler.
        indices = [
            i for i, item in enumerate(inputs.variables) if item in first or item not in elsewhere
        ]
        self._rows = builder.build(
            "gradient", row_outputs, row_updates, True, indices, definition.sliceable
        )
        self._before = [builder.build("clear", [], plan.clearing)] if plan.clearing else []
        used, self._counts = counter.used([], plan.counting), []
        counted = [item for item in definition.sliceable if item in used]
        if plan.counting:  # the ranks meet in it, which not every mode can do
            count = counter.build("count", [], plan.counting, True, sliceable=counted, mode=None)
            self._counts.append(count)
        self._counts_sliceable = bool(counted)
        self._later: list[_Phase] = []
        if plan.outputs or plan.updates:
            outputs = [((output, None), output) for output in plan.outputs]  # the master's value
            self._later.append(builder.build("update", outputs, plan.updates))
        self._targets = [target for target, _ in plan.updates]
        self._own = [update.target for update in definition.updates if update.is_own]
        self._told = _named(plan), plan.is_doubtful
        reduces(self._rows.function, *self._told)
        called = [*self._before, *self._counts, self._rows, *self._later]
        self._called, self._place = [phase.function for phase in called], called.index(self._rows)
        self.functions = self._called[len(self._before) :]
        self._repeated = self._repeat()

    @property
    def n_outputs(self) -> int:
        return len(self._places)

    @property
    def function(self) -> synk.Function:
        """The function that is called on rows."""
        return self._rows.function

    def _repeat(self) -> RepeatedStep:
        shares(self._called, self._own)
        # The count is called on rows, too.
        repeated = RepeatedStep(self._called, self._place, not self._counts, self.name or "step")
        #: Takes a step, and reports it to functions of ``synk.on_step``
        self.reported = repeated.reported
        return repeated

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles record steps of their own, and are without the script's expressions.
        own = dict.fromkeys(("_repeated", "reported", "_definition", "_with_fixed_draws"))
        return {**vars(self), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._repeated = self._repeat()
        reduces(self._rows.function, *self._told)

    def __call__(
        self, values: Sequence[Any], batch: Any, num_slices: int, batch_s: Any = None
    ) -> list[Any]:
        """Take a step; return the list of outputs."""
        results = self._repeated.take(
            lambda: self._make_calls(values, batch, num_slices, batch_s),
            values,
            batch,
            num_slices != 1 or batch_s is not None,
        )
        first, last = results[self._place], results[-1]
        return [(last if is_last else first)[index] for is_last, index in self._places]

    def described(self) -> list[tuple[object, ...]]:
        """Return the rows of a table: the functions, what is reduced between them, what is updated."""
        rows: list[tuple[object, ...]] = [(self._rows.function.name, "on the rows of each rank")]
        for op, shareds, wire in self._reduced:
            text = f"of {len(shareds)} variable{'s' * (len(shareds) != 1)}"
            rows.append((f"all_reduce, {op}", text if wire is None else f"{text}, sent as {wire}"))
        rows += [(phase.function.name, "on each rank") for phase in self._later]
        return [*rows, ("updates", listed([target.name or target for target in self._targets]))]

    def _make_calls(self, values: Sequence[Any], batch: Any, num_slices: int, batch_s: Any) -> None:
        sliceable = {} if batch_s is None else {"batch_s": batch_s}
        for phase in self._before:
            self._call(phase, values)
        for phase in self._counts:
            self._call(phase, values, batch=batch, **(sliceable if self._counts_sliceable else {}))
        self._call(self._rows, values, batch=batch, num_slices=num_slices, **sliceable)
        op: Any
        for op, shareds, wire in self._reduced:
            weights = self._rows.function if op == "avg" else None
            synk.all_reduce(shareds, op, weights=weights, wire=wire)
        if self._streams:
            synk.broadcast(self._streams)
        for phase in self._later:
            self._call(phase, values)

    def _call(self, phase: _Phase, values: Sequence[Any], **options: Any) -> None:
        positional, named = self._inputs.select(phase.indices, values)
        phase.function(*positional, **options, **named)

    def check(
        self,
        values: Sequence[Any],
        batch: Any,
        num_slices: int,
        batch_s: Any,
        random: bool,
        rtol: float | None,
        atol: float | None,
    ) -> synk.Comparison:
        """Compare a step with the same step on one rank; return the comparison.

        If `random`, numbers that follow from the rows are in place of random ones.

        Raises
        ------
        MismatchError
            If an output or an updated variable differs.
        """
        if random:
            if self._definition is None:
                raise ValueError("check: random=True is for the original step, not for a copy of it")
            if self._with_fixed_draws is None:
                self._with_fixed_draws = Step(with_fixed_draws(self._definition))
            step = self._with_fixed_draws
            return step.check(values, batch, num_slices, batch_s, False, rtol, atol)
        last = len(self._called) - 1
        outputs = {
            f"output {place}": (last if is_last else self._place, index)
            for place, (is_last, index) in enumerate(self._places)
        }

        def take_step() -> None:
            self._make_calls(values, batch, num_slices, batch_s)

        return compare_step(self._rows.function, take_step, outputs, self._targets, rtol, atol)


def _named(plan: Plan) -> dict[SharedVariable, tuple[str, str]]:
    """Return the name in messages of each variable that is reduced, and the operation."""
    names = {gradient: "the gradient" for gradient in plan.gradients}
    return {
        shared: (names.get(shared, f"what is reduced for an update ({shared.name})"), op)
        for op, shareds in plan.reduced.items()
        for shared in shareds
    }


def _reductions(plan: Plan, wire: Any) -> list[tuple[str, list[SharedVariable], Any]]:
    """Return the reductions: operations, variables, and their wire formats.

    Only gradients may be delayed or inexact, as with a wire format.
    """
    found = []
    for op, shareds in plan.reduced.items():
        gradients = [shared for shared in shareds if wire is not None and shared in plan.gradients]
        others = [shared for shared in shareds if shared not in gradients]
        found += [(op, each, form) for each, form in ((gradients, wire), (others, None)) if each]
    for _, shareds, form in found:
        for shared in shareds:
            if form is not None and shared.dtype != "float32":
                raise TypeError(
                    f"wire: expected float32 gradients, got {shared.dtype}; use float32 parameters "
                    f"({names.package.__name__.upper()}_FLAGS=floatX=float32), or leave out wire="
                )
    return found


def _overlapped(plan: Plan, wire: Any) -> list[tuple[SharedVariable, Variable, Any]]:
    """Return the updates of the first phase, in which the largest gradient vector is in buckets."""
    vectors = [
        shared
        for shared, new, _ in plan.row_updates
        if shared in plan.gradients and hasattr(new.tag, "filled_with")
    ]
    if not vectors:
        return plan.row_updates
    largest = max(vectors, key=lambda shared: shared.get_value(borrow=True).nbytes)
    op: Any
    [op] = [op for op, shareds in plan.reduced.items() if largest in shareds]
    return [
        (
            shared,
            synk.ops.in_buckets(shared, new.tag.filled_with, shared.tag.pieces, op, wire=wire)
            if shared is largest
            else new,
            slice_op,
        )
        for shared, new, slice_op in plan.row_updates
    ]


# In one process


class SerialStep:
    """The serial step that a step on all ranks must equal. It is called like a `Step`."""

    def __init__(self, definition: Definition) -> None:
        inputs, options = definition.inputs, definition.options
        self._inputs = inputs
        self.name: str | None = options.get("name")
        self._scattered = [variable in definition.rows for variable in inputs.variables]
        self._function = package.function(
            inputs.given,
            [spec.variable for spec in definition.outputs],
            updates=[(update.target, update.new) for update in definition.merged().updates],
            givens=list(definition.givens.items()),
            **{"name": "gradient", **options},
        )

    def check(self, *_: Any) -> NoReturn:
        """Refuse to compare the serial step with itself."""
        raise TypeError(
            "check: expected a step on all ranks, of make_train_function(), got the serial step of "
            "make_train_function_theano(); check the former, which is compared with the serial step"
        )

    def reported(self, take: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``take(*arguments)``: ``synk.on_step`` is about the steps of ranks."""
        return take(*arguments)

    def described(self) -> list[tuple[object, ...]]:
        """Return the rows of a table."""
        return [("functions", "of the compiler alone, for one process")]

    def __call__(self, values: Sequence[Any], batch: Any, num_slices: int) -> list[Any]:
        """Take a step; return the list of outputs. The result does not depend on `num_slices`."""
        rows: slice | numpy.ndarray
        if batch is None or isinstance(batch, (int, numpy.integer)):
            rows = slice(batch)
        else:
            rows = batch if isinstance(batch, slice) else numpy.asarray(batch)
        chosen = [
            _rows_of(value, rows) if scattered and value is not MISSING else value
            for value, scattered in zip(map(_usable, values), self._scattered)
        ]
        positional, named = self._inputs.select(range(len(chosen)), chosen)
        return self._function(*positional, **named)


def _usable(value: Any) -> Any:
    """Return an array that the compiler takes, and that is not wrong in BLAS because of its strides."""
    if not isinstance(value, numpy.ndarray) or value.flags.forc and value.flags.aligned:
        return value
    return numpy.array(value, order="C")


def _rows_of(value: Any, rows: slice | numpy.ndarray) -> Any:
    if isinstance(value, (list, tuple)):
        return numpy.asarray(value)[rows].tolist()  # the compiler casts lists, but not arrays
    return value[rows]


# Random numbers that follow from the rows: a row gets the same ones on any rank, and in one process

_GOLDEN = 0.6180339887498949  # multiples of it are spread evenly, modulo 1
_STEPS = (0.7548776662466927, 0.5698402909980532, 0.4301597090019468)  # along the axes
#: For a draw without an axis of rows: its sine and cosine, of 2 pi times it, are equal, so that normal
#: numbers, which are made of a vector of uniform ones by these, are all the same.
SAME_FOR_PAIRS = 0.125


def with_fixed_draws(definition: Definition) -> Definition:
    """Return a step with numbers that follow from the rows in place of random numbers.

    Raises
    ------
    ValueError
        If the script draws no random numbers.
    """
    roots = [spec.variable for spec in definition.outputs]
    roots += [item.new for item in [*definition.updates, *definition.grad_updates] if not item.is_own]
    draws = draws_in(inputs_first(roots, operands_with(definition.givens)))
    if not draws:
        raise ValueError("check: random=True is for steps that draw random numbers; this one does not")
    by_row = _number_of_each_row(definition)
    of_rows = Dependence(definition.rows, definition.givens)
    fixed = {draw: _fixed(draw, by_row, bool(of_rows.of(_size(draw)))) for draw in draws}
    return definition._replace(givens={**definition.givens, **fixed})


def _size(draw: Variable) -> Variable:
    """Return the shape of a draw, computed from the operands of the draw."""
    size, *parameters = draw.owner.inputs[1:]
    is_given = getattr(size.type, "ndim", None) == 1 and not _is_empty(size)
    if is_given:
        return size
    return sum(parameters[1:], parameters[0]).shape


def _is_empty(size: Variable) -> bool:
    data = getattr(size, "data", None)
    return data is not None and not len(data)


def _number_of_each_row(definition: Definition) -> Variable:
    """Return a vector with a number for each row, which depends on the contents of the row."""
    rows, axis = next(iter(definition.rows.items()))
    others = [index for index in range(rows.ndim) if index != axis]
    numbers = tt.cast(rows, "float64")
    return numbers.sum(axis=others) if others else numbers


def _fixed(draw: Variable, by_row: Variable, has_rows: bool) -> Variable:
    """Return numbers of the shape and the type of a draw."""
    size, length = _size(draw), by_row.shape[0]
    total, is_by_row = tt.constant(numpy.float64(0)), tt.constant(numpy.int8(0))
    for axis in range(draw.ndim):
        places = tt.arange(size[axis])
        along = tt.cast(places, "float64") * _STEPS[axis % len(_STEPS)]
        if has_rows:  # along the first axis of this length
            is_axis = tt.eq(size[axis], length) * (1 - is_by_row)
            along = tt.switch(is_axis, by_row[places % length], along)
            is_by_row = is_by_row + tt.cast(is_axis, "int8")
        order: list[Any] = ["x"] * draw.ndim
        order[axis] = 0
        total = total + along.dimshuffle(*order)
    numbers = (total * _GOLDEN) % 1
    if has_rows:
        numbers = tt.switch(is_by_row, numbers, SAME_FOR_PAIRS)
    if not draw.dtype.startswith("float"):
        numbers = numbers < 0.5
    numbers = names.with_pattern(tt.cast(numbers, draw.dtype), draw.type.broadcastable)
    return draw.type.filter_variable(numbers)
