"""Finding the rows in a PyMC model, and the model with a potential in their place."""

from __future__ import annotations

import itertools
from typing import Any, Mapping, NamedTuple

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.model.fgraph import fgraph_from_model, model_from_fgraph, model_potential
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.type import TensorType

from synkhronos.extensions.pymc.potential import (
    like,
    substitute,
    sum_over_ranks,
    total_of,
)
from synkhronos.extensions.pymc.rows import Rows

_REMOVED = "local_remove_check_parameter"  # as PyMC does with check_bounds=False


class Term(NamedTuple):
    """The log-probability of an observed variable.

    Attributes
    ----------
    variable : variable
    observed : Constant or SharedVariable
        Its observed values.
    value : variable
        The log-probability, of free variables and leaves.
    sizes : list of variables
        Vectors of extents in it, of which the first is the number of rows.
    leaves : list of Constant or SharedVariable
        What it depends on, other than through free variables and sizes.
    """

    variable: Variable
    observed: Variable
    value: Variable
    sizes: list[Variable]
    leaves: list[Variable]

    @property
    def length(self) -> int:
        """The number of rows in the model."""
        return len(_array(self.observed))


class Potential(NamedTuple):
    """The sum of the terms with equal numbers of rows.

    Attributes
    ----------
    name : str
    rows : Rows
    inputs : list of variables
        The variables of the model whose values are its parameters.
    leaves : list of Constant or SharedVariable
        What the rows replace.
    """

    name: str
    rows: Rows
    inputs: list[Variable]
    leaves: list[Variable]


def divide(model: Any, data: Any, observed: Any, mode: Any) -> Any:
    """Return a model with the rows divided over the ranks, see `parallelize`."""
    terms = [_term(model, one) for one in _chosen(model, observed)]
    given = _given(model, data, terms)
    terms.sort(key=_length)
    groups = [list(group) for _, group in itertools.groupby(terms, _length)]
    potentials = [_potential(model, group, given, mode) for group in groups]
    used = {leaf for potential in potentials for leaf in potential.leaves}
    unused = [one.name for one in given or () if one not in used]
    if unused:
        raise ValueError(
            f"parallelize: data: the observed variables that are divided do not depend on {unused}"
        )
    return _replaced(model, terms, potentials)


def _length(term):
    return term.length


# The terms


def _chosen(model, observed):
    if not isinstance(model, pm.Model):
        raise TypeError(f"parallelize: expected a pymc.Model, got {model!r}")
    names = [one.name for one in model.observed_RVs]
    if isinstance(observed, str) or not names or {*(names if observed is None else observed)} - {*names}:
        raise ValueError(
            f"parallelize: observed: expected a list of observed variables, of which the model has "
            f"{names}, got {observed!r}"
        )
    return [one for one in model.observed_RVs if observed is None or one.name in observed]


def _term(model, variable):
    own = model.rvs_to_values[variable]
    others = {one: model.rvs_to_values[one] for one in model.observed_RVs if one is not variable}
    kept = {one: one for one in model.free_RVs}
    (value,) = substitute([pm.logp(variable, own, warn_rvs=False)], {**kept, **others})
    observed = [one for one in ancestors([own]) if _is_leaf(one) and one.type.ndim]
    if not observed:
        raise ValueError(
            f"parallelize: expected that {variable.name!r} has observed values with rows on axis 0, got "
            f"{own}; leave it out by observed=[...], with the names of the others"
        )
    sizes = _sizes(variable, model.free_RVs, len(_array(observed[0])))
    found = ancestors([value], blockers=[*kept, *sizes])
    leaves = [one for one in dict.fromkeys(found) if _is_leaf(one) and one not in sizes]
    return Term(variable, observed[0], value, sizes, leaves)


def _sizes(variable, free, length):
    """Return the sizes of distributions that begin with the number of rows."""
    sizes = []
    for one in ancestors([variable], blockers=free):
        of_node = getattr(one.owner and one.owner.op, "size_param", None)
        size = of_node and of_node(one.owner)
        if size is not None and isinstance(size.type, TensorType) and size not in sizes:
            extents = pytensor.function([], size, mode="FAST_COMPILE")()
            if len(extents) and extents[0] == length:
                sizes.append(size)
    return sizes


def _is_leaf(one):
    return isinstance(one, (Constant, SharedVariable)) and isinstance(one.type, TensorType)


def _array(leaf):
    return leaf.data if isinstance(leaf, Constant) else leaf.get_value(borrow=True)


# The rows


def _given(model, data, terms):
    """Return the arrays that the script gives, or None for the model's own, by leaf; or None."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise TypeError(
            f"parallelize: data: expected a dictionary of arrays by name, got {type(data).__name__}"
        )
    known = {one.name: one for one in model.data_vars}
    known.update({term.variable.name: term.observed for term in terms})
    given = {term.observed: None for term in terms}
    for key, array in data.items():
        name = getattr(key, "name", key)
        if name not in known:
            raise ValueError(
                f"parallelize: data: expected names of pm.Data or of observed variables, which are "
                f"{sorted(known)}, got {name!r}"
            )
        given[known[name]] = array
    return given


def _potential(model, terms, given, mode):
    name = "_and_".join(term.variable.name for term in terms)
    title = f"parallelize({name})"
    leaves = list(dict.fromkeys(itertools.chain(*(term.leaves for term in terms))))
    rows = [one for one in leaves if _has_rows(one, terms[0].length, given)]
    arrays, variables, replaced = _rows(rows, given)
    inputs = _inputs(model, terms, rows)
    parameters = [one.type(one.name) for one in inputs]
    replaced.update(zip(inputs, parameters))
    for term in terms:
        n_rows = replaced[term.observed].shape[:1]
        replaced.update((size, pt.join(0, n_rows, size[1:])) for size in term.sizes)
    values = substitute([term.value for term in terms], replaced)
    total = sum(total_of(title, one) for one in values)
    differentiable = [one in model.free_RVs and one.type.dtype.startswith("float") for one in inputs]
    checks = {} if model.check_bounds else {"checks": _REMOVED}
    made = Rows(title, total, parameters, differentiable, variables, arrays, mode, **checks)
    made.try_halves(_values_at(model, inputs))
    return Potential(f"{name}_rows", made, inputs, rows)


def _has_rows(leaf, length, given):
    if given is not None:
        return leaf in given
    return leaf.type.ndim and len(_array(leaf)) == length


def _rows(leaves, given):
    """Return arrays, variables for their rows, and the variable by leaf.

    Constants that are equal, such as an index that is used twice, have one array.
    """
    arrays, variables, kept, replaced = [], [], [], {}
    for leaf in leaves:
        array = (given or {}).get(leaf)
        same = [one for one in kept if array is None and _are_equal(one, leaf)]
        if same:
            variable = variables[kept.index(same[0])]
        else:
            kept.append(leaf if array is None else None)
            arrays.append(_array(leaf) if array is None else array)
            variables.append(like(leaf, leaf.name or f"data[{len(variables)}]", leaf.type.shape))
            variable = variables[-1]
        replaced[leaf] = variable
    return arrays, variables, replaced


def _are_equal(one, other):
    return isinstance(one, Constant) and isinstance(other, Constant) and one.equals(other)


def _inputs(model, terms, rows):
    """Return the variables of the model that the ranks need: free ones, and data without rows."""
    free, sizes = {*model.free_RVs}, itertools.chain(*(term.sizes for term in terms))
    shared = {*itertools.chain(*(term.leaves for term in terms))} - {*rows}
    found = ancestors([term.value for term in terms], blockers=[*free, *sizes])
    return [
        one
        for one in dict.fromkeys(found)
        if one in free or (one in shared and isinstance(one, SharedVariable))
    ]


def _values_at(model, inputs):
    """Return the values of variables of the model at a point near the initial one."""
    random = np.random.default_rng(0)
    point = {
        name: value + random.uniform(-0.5, 0.5, value.shape).astype(value.dtype)
        if value.dtype.kind == "f"
        else value
        for name, value in model.initial_point(random_seed=0).items()
    }
    compute = model.compile_fn(
        model.replace_rvs_by_values(inputs), mode="FAST_COMPILE", on_unused_input="ignore"
    )
    return [np.asarray(one, kind.type.dtype) for one, kind in zip(compute(point), inputs)]


# The model


def _replaced(model, terms, potentials):
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
        graph.add_output(model_potential(total))
    made = model_from_fgraph(graph, mutate_fgraph=True)
    made.check_bounds = model.check_bounds
    return made
