"""Divides a training step into the part that each rank computes on its rows, and the rest.

An update contains gradients somewhere in its graph. Each rank computes these on its own rows, and they
are reduced over the ranks. The rest of the graph, in which they are replaced by their reduced values,
every rank computes from the same values.
"""

from __future__ import annotations

from typing import Any, Sequence

from synkhronos.engines import names
from synkhronos.engines.analysis import graphs
from synkhronos.engines.analysis.graphs import Dependence, inputs_first, rebuilt
from synkhronos.engines.names import GeneratorType, SharedVariable, Variable
from synkhronos.extensions.steps import errors, losses
from synkhronos.extensions.steps.arguments import Output, Update
from synkhronos.extensions.steps.clipped_gradients import scaled
from synkhronos.extensions.steps.definition import Definition
from synkhronos.extensions.steps.losses import AllRows
from synkhronos.extensions.steps.reduced_expressions import (
    ReducedExpression,
    ReducedVectors,
    in_place,
    is_in_place,
)


class Plan:
    """The computations of each phase of a step.

    Updates and outputs are sorted into phases. A variable is *local* if its value may differ from rank
    to rank: it depends on the rows, on random streams, or on shared variables that each rank keeps for
    itself.

    Parameters
    ----------
    definition : Definition
        The step.
    all_rows : AllRows
        The values over all rows.

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
    outputs, updates : list
        The last phase, on every rank.
    places : list of (bool, int)
        For each output of the definition, whether it belongs to the last phase, and its index.
    is_doubtful : bool
        Whether a warning has said that the step differs from the serial one.

    Raises
    ------
    ValueError
        If the step cannot equal the serial one: nothing is divided among the ranks, or an update or an
        output depends on the rows other than through gradients, in a way that cannot be averaged.
    TypeError
        If an update whose values have to be averaged is not a float.
    """

    def __init__(self, definition: Definition, all_rows: AllRows) -> None:
        self._all_rows = all_rows
        self._definition, self._givens = definition, definition.givens
        self._reductions = definition.reductions
        self._vectors = ReducedVectors()
        self._parents = graphs.operands_with(self._givens)
        roots = [spec.variable for spec in definition.outputs]
        roots += [update.new for update in [*definition.updates, *definition.grad_updates]]
        reached = list(inputs_first(roots, self._parents))
        random = [item for item in reached if graphs.is_random_state(item)]
        collected = {
            item
            for item in reached
            if getattr(item.owner and item.owner.op, "is_same_everywhere", False)
        }
        kept = [update.target for update in definition.updates if update.is_own]
        sources = [*definition.rows, *random, *kept]
        if not sources and not definition.is_only_an_update:
            raise errors.nothing_divided(definition.index, definition.whole)
        self._full = Dependence(sources, self._givens)
        self._random = self._full.mask_of(random)
        self._uncollected = Dependence(sources, self._givens, collected)
        if self._has_penalty():
            self._definition = definition.merged()
        self._candidates = self._find_candidates()
        self._local = Dependence(sources, self._givens, self._candidates)
        self._touched = Dependence(self._candidates, self._givens)
        self._of_gradients = self._touched.mask_of(
            [candidate for candidate in self._candidates if not self._reductions.is_loss(candidate)]
        )
        self._make_phases()
        self.is_doubtful = losses.check_losses(definition)

    def _make_phases(self) -> None:
        own, averaged, last = self._sorted_updates()
        outputs: list[Variable] = []
        self.row_outputs, self.places = self._sorted_outputs(outputs)
        self._reduce_shared_gradients()
        expressions = [*(item.new for item in last), *outputs]
        self._check_averaged(averaged)
        changes = [
            item.target.type.filter_variable(item.new - item.target if item.op == "sum" else item.new)
            for item in averaged
        ]
        pairs: list[tuple[Any, Variable]] = list(zip(averaged, changes))
        whole = [
            self._vectors.add_whole(new, item.op, item.target) for item, new in pairs if item.target.ndim
        ]
        singles = [ReducedExpression(new, item.op) for item, new in pairs if not item.target.ndim]
        replacements, reduced = self._reduce(expressions, singles)
        kept = [(whole if item.target.ndim else reduced).pop(0) for item in averaged]
        self.row_updates = self._vectors.updates + [(item.target, item.new, None) for item in own]
        self.streams = self._streams(last)
        news = iter(rebuilt(expressions, replacements, self._givens))
        self.clearing, self.counting = self._vectors.clearing(), self._all_rows.updates
        self.reduced = self._vectors.reduced
        self.gradients = [*self._vectors.gradients, *self._definition.grad_shared]
        self.updates = [(item.target, next(news)) for item in last] + self._stored(averaged, kept)
        self.outputs = list(news)

    def _has_penalty(self) -> bool:
        """Whether an update rule's own gradients have to be completed after they were added up."""
        if self._reductions.loss_op != "sum" or not self._definition.grad_shared:
            return False
        variables = inputs_first([grad_update.new for grad_update in self._definition.grad_updates])
        found = [self._reductions.find(variable) for variable in variables]
        reduced = [item for item in found if item is not None]
        if all(self._reductions.is_loss(item.expression) for item in reduced):
            loss = self._definition.outputs[0].variable  # the rule has gradients of its own
            if self._full.of(loss) and losses.split(loss, self._full)[1] is not None:
                raise errors.refusal("unknown penalty")
        return any(self._parts(item)[1] is not None for item in reduced)

    def _find_candidates(self) -> dict[Variable, ReducedExpression]:
        roots = [update.new for update in self._definition.updates if not update.is_own]
        roots += [spec.variable for spec in self._definition.outputs if not spec.has_op]
        found = {item: self._reductions.find(item) for item in inputs_first(roots, self._parents)}
        return {
            variable: reduction
            for variable, reduction in found.items()
            if reduction is not None and self._full.of(variable)
        }

    def _reduce_shared_gradients(self) -> None:
        """Take over the variables of an update rule that hold gradients."""
        definition, op = self._definition, self._reductions.loss_op
        for update, new in zip(definition.grad_updates, self._shared_gradients()):
            self._vectors.updates.append((update.target, new, update.op if update.has_op else op))
        if definition.grad_shared:
            self._vectors.reduced.setdefault(op, []).extend(definition.grad_shared)

    def _shared_gradients(self) -> list[Variable]:
        """Return the new values of an update rule's gradients; vectors have tags with their parts."""
        news = [grad_update.new for grad_update in self._definition.grad_updates]
        filled = [getattr(item.tag, "filled_with", []) for item in news]
        every = iter(self._scaled([*news, *(item for each in filled for item in each)]))
        shared = [next(every) for _ in news]
        for new, expressions in zip(shared, filled):
            if expressions:
                new.tag.filled_with = [next(every) for _ in expressions]
        return shared

    def _scaled(self, gradients: Sequence[Variable]) -> list[Variable]:
        op = self._reductions.loss_op
        return scaled(gradients, op, self._definition, self._full, self._all_rows)

    # Outputs

    def _sorted_outputs(self, last: list[Variable]) -> tuple[list[Output], list[tuple[bool, int]]]:
        """Return the outputs of the first phase, and where each output is; add the others to `last`."""
        first: list[Output] = []
        places = []
        for output in self._definition.outputs:
            is_last = not output.has_op and self._is_last(output.where, output.variable)
            places.append((is_last, len(last) if is_last else len(first)))
            if is_last:
                last.append(output.variable)
            else:
                first.append(self._combined(output))
        return first, places

    def _is_last(self, where: str, variable: Variable) -> bool:
        """Whether an output is computed from reduced values, so that it equals the serial output."""
        if not self._full.of(variable):
            return True
        if self._reductions.is_loss(variable):
            return self._parts(self._candidates[variable])[1] is not None
        touched, mask = self._touched.of(variable), self._local.of(variable)
        if mask and touched & self._of_gradients:
            raise errors.refusal("mixed output", None, self._local, mask, where=where)
        return bool(touched and not mask)

    def _combined(self, output: Output) -> Output:
        """Return an output of the ranks; a loss that is a sum is added up over them."""
        is_sum = self._reductions.loss_op == "sum" and not output.has_op
        if is_sum and self._reductions.is_loss(output.variable):
            return output._replace(given=(output.variable, "sum"))
        return output

    # ReducedExpressions

    def _parts(self, item: ReducedExpression) -> tuple[Any, Any]:
        """Return the part of an expression that is reduced, and the rest or None.

        A term that is the same on every rank is left out of a sum over the ranks.
        """
        return losses.split(item.expression, self._full) if item.op == "sum" else (item.expression, None)

    def _reduce(
        self, expressions: Sequence[Variable], singles: Sequence[ReducedExpression]
    ) -> tuple[dict[Variable, Variable], list[Variable]]:
        """Return the replacements of what is reduced in `expressions`, and the reduced singles."""
        reached = inputs_first(expressions, self._local.parents)
        chosen = {item: self._candidates[item] for item in reached if item in self._candidates}
        by_key = {item.key: item for item in chosen.values()}
        gradients = [item for item in by_key.values() if item.is_gradient]
        for gradient, expression in zip(
            gradients, self._scaled([each.expression for each in gradients])
        ):
            by_key[gradient.key] = gradient._replace(expression=expression)
        parts = {key: self._parts(item) for key, item in by_key.items()}
        wanted = [item._replace(expression=parts[key][0]) for key, item in by_key.items()]
        made = self._vectors.add([*singles, *wanted])
        reduced, replacements = dict(zip(parts, made[len(singles) :])), {}
        for variable, item in chosen.items():
            value, free = reduced[item.key], parts[item.key][1]
            if free is not None:
                value = value + rebuilt([free], {}, self._givens)[0]
            replacements[variable] = names.in_type_of(variable, value)
        return replacements, made[: len(singles)]

    # Updates

    def _sorted_updates(self) -> tuple[list[Update], list[Update], list[Update]]:
        """Return the updates that each rank keeps, that are averaged, and that follow the reduction."""
        own: list[Update] = []
        averaged: list[Update] = []
        last: list[Update] = []
        for update in self._definition.updates:
            mask = self._local.of(update.new)
            if update.is_own:
                own.append(update)
            elif not mask & ~self._random:  # the same on all ranks if all draw the same numbers
                last.append(update)
            elif self._touched.of(update.new):
                raise errors.refusal("mixed", update.target, self._local, mask)
            else:  # it depends on the rows directly, or through collectives only
                (averaged if self._uncollected.of(update.new) else own).append(update)
        return own, averaged, last

    def _check_averaged(self, updates: Sequence[Update]) -> None:
        """Raise an error if the average of the ranks' new values may not be the value for all rows."""
        definition, local = self._definition, self._local
        for target, new, _, has_op in updates:
            if not hasattr(target.get_value(borrow=True), "__array__"):
                raise errors.refusal("not a tensor", target, local, local.of(new))
            if not has_op and not target.type.dtype.startswith(("float", "complex")):
                raise errors.refusal("not a float", target, local, local.of(new))
        # A default update can be given no operation. If it differs, the first call says so.
        defaults = definition.defaults
        stated = [update for update in updates if not update.has_op and update.target not in defaults]
        read = losses.degrees_and_causes([update.new for update in stated], definition)
        found = [
            (update, term, is_summed)
            for update, (degrees, causes) in zip(stated, read)
            if degrees is None or not degrees <= {0} or causes.possible
            for term, is_summed in losses.terms(update.new, local)
        ]
        targets = Dependence([update.target for update in updates], self._givens)
        values = losses.values_of([term for _, term, _ in found], definition)
        for (update, term, is_summed), value in zip(found, values):
            mask = local.of(update.new)
            if targets.of(term):
                raise errors.refusal("no gradient", update.target, local, mask)
            if value is not None and (value.axis is not None or value.degrees == {1}):
                has_rows = value.axis is not None and not is_summed
                cause = "item of rows" if has_rows else "sum over rows"
                raise errors.refusal(cause, update.target, local, mask)

    def _stored(
        self, updates: Sequence[Update], kept: Sequence[Variable]
    ) -> list[tuple[SharedVariable, Variable]]:
        """Return the updates that store reduced new values."""
        pairs = []
        for update, reduced in zip(updates, kept):
            new = update.target + reduced if update.op == "sum" else reduced
            if update.op != "sum" and is_in_place(update.target, update.new):
                new = in_place(update.target, reduced)
            pairs.append((update.target, update.target.type.filter_variable(new)))
        return pairs

    def _streams(self, updates: Sequence[Update]) -> list[SharedVariable]:
        """Return the random streams from which every rank has to draw alike."""
        by_row = [spec.variable for spec in self.row_outputs] + [new for _, new, _ in self.row_updates]
        by_rank = self._full.of(*by_row) & self._random
        together = 0
        for update in updates:
            mask = self._local.of(update.new)
            if mask & by_rank:
                raise errors.refusal("drawn twice", update.target, self._local, mask & by_rank)
            if any(isinstance(source.type, GeneratorType) for source in self._local.sources_in(mask)):
                raise errors.refusal("not broadcast", update.target, self._local, mask)
            together |= mask
        return self._local.sources_in(together)
