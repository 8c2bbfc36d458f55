"""The terms of a model's log-probability that are divided: observed variables, or potentials."""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.logprob.basic import conditional_logp
from pymc.variational.minibatch_rv import MinibatchRandomVariable, get_scaling

from synkhronos.engines.names import SharedVariable, Variable, ancestors
from synkhronos.extensions.pymc.imputed import joined_by_row, selected_first
from synkhronos.extensions.pymc.leaves import (
    array_of,
    computed_once,
    folded,
    has_length,
    is_leaf,
    is_sparse,
    rows_first,
    shapes_in,
    value_of,
)
from synkhronos.extensions.pymc.point import Point
from synkhronos.extensions.pymc.potential import substitute
from synkhronos.extensions.pymc.sparse_rows import padded


class Term(NamedTuple):
    """A part of the log-probability that is a sum over rows.

    Attributes
    ----------
    variable : variable
        The observed variable, or the potential.
    graph : variable
        The variable as a function of the parameters, without operations on constants alone.
    value : variable or None
        The observed values, in a graph; None for a potential.
    observed : Constant, SharedVariable or None
        The observed values.
    n_rows : int
        The number of rows in the model.
    leaves : list of Constant or SharedVariable
        Shared variables that it depends on, and constants of as many rows.
    sources : list of Constant or SharedVariable
        Variables of the model that have rows, some of which the graph no longer contains.
    scale : callable or None
        Returns the factor that ``total_size`` gives the log-probability of a number of rows.
    computed : dict
        What the model computes from data, by the constant that has its value.
    fixed : list of SharedVariable
        Variables whose values were used to find the rows.
    """

    variable: Variable
    graph: Variable
    value: Variable | None
    observed: Variable | None
    n_rows: int
    leaves: list[Variable]
    sources: list[Variable]
    scale: Callable[[int], float] | None
    computed: dict[Variable, Variable]
    fixed: list[SharedVariable]


def number_of_rows(term: Term) -> int:
    """Return the number of rows of a term."""
    return term.n_rows


def terms_of(
    model: Any, observed: Sequence[str] | None, point: Point, has_data: bool = False
) -> list[Term]:
    """Return the terms of a model that are divided, which keep all data if the script gives others."""
    kept: list[Variable] = []
    if has_data:
        values = [_observed(point.value_of(variable)) for variable in model.observed_RVs]
        kept += [
            value for value in [*values, *map(point.stand_in_of, model.data_vars)] if value is not None
        ]
    return [_term(model, item, point, kept) for item in _chosen(model, observed)]


def _chosen(model: Any, observed: Sequence[str] | None) -> list[Variable]:
    """Return the observed variables and potentials with these names; by default those that have rows."""
    known = {variable.name: variable for variable in [*model.observed_RVs, *model.potentials]}
    for name in model.named_vars:  # of a variable with missing values
        known.setdefault(name, known.get(f"{name}_observed"))
    known = {name: item for name, item in known.items() if item is not None}
    if observed is not None:
        if isinstance(observed, str) or not observed or {*observed} - {*known}:
            raise _unknown(known, observed)
        return list(dict.fromkeys(known[name] for name in observed))
    if not known:
        raise _unknown(known, observed)
    chosen = [variable for variable in model.observed_RVs if _has_rows(model.rvs_to_values[variable])]
    return chosen or list(model.observed_RVs or model.potentials)


def _unknown(known: Mapping[str, Variable], observed: Any) -> ValueError:
    return ValueError(
        f"parallelize: observed: expected a list of observed variables and potentials, of which the "
        f"model has {list(known)}, got {observed!r}"
    )


def _has_rows(value: Variable) -> bool:
    return _number_of_rows(value) > 1


def _number_of_rows(value: Variable) -> int:
    """Return the number of rows of observed values; 0 if they have no rows, or draw random numbers."""
    known, leaf = value_of(value), _observed(value)
    if known is None and leaf is not None:
        known = array_of(leaf)
    return len(known) if known is not None and np.ndim(known) else 0


def _observed(value: Variable) -> Variable | None:
    """Return the observed values in a graph, if they have rows."""
    return next((item for item in ancestors([value]) if is_leaf(item) and item.type.ndim), None)


def _term(model: Any, variable: Variable, point: Point, kept: Sequence[Variable]) -> Term:
    value = None if variable in model.potentials else point.value_of(variable)
    _check_is_whole(model, variable)
    graph, scale = _without_scale(of_parameters(variable, point), value)
    observed = _longest(computed_once([graph])[0][0]) if value is None else _observed(value)
    n_rows = 0 if observed is None else _number_of_rows(observed if value is None else value)
    if not n_rows:
        raise ValueError(
            f"parallelize: expected that {variable.name!r} has observed values with rows on axis 0, got "
            f"{value}; leave it out by observed=[...], with the names of the others"
        )
    sources = [leaf for leaf in ancestors([graph]) if is_leaf(leaf) and n_rows in array_of(leaf).shape]
    original = [point.graph_of(variable)]
    before = _shared_in(original if value is None else [*original, value])
    graph = padded(f"parallelize({variable.name})", graph, n_rows)
    graph, selected = selected_first(
        graph, n_rows, list(point.parameters.values()), lambda: point.values(list(point.parameters))
    )
    outputs = folded([graph] if value is None else [graph, value], kept)
    outputs, computed = computed_once(outputs, n_rows, kept)
    sources += [item for item in ancestors(computed.values()) if isinstance(item, SharedVariable)]
    after = _shared_in([*outputs, *computed.values()])
    outputs[0] = rows_first(outputs[0], n_rows)
    return Term(
        variable,
        outputs[0],
        None if value is None else outputs[1],
        None if value is None else observed,
        n_rows,
        leaves_of(outputs, n_rows),
        [*sources, *selected],
        scale,
        computed,
        [item for item in before if item not in after],
    )


def _shared_in(outputs: Sequence[Variable]) -> list[SharedVariable]:
    found = dict.fromkeys(ancestors(outputs))
    return [item for item in found if isinstance(item, SharedVariable) and hasattr(item.type, "ndim")]


def _without_scale(
    graph: Variable, value: Variable | None
) -> tuple[Variable, Callable[[int], float] | None]:
    """Return a graph without ``total_size``, and the factor by the number of rows."""
    if graph.owner is None or not isinstance(graph.owner.op, MinibatchRandomVariable):
        return graph, None
    variable, *total_size = graph.owner.inputs
    shape: Any = value
    (others,) = pytensor.function([], [shape.shape[1:]], mode="FAST_COMPILE")()

    def scale(n_rows: int) -> float:
        return float(get_scaling(total_size, pt.constant([n_rows, *others])).eval(mode="FAST_COMPILE"))

    return variable, scale


def _check_is_whole(model: Any, variable: Variable) -> None:
    """Raise ValueError if missing values are divided from observed ones within rows."""
    if variable.owner and {*variable.owner.outputs} & {*model.free_RVs}:
        raise ValueError(
            f"parallelize: {variable.name!r} has missing values within rows that cannot be computed "
            f"separately; leave it out by observed=[...], with the names of the others, or write its "
            f"log-probability with rows_potential"
        )


def _longest(graph: Variable) -> Variable | None:
    """Return the constant or the shared variable that has most rows."""
    shapes = shapes_in([graph])
    leaves = [
        item for item in ancestors([graph]) if is_leaf(item) and item.type.ndim and item not in shapes
    ]
    return max(leaves, key=lambda one: array_of(one).shape[0], default=None)


def of_parameters(variable: Variable, point: Point) -> Variable:
    """Return a variable as a function of the parameters and of observed values, item by item."""
    return joined_by_row(point.graph_of(variable), list(point.parameters.values()))


def leaves_of(outputs: Sequence[Variable], n_rows: int) -> list[Variable]:
    """Return the shared variables of a graph, and its constants of this number of rows."""
    shapes = shapes_in(outputs)
    return [
        variable
        for variable in dict.fromkeys(ancestors(outputs))
        if is_leaf(variable) and not is_sparse(variable) and variable not in shapes
        if isinstance(variable, SharedVariable) or has_length(variable, n_rows)
    ]


def log_prob_of(term: Term, stand_ins: Mapping[Variable, Variable]) -> Variable:
    """Return the log-probability of a term, with stand-ins for its leaves.

    PyMC rewrites everything in the graph, including constants, so it gets a copy.
    """
    if term.value is None:
        return substitute([term.graph], stand_ins)[0]
    graph, value = substitute([term.graph, term.value], stand_ins)
    if getattr(graph.owner.op, "n_dependent_rvs", 1) > 1:  # of pymc_extras.marginalize
        raise ValueError(
            f"parallelize: {term.variable.name!r} and other observed variables share the marginalized "
            f"variable {graph.owner.op.marginalized_name!r}, and have one log-probability; leave it out "
            f"by observed=[...], or observe them as the columns of one variable"
        )
    found = pm.logp(graph, value, warn_rvs=False)
    found = found[0] if isinstance(found, (list, tuple)) else found
    return folded([found], only_shapes=True)[0]  # other constants may have the number of rows


def plain_log_prob_of(term: Term, point: Point, stand_ins: Mapping[Variable, Variable]) -> Variable:
    """Return the log-probability of a term as PyMC computes that of the model."""
    variable = term.variable
    if term.value is None:
        return substitute([point.graph_of(variable)], stand_ins)[0]
    graph, value = substitute([point.graph_of(variable), point.value_of(variable)], stand_ins)
    return conditional_logp({graph: value}, warn_rvs=False)[value]
