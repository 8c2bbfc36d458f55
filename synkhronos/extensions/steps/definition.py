"""The definition of a step, made of the arguments of a training function or a parallel function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Collection, NamedTuple, Sequence

from synkhronos._text import shortened
from synkhronos.engines.analysis.graphs import (
    gradient_seeds,
    inputs_first,
    is_random_state,
    operands_with,
)
from synkhronos.engines.analysis.windows import find_windows
from synkhronos.engines.names import Constant, SharedVariable, Variable
from synkhronos.extensions._parameters import check_loss, checked_parameters
from synkhronos.extensions.steps.marked_expressions import marks_in
from synkhronos.extensions.steps.parsing import (
    Output,
    Update,
    check_distinct,
    check_gradients,
    check_loss_op,
    parse_givens,
    parse_losses,
    parse_output,
    parse_outputs,
    parse_overlap,
    parse_updates,
    parse_variables,
    parse_wire,
)
from synkhronos.extensions.steps.reduced_expressions import (
    Params,
    ReducedExpressions,
    is_float_scalar,
    is_float_tensor,
    parameters_under,
)
from synkhronos.extensions.steps.step_inputs import StepInputs, group_of, variable_of
from synkhronos.extensions.steps.update_rules import apply_rule


class Definition(NamedTuple):
    """A step as a script has defined it, in serial terms.

    Attributes
    ----------
    inputs : StepInputs
        The inputs.
    outputs : list of Output
        The outputs.
    updates : list of Update
        With the default updates of shared variables.
    givens : dict
        The compiler's substitutions.
    reductions : ReducedExpressions
        What is reduced where updates and outputs use it.
    broadcast : list of variables
        The inputs whose whole value every rank gets.
    sliceable : list of shared variables
        The shared variables whose rows are divided.
    options : dict
        Keywords of the compiler's own ``function``.
    wire : str, PowerSGD, TopK or None
        The format in which gradients are sent between machines.
    overlap : bool
        Whether gradients are sent while the ranks compute.
    rows : dict
        The inputs and shared variables whose rows are divided among the ranks, and the variables that
        are replaced by rows which an index selects; with the axis of the rows.
    index : list of variables
        The inputs that may select rows in `givens`.
    whole : list of variables
        The variables that are replaced by values that depend on an index, but have no rows.
    defaults : list of shared variables
        The variables whose default updates are among the updates.
    grad_updates : list of Update
        The updates in which an update rule writes its gradients to shared variables.
    grad_shared : list of shared variables
        These variables.
    has_further : bool
        Whether there are updates that are not from the update rule.
    """

    inputs: StepInputs
    outputs: list[Output]
    updates: list[Update]
    givens: dict[Variable, Variable]
    reductions: ReducedExpressions
    broadcast: list[Variable]
    sliceable: list[SharedVariable]
    options: dict[str, Any]
    wire: Any
    overlap: bool
    rows: dict[Variable, int]
    index: list[Variable]  # type: ignore[assignment]  # the method of tuples is not used
    whole: list[Variable]
    defaults: list[SharedVariable]
    grad_updates: list[Update]
    grad_shared: list[SharedVariable]
    has_further: bool

    @property
    def is_only_an_update(self) -> bool:
        """Whether a step only applies values that an earlier step has stored, such as gradients.

        It has no outputs, computes no gradient, and no input can select rows. Every rank computes
        all of it.
        """
        news = [update.new for update in self.updates]
        leaves = [item for item in inputs_first(news, operands_with(self.givens)) if item.owner is None]
        inputs = [item for item in leaves if not isinstance(item, (Constant, SharedVariable))]
        return (
            bool(news)
            and not self.outputs
            and all(is_float_scalar(variable) for variable in inputs)
            and not gradient_seeds(news)
        )


def define_training(
    loss: Variable,
    params: Any,
    x: Any,
    y: Any,
    update_rule: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    outputs: Any,
    updates: Any,
    givens: Any,
    loss_op: Any,
    bcast_inputs: Any,
    **options: Any,
) -> Definition:
    """Return the step that the arguments of ``make_train_function`` define."""
    check_loss_op(loss_op)
    inputs = _inputs_of_training(x, y, update_rule, bcast_inputs)
    if isinstance(params, Iterable) and not isinstance(params, Variable):
        params = list(params)  # a generator can be consumed only once
    applied = apply_rule(update_rule, loss, params, args, kwargs)
    further = parse_updates(updates)
    others, _ = parse_outputs(outputs)
    reductions = ReducedExpressions(loss_op)
    loss_output = parse_output(loss, "loss")
    knows_gradients = applied.is_marked or (applied.grad_shared and loss_op == "avg")
    if not knows_gradients or others or further:
        check_loss(loss)
        reductions.add_gradients_of(loss, checked_parameters(params))
    reductions.add_loss(loss, params)
    return _defined(
        inputs,
        [loss_output, *others],
        [*parse_updates(applied.updates, "the updates of update_rule"), *further],
        parse_givens(givens),
        reductions,
        grad_updates=parse_updates(applied.grad_updates, "the grad_updates of update_rule"),
        grad_shared=applied.grad_shared,
        has_further=bool(further),
        bcast_inputs=bcast_inputs,
        **options,
    )


def _inputs_of_training(x: Any, y: Any, rule: Any, bcast_inputs: Any) -> StepInputs:
    if rule is None:
        raise TypeError("update_rule: expected a rule, such as updates.adam, got None")
    if y is not None and not isinstance(y, (Variable, list, tuple)) and not hasattr(y, "variable"):
        raise TypeError(
            f"y: expected a variable, or a list of variables, got {shortened(y)}; without y, give None "
            f"in its place, or the rule by its name: update_rule="
        )
    groups = [group_of("x_data", x)] + ([] if y is None else [group_of("y_data", y)])
    broadcast = parse_variables(bcast_inputs, "bcast_inputs")
    return StepInputs([*groups, *(group_of(None, item) for item in broadcast)], "train function")


def define_function(
    inputs: Any,
    outputs: Any,
    *,
    updates: Any,
    givens: Any,
    loss: Any,
    params: Any,
    gradients: Any,
    loss_op: Any,
    bcast_inputs: Any,
    sliceable_shareds: Any,
    **options: Any,
) -> tuple[Definition, bool | list[str]]:
    """Return the step that the arguments of ``parallel_function`` define, and the form of results."""
    check_loss_op(loss_op)
    listed = parse_variables(inputs, "inputs")
    variables = [variable_of(item) for item in listed]
    broadcast = parse_variables(bcast_inputs, "bcast_inputs")
    listed += [item for item in broadcast if variable_of(item) not in variables]
    parsed = StepInputs([group_of(None, item) for item in listed], "parallel function")
    results, form = parse_outputs(outputs)
    pairs, substituted = parse_updates(updates), parse_givens(givens)
    sliceable = parse_variables(sliceable_shareds, "sliceable_shareds")
    reductions = ReducedExpressions(loss_op)
    if gradients is None:
        _find_gradients(reductions, results, pairs, loss, params, {*substituted, *sliceable})
    else:
        check_gradients(gradients, params)
        reductions.add_gradients(gradients, checked_parameters(params))
        for parse_loss in parse_losses(loss):
            reductions.add_loss(parse_loss, params)
        reductions.add_losses_of(gradients)
    definition = _defined(
        parsed,
        results,
        pairs,
        substituted,
        reductions,
        bcast_inputs=bcast_inputs,
        sliceable_shareds=sliceable_shareds,
        **options,
    )
    return definition, form


def _find_gradients(
    reductions: ReducedExpressions,
    outputs: Sequence[Output],
    updates: Sequence[Update],
    loss: Any,
    params: Any,
    data: Collection[Variable],
) -> None:
    """Add the gradients that updates may contain to the reduced expressions.

    Parameters
    ----------
    data : collection of variables
        Shared variables that are not parameters.
    """
    if params is None:
        known = [update.target for update in updates if is_float_tensor(update.target)]
    else:
        known = checked_parameters(params)

    def params_of(variable: Variable) -> Params:
        if params is not None:
            return known, ()
        return known, [each for each in parameters_under(variable) if each not in {*known, *data}]

    for parse_loss in parse_losses(loss):
        reductions.add_gradients_of(parse_loss, *params_of(parse_loss))
    if loss is not None:
        return
    marks = marks_in([update.new for update in updates])
    scalars = [spec.variable for spec in outputs if is_float_scalar(spec.variable)]
    if marks:
        reductions.add_losses_of([mark.owner.inputs[0] for mark in marks if mark.owner.op.op is None])
    else:
        reductions.add_gradients_of_losses_in([update.new for update in updates], scalars, params_of)
    if reductions.loss_op == "sum" and not reductions.losses:
        if len(scalars) != 1:
            raise ValueError(
                f"loss_op: 'sum' is the operation for a loss, which was not found among "
                f"{len(scalars)} scalar float outputs; name it with loss="
            )
        reductions.add_loss(scalars[0], parameters_under(scalars[0]))


def _defined(
    inputs: StepInputs,
    outputs: list[Output],
    updates: list[Update],
    givens: dict[Variable, Variable],
    reductions: ReducedExpressions,
    *,
    bcast_inputs: Any,
    function_options: Any,
    wire: Any,
    overlap: Any,
    sliceable_shareds: Any = None,
    grad_updates: Sequence[Update] = (),
    grad_shared: Sequence[SharedVariable] = (),
    has_further: bool = False,
) -> Definition:
    """Return a definition with the rows that are divided, and with default updates."""
    broadcast = [variable_of(variable) for variable in bcast_inputs or ()]
    sliceable = parse_variables(sliceable_shareds, "sliceable_shareds")
    divided, index = _divided(inputs, broadcast, sliceable)
    found = find_windows(list(givens.items()), index, divided)
    options = dict(function_options or {})
    check_distinct(updates)
    excluded = options.get("no_default_updates", False)
    added = _default_updates(updates, [spec.variable for spec in outputs], givens, excluded)
    return Definition(
        inputs,
        outputs,
        [*updates, *added],
        givens,
        reductions,
        broadcast=broadcast,
        sliceable=sliceable,
        options=options,
        wire=parse_wire(wire),
        overlap=parse_overlap(overlap),
        rows={**divided, **found.axes},
        index=index,
        whole=found.whole,
        defaults=[item.target for item in added],
        grad_updates=list(grad_updates),
        grad_shared=list(grad_shared),
        has_further=has_further or bool(added),
    )


def _divided(
    inputs: StepInputs, broadcast: Sequence[Variable], sliceable: Sequence[SharedVariable]
) -> tuple[dict[Variable, int], list[Variable]]:
    """Return the axis of each variable that has rows, and the inputs that may select rows."""
    divided, index = {}, []
    for given, variable in zip(inputs.given, inputs.variables):
        if variable in broadcast:
            continue
        if getattr(variable.type, "ndim", 0):
            divided[variable] = getattr(given, "axis", 0)
        else:  # scalars, and values that are not arrays, have no rows
            index.append(variable)
    return {**divided, **dict.fromkeys(sliceable, 0)}, index


def _default_updates(
    updates: Sequence[Update],
    outputs: Sequence[Variable],
    givens: Mapping[Variable, Variable],
    excluded: bool | Sequence[SharedVariable],
) -> list[Update]:
    """Return the default updates of shared variables that are used.

    Those of random streams are left to the compiler, because each rank has its own streams.
    """
    added: list[Update] = []
    if excluded is True:
        return added
    targets = {update.target for update in updates}
    parents = operands_with(givens)
    roots = [*outputs, *(update.new for update in updates)]
    done: set[Variable] = set()
    while roots:
        found = []
        for variable in inputs_first(roots, parents, done):
            done.add(variable)
            if variable in targets or variable in (excluded or ()) or is_random_state(variable):
                continue
            default = getattr(variable, "default_update", None)
            if isinstance(variable, SharedVariable) and default is not None:
                found.append(variable)
        roots = [shared.default_update for shared in found]
        added.extend([Update(shared, shared.default_update) for shared in found])
        targets.update(found)
    return added
