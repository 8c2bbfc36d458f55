"""Finding the rows in a PyMC model, and the model with a potential in their place."""

from __future__ import annotations

import itertools
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np
import pymc as pm
import pytensor.tensor as pt
from pymc.model.fgraph import fgraph_from_model, model_from_fgraph, model_potential
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import ancestors
from pytensor.tensor.type import TensorType

import synkhronos as synk
from synkhronos._typing import AnyArray
from synkhronos.extensions.pymc.divided import DividedModel
from synkhronos.extensions.pymc.points import points_of
from synkhronos.extensions.pymc.potential import (
    like,
    substitute,
    sum_over_ranks,
    total_of,
)
from synkhronos.extensions.pymc.rows import Rows

_REMOVED = "local_remove_check_parameter"  # as PyMC does with check_bounds=False


class Term(NamedTuple):
    """An observed variable, whose log-probability is a sum over rows.

    Attributes
    ----------
    variable : variable
        The observed variable.
    value : variable
        Its observed values, in a graph.
    observed : Constant or SharedVariable
        Its observed values.
    leaves : list of Constant or SharedVariable
        Shared variables that it depends on, and constants of as many rows.
    lengths : list of Constant or SharedVariable
        The values that give distributions the number of rows as their size.
    """

    variable: Variable
    value: Variable
    observed: Variable
    leaves: list[Variable]
    lengths: list[Variable]

    @property
    def n_rows(self) -> int:
        """The number of rows in the model."""
        return len(_array(self.observed))


class Potential(NamedTuple):
    """The sum of the terms with equal numbers of rows.

    Attributes
    ----------
    name : str
        The names of the terms.
    rows : Rows
        The sum of their log-probabilities.
    inputs : list of variables
        The variables of the model whose values are its parameters.
    leaves : list of Constant or SharedVariable
        The values that the rows replace.
    """

    name: str
    rows: Rows
    inputs: list[Variable]
    leaves: list[Variable]


def divide(model: Any, data: Any, observed: Any, mode: Any) -> Any:
    """Return a model with the rows divided over the ranks; see `parallelize`."""
    terms = [_term(model, one) for one in _chosen(model, observed)]
    given = _given(model, data, terms)
    terms.sort(key=_n_rows)
    groups = [list(group) for _, group in itertools.groupby(terms, _n_rows)]
    potentials = [_potential(model, group, given, mode) for group in groups]
    used = {leaf for potential in potentials for leaf in potential.leaves}
    unused = [one.name for one in given or () if one not in used]
    if unused:
        raise ValueError(
            f"parallelize: data: the observed variables that are divided do not depend on {unused}"
        )
    return _replaced(model, terms, potentials)


def _n_rows(term: Term) -> int:
    return term.n_rows


# The terms


def _chosen(model: Any, observed: Sequence[str] | None) -> list[Variable]:
    if not isinstance(model, pm.Model):
        raise TypeError(f"parallelize: expected a pymc.Model, got {model!r}")
    names = [one.name for one in model.observed_RVs]
    if isinstance(observed, str) or not names or {*(names if observed is None else observed)} - {*names}:
        raise ValueError(
            f"parallelize: observed: expected a list of observed variables, of which the model has "
            f"{names}, got {observed!r}"
        )
    return [one for one in model.observed_RVs if observed is None or one.name in observed]


def _term(model: pm.Model, variable: Variable) -> Term:
    value = model.rvs_to_values[variable]
    observed = [one for one in ancestors([value]) if _is_leaf(one) and one.type.ndim]
    if not observed:
        raise ValueError(
            f"parallelize: expected that {variable.name!r} has observed values with rows on axis 0, got "
            f"{value}; leave it out by observed=[...], with the names of the others"
        )
    n_rows = len(_array(observed[0]))
    lengths = _lengths(model, variable, n_rows)
    values = [model.rvs_to_values[one] for one in model.observed_RVs]  # on which it may depend
    leaves = [
        one
        for one in dict.fromkeys(ancestors([variable, *values], blockers=model.free_RVs))
        if _is_leaf(one) and one not in lengths
        if isinstance(one, SharedVariable) or (one.type.ndim and len(one.data) == n_rows)
    ]
    return Term(variable, value, observed[0], leaves, lengths)


def _lengths(model: pm.Model, variable: Variable, n_rows: int) -> list[Variable]:
    """Return the leaves that give a variable, and the variables it is made of, this number of rows."""
    found = ancestors([variable], blockers=model.free_RVs)
    nodes = {one.owner for one in found if hasattr(one.owner and one.owner.op, "size_param")}
    sizes = [node.op.size_param(node) for node in nodes]
    drawn = [output for node in nodes for output in node.outputs]
    found = ancestors([one for one in sizes if one is not None], blockers=drawn)
    return [
        one
        for one in dict.fromkeys(found)
        if _is_leaf(one) and one.type.ndim <= 1 and one.type.dtype == "int64"
        if _array(one).ravel()[:1].tolist() == [n_rows]
    ]


def _log_probs(
    model: pm.Model, terms: Sequence[Term], stand_ins: Mapping[Variable, Variable]
) -> list[Variable]:
    """Return the log-probability of each term, with stand-ins for variables of the model.

    PyMC rewrites everything in the graph, including constants and free variables, so it gets copies.
    """
    observed = substitute([model.rvs_to_values[one] for one in model.observed_RVs], stand_ins)
    values = dict(zip(model.observed_RVs, observed))
    found = []
    for term in terms:
        known = {one: value for one, value in values.items() if one is not term.variable}
        (conditional,) = substitute([term.variable], {**stand_ins, **known})
        found.append(pm.logp(conditional, values[term.variable], warn_rvs=False))
    return found


def _is_leaf(one: Variable) -> bool:
    return isinstance(one, (Constant, SharedVariable)) and isinstance(one.type, TensorType)


def _array(leaf: Variable) -> AnyArray:
    array: AnyArray = leaf.data if isinstance(leaf, Constant) else leaf.get_value(borrow=True)
    return array


# The rows


def _given(model: pm.Model, data: Any, terms: Sequence[Term]) -> dict[Variable, Any] | None:
    """Return the script's arrays by leaf, with None for the model's own values; or None."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise TypeError(
            f"parallelize: data: expected a dictionary of arrays by name, got {type(data).__name__}"
        )
    known = {one.name: one for one in model.data_vars}
    known.update({term.variable.name: term.observed for term in terms})
    given: dict[Variable, Any] = {term.observed: None for term in terms}
    for key, array in data.items():
        name: Any = getattr(key, "name", key)
        if name not in known:
            raise ValueError(
                f"parallelize: data: expected names of pm.Data or of observed variables, which are "
                f"{sorted(known)}, got {name!r}"
            )
        given[known[name]] = None if array is None else _checked(name, known[name], array)
    return given


def _checked(name: str, leaf: Variable, given: Any) -> synk.Data | AnyArray:
    array = given if isinstance(given, synk.Data) else np.asanyarray(given)
    if not np.can_cast(array.dtype, leaf.type.dtype, "same_kind") or array.ndim != leaf.type.ndim:
        raise TypeError(
            f"parallelize: data: {name}: expected {leaf.type.ndim} dimension(s) and a dtype like "
            f"{leaf.type.dtype}, got {array.ndim} and {array.dtype}"
        )
    return array


def _potential(
    model: pm.Model, terms: Sequence[Term], given: dict[Variable, Any] | None, mode: Any
) -> Potential:
    name = "_and_".join(term.variable.name for term in terms)
    title = f"parallelize({name})"
    leaves = list(dict.fromkeys(itertools.chain(*(term.leaves for term in terms))))
    lengths = list(dict.fromkeys(itertools.chain(*(term.lengths for term in terms))))
    stand_ins = {one: one.type(one.name) for one in [*model.free_RVs, *leaves]}
    log_probs = _log_probs(model, terms, stand_ins)
    used = {*ancestors(log_probs)}
    rows = [one for one in leaves if stand_ins[one] in used and _has_rows(one, terms[0].n_rows, given)]
    arrays, variables, by_leaf = _rows(rows, given)
    n_rows = variables[0].shape[:1]
    for one in [one for one in used if _is_leaf(one) and _is_in(one, lengths)]:
        by_leaf[one] = pt.join(0, n_rows, _array(one)[1:]) if one.type.ndim else n_rows[0]
    by_leaf.update((one, one) for one in leaves if isinstance(one, Constant) and one not in by_leaf)
    log_probs = substitute(log_probs, {stand_ins.get(one, one): new for one, new in by_leaf.items()})
    total = sum(total_of(title, one) for one in log_probs)
    used = {*ancestors([total])}
    inputs = [one for one in stand_ins if one not in by_leaf and stand_ins[one] in used]
    made = Rows(
        title,
        total,
        [stand_ins[one] for one in inputs],
        [one in model.free_RVs and one.type.dtype.startswith("float") for one in inputs],
        variables,
        arrays,
        mode,
        **({} if model.check_bounds else {"checks": _REMOVED}),
        plain=_plain_sum(title, model, terms, {one: stand_ins[one] for one in inputs}, given),
    )
    made.test(points_of(model, inputs))
    return Potential(f"{name}_rows", made, inputs, rows)


def _plain_sum(
    title: str,
    model: pm.Model,
    terms: Sequence[Term],
    stand_ins: Mapping[Variable, Variable],
    given: Mapping[Variable, Any] | None,
) -> Any:
    """Return the sum of the terms in the model's own graph, or None if the rows are the script's."""
    if given is not None and any(array is not None for array in given.values()):
        return None
    return sum(total_of(title, one) for one in _log_probs(model, terms, stand_ins))


def _has_rows(leaf: Variable, length: int, given: dict[Variable, Any] | None) -> bool:
    if given is not None:
        return leaf in given
    return leaf.type.ndim and len(_array(leaf)) == length


def _rows(
    leaves: Sequence[Variable], given: dict[Variable, Any] | None
) -> tuple[list[Any], list[Variable], dict[Variable, Variable]]:
    """Return arrays, variables for their rows, and the variable by leaf.

    Constants that are equal, such as an index that is used twice, have one array.
    """
    arrays: list[Any] = []
    variables: list[Variable] = []
    kept: list[Variable | None] = []
    replaced: dict[Variable, Variable] = {}
    for leaf in leaves:
        array = (given or {}).get(leaf)
        same = [one for one in kept if array is None and _are_equal(one, leaf)]
        if same:
            variable = variables[kept.index(same[0])]
        else:
            kept.append(leaf if array is None else None)
            arrays.append(_array(leaf) if array is None else array)
            label = leaf.name or f"data[{len(variables)}]"
            variables.append(like(arrays[-1], label, leaf.type.shape))
            variable = variables[-1]
        replaced[leaf] = variable
    return arrays, variables, replaced


def _is_in(leaf: Variable, lengths: Sequence[Variable]) -> bool:
    # PyMC has copied some of the constants.
    return leaf in lengths or (leaf.type.ndim and any([_are_equal(leaf, one) for one in lengths]))


def _are_equal(one: Variable | None, other: Variable | None) -> bool:
    return isinstance(one, Constant) and isinstance(other, Constant) and one.equals(other)


# The model


def _replaced(model: pm.Model, terms: Sequence[Term], potentials: Sequence[Potential]) -> pm.Model:
    """Return a copy of the model, with potentials in place of terms."""
    gone = {leaf for potential in potentials for leaf in potential.leaves}
    gone.update(term.variable for term in terms)
    dropped = [term.variable for term in terms] + [one for one in model.data_vars if one in gone]
    for one in model.deterministics:
        if gone & {*ancestors([one], blockers=model.free_RVs)}:
            dropped.append(one)
    graph, copies = fgraph_from_model(model)
    for one in dropped:
        graph.remove_output(graph.outputs.index(copies[one]))
    for name, rows, inputs, _ in potentials:
        total = sum_over_ranks(rows, [copies[one] for one in inputs])
        total.name = name
        own = [] if isinstance(model_potential, Op) else [name]  # PyMC 5, or 6
        graph.add_output(model_potential(total, *own))
    made = model_from_fgraph(graph, mutate_fgraph=True)
    made.check_bounds = model.check_bounds
    # PyMC has reordered the variables, and draws are made in their order.
    order = list(model.named_vars)
    for variables in (made.free_RVs, made.deterministics):
        variables.sort(key=lambda one: order.index(one.name))
    made.__class__ = DividedModel
    return made
