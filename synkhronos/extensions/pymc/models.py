"""`DividedModel`: a model without the rows, which says where PyMC would need them.

PyMC computes predictions and the log-likelihood of each row from the observed variables of a model, and
nothing at all if there are none. It also starts chains in other processes, or asks JAX, without a
question to the model, and fails there with long tracebacks. But it reads the observed variables first.
So the model looks at who reads them. Models that PyMC makes of its graph, as ``pm.do`` and copies, do so
too.
"""

from __future__ import annotations

import itertools
import multiprocessing
import operator
import sys
import warnings
from types import FrameType
from typing import Any, Mapping, Sequence

import numpy as np
import pymc as pm
from pymc.model import fgraph
from pymc.model.fgraph import fgraph_from_model, model_from_fgraph, model_potential
from pytensor.graph.op import Op

import synkhronos as synk
from synkhronos._text import listed
from synkhronos._typing import AnyArray
from synkhronos.engines.names import SharedVariable, Variable, ancestors
from synkhronos.extensions.pymc.graphs import has_dims, select_first
from synkhronos.extensions.pymc.potential import RowsSum, substitute, sum_over_ranks, sums_over_rows
from synkhronos.extensions.pymc.terms import Group, Point, Term, lowered, terms_of

_NEEDS_JAX = ("blackjax", "numpyro")
_PACKAGES = ("pymc", "pymc_extras")


class DividedModel(pm.Model):  # type: ignore[misc]
    """A model whose observed variables, or some of them, are divided over the ranks."""

    @property
    def observed_RVs(self) -> Any:  # noqa: N802 - PyMC's name
        """The observed variables that are not divided."""
        _check_readers(sys._getframe(1))
        return self.__dict__["observed_RVs"]

    @observed_RVs.setter
    def observed_RVs(self, variables: Any) -> None:  # noqa: N802
        self.__dict__["observed_RVs"] = variables

    def replace_rvs_by_values(self, graphs: Sequence[Variable], **options: Any) -> Any:
        """Return graphs of the values, without named dimensions, of which there are no gradients."""
        return [lowered(graph) for graph in super().replace_rvs_by_values(graphs, **options)]

    def sums_over_rows(self) -> list[Any]:
        """Return the sums over rows in the model."""
        return sums_over_rows(self.potentials)

    def left_out(self) -> list[str]:
        """Return the names of the deterministic variables that depend on rows."""
        models = [rows.model for rows in self.sums_over_rows() if getattr(rows, "model", None)]
        names = [variable.name for model in models for variable in model.deterministics]
        return [item for item in dict.fromkeys(names) if item not in self.named_vars]

    def __getitem__(self, key: str) -> Any:
        try:
            return super().__getitem__(key)
        except KeyError:
            if key in self.left_out():
                raise KeyError(_left_out([key])) from None
            raise

    def set_data(self, name: str, values: Any, coords: Any = None) -> None:
        """Change data of the model, whose rows may be divided; see ``pymc.Model.set_data``."""
        for rows in () if name in self.named_vars else self.sums_over_rows():
            data = rows.model and rows.model.named_vars.get(name)
            if data is not None and rows.depends_on(data):
                rows.model.set_data(name, values, coords=coords)
                return
            if data is not None and data in rows.model.data_vars:
                raise ValueError(
                    f"set_data: the rows of {name!r} were given to parallelize() by data={{...}}; call "
                    f"it again with others"
                )
        super().set_data(name, values, coords=coords)


def _left_out(names: Sequence[str]) -> str:
    return (
        f"{', '.join(map(repr, names))}: deterministic variables that depend on the rows are not "
        f"computed while sampling; compute them with compute_deterministics(drawn, model), or sample "
        f"with synkhronos.extensions.pymc.sample(parallel, deterministics=True)"
    )


def _model_of_graph(**options: Any) -> pm.Model:
    """Return the model into which PyMC puts the variables of a graph."""
    made, graph = pm.Model(**options), sys._getframe(1).f_locals["fgraph"]
    if any(isinstance(node.op, RowsSum) for node in graph.apply_nodes):
        made.__class__ = DividedModel
    return made


fgraph.Model = _model_of_graph


def _check_readers(frame: FrameType | None) -> None:
    """Raise if a function of PyMC among the callers cannot do its work with such a model."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] in _PACKAGES:
            check = _CHECKS.get(frame.f_code.co_name)
            if check is not None:
                check(frame, frame.f_locals)
                return
        frame = frame.f_back


def _check_density(frame: FrameType, given: dict[str, Any]) -> None:
    if given.get("kind") != "likelihood" or given.get("var_names") is not None:
        return
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "sample" and frame.f_globals.get("__name__") == pm.sample.__module__:
            warnings.warn(
                "the log-likelihood has no rows that are divided over the ranks; compute it from the "
                "draws, by pm.compute_log_likelihood(idata, model=model) with the model that was given "
                "to parallelize()",
                stacklevel=2,
            )
            return
    raise ValueError(
        "compute_log_likelihood: this model, from parallelize(), has no rows. Give the model that was "
        "given to parallelize(), as in pm.compute_log_likelihood(idata, model=model)"
    )


def _check_predictive(frame: FrameType, given: dict[str, Any]) -> None:
    if given.get("var_names") is None:
        raise ValueError(
            "sample_posterior_predictive: this model, from parallelize(), has no rows. Give the model "
            "that was given to parallelize(), as in pm.sample_posterior_predictive(idata, model=model)"
        )


def _check_sample(frame: FrameType, given: dict[str, Any]) -> None:
    sampler = given.get("nuts_sampler")  # in PyMC 6, None until it has chosen one
    if sampler in _NEEDS_JAX:
        _refuse_jax(frame, given)
    names, model = given.get("var_names"), given.get("model")
    if names and isinstance(model, DividedModel) and {*names} & {*model.left_out()}:
        raise ValueError(f"var_names: {_left_out(sorted({*names} & {*model.left_out()}))}")
    cores, chains, context = given.get("cores"), given.get("chains"), given.get("mp_ctx")
    if sampler != "pymc" or not cores or not chains or min(cores, chains) < 2:
        return
    if isinstance(context, str) or context is None:
        context = multiprocessing.get_context(context)
    if context.get_start_method() == "fork":
        raise ValueError(
            f"pm.sample: {cores} chains would be sampled in processes that are forked from this one and "
            f"cannot use the ranks; sample them one after another, with pm.sample(cores=1)"
        )


def _check_smc(frame: FrameType, given: dict[str, Any]) -> None:
    if min(given["cores"], given["chains"]) > 1:
        raise ValueError(
            f"pm.sample_smc: {given['chains']} chains would be sampled in processes of their own, which "
            f"cannot use the ranks; sample them one after another, with pm.sample_smc(cores=1)"
        )


def _check_pathfinder(frame: FrameType, given: dict[str, Any]) -> None:
    option = "parallel=False" if "parallel" in given else 'concurrent="thread"'  # as it was once
    if given.get("parallel") or given.get("concurrent") == "process":
        raise ValueError(
            f"fit_pathfinder: the paths would be computed in processes of their own, which cannot use "
            f"the ranks; give it {option}"
        )


def _refuse_jax(frame: FrameType, given: dict[str, Any]) -> None:
    raise ValueError(
        'JAX cannot use the ranks; with the model of parallelize(), use nuts_sampler="nutpie" or "pymc" '
        "of pm.sample, or fit_pathfinder(parallel=False) of pymc_extras"
    )


#: What to do if a function of PyMC reads the observed variables.
_CHECKS = {
    "compute_log_density": _check_density,
    "fit_blackjax_pathfinder": _refuse_jax,
    "fit_pathfinder": _check_pathfinder,
    "sample": _check_sample,
    "sample_jax_nuts": _refuse_jax,
    "sample_posterior_predictive": _check_predictive,
    "sample_smc": _check_smc,
}


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
    by_length = operator.attrgetter("n_rows")
    terms = sorted(terms_of(model, observed, point, data is not None), key=by_length)
    given = _given(model, data, terms, point)
    groups = []
    for _, equally_long in itertools.groupby(terms, by_length):
        groups.append(Group(model, list(equally_long), given, point, mode))
        groups[-1].sum_up()
    used = {leaf for group in groups for leaf in group.leaves}
    unused = [item.name for item in given or () if item not in used]
    if unused:
        raise ValueError(
            f"parallelize: data: the observed variables that are divided do not depend on {unused}"
        )
    return _replaced(model, terms, groups, point)


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


def _replaced(model: Any, terms: Sequence[Term], groups: Sequence[Group], point: Point) -> Any:
    """Return a copy of the model, with potentials in place of terms."""
    graph, copies = fgraph_from_model(_WithoutInitialValues(model))
    for item in _dropped(model, terms, groups, point):
        graph.remove_output(graph.outputs.index(copies[item]))
    for item in [copies[term.variable] for term in terms if term.value is not None]:
        value = item.owner.inputs[1]  # for what depends on the variable
        graph.replace(item, item.type.filter_variable(value, allow_convert=True), import_missing=True)
    for group in groups:
        name, values = f"{group.name}_rows", [copies[point.source_of(item)] for item in group.inputs]
        total = sum_over_ranks(group.rows, [item.values if has_dims(item) else item for item in values])
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
        select_first(made.free_RVs, lambda items: point.values([model[item.name] for item in items]))
    return made


def _share_data(model: Any, made: Any) -> None:
    """Have both models use the same data and lengths of dimensions."""
    pairs = [(made[item.name], item) for item in model.data_vars if item.name in made.named_vars]
    pairs += [(made.dim_lengths[dim], item) for dim, item in model.dim_lengths.items()]
    for copied, variable in pairs:
        if isinstance(variable, SharedVariable):
            copied.container = variable.container
    made._coords = model._coords


def _dropped(model: Any, terms: Sequence[Term], groups: Sequence[Group], point: Point) -> list[Variable]:
    """Return the variables of the model that depend on rows."""
    left = {*itertools.chain(*(term.leaves for term in terms))}
    gone = {leaf for group in groups for leaf in group.leaves}
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
