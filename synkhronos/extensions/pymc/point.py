"""A model's variables in graphs of their own, and values with which graphs are tried."""

from __future__ import annotations

import itertools
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pytensor.graph.rewriting.utils import rewrite_graph

from synkhronos._typing import AnyArray
from synkhronos.engines.names import Constant, TensorType, Variable, ancestors
from synkhronos.extensions.pymc.leaves import has_dims, is_leaf
from synkhronos.extensions.pymc.potential import substitute

#: By how much values differ from the initial point, before and after points of the prior are tried.
_NEAR, _FAR = (0.5, 0.5, 0.5, 0.1, 0.0, 1.0, 1.0, 1.0), (2.0, 0.2, 1.0, 4.0)
_DRAWS, _ROUNDS = 64, 8


class Point:
    """A model's variables as functions of parameters, and values of these near the initial point.

    Parameters
    ----------
    model : pymc.Model

    Attributes
    ----------
    parameters : dict
        The tensors that stand for the free variables.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._sources: dict[Variable, Variable] = {}
        self.parameters: dict[Variable, Variable] = {
            item: TensorType(item.type.dtype, item.type.shape)(item.name)  # a name may look like a dtype
            for item in model.free_RVs
        }
        self._known: dict[Variable, Variable] = {
            variable: _with_dims(tensor, variable) for variable, tensor in self.parameters.items()
        }
        parts = [
            *model.basic_RVs,
            *model.rvs_to_values.values(),
            *model.potentials,
            *model.deterministics,
        ]
        for variable in [item for item in ancestors(parts) if is_leaf(item) and has_dims(item)]:
            tensor = _tensor_of(variable)
            self._sources[tensor] = variable
            self._known[variable] = _with_dims(tensor, variable)
        for variable in model.observed_RVs:
            (self._known[variable],) = substitute([model.rvs_to_values[variable]], self._known)

    def graph_of(self, variable: Variable) -> Variable:
        """Return a variable as a function of the parameters and of observed values."""
        known = {item: value for item, value in self._known.items() if item is not variable}
        return lowered(substitute([variable], known)[0])

    def value_of(self, variable: Variable) -> Variable:
        """Return the values of an observed variable."""
        return lowered(self._known[variable])

    def source_of(self, leaf: Variable) -> Variable:
        """Return the variable of the model for which a leaf of a graph stands."""
        return self._sources.get(leaf, leaf)

    def stand_in_of(self, variable: Variable) -> Variable:
        """Return the leaf in graphs for ``pm.Data`` of the model."""
        return next((leaf for leaf, source in self._sources.items() if source is variable), variable)

    def values(self, inputs: Sequence[Variable] | None = None) -> list[AnyArray]:
        """Return the values of variables near the initial point; by default, of the free variables."""
        return next(self.tried(list(self.parameters) if inputs is None else inputs))

    def computed(
        self, outputs: Sequence[Variable], others: Mapping[Variable, AnyArray] | None = None
    ) -> list[AnyArray]:
        """Return the values of graphs there, which may also depend on others with these values."""
        others = others or {}
        inputs = [*self.parameters.values(), *others]
        compute = pytensor.function(inputs, list(outputs), mode="FAST_COMPILE", on_unused_input="ignore")
        return list(compute(*self.values(), *others.values()))

    def tried(self, inputs: Sequence[Variable]) -> Iterator[list[AnyArray]]:
        """Yield values at which a log-probability may be finite: near the initial point, then others."""
        model, variables = self._model, [self.source_of(variable) for variable in inputs]
        compute = model.compile_fn(
            model.replace_rvs_by_values(variables),
            inputs=model.value_vars,
            mode="FAST_COMPILE",
            on_unused_input="ignore",
        )
        random, initial = np.random.default_rng(0), model.initial_point(random_seed=0)

        def near(width: float) -> list[AnyArray]:
            point = {
                name: value + random.uniform(-width, width, value.shape).astype(value.dtype)
                if value.dtype.kind == "f"
                else value
                for name, value in initial.items()
            }
            return _typed(compute(point), inputs)

        yield from map(near, _NEAR)
        for drawn in _draws(variables):
            yield _typed(drawn, inputs)
        yield from map(near, itertools.chain(*[_FAR] * _ROUNDS))


def _tensor_of(leaf: Variable) -> Variable:
    """Return a tensor with the value of a leaf whose dimensions have names."""
    if isinstance(leaf, Constant):
        return pt.constant(leaf.data, leaf.name)
    return pytensor.shared(leaf.get_value(borrow=True), leaf.name, borrow=True)


def _with_dims(tensor: Variable, variable: Variable) -> Variable:
    """Return a tensor with the dimensions of a variable, if these have names."""
    if not has_dims(variable):
        return tensor
    from pytensor.xtensor import as_xtensor

    return as_xtensor(tensor, dims=variable.type.dims)


def lowered(graph: Variable) -> Variable:
    """Return a graph of tensors, for one that may have dimensions with names."""
    if not any(map(has_dims, ancestors([graph]))):
        return graph
    return rewrite_graph(graph.values if has_dims(graph) else graph, include=("lower_xtensor",))


def _draws(variables: Sequence[Variable]) -> Iterator[Sequence[Any]]:
    """Return values drawn from the prior, if it can be drawn from."""
    try:
        return zip(*pm.draw(list(variables), draws=_DRAWS, random_seed=0, mode="FAST_COMPILE"))
    except Exception:  # as pm.Flat raises; the draws only help to find a point
        return iter(())


def _typed(values: Sequence[Any], inputs: Sequence[Any]) -> list[AnyArray]:
    return [np.asarray(value, kind.type.dtype) for value, kind in zip(values, inputs)]
