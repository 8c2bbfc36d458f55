"""A training step on all ranks: the phases of a plan, as one command."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import synkhronos as synk
from synkhronos._text import listed
from synkhronos.engines import names
from synkhronos.engines.analysis.graphs import inputs_first, operands_with
from synkhronos.engines.names import SharedVariable, Variable
from synkhronos.extensions.steps.definition import Definition
from synkhronos.extensions.steps.losses import AllRows, with_statistics
from synkhronos.extensions.steps.plan import Plan
from synkhronos.extensions.steps.serial_step import with_fixed_draws
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
        self._count, self._counts_sliceable = self._build_count(counter, plan, definition.sliceable)
        self._later: list[_Phase] = []
        if plan.outputs or plan.updates:
            outputs = [((output, None), output) for output in plan.outputs]  # the master's value
            self._later.append(builder.build("update", outputs, plan.updates))
        self._targets = [target for target, _ in plan.updates]
        self._own = [update.target for update in definition.updates if update.is_own]
        self._told = _named(plan), plan.is_doubtful
        reduces(self._rows.function, *self._told)
        counts = [] if self._count is None else [self._count]
        called = [*self._before, *counts, self._rows, *self._later]
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
        repeated = RepeatedStep(self._called, self._place, self._count is None, self.name or "step")
        #: Takes a step, and reports it to functions of ``synk.on_step``
        self.reported = repeated.reported
        return repeated

    def _build_count(
        self, builder: _Builder, plan: Plan, sliceable: Sequence[SharedVariable]
    ) -> tuple[_Phase | None, bool]:
        """Return the phase that counts the rows of all ranks, and whether they are sliceable."""
        if not plan.counting:
            return None, False
        used = builder.used([], plan.counting)
        counted = [item for item in sliceable if item in used]
        # The ranks meet in it, which not every mode can do.
        phase = builder.build("count", [], plan.counting, True, sliceable=counted, mode=None)
        return phase, bool(counted)

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
        positional, named = self._inputs.select(self._rows.indices, values)
        if batch_s is not None:
            named["batch_s"] = batch_s
        rows = self._rows.function
        for phase in self._before:
            phase.function()
        if self._count is not None:
            by_position, by_name = self._inputs.select(self._count.indices, values)
            if self._counts_sliceable and batch_s is not None:
                by_name["batch_s"] = batch_s
            self._count.function(*by_position, batch=batch, **by_name)
        rows(*positional, batch=batch, num_slices=num_slices, **named)
        op: Any
        for op, shareds, wire in self._reduced:
            synk.all_reduce(shareds, op, weights=rows if op == "avg" else None, wire=wire)
        if self._streams:
            synk.broadcast(self._streams)
        for phase in self._later:
            positional, named = self._inputs.select(phase.indices, values)
            phase.function(*positional, **named)

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
