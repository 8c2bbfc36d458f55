"""Divides a training step into the part that each rank computes on its rows, and the rest.

An update contains gradients somewhere in its graph. Each rank computes these on its own rows, and they
are reduced over the ranks. The rest of the graph, in which they are replaced by their reduced values,
every rank computes from the same values.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from synkhronos.engines import names
from synkhronos.engines.analysis.difference_causes import difference_causes
from synkhronos.engines.analysis.graphs import (
    Dependence,
    inputs_first,
    is_random_state,
    operands_with,
    rebuilt,
)
from synkhronos.engines.names import GeneratorType, SharedVariable, Variable
from synkhronos.extensions.steps import errors
from synkhronos.extensions.steps.all_rows import AllRows
from synkhronos.extensions.steps.clipped_gradients import GradientScaling
from synkhronos.extensions.steps.definition import Definition
from synkhronos.extensions.steps.linear import split, terms
from synkhronos.extensions.steps.losses import check_losses, values_of
from synkhronos.extensions.steps.parsing import Output, Update
from synkhronos.extensions.steps.reduced_expressions import ReducedExpression
from synkhronos.extensions.steps.reduced_vectors import ReducedVectors, in_place, is_in_place


class Plan(NamedTuple):
    """The computations of each phase of a step.

    Attributes
    ----------
    clearing : list of (shared, new)
        Updates before the first phase, on every rank.
    counting : list of (shared, new)
        Updates before the first phase, on each rank's rows.
    row_outputs : list of Output
        The first phase, on each rank's rows.
    row_updates : list of (shared, new, op)
        The updates of the first phase; `op` combines slices of the rows.
    reduced : dict
        For each operation, the shared variables to reduce after the first phase.
    gradients : list of shared variables
        The reduced variables that hold gradients.
    streams : list of shared variables
        States of random streams to broadcast after the first phase.
    preparing : list of (shared, new)
        Updates that an update rule makes from the gradients before its own updates.
    outputs, updates : list
        The last phase, on every rank.
    places : list of (bool, int)
        For each output of the definition, whether it belongs to the last phase, and its index.
    is_doubtful : bool
        Whether a warning has said that the step differs from the serial one.
    """

    clearing: list[tuple[SharedVariable, Variable]]
    counting: list[tuple[SharedVariable, Variable]]
    row_outputs: list[Output]
    row_updates: list[tuple[SharedVariable, Variable, Any]]
    reduced: dict[str, list[SharedVariable]]
    gradients: list[SharedVariable]
    streams: list[SharedVariable]
    preparing: list[tuple[SharedVariable, Variable]]
    outputs: list[Variable]
    updates: list[tuple[SharedVariable, Variable]]
    places: list[tuple[bool, int]]
    is_doubtful: bool = False


def make_plan(definition: Definition, all_rows: AllRows) -> Plan:
    """Return the phases of a step.

    Raises
    ------
    ValueError
        If the step cannot equal the serial one: nothing is divided among the ranks, or an update or an
        output depends on the rows other than through gradients, in a way that cannot be averaged.
    TypeError
        If an update whose values have to be averaged is not a float.
    """
    return _Planner(definition, all_rows).plan()._replace(is_doubtful=check_losses(definition))


class _Planner:
    """Sorts updates and outputs into phases.

    A variable is *local* if its value may differ from rank to rank: it depends on the rows, on random
    streams, or on shared variables that each rank keeps for itself.
    """

    def __init__(self, definition: Definition, all_rows: AllRows) -> None:
        self.all_rows = all_rows
        self.definition, self.givens = definition, definition.givens
        self.reductions = definition.reductions
        self.vectors = ReducedVectors()
        self.parents = operands_with(self.givens)
        roots = [spec.variable for spec in definition.outputs]
        roots += [update.new for update in [*definition.updates, *definition.grad_updates]]
        random = [item for item in inputs_first(roots, self.parents) if is_random_state(item)]
        kept = [update.target for update in definition.updates if update.is_own]
        sources = [*definition.rows, *random, *kept]
        if not sources and not definition.is_only_an_update:
            raise errors.nothing_divided(definition.index, definition.whole)
        self.full = Dependence(sources, self.givens)
        self.scaling = GradientScaling(definition, self.full, all_rows)
        self.random = self.full.mask_of(random)
        self.is_prepared = self._has_penalty()
        self.candidates = self._candidates()
        self.local = Dependence(sources, self.givens, self.candidates)
        self.touched = Dependence(self.candidates, self.givens)
        self.gradients = self.touched.mask_of(
            [candidate for candidate in self.candidates if not self.reductions.is_loss(candidate)]
        )

    def _has_penalty(self) -> bool:
        """Whether an update rule's own gradients have to be completed after they were added up."""
        if self.reductions.loss_op != "sum" or not self.definition.grad_shared:
            return False
        variables = inputs_first([grad_update.new for grad_update in self.definition.grad_updates])
        found = [self.reductions.find(variable) for variable in variables]
        reduced = [item for item in found if item is not None]
        if all(self.reductions.is_loss(item.expression) for item in reduced):
            self._check_no_penalty()
        return any(self._parts(item)[1] is not None for item in reduced)

    def _check_no_penalty(self) -> None:
        """Raise an error if the loss has a penalty, and an update rule's gradients are unknown."""
        loss = self.definition.outputs[0].variable
        if self.full.of(loss) and split(loss, self.full)[1] is not None:
            raise errors.unknown_penalty()

    def _reduction_at(self, variable: Variable) -> ReducedExpression | None:
        found = self.reductions.find(variable)
        return found if found is not None and self.full.of(variable) else None

    def _candidates(self) -> dict[Variable, ReducedExpression]:
        roots = [update.new for update in self.definition.updates if not update.is_own]
        roots += [spec.variable for spec in self.definition.outputs if not spec.has_op]
        if self.is_prepared:
            roots += [grad_update.new for grad_update in self.definition.grad_updates]
        variables = inputs_first(roots, self.parents)
        found = {variable: self._reduction_at(variable) for variable in variables}
        return {variable: item for variable, item in found.items() if item is not None}

    def plan(self) -> Plan:
        own, averaged, last = self._sorted_updates()
        row_outputs, outputs, places = self._outputs()
        preparing = self._grad_updates()
        expressions = [*(item.new for item in [*last, *preparing]), *outputs]
        kept = self._reserve(averaged)
        replacements = self._replacements(expressions)  # builds the vectors
        row_updates = self.vectors.updates + [(item.target, item.new, None) for item in own]
        row_variables = [spec.variable for spec in row_outputs]
        streams = self._streams(last, row_variables, row_updates)
        news = iter(rebuilt(expressions, replacements, self.givens))
        return Plan(
            clearing=self.vectors.clearing(),
            counting=self.all_rows.updates,
            row_outputs=[self._combined(output) for output in row_outputs],
            row_updates=row_updates,
            reduced=self.vectors.reduced,
            gradients=[*self.vectors.gradients, *self.definition.grad_shared],
            streams=streams,
            updates=[(item.target, next(news)) for item in last] + self._stored(averaged, kept),
            preparing=[(item.target, next(news)) for item in preparing],
            outputs=list(news),
            places=places,
        )

    def _grad_updates(self) -> list[Update]:
        """Take over the reductions of an update rule, or return them to be computed afterwards."""
        definition, op = self.definition, self.reductions.loss_op
        if self.is_prepared:
            for update in definition.grad_updates:
                mask = self.local.of(update.new)
                if mask:
                    raise errors.mixed(update.target, self.local, mask)
            return definition.grad_updates
        for update, new in zip(definition.grad_updates, self._shared_gradients(op)):
            self.vectors.updates.append((update.target, new, update.op if update.has_op else op))
        if definition.grad_shared:
            self.vectors.reduced.setdefault(op, []).extend(definition.grad_shared)
        return []

    def _shared_gradients(self, op: str) -> list[Variable]:
        """Return the new values of an update rule's gradients; vectors have tags with their parts."""
        news = [grad_update.new for grad_update in self.definition.grad_updates]
        filled = [getattr(item.tag, "filled_with", []) for item in news]
        every = iter(self.scaling.applied([*news, *(item for each in filled for item in each)], op))
        shared = [next(every) for _ in news]
        for new, expressions in zip(shared, filled):
            if expressions:
                new.tag.filled_with = [next(every) for _ in expressions]
        return shared

    # Outputs

    def _outputs(self) -> tuple[list[Output], list[Variable], list[tuple[bool, int]]]:
        """Return the outputs of the first phase and of the last phase, and where each output is."""
        first: list[Output] = []
        last: list[Variable] = []
        places = []
        for output in self.definition.outputs:
            is_last = not output.has_op and self._is_last(output.where, output.variable)
            places.append((is_last, len(last) if is_last else len(first)))
            if is_last:
                last.append(output.variable)
            else:
                first.append(output)
        return first, last, places

    def _is_last(self, where: str, variable: Variable) -> bool:
        """Whether an output is computed from reduced values, so that it equals the serial output."""
        if not self.full.of(variable):
            return True
        if self.reductions.is_loss(variable):
            return self._parts(self.candidates[variable])[1] is not None
        touched, mask = self.touched.of(variable), self.local.of(variable)
        if mask and touched & self.gradients:
            raise errors.mixed_output(where, self.local, mask)
        return bool(touched and not mask)

    def _combined(self, output: Output) -> Output:
        """Return an output of the ranks; a loss that is a sum is added up over them."""
        is_sum = self.reductions.loss_op == "sum" and not output.has_op
        if is_sum and self.reductions.is_loss(output.variable):
            return output._replace(given=(output.variable, "sum"))
        return output

    # ReducedExpressions

    def _parts(self, one: ReducedExpression) -> tuple[Any, Any]:
        """Return the part of an expression that is reduced, and the rest or None.

        A term that is the same on every rank is left out of a sum over the ranks.
        """
        return split(one.expression, self.full) if one.op == "sum" else (one.expression, None)

    def _replacements(self, expressions: Sequence[Variable]) -> dict[Variable, Variable]:
        """Return the replacements of the variables in `expressions` that are reduced."""
        reached = inputs_first(expressions, self.local.parents)
        chosen = {item: self.candidates[item] for item in reached if item in self.candidates}
        by_key = {item.key: item for item in chosen.values()}
        gradients = [item for item in by_key.values() if item.is_gradient]
        expressions = [gradient.expression for gradient in gradients]
        rewritten = self.scaling.applied(expressions, self.reductions.loss_op)
        for gradient, expression in zip(gradients, rewritten):
            by_key[gradient.key] = gradient._replace(expression=expression)
        places, frees = {}, {}
        for key, node in by_key.items():
            reduced, frees[key] = self._parts(node)
            places[key] = self.vectors.add(reduced, node.op, node.shape, node.is_gradient)
        self.vectors.build()
        replacements = {}
        for variable, item in chosen.items():
            value, free = self.vectors.reduced_at(places[item.key]), frees[item.key]
            if free is not None:
                value = value + rebuilt([free], {}, self.givens)[0]
            replacements[variable] = names.in_type_of(variable, value)
        return replacements

    # Updates

    def _sorted_updates(self) -> tuple[list[Update], list[Update], list[Update]]:
        """Return the updates that each rank keeps, that are averaged, and that follow the reduction."""
        own: list[Update] = []
        averaged: list[Update] = []
        last: list[Update] = []
        for update in self.definition.updates:
            if update.is_own or self._is_same_everywhere(update.new):
                own.append(update)
            else:
                (averaged if self._is_averaged(update) else last).append(update)
        return own, averaged, last

    def _is_same_everywhere(self, new: Variable) -> bool:
        """Whether a value depends on the rows only through collectives, and not on gradients."""
        if not self.local.of(new) & ~self.random or self.touched.of(new):
            return False
        variables = inputs_first([new], self.local.parents)
        collected = [
            variable
            for variable in variables
            if getattr(variable.owner and variable.owner.op, "is_same_everywhere", False)
        ]
        return bool(collected) and not Dependence(self.local.sources, self.givens, collected).of(new)

    def _is_averaged(self, update: Update) -> bool:
        """Whether the ranks' new values have to be combined because they depend on the rows directly."""
        mask = self.local.of(update.new)
        if not mask & ~self.random:
            return False  # the same on all ranks if all draw the same numbers
        if self.touched.of(update.new):
            raise errors.mixed(update.target, self.local, mask)
        return True

    def _reserve(self, updates: Sequence[Update]) -> list[Any]:
        """Add reductions of new values that depend on the rows directly; return the place of each."""
        targets = Dependence([update.target for update in updates], self.givens)
        kept: list[Any] = []
        for target, new, op, has_op in updates:
            if not hasattr(target.get_value(borrow=True), "__array__"):
                raise errors.not_a_tensor(target, self.local, self.local.of(new))
            if not has_op:
                self._check_average(target, new, targets)
            value = target.type.filter_variable(new - target if op == "sum" else new)
            if target.ndim:
                kept.append(self.vectors.add_whole(value, op, target))  # type: ignore[arg-type]  # not None
            else:
                kept.append(self.vectors.add(value, op, ()))  # type: ignore[arg-type]  # as above
        return kept

    def _check_average(self, target: SharedVariable, new: Variable, targets: Dependence) -> None:
        mask = self.local.of(new)
        if not target.type.dtype.startswith(("float", "complex")):
            raise errors.not_a_float(target, self.local, mask)
        # A default update can be given no operation. If it differs, the first call says so.
        if target in self.definition.defaults or self._is_mean(new):
            return
        for term, is_summed in terms(new, self.local):
            if targets.of(term):
                raise errors.step_without_gradient(target, self.local, mask)
            [value] = values_of([term], self.definition)
            if value is not None and (value.axis is not None or value.degrees == {1}):
                has_rows = value.axis is not None and not is_summed
                raise errors.sum_over_rows(target, self.local, mask, not has_rows)

    def _is_mean(self, new: Variable) -> bool:
        """Whether the average of the ranks' values is certainly the value for all rows."""
        rows = self.definition.rows
        [value], [causes] = (
            values_of([new], self.definition),
            difference_causes(list(rows), list(rows.values()), [new]),
        )
        is_known = value is not None and value.axis is None and value.degrees <= {0}
        return is_known and not causes.possible

    def _stored(
        self, updates: Sequence[Update], kept: Sequence[Any]
    ) -> list[tuple[SharedVariable, Variable]]:
        """Return the updates that store reduced new values."""
        pairs = []
        for update, place in zip(updates, kept):
            reduced = self.vectors.reduced_at(place)
            new = update.target + reduced if update.op == "sum" else reduced
            if update.op != "sum" and is_in_place(update.target, update.new):
                new = in_place(update.target, reduced)
            pairs.append((update.target, update.target.type.filter_variable(new)))
        return pairs

    def _streams(
        self,
        updates: Sequence[Update],
        row_outputs: Sequence[Variable],
        row_updates: Sequence[tuple[SharedVariable, Variable, Any]],
    ) -> list[SharedVariable]:
        """Return the random streams from which every rank has to draw alike."""
        by_rank = self.full.of(*row_outputs, *(new for _, new, _ in row_updates)) & self.random
        together = 0
        for update in updates:
            mask = self.local.of(update.new)
            if mask & by_rank:
                raise errors.drawn_twice(update.target, self.local, mask & by_rank)
            if any(isinstance(source.type, GeneratorType) for source in self.local.sources_in(mask)):
                raise errors.not_broadcast(update.target, self.local, mask)
            together |= mask
        return self.local.sources_in(together)
