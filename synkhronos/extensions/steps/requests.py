"""Checks the arguments of the functions in `train` and converts them to a common form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Collection, NamedTuple, Sequence

import numpy

import synkhronos as synk
from synkhronos._text import shortened
from synkhronos.engines.analysis.windows import find_windows
from synkhronos.engines.names import Variable
from synkhronos.extensions._flat_gradient import check_loss, checked_parameters
from synkhronos.extensions.steps.arguments import Inputs, group_of, variable_of
from synkhronos.extensions.steps.cuts import (
    Cuts,
    Params,
    is_float_scalar,
    is_float_tensor,
    parameters_under,
)
from synkhronos.extensions.steps.marks import marks_in
from synkhronos.extensions.steps.rules import apply_rule
from synkhronos.extensions.steps.script import (
    Output,
    Script,
    Update,
    check_distinct,
    parse_givens,
    parse_output,
    parse_updates,
    with_default_updates,
)
from synkhronos.extensions.steps.step import Options


class Arguments(NamedTuple):
    """The arguments that a training function and a parallel function have in common."""

    inputs: Any  # of a training function: (x, y)
    outputs: Any
    updates: Any
    givens: Any
    bcast_inputs: Any
    sliceable_shareds: Any
    loss_op: Any
    function_options: Any
    wire: Any = None
    overlap: Any = False


def script_of_training(
    arguments: Arguments,
    loss: Variable,
    params: Any,
    rule: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Script, Inputs, Options]:
    """Return what the arguments of ``make_train_function`` ask for."""
    _check_loss_op(arguments.loss_op)
    inputs = _inputs_of_training(arguments, rule)
    if isinstance(params, Iterable) and not isinstance(params, Variable):
        params = list(params)  # a generator can be consumed only once
    applied = apply_rule(rule, loss, params, args, kwargs)
    own = parse_updates(arguments.updates)
    outputs, _ = _parse_outputs(arguments.outputs)
    cuts = Cuts(arguments.loss_op)
    loss_output = parse_output(loss, "loss")
    knows_gradients = applied.is_marked or (applied.grad_shared and arguments.loss_op == "avg")
    if not knows_gradients or outputs or own:
        check_loss(loss)
        cuts.add_gradients_of(loss, checked_parameters(params))
    cuts.add_loss(loss, params)
    script = Script(
        rows={},
        outputs=[loss_output, *outputs],
        updates=[*parse_updates(applied.updates, "the updates of update_rule"), *own],
        givens=parse_givens(arguments.givens),
        cuts=cuts,
        grad_updates=parse_updates(applied.grad_updates, "the grad_updates of update_rule"),
        grad_shared=applied.grad_shared,
        n_further=len(own),
    )
    script, options = _completed(script, inputs, arguments)
    return script, inputs, options


def _inputs_of_training(arguments, rule):
    x, y = arguments.inputs
    if rule is None:
        raise TypeError("update_rule: expected a rule, such as updates.adam, got None")
    if y is not None and not isinstance(y, (Variable, list, tuple)) and not hasattr(y, "variable"):
        raise TypeError(
            f"y: expected a variable, or a list of variables, got {shortened(y)}; without y, give None "
            f"in its place, or the rule by its name: update_rule="
        )
    groups = [group_of("x_data", x)] + ([] if y is None else [group_of("y_data", y)])
    broadcast = _listed(arguments.bcast_inputs, "bcast_inputs")
    return Inputs([*groups, *(group_of(None, one) for one in broadcast)], "train function")


def script_of_function(
    arguments: Arguments, loss: Any, params: Any, gradients: Any
) -> tuple[Script, Inputs, Options, bool | list[str]]:
    """Return what the arguments of ``parallel_function`` ask for, and the form of the results."""
    _check_loss_op(arguments.loss_op)
    listed = _listed(arguments.inputs, "inputs")
    variables = [variable_of(one) for one in listed]
    broadcast = _listed(arguments.bcast_inputs, "bcast_inputs")
    listed += [one for one in broadcast if variable_of(one) not in variables]
    inputs = Inputs([group_of(None, one) for one in listed], "parallel function")
    outputs, form = _parse_outputs(arguments.outputs)
    updates, givens = parse_updates(arguments.updates), parse_givens(arguments.givens)
    sliceable = _listed(arguments.sliceable_shareds, "sliceable_shareds")
    cuts = Cuts(arguments.loss_op)
    if gradients is None:
        _find_gradients(cuts, outputs, updates, loss, params, {*givens, *sliceable})
    else:
        _check_gradients(gradients, params)
        cuts.add_gradients(gradients, checked_parameters(params))
        for one in _losses(loss):
            cuts.add_loss(one, params)
        cuts.add_losses_of(gradients)
    script = Script({}, outputs, updates, givens, cuts)
    script, options = _completed(script, inputs, arguments)
    return script, inputs, options, form


def _find_gradients(
    cuts: Cuts,
    outputs: Sequence[Output],
    updates: Sequence[Update],
    loss: Any,
    params: Any,
    data: Collection[Variable],
) -> None:
    """Add the gradients that updates may contain to the expressions at which they are cut.

    Parameters
    ----------
    data : collection of variables
        Shared variables that are no parameters.
    """
    if params is None:
        known = [one.target for one in updates if is_float_tensor(one.target)]
    else:
        known = checked_parameters(params)

    def params_of(one: Variable) -> Params:
        if params is not None:
            return known, ()
        return known, [each for each in parameters_under(one) if each not in {*known, *data}]

    for one in _losses(loss):
        cuts.add_gradients_of(one, *params_of(one))
    if loss is not None:
        return
    marks = marks_in([one.new for one in updates])
    scalars = [one.variable for one in outputs if is_float_scalar(one.variable)]
    if marks:
        cuts.add_losses_of([one.owner.inputs[0] for one in marks if one.owner.op.op is None])
    else:
        cuts.add_gradients_of_losses_in([one.new for one in updates], scalars, params_of)
    if cuts.loss_op == "sum" and not cuts.losses:
        if len(scalars) != 1:
            raise ValueError(
                f"loss_op: 'sum' is the operation for a loss, which was not found among "
                f"{len(scalars)} scalar float outputs; name it with loss="
            )
        cuts.add_loss(scalars[0], parameters_under(scalars[0]))


def _losses(loss: Any) -> list[Variable]:
    """Return the losses that were given; raise an error if one is not a scalar float."""
    if loss is None:
        return []
    losses = list(loss) if isinstance(loss, (list, tuple)) else [loss]
    for one in losses:
        check_loss(one)
    return losses


def _check_gradients(gradients, params):
    if not isinstance(gradients, (list, tuple)) or params is None or len(gradients) != len(params):
        raise ValueError(
            "gradients: expected a list of gradient expressions, and as many params in the same order, "
            "as in gradients=grad(loss, params), params=params"
        )
    for position, one in enumerate(gradients):
        if not isinstance(one, Variable):
            raise TypeError(f"gradients[{position}]: expected an expression, got {one!r}")


def _completed(script: Script, inputs: Inputs, arguments: Arguments) -> tuple[Script, Options]:
    """Add to a script its rows and default updates; return it with the options of its functions."""
    broadcast = [variable_of(one) for one in arguments.bcast_inputs or ()]
    sliceable = _listed(arguments.sliceable_shareds, "sliceable_shareds")
    divided, index = _divided(inputs, broadcast, sliceable)
    found = find_windows(list(script.givens.items()), index, divided)
    options = dict(arguments.function_options or {})
    check_distinct(script.updates)
    updates = with_default_updates(
        script.updates,
        [one.variable for one in script.outputs],
        script.givens,
        options.get("no_default_updates", False),
    )
    added = [one.target for one in updates[len(script.updates) :]]
    script = script._replace(
        rows={**divided, **found.axes},
        index=index,
        whole=found.whole,
        updates=updates,
        n_further=script.n_further + len(added),
    )
    return script, Options(
        broadcast,
        sliceable,
        script.givens,
        added,
        options,
        _checked_wire(arguments.wire),
        _checked_overlap(arguments.overlap),
    )


def _divided(inputs, broadcast, sliceable):
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


def _parse_outputs(outputs: Any) -> tuple[list[Output], bool | list[str]]:
    """Return the outputs, and the form of a result: whether it is a list, or the keys of a dict."""
    if outputs is None:
        return [], True
    if isinstance(outputs, Mapping):
        keys = sorted(outputs)
        return [parse_output(outputs[key], f"outputs[{key!r}]") for key in keys], keys
    is_list = isinstance(outputs, list)
    each = outputs if is_list else [outputs]
    return [parse_output(one, f"outputs[{i}]") for i, one in enumerate(each)], is_list


def _listed(variables, what):
    if variables is None:
        return []
    if not isinstance(variables, (list, tuple)):
        raise TypeError(f"{what}: expected a list of variables, got {shortened(variables)}")
    return list(variables)


def _checked_wire(wire):
    if wire is not None and not isinstance(wire, (str, synk.PowerSGD, synk.TopK)):
        raise TypeError(
            f"wire: expected the name of a format, synkhronos.PowerSGD(rank), synkhronos.TopK(fraction) "
            f"or None, got {wire!r}"
        )
    return wire


def _checked_overlap(overlap):
    if not isinstance(overlap, (bool, numpy.bool_)):
        raise TypeError(f"overlap: expected True or False, got {overlap!r}")
    return bool(overlap)


def _check_loss_op(loss_op):
    if loss_op not in ("avg", "sum"):
        raise ValueError(f"loss_op: expected 'avg' or 'sum', got {loss_op!r}")
