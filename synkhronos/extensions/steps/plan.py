"""Divides a training step into the part that each rank computes on its rows, and the rest.

An update contains gradients somewhere in its graph. The graph is cut there. Below the cut are the
gradients, which each rank computes on its own rows and which are then reduced over the ranks. Above it
is the rest, which every rank computes from the reduced gradients, and therefore from the same values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from synkhronos.engines import names
from synkhronos.engines.names import GeneratorType, SharedVariable, Variable
from synkhronos.extensions.steps import refusals as refusals
from synkhronos.extensions.steps.cuts import Cut
from synkhronos.extensions.steps.dependence import Dependence, rebuilt
from synkhronos.extensions.steps.graphs import inputs_first, is_random_state, operands_with
from synkhronos.extensions.steps.linear import has_rows, is_count, split, terms
from synkhronos.extensions.steps.losses import check_losses
from synkhronos.extensions.steps.script import Output, Script, Update, is_only_an_update
from synkhronos.extensions.steps.shares import Shares
from synkhronos.extensions.steps.slots import Slots


class Plan(NamedTuple):
    """What each phase of a step computes.

    Attributes
    ----------
    clearing : list of (shared, new)
        Updates before the first phase, on every rank.
    counting : list of (shared, new)
        Updates before the first phase, on each rank's rows.
    row_outputs : list of outputs as the user gave them
        The first phase, on each rank's rows.
    row_variables : list of variables
        The variables of these outputs.
    row_updates : list of (shared, new, op)
    reduced : dict
        For each operation, the shared variables to reduce after the first phase.
    gradients : list of shared variables
        The reduced variables that hold gradients.
    streams : list of shared variables
        States of random streams to broadcast after the first phase.
    preparing : list of (shared, new)
        What an update rule computes from the gradients before its own updates.
    outputs, updates : list
        The last phase, on every rank.
    places : list of (bool, int)
        For each output of the script, whether it belongs to the last phase, and its index.
    is_doubtful : bool
        Whether a warning has said that the step differs from the serial one.
    """

    clearing: list[tuple[SharedVariable, Variable]]
    counting: list[tuple[SharedVariable, Variable]]
    row_outputs: list[Any]
    row_variables: list[Variable]
    row_updates: list[tuple[SharedVariable, Variable, Any]]
    reduced: dict[str, list[SharedVariable]]
    gradients: list[SharedVariable]
    streams: list[SharedVariable]
    preparing: list[tuple[SharedVariable, Variable]]
    outputs: list[Variable]
    updates: list[tuple[SharedVariable, Variable]]
    places: list[tuple[bool, int]]
    is_doubtful: bool = False


def make_plan(script: Script) -> Plan:
    """Return the phases of a step.

    Raises
    ------
    ValueError
        If the step cannot equal the serial one: nothing is divided among the ranks, or an update or an
        output depends on the rows other than through gradients, in a way that cannot be averaged.
    TypeError
        If an update whose values have to be averaged is not a float.
    """
    return _Planner(script).plan()._replace(is_doubtful=check_losses(script))


class _Planner:
    """Sorts updates and outputs into phases.

    A variable is *local* if its value may differ from rank to rank: it depends on the rows, on random
    streams, or on shared variables that each rank keeps for itself.
    """

    def __init__(self, script: Script) -> None:
        self.script, self.givens = script, script.givens
        self.slots = Slots()
        self.parents = operands_with(self.givens)
        roots = [one.variable for one in script.outputs]
        roots += [one.new for one in [*script.updates, *script.grad_updates]]
        random = [one for one in inputs_first(roots, self.parents) if is_random_state(one)]
        kept = [one.target for one in script.updates if one.is_own]
        sources = [*script.rows, *random, *kept]
        if not sources and not is_only_an_update(script):
            raise refusals.nothing_divided(script.index, script.whole)
        self.full = Dependence(sources, self.givens)
        self.shares = Shares(script, self.full)
        self.random = self.full.mask_of(random)
        self.is_prepared = self._has_penalty()
        self.candidates = self._candidates()
        self.local = Dependence(sources, self.givens, self.candidates)
        self.touched = Dependence(self.candidates, self.givens)
        self.gradients = self.touched.mask_of(
            [one for one in self.candidates if not script.cuts.is_loss(one)]
        )

    def _has_penalty(self):
        """Whether an update rule's own gradients have to be completed after they were added up."""
        if self.script.cuts.loss_op != "sum" or not self.script.grad_shared:
            return False
        variables = inputs_first([one.new for one in self.script.grad_updates])
        found = [self.script.cuts.find(variable) for variable in variables]
        cuts = [cut for cut in found if cut is not None]
        if all(self.script.cuts.is_loss(cut.expression) for cut in cuts):
            self._check_no_penalty()
        return any(self._parts(cut)[1] is not None for cut in cuts)

    def _check_no_penalty(self):
        """Raise an error if the loss has a penalty, and an update rule's gradients are unknown."""
        loss = self.script.outputs[0].variable
        if self.full.of(loss) and split(loss, self.full)[1] is not None:
            raise refusals.unknown_penalty()

    def _cut_at(self, variable):
        cut = self.script.cuts.find(variable)
        return cut if cut is not None and self.full.of(variable) else None

    def _candidates(self) -> dict[Variable, Cut]:
        roots = [one.new for one in self.script.updates if not one.is_own]
        roots += [one.variable for one in self.script.outputs if not one.has_op]
        if self.is_prepared:
            roots += [one.new for one in self.script.grad_updates]
        variables = inputs_first(roots, self.parents)
        found = {variable: self._cut_at(variable) for variable in variables}
        return {variable: cut for variable, cut in found.items() if cut is not None}

    def plan(self) -> Plan:
        own, averaged, last = self._sorted_updates()
        row_outputs, outputs, places = self._outputs()
        preparing = self._grad_updates()
        expressions = [*(one.new for one in [*last, *preparing]), *outputs]
        kept = self._reserve(averaged)
        replacements = self._replacements(expressions)  # builds the slots
        row_updates = self.slots.updates + [(one.target, one.new, None) for one in own]
        row_variables = [one.variable for one in row_outputs]
        streams = self._streams(last, row_variables, row_updates)
        news = iter(rebuilt(expressions, replacements, self.givens))
        return Plan(
            clearing=self.slots.clearing(),
            counting=self.shares.counting,
            row_outputs=[self._given(one) for one in row_outputs],
            row_variables=row_variables,
            row_updates=row_updates,
            reduced=self.slots.reduced,
            gradients=[*self.slots.gradients, *self.script.grad_shared],
            streams=streams,
            updates=[(one.target, next(news)) for one in last] + self._stored(averaged, kept),
            preparing=[(one.target, next(news)) for one in preparing],
            outputs=list(news),
            places=places,
        )

    def _grad_updates(self) -> list[Update]:
        """Take over the reductions of an update rule, or return them to be computed afterwards."""
        script, op = self.script, self.script.cuts.loss_op
        if self.is_prepared:
            for update in script.grad_updates:
                mask = self.local.of(update.new)
                if mask:
                    raise refusals.mixed(update.target, self.local, mask)
            return script.grad_updates
        for update, new in zip(script.grad_updates, self._shared_gradients(op)):
            self.slots.updates.append((update.target, new, update.op if update.has_op else op))
        if script.grad_shared:
            self.slots.reduced.setdefault(op, []).extend(script.grad_shared)
        return []

    def _shared_gradients(self, op):
        """Return the new values of an update rule's gradients, of vectors with what they are filled."""
        news = [one.new for one in self.script.grad_updates]
        filled = [getattr(one.tag, "filled_with", []) for one in news]
        every = iter(self.shares.applied([*news, *(one for each in filled for one in each)], op))
        shared = [next(every) for _ in news]
        for new, expressions in zip(shared, filled):
            if expressions:
                new.tag.filled_with = [next(every) for _ in expressions]
        return shared

    # Outputs

    def _outputs(self) -> tuple[list[Output], list[Variable], list[tuple[bool, int]]]:
        """Return the outputs of the first phase and of the last phase, and where each output is."""
        first, last, places = [], [], []
        for output in self.script.outputs:
            is_last = not output.has_op and self._is_last(output.where, output.variable)
            places.append((is_last, len(last) if is_last else len(first)))
            if is_last:
                last.append(output.variable)
            else:
                first.append(output)
        return first, last, places

    def _is_last(self, where, variable):
        """Whether an output is computed from reduced values, so that it equals the serial output."""
        if not self.full.of(variable):
            return True
        if self.script.cuts.is_loss(variable):
            return self._parts(self.candidates[variable])[1] is not None
        touched, mask = self.touched.of(variable), self.local.of(variable)
        if mask and touched & self.gradients:
            raise refusals.mixed_output(where, self.local, mask)
        return bool(touched and not mask)

    def _given(self, output):
        cuts = self.script.cuts
        if cuts.loss_op == "sum" and not output.has_op and cuts.is_loss(output.variable):
            return output.variable, "sum"
        return output.given

    # Cuts

    def _parts(self, cut):
        """Return the part of a cut's expression that is reduced, and the rest or None.

        A term that is the same on every rank is left out of a sum over the ranks.
        """
        return split(cut.expression, self.full) if cut.op == "sum" else (cut.expression, None)

    def _replacements(self, expressions) -> dict[Variable, Variable]:
        """Return what replaces the cut variables in `expressions`."""
        reached = inputs_first(expressions, self.local.parents)
        cuts = {one: self.candidates[one] for one in reached if one in self.candidates}
        by_key = {cut.key: cut for cut in cuts.values()}
        gradients = [cut for cut in by_key.values() if cut.is_gradient]
        expressions = [cut.expression for cut in gradients]
        rewritten = self.shares.applied(expressions, self.script.cuts.loss_op)
        for cut, expression in zip(gradients, rewritten):
            by_key[cut.key] = cut._replace(expression=expression)
        places, frees = {}, {}
        for key, cut in by_key.items():
            reduced, frees[key] = self._parts(cut)
            places[key] = self.slots.add(reduced, cut.op, cut.shape, cut.is_gradient)
        self.slots.build()
        replacements = {}
        for variable, cut in cuts.items():
            value, free = self.slots.piece(places[cut.key]), frees[cut.key]
            if free is not None:
                value = value + rebuilt([free], {}, self.givens)[0]
            replacements[variable] = names.in_type_of(variable, value)
        return replacements

    # Updates

    def _sorted_updates(self) -> tuple[list[Update], list[Update], list[Update]]:
        """Return the updates that each rank keeps, that are averaged, and that follow from the cuts."""
        own, averaged, last = [], [], []
        for update in self.script.updates:
            if update.is_own:
                own.append(update)
            else:
                (averaged if self._is_averaged(update) else last).append(update)
        return own, averaged, last

    def _is_averaged(self, update: Update) -> bool:
        """Whether the ranks' new values have to be combined because they depend on the rows directly."""
        mask = self.local.of(update.new)
        if not mask & ~self.random:
            return False  # the same on all ranks if all draw the same numbers
        if self.touched.of(update.new):
            raise refusals.mixed(update.target, self.local, mask)
        return True

    def _reserve(self, updates):
        """Add reductions of new values that depend on the rows directly; return the place of each."""
        targets = Dependence([one.target for one in updates], self.givens)
        kept: list[Any] = []
        for target, new, op, has_op in updates:
            if not hasattr(target.get_value(borrow=True), "__array__"):
                raise refusals.not_a_tensor(target, self.local, self.local.of(new))
            if not has_op:
                self._check_average(target, new, targets)
            value = target.type.filter_variable(new - target if op == "sum" else new)
            if target.ndim:
                kept.append(self.slots.add_whole(value, op, target))
            else:
                kept.append(self.slots.add(value, op, ()))
        return kept

    def _check_average(self, target, new, targets):
        mask = self.local.of(new)
        if not target.type.dtype.startswith(("float", "complex")):
            raise refusals.not_a_float(target, self.local, mask)
        for term, is_summed in terms(new, self.local):
            if targets.of(term):
                raise refusals.step_without_gradient(target, self.local, mask)
            if has_rows(term, self.script.rows, self.local):
                raise refusals.sum_over_rows(target, self.local, mask, is_summed)
            if is_count(term):
                raise refusals.sum_over_rows(target, self.local, mask, True)

    def _stored(self, updates, kept):
        """Return the updates that store reduced new values."""
        pairs = []
        for update, place in zip(updates, kept):
            reduced = self.slots.piece(place) if isinstance(place, tuple) else place
            new = update.target + reduced if update.op == "sum" else reduced
            pairs.append((update.target, update.target.type.filter_variable(new)))
        return pairs

    def _streams(self, updates, row_outputs, row_updates) -> list[SharedVariable]:
        """Return the random streams from which every rank has to draw alike."""
        by_rank = self.full.of(*row_outputs, *(new for _, new, _ in row_updates)) & self.random
        together = 0
        for update in updates:
            mask = self.local.of(update.new)
            if mask & by_rank:
                raise refusals.drawn_twice(update.target, self.local, mask & by_rank)
            if any(isinstance(one.type, GeneratorType) for one in self.local.sources_in(mask)):
                raise refusals.not_broadcast(update.target, self.local, mask)
            together |= mask
        return self.local.sources_in(together)
