"""A model's variables in graphs of their own, and values with which graphs are tried."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.rewriting.utils import rewrite_graph

from synkhronos._typing import AnyArray
from synkhronos.engines.names import Constant, TensorType, Variable, ancestors
from synkhronos.extensions.pymc.leaves import has_dims, is_leaf
from synkhronos.extensions.pymc.potential import substitute


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
        return _as_tensor(substitute([variable], known)[0])

    def value_of(self, variable: Variable) -> Variable:
        """Return the values of an observed variable."""
        return _as_tensor(self._known[variable])

    def source_of(self, leaf: Variable) -> Variable:
        """Return the variable of the model for which a leaf of a graph stands."""
        return self._sources.get(leaf, leaf)

    def stand_in_of(self, variable: Variable) -> Variable:
        """Return the leaf in graphs for ``pm.Data`` of the model."""
        return next((leaf for leaf, source in self._sources.items() if source is variable), variable)

    def values(self, inputs: Sequence[Variable]) -> list[AnyArray]:
        """Return the values of variables of the model."""
        random = np.random.default_rng(0)
        point = {
            name: value + random.uniform(-0.5, 0.5, value.shape).astype(value.dtype)
            if value.dtype.kind == "f"
            else value
            for name, value in self._model.initial_point(random_seed=0).items()
        }
        compute = self._model.compile_fn(
            self._model.replace_rvs_by_values([self.source_of(variable) for variable in inputs]),
            inputs=self._model.value_vars,
            mode="FAST_COMPILE",
            on_unused_input="ignore",
        )
        return [np.asarray(item, kind.type.dtype) for item, kind in zip(compute(point), inputs)]


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


def _as_tensor(graph: Variable) -> Variable:
    """Return a graph of tensors, for one that may have dimensions with names."""
    if not has_dims(graph):
        return graph
    return rewrite_graph(graph.values, include=("lower_xtensor",))
