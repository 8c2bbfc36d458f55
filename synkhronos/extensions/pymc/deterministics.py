"""The values of deterministic variables by rows, for draws of the parameters."""

from __future__ import annotations

import itertools
from typing import Any, Callable, NamedTuple, Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt
import xarray

import synkhronos as synk
from synkhronos._text import listed
from synkhronos._typing import AnyArray
from synkhronos.engines.names import Variable
from synkhronos.extensions.pymc.graphs import array_of, folded, has_length, padded
from synkhronos.extensions.pymc.potential import substitute
from synkhronos.extensions.pymc.rows import slices_of
from synkhronos.extensions.pymc.serial import dependence
from synkhronos.extensions.pymc.terms import Point, arrays_of, leaves_of, of_parameters, with_rows


def computed(
    draws: Any,
    model: Any,
    names: Sequence[str] | None,
    rows: slice | None = None,
    mode: Any = None,
    sample_dims: Sequence[str] = ("chain", "draw"),
) -> xarray.Dataset:
    """Return deterministic variables for draws of the parameters; see `compute_deterministics`."""
    known = {variable.name: variable for variable in model.deterministics}
    names = list(known) if names is None else list(names)
    if isinstance(names, str) or {*names} - {*known}:
        raise ValueError(
            f"compute_deterministics: var_names: expected names of deterministic variables, which are "
            f"{list(known)}, got {names!r}"
        )
    draws, point = getattr(draws, "posterior", draws), Point(model)
    missing = [variable.name for variable in model.free_RVs if variable.name not in draws]
    if missing:
        raise ValueError(
            f"compute_deterministics: draws: expected draws of the free variables of the model, got "
            f"none of {listed(missing)}"
        )
    arrays = [draws[item.name].astype(item.type.dtype, copy=False) for item in model.free_RVs]
    core = [[dim for dim in array.dims if dim not in sample_dims] for array in arrays]
    found = {}
    for name in names:
        by_row = _by_row(model, known[name], point)
        if by_row is None:
            inputs, graph = list(point.parameters.values()), of_parameters(known[name], point)
            compute = pytensor.function(inputs, graph, on_unused_input="ignore")
        else:
            compute = by_row.function(name, list(point.parameters.values()), rows, mode)
        axes = model.named_vars_to_dims.get(name) or [None] * known[name].type.ndim
        dims = [dim or f"{name}_dim_{axis}" for axis, dim in enumerate(axes)]
        values = xarray.apply_ufunc(
            lambda *values, compute=compute: np.array(compute(*values)),
            *arrays,
            input_core_dims=core,
            output_core_dims=[dims],
            exclude_dims={*itertools.chain(*core)},
            vectorize=True,
        )
        labels = {dim: _labels(model, dim, values.sizes[dim]) for dim in dims}
        if by_row is not None:
            labels[dims[0]] = _labels(model, dims[0], len(by_row.arrays[0]))[rows or slice(None)]
        found[name] = values.transpose(*sample_dims, ...).assign_coords(labels)
    return xarray.Dataset(found)


def _labels(model: Any, dim: str, length: int) -> AnyArray:
    """Return the labels of the items of a dimension."""
    labels = model.coords.get(dim)
    return np.arange(length) if labels is None else np.asarray(labels)


# The variables


class ByRow(NamedTuple):
    """A variable that has an item for each row.

    Attributes
    ----------
    output : variable
        A graph of the rows.
    variables : list of variables
        The variables that stand for rows.
    arrays : list of arrays
        The rows.
    """

    output: Variable
    variables: list[Variable]
    arrays: list[Any]

    def function(
        self, name: str, parameters: Sequence[Variable], rows: slice | None, mode: Any
    ) -> Callable[..., Any]:
        """Return a function of the parameters, which all ranks compute."""
        arrays = [array if rows is None else array[rows] for array in self.arrays]
        if not len(arrays[0]):
            raise ValueError(
                f"compute_deterministics: rows: expected rows of {name!r}, got none in {rows}"
            )
        data = [synk.data(array, var=item, constant=True) for array, item in zip(arrays, self.variables)]
        compute = synk.function(
            self.variables,
            (self.output, "gather"),
            bcast_inputs=parameters,
            mode=mode,
            name=f"compute_deterministics({name})",
            on_unused_input="ignore",
        )
        return lambda *values: compute(*data, *values, num_slices=slices_of(data))


def _by_row(model: Any, variable: Variable, point: Point) -> ByRow | None:
    """Return the rows of a variable, if it has an item for each, of constants and shared variables."""
    parameters, values = list(point.parameters.values()), point.values()
    graph = of_parameters(variable, point)
    (whole,) = point.computed([graph])
    if not whole.ndim or len(whole) < 2:
        return None
    try:
        (graph,) = folded([padded(variable.name, graph, len(whole))])
    except ValueError:  # a sparse matrix
        return None
    leaves = leaves_of([graph], len(whole))
    stand_ins = {item: item.type(item.name) for item in leaves}
    outputs = substitute([graph], stand_ins)
    arrays = [array_of(leaf) for leaf in leaves]
    inputs = {**point.parameters, **stand_ins}
    found = dependence({variable: outputs[0]}, len(whole), inputs, [*values, *arrays])
    rows = [leaf for leaf in leaves if has_length(leaf, len(whole)) and leaf not in found.across]
    if not rows or found.whole:
        return None
    arrays, variables, by_leaf = arrays_of(rows, {})
    (output,) = with_rows(model, outputs, stand_ins, len(whole), by_leaf)
    now = {stand_ins[leaf]: pt.constant(array_of(leaf)) for leaf in leaves if leaf not in rows}
    made = ByRow(substitute([output], now)[0], variables, arrays)
    return made if _agrees(made, parameters, values, whole) else None


def _agrees(made: ByRow, parameters: Sequence[Variable], values: Sequence[Any], whole: AnyArray) -> bool:
    """Whether the items of two halves of the rows are those of all rows."""
    compute = pytensor.function(
        [*made.variables, *parameters], made.output, mode="FAST_COMPILE", on_unused_input="ignore"
    )
    half = len(whole) // 2
    for rows in (slice(None, half), slice(half, None)):
        try:
            items = compute(*(array[rows] for array in made.arrays), *values)
        except (ValueError, IndexError, TypeError, AssertionError):
            return False
        if items.shape != whole[rows].shape or not np.allclose(items, whole[rows], equal_nan=True):
            return False
    return True
