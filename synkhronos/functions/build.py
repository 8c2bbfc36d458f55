"""`function`: the equivalent of ``theano.function`` for all ranks."""

from __future__ import annotations

import sys
from typing import Any, Iterable, Mapping, Optional, Sequence, Tuple, Union

import numpy as np

from synkhronos._checks import check_pairs
from synkhronos._errors import warn
from synkhronos._typing import Compiled, OutputOp, ReduceOp, SharedVariable, Variable
from synkhronos.arithmetic.operations import OPERATIONS
from synkhronos.engines.analysis.windows import how_to_select
from synkhronos.engines.base import BOUND, Definition, Engine, Windows, name_of
from synkhronos.functions import signature
from synkhronos.functions.analysis import check_loss_ops, check_recurrence, collectives_in
from synkhronos.functions.copies import Parts, compiling
from synkhronos.functions.function import Function
from synkhronos.functions.replica import Replica, Window
from synkhronos.host import compiler
from synkhronos.world.world import World, current_world

Input = Union[Variable, signature.In]
Output = Union[Variable, Tuple[Variable, Optional[OutputOp]], signature.Out]
Update = Union[Tuple[SharedVariable, Any], Tuple[SharedVariable, Any, Optional[ReduceOp]]]


def _accumulated(
    engine: Engine, compiled: Compiled, ops: Mapping[SharedVariable, str | None]
) -> tuple[list[tuple[SharedVariable, str | None]], list[str]]:
    """Return how updates accumulate over slices, and for each that cannot, a sentence that says why.

    The first is a list of ``(shared, op)``, which includes default updates. Random streams are not
    included: they continue from slice to slice.
    """
    streams = engine.random_streams(compiled)
    accumulated, not_accumulated = [], []
    for shared in engine.updated(compiled):
        if shared in streams:
            continue
        if not engine.is_tensor(shared):
            not_accumulated.append(
                f"the update of {shared} cannot accumulate over slices, as it is not a tensor but "
                f"{shared.type}"
            )
        else:
            is_mean = OPERATIONS["avg"].is_defined_for(engine.type_of(shared).dtype)
            op = ops.get(shared, "avg" if is_mean else None)
            accumulated.append((shared, op))
    return accumulated, not_accumulated


def function(
    inputs: Sequence[Input],
    outputs: Output | list[Output] | Mapping[str, Output] | None = None,
    bcast_inputs: Sequence[Input] | None = None,
    updates: Mapping[SharedVariable, Any] | Sequence[Update] | None = None,
    givens: Mapping[Variable, Any] | Iterable[tuple[Variable, Any]] | None = None,
    sliceable_shareds: Sequence[SharedVariable] | None = None,
    **kwargs: Any,
) -> Function:
    """Compile a function that computes on all ranks.

    Parameters
    ----------
    inputs : list of variables
        Tensors of at least one dimension. Each is split along axis 0 over the ranks.
    outputs : variable, (variable, op), or list of these, optional
        `op` says how the values of the ranks are combined: ``"avg"`` (default; weighted by the number
        of rows), ``"sum"``, ``"prod"``, ``"min"``, ``"max"``, ``"gather"`` (concatenated along axis 0),
        or None for the master's own value. With the prefix ``"c_"`` the reduction uses the CPU.
    bcast_inputs : list of variables, optional
        Further inputs, which every rank gets whole. In a call they follow `inputs`.
    updates : list of (shared, new) or (shared, new, op), or an ordered dict, optional
        Each rank updates its own replica only. `op`, by default ``"avg"``, combines the new values of
        several slices (``num_slices``).
    givens : as in Theano, optional
        Substitutions in the graph. Rows of shared variables that an index selects, a scalar in `inputs`,
        are divided among the ranks.
    sliceable_shareds : list of shared variables, optional
        Variables that hold rows of data, from which `batch_s` and `num_slices` select.
    **kwargs
        Further arguments of ``theano.function``.

    Returns
    -------
    Function
        The function; call it like a Theano function.

    Warns
    -----
    SynkhronosWarning
        If an index selects values in `givens` but nothing is divided, or if an output is a gradient
        whose operation is not the `loss_op` of the collectives in the graph. Also before the first call,
        if a result differs from the result of one process.

    Raises
    ------
    TypeError
        If an argument is not a variable of the right kind, or an operation is not defined for the dtype
        of an output.
    ValueError
        If an input cannot be split along its axis, or a scan along this axis computes each step from
        earlier steps; an operation does not exist; a variable is given twice; a sliceable shared
        variable is unused, updated by the function or replaced by `givens`; or rows that an index
        selects cannot be divided.
    SynkhronosError
        If there is no room on disk for Theano's compiled code.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dmatrix("x")
    >>> f = synk.function([x], [x.mean(), (x.max(axis=0), "max")])
    >>> f(np.arange(6.0).reshape(3, 2))  # two rows on this process, one on the worker
    [array(2.5), array([4., 5.])]
    >>> synk.close()
    """
    world = current_world()
    world.check_usable()
    engine = world.rank_state.engine
    downcast = bool(kwargs.get("allow_input_downcast"))
    parsed = signature.parse_inputs(engine, inputs, bcast_inputs, downcast)
    parsed_outputs, form = signature.parse_outputs(engine, outputs)
    pairs, ops = signature.parse_updates(engine, updates)
    replaced = check_pairs([] if givens is None else givens, "givens", "(variable, value)")
    sliceable = signature.parse_sliceable(engine, sliceable_shareds, pairs)
    if kwargs.get("name") is None:
        caller = sys._getframe(1)  # the name that Theano would use
        kwargs["name"] = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    split = {spec.variable: spec.axis for spec in parsed if spec.axis is not None}
    variables = [spec.variable for spec in parsed_outputs]
    with compiling(world, kwargs["name"]):
        n_own = len(inputs or ())
        windows, window = divide(world, parsed, n_own, replaced, sliceable, parsed_outputs, pairs)
        rows = {**split, **windows.divided} or dict.fromkeys(sliceable, 0)
        excluded = kwargs.get("no_default_updates")
        results, news, cut, fixed = engine.free_rows(variables, pairs, windows.givens, rows, excluded)
        arguments = [*(spec.variable for spec in parsed), *windows.bounds]
        on_host = [output.over_cpu for output in parsed_outputs]
        definition = Definition(arguments, results, on_host, news, cut, sliceable)
        compiled = engine.build(definition, **kwargs)
    bounds = [] if window is None else [BOUND, BOUND]
    axes = [*(spec.axis for spec in parsed), *bounds, *[0] * len(sliceable)]
    check_recurrence(engine, compiled, axes, parsed, windows.divided, sliceable)
    by_shared = {shared: op for (shared, _), op in zip(pairs, ops)}
    accumulated, not_accumulated = _accumulated(engine, compiled, by_shared)
    replica = Replica(
        number=-1,
        compiled=compiled,
        output_modes=[output.op for output in parsed_outputs],
        output_dtypes=[np.dtype(output.dtype) for output in parsed_outputs],
        output_axes=[output.axis for output in parsed_outputs],
        window=window,
        axes=axes,
        sliceable=sliceable,  # type: ignore[arg-type]  # numbers come with the `Function`
        updates=accumulated,  # type: ignore[arg-type]  # as above
        fixed=fixed,
        **collectives_in(engine, compiled, axes),
    )
    parts = Parts(kwargs["name"], replica, parsed, ops, not_accumulated, form)
    made = Function(world, parts, parsed_outputs)
    check_loss_ops(world, made)
    return made


# Rows that an index selects in givens

#: The operations that return the value that every rank has.
_OF_EQUAL_VALUES = ("avg", "min", "max", None)


def divide(
    world: World,
    inputs: Sequence[signature.Input],
    n_own: int,
    givens: Sequence[tuple[Variable, Any]],
    sliceable: Sequence[Variable],
    outputs: Sequence[signature.Output],
    updates: Sequence[tuple[SharedVariable, Any]],
) -> tuple[Windows, Window | None]:
    """Have each rank use its part of the rows that an index selects in givens.

    Parameters
    ----------
    inputs : list of Input
        Of the first `n_own` inputs, the inputs that are not split may select rows. Every rank uses all
        of the others.
    givens : list of pairs
        The variables and what replaces them.
    sliceable : list of shared variables
        The shared variables whose rows are divided.
    outputs : list of Output
        The outputs of the function.
    updates : list of pairs
        Its updates.

    Raises
    ------
    ValueError
        If an index selects rows in a way in which they cannot be divided, or nothing is divided and so
        an output would differ from the serial one.

    Warns
    -----
    SynkhronosWarning
        If nothing is divided although an index selects something.
    """
    engine, index = world.rank_state.engine, [item for item in inputs[:n_own] if item.axis is None]
    if not givens or not index:
        return Windows(givens, [], [], {}, []), None
    split = [item for item in inputs if item.axis is not None]
    rows = {item.variable: item.axis for item in inputs if item.axis is not None}
    divided = {**rows, **dict.fromkeys(sliceable, 0)}
    windows = engine.cut_windows(givens, [spec.variable for spec in index], divided)
    if not windows.bounds:
        if windows.whole and not divided:
            news = [new for _, new in updates]
            _check_nothing_is_wrong(world, windows.whole, index, outputs, news)
        return windows, None
    positions = [position for position, variable in enumerate(inputs) if variable.axis is None]
    variables = [inputs[position].variable for position in positions]
    on_host = [True] * len(windows.lengths)
    definition = Definition(variables, windows.lengths, on_host)
    lengths = engine.build(definition, on_unused_input="ignore")
    names = [name_of(item) for item in windows.divided]
    return windows, Window(lengths, positions, names, [item.label for item in split])


def _check_nothing_is_wrong(
    world: World,
    whole: Sequence[Variable],
    index: Sequence[signature.Input],
    outputs: Sequence[signature.Output],
    news: Sequence[Any],
) -> None:
    """Say that nothing is divided although `whole` depend on an index; raise if that is wrong."""
    results = [*(spec.variable for spec in outputs), *news]
    are_used = world.rank_state.engine.are_computed_from(results, whole)
    if not any(are_used):
        return
    replaced = ", ".join(map(name_of, whole))
    selecting = ", ".join([name_of(spec.variable) for spec in index])
    text = (
        f"nothing is divided among the ranks, so each of them computes the same: what replaces "
        f"{replaced} in givens depends on {selecting}, but has no rows that it selects"
    )
    remedy = how_to_select(replaced, selecting)
    for position, (node, is_used) in enumerate(zip(outputs, are_used)):
        if is_used and node.op not in _OF_EQUAL_VALUES:
            raise ValueError(
                f"outputs[{position}]: {node.op!r} over the ranks would differ from "
                f"{compiler.NAME}.function(), as {text}. {remedy}"
            )
    if world.size > 1:
        warn(f"function: {text}, which is right, but takes as long as on one process. {remedy}")
