"""A copy of a PyMC model, with sums over the rows of all ranks in place of observed variables."""

from __future__ import annotations

import itertools
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np
import pymc as pm
from pymc.model.fgraph import fgraph_from_model, model_from_fgraph, model_potential
from pytensor.graph.op import Op

import synkhronos as synk
from synkhronos._text import listed
from synkhronos._typing import AnyArray
from synkhronos.engines.names import SharedVariable, Variable, ancestors
from synkhronos.extensions.pymc.divided import DividedModel
from synkhronos.extensions.pymc.groups import Group
from synkhronos.extensions.pymc.imputed import select_first
from synkhronos.extensions.pymc.leaves import has_dims
from synkhronos.extensions.pymc.point import Point
from synkhronos.extensions.pymc.potential import substitute, sum_over_ranks
from synkhronos.extensions.pymc.rows import Rows
from synkhronos.extensions.pymc.terms import Term, number_of_rows, terms_of


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
    if not isinstance(model, pm.Model):
        raise TypeError(f"parallelize: expected a pymc.Model, got {model!r}")
    if isinstance(model, DividedModel):
        raise ValueError(
            f"parallelize: expected a model whose rows are not divided, got one of parallelize(), with "
            f"{listed(rows.name for rows in model.sums_over_rows())}; give it the original model"
        )
    point = Point(model)
    terms = sorted(terms_of(model, observed, point, data is not None), key=number_of_rows)
    given = _given(model, data, terms, point)
    potentials = []
    for _, group in itertools.groupby(terms, number_of_rows):
        summed = Group(model, list(group), given, point, mode)
        potentials.append(Potential(f"{summed.name}_rows", *summed.summed()))
    used = {leaf for potential in potentials for leaf in potential.leaves}
    unused = [item.name for item in given or () if item not in used]
    if unused:
        raise ValueError(
            f"parallelize: data: the observed variables that are divided do not depend on {unused}"
        )
    return _replaced(model, terms, potentials, point)


# The arrays


def _given(model: Any, data: Any, terms: Sequence[Term], point: Point) -> dict[Variable, Any] | None:
    """Return the script's arrays by leaf, with None for the model's own values; or None."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise TypeError(
            f"parallelize: data: expected a dictionary of arrays by name, got {type(data).__name__}"
        )
    known = {variable.name: point.stand_in_of(variable) for variable in model.data_vars}
    observed = [term for term in terms if term.observed is not None]
    known.update({term.variable.name: term.observed for term in observed})
    given: dict[Variable, Any] = {term.observed: None for term in observed}
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


# The model


class _WithoutInitialValues:
    """A model of which PyMC makes a copy: it refuses initial values, which are added to the copy."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.rvs_to_initial_values: dict[Variable, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _replaced(model: Any, terms: Sequence[Term], potentials: Sequence[Potential], point: Point) -> Any:
    """Return a copy of the model, with potentials in place of terms."""
    graph, copies = fgraph_from_model(_WithoutInitialValues(model))
    for item in _dropped(model, terms, potentials, point):
        graph.remove_output(graph.outputs.index(copies[item]))
    for item in [copies[term.variable] for term in terms if term.value is not None]:
        value = item.owner.inputs[1]  # for what depends on the variable
        graph.replace(item, item.type.filter_variable(value, allow_convert=True), import_missing=True)
    for name, rows, inputs, _ in potentials:
        _check_gradients(model, inputs)
        values = [copies[point.source_of(variable)] for variable in inputs]
        total = sum_over_ranks(rows, [item.values if has_dims(item) else item for item in values])
        total.name = name
        own = [] if isinstance(model_potential, Op) else [name]  # PyMC 5, or 6
        graph.add_output(model_potential(total, *own))
    made = model_from_fgraph(graph, mutate_fgraph=True)
    made.check_bounds = model.check_bounds
    # PyMC has reordered the variables, and draws are made in their order.
    order = list(model.named_vars)
    for variables in (made.free_RVs, made.deterministics):
        variables.sort(key=lambda one: order.index(one.name))
    _share_data(model, made)
    _copy_initial_values(model, made)
    if not any(has_dims(variable) for variable in made.free_RVs):
        select_first(made.free_RVs, lambda: point.values([model[item.name] for item in made.free_RVs]))
    return made


def _share_data(model: Any, made: Any) -> None:
    """Have both models use the same data and lengths of dimensions."""
    pairs = [(made[item.name], item) for item in model.data_vars if item.name in made.named_vars]
    pairs += [(made.dim_lengths[dim], item) for dim, item in model.dim_lengths.items()]
    for copied, variable in pairs:
        if isinstance(variable, SharedVariable):
            copied.container = variable.container
    made._coords = model._coords


def _check_gradients(model: Any, inputs: Sequence[Variable]) -> None:
    """Raise ValueError if PyTensor has no gradient of the transformation of a variable."""
    found = [
        item.name for item in inputs if has_dims(item) and model.rvs_to_transforms.get(item) is not None
    ]
    if found:
        raise ValueError(
            f"parallelize: {found[0]!r} is a variable of pymc.dims with a transformation, of which "
            f"PyTensor has no gradient in a potential; use a variable of pm in its place, as in "
            f"pymc.dims.as_xtensor(pm.HalfNormal(...), dims=(...))"
        )


def _dropped(
    model: Any, terms: Sequence[Term], potentials: Sequence[Potential], point: Point
) -> list[Variable]:
    """Return the variables of the model that depend on rows."""
    left = {*itertools.chain(*(term.leaves for term in terms))}
    gone = {leaf for potential in potentials for leaf in potential.leaves}
    gone.update(source for term in terms for source in term.sources if source not in left)
    gone = {point.source_of(item) for item in gone}
    gone.update(term.variable for term in terms)
    dropped = [term.variable for term in terms] + [item for item in model.data_vars if item in gone]
    for variable in model.deterministics:
        if gone & {*ancestors([variable], blockers=model.free_RVs)}:
            dropped.append(variable)
    return dropped


def _copy_initial_values(model: Any, made: Any) -> None:
    data = {item: made[item.name] for item in model.data_vars if item.name in made.named_vars}
    for variable, value in model.rvs_to_initial_values.items():
        if isinstance(value, Variable):
            (value,) = substitute([value], data)
        if value is not None:
            made.set_initval(made[variable.name], value)
