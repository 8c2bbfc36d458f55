"""The definition of a step, made of the arguments of a training function or a parallel function.

Update rules from any source are converted to a common form.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, Callable, Collection, NamedTuple, Sequence

from synkhronos._checks import check_flag, check_list
from synkhronos._text import shortened
from synkhronos.engines.analysis import graphs
from synkhronos.engines.analysis.windows import find_windows
from synkhronos.engines.names import Constant, SharedVariable, Variable
from synkhronos.extensions._parameters import check_loss, checked_parameters
from synkhronos.extensions.steps import arguments
from synkhronos.extensions.steps.arguments import Arguments, Output, StepInputs, Update
from synkhronos.extensions.steps.reduced_expressions import (
    Params,
    ReducedExpressions,
    gradients,
    is_float_scalar,
    is_float_tensor,
    marks_in,
    parameters_under,
)


class AppliedRule(NamedTuple):
    """The result of an update rule.

    Attributes
    ----------
    updates : list of pairs, or dict
        The updates of the parameters.
    grad_updates : list of pairs, or dict
        The updates that write the gradients to shared variables, if the rule has such variables.
    grad_shared : list of shared variables
        These variables.
    is_marked : bool
        Whether the rule got marked gradients, so that gradients need not be searched for.
    """

    updates: Any
    grad_updates: Any
    grad_shared: list[SharedVariable]
    is_marked: bool = False


def apply_rule(
    rule: Any,
    loss: Variable,
    params: Sequence[SharedVariable],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> AppliedRule:
    """Return the `AppliedRule` of an update rule, or of ready updates.

    Raises
    ------
    TypeError
        If `rule` is neither, or arguments are given for ready updates.
    """
    if isinstance(rule, (Mapping, list, tuple)):
        if args or kwargs:
            raise TypeError(
                f"update_rule: got ready updates, which take no arguments, and arguments: "
                f"{[*args, *kwargs]}; leave them out, or give the rule itself"
            )
        return _normalized(rule, False)
    if hasattr(rule, "get_updates"):
        return _normalized(rule.get_updates(*args, loss=loss, params=params, **kwargs), False)
    if not callable(rule):
        raise TypeError(
            f"update_rule: expected a function such as updates.adam, an optimizer with get_updates(), "
            f"or updates as a dict or a list, got {rule!r}"
        )
    return _called(rule, loss, params, args, kwargs)


def _called(
    rule: Callable[..., Any],
    loss: Variable,
    params: Sequence[SharedVariable],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> AppliedRule:
    try:
        known = [name.lower() for name in inspect.signature(rule).parameters]
    except (TypeError, ValueError):
        known = []
    first, second = [*known, "", ""][:2]
    is_reversed = "param" in first and "param" not in second
    name = second if is_reversed else first

    def call(with_loss: bool) -> AppliedRule:
        given = loss if with_loss else gradients(loss, params)
        pair = (params, given) if is_reversed else (given, params)
        return _normalized(rule(*pair, *args, **kwargs), not with_loss)

    if "grad" in name or "loss" in name or "cost" in name:
        return call("grad" not in name)
    try:
        return call(True)
    except Exception as error:  # a rule may fail in any way if it expects gradients
        try:
            return call(False)
        except Exception:
            raise error from None


def _normalized(result: Any, is_marked: bool) -> AppliedRule:
    if isinstance(result, tuple) and len(result) == 3 and _are_updates(result[0]):
        grad_updates, param_updates, shared = result
        shareds = list(shared) if isinstance(shared, (list, tuple)) else [shared]
        return AppliedRule(param_updates, grad_updates, shareds, is_marked)
    return AppliedRule(result, [], [], is_marked)


def _are_updates(value: Any) -> bool:
    """Whether this is a collection of updates, and not one update itself."""
    if isinstance(value, Mapping):
        return True
    return isinstance(value, (list, tuple)) and not (value and isinstance(value[0], Variable))


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

    @property
    def is_only_an_update(self) -> bool:
        """Whether a step only applies values that an earlier step has stored, such as gradients.

        It has no outputs, computes no gradient, and no input can select rows. Every rank computes
        all of it.
        """
        news = [update.new for update in self.updates]
        leaves = [
            item
            for item in graphs.inputs_first(news, graphs.operands_with(self.givens))
            if item.owner is None
        ]
        inputs = [item for item in leaves if not isinstance(item, (Constant, SharedVariable))]
        return (
            bool(news)
            and not self.outputs
            and all(is_float_scalar(variable) for variable in inputs)
            and not graphs.gradient_seeds(news)
        )

    def merged(self) -> Definition:
        """Return the step with the gradients of an update rule as updates like the others.

        The updates of the parameters then contain the expressions of the gradients.
        """
        gradients = {update.target: update.new for update in self.grad_updates}
        news = graphs.rebuilt(
            [update.new for update in self.updates], gradients, {}, parents=graphs.operands
        )
        updates = [update._replace(new=new) for update, new in zip(self.updates, news)]
        return self._replace(updates=[*self.grad_updates, *updates], grad_updates=[], grad_shared=[])


def define_training(given: Arguments) -> Definition:
    """Return the step that the arguments of ``make_train_function``, by their names, define."""
    loss, params, loss_op = given["loss"], given["params"], given["loss_op"]
    arguments.check_loss_op(loss_op)
    inputs = _inputs_of_training(given)
    if isinstance(params, Iterable) and not isinstance(params, Variable):
        params = list(params)  # a generator can be consumed only once
    applied = apply_rule(given["update_rule"], loss, params, given["args"], given["kwargs"])
    further = arguments.parse_updates(given["updates"])
    others, _ = arguments.parse_outputs(given["outputs"])
    reductions = ReducedExpressions(loss_op)
    loss_output = arguments.parse_output(loss, "loss")
    knows_gradients = applied.is_marked or (applied.grad_shared and loss_op == "avg")
    if not knows_gradients or others or further:
        check_loss(loss)
        reductions.add_gradients_of(loss, checked_parameters(params))
    reductions.add_loss(loss, params)
    updates = [*arguments.parse_updates(applied.updates, "the updates of update_rule"), *further]
    outputs, givens = [loss_output, *others], arguments.parse_givens(given["givens"])
    return _defined(given, inputs, outputs, updates, givens, reductions, applied)


def _inputs_of_training(given: Arguments) -> StepInputs:
    y = given["y"]
    if given["update_rule"] is None:
        raise TypeError("update_rule: expected a rule, such as updates.adam, got None")
    if y is not None and not isinstance(y, (Variable, list, tuple)) and not hasattr(y, "variable"):
        raise TypeError(
            f"y: expected a variable, or a list of variables, got {shortened(y)}; without y, give None "
            f"in its place, or the rule by its name: update_rule="
        )
    inputs: list[tuple[str | None, Any]] = [("x_data", given["x"])]
    inputs += [] if y is None else [("y_data", y)]
    broadcast = check_list(given["bcast_inputs"], "bcast_inputs", "variables")
    inputs += [(None, item) for item in broadcast]
    return StepInputs(inputs, "train function")


def define_function(given: Arguments) -> tuple[Definition, bool | list[str]]:
    """Return the step that the arguments of ``parallel_function`` define, and the form of results."""
    loss, params, gradients = given["loss"], given["params"], given["gradients"]
    arguments.check_loss_op(given["loss_op"])
    inputs = check_list(given["inputs"], "inputs", "variables")
    variables = [arguments.variable_of(item) for item in inputs]
    broadcast = check_list(given["bcast_inputs"], "bcast_inputs", "variables")
    inputs += [item for item in broadcast if arguments.variable_of(item) not in variables]
    parsed = StepInputs([(None, item) for item in inputs], "parallel function")
    outputs, form = arguments.parse_outputs(given["outputs"])
    updates, givens = arguments.parse_updates(given["updates"]), arguments.parse_givens(given["givens"])
    sliceable = check_list(given["sliceable_shareds"], "sliceable_shareds", "variables")
    reductions = ReducedExpressions(given["loss_op"])
    if gradients is None:
        _find_gradients(reductions, outputs, updates, loss, params, {*givens, *sliceable})
    else:
        arguments.check_gradients(gradients, params)
        reductions.add_gradients(gradients, checked_parameters(params))
        for parse_loss in arguments.parse_losses(loss):
            reductions.add_loss(parse_loss, params)
        reductions.add_losses_of(gradients)
    return _defined(given, parsed, outputs, updates, givens, reductions), form


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

    for parse_loss in arguments.parse_losses(loss):
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
    given: Arguments,
    inputs: StepInputs,
    outputs: list[Output],
    updates: list[Update],
    givens: dict[Variable, Variable],
    reductions: ReducedExpressions,
    applied: AppliedRule = AppliedRule([], [], []),  # noqa: B008  # it is not changed
) -> Definition:
    """Return a definition with the rows that are divided, and with default updates."""
    broadcast = [arguments.variable_of(variable) for variable in given["bcast_inputs"] or ()]
    sliceable = check_list(given.get("sliceable_shareds"), "sliceable_shareds", "variables")
    divided, index = _divided(inputs, broadcast, sliceable)
    found = find_windows(list(givens.items()), index, divided)
    options = dict(given["function_options"] or {})
    arguments.check_distinct(updates)
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
        wire=arguments.parse_wire(given["wire"]),
        overlap=check_flag(given["overlap"], "overlap"),
        rows={**divided, **found.axes},
        index=index,
        whole=found.whole,
        defaults=[item.target for item in added],
        grad_updates=arguments.parse_updates(applied.grad_updates, "the grad_updates of update_rule"),
        grad_shared=list(applied.grad_shared),
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
    if excluded is True:
        return []
    roots = [*outputs, *(update.new for update in updates)]
    known = {*(update.target for update in updates), *(excluded or ())}
    found = graphs.default_updates(roots, known, graphs.operands_with(givens))
    return [Update(shared, new) for shared, new in found.items() if not graphs.is_random_state(shared)]
