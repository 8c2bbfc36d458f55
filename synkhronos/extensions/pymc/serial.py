"""The sum over rows and its gradient on one process: of parts of the rows, or of the model itself."""

from __future__ import annotations

import math
import warnings
from typing import Any, Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorConstant

import synkhronos as synk
from synkhronos._typing import AnyArray

_SAMPLE = 1000  # rows on which a sum is tested
_BLOCKS = 8
_CHUNK = 64 << 20  # bytes of rows that are computed at once


def value_and_gradient(total: Any, parameters: Sequence[Any], wrt: Sequence[int]) -> Any:
    """Return a vector of a sum and its derivatives, in the order of the parameters."""
    chosen = [parameters[index] for index in wrt]
    gradients = pt.grad(total, chosen, disconnected_inputs="ignore") if chosen else []
    return pt.concatenate([total[None], *(one.ravel() for one in gradients)])


def n_bytes(data: Sequence[synk.Data]) -> int:
    """Return the size of rows."""
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in data)


class SerialSum:
    """The sum and its gradient, by the function of the ranks, which the master calls alone.

    Parameters
    ----------
    name : str
        Its name in messages.
    function : Function
        Returns the vector of `value_and_gradient`, for rows and values of the parameters.
    data : list of Data
        The rows.
    parameters : list of variables
        The parameters.
    wrt : list of int
        The positions of the differentiable parameters.
    """

    def __init__(
        self,
        name: str,
        function: synk.Function,
        data: Sequence[synk.Data],
        parameters: Sequence[Any],
        wrt: Sequence[int],
    ) -> None:
        self.name, self.n_rows = name, len(data[0])
        self.n_bytes = n_bytes(data)
        self.computed_with = [one.type.dtype for one in parameters]
        self.dtypes = [one.dtype for one in data] + self.computed_with
        self._function, self._data = function, list(data)
        self._parameters, self._wrt = parameters, wrt

    def sample(self) -> list[AnyArray]:
        """Return at most 1000 of the rows, evenly spaced."""
        step = -(-self.n_rows // _SAMPLE)
        return [one[::step] for one in map(np.asarray, self._data)]

    def of(self, rows: Sequence[AnyArray], values: Sequence[Any]) -> AnyArray:
        """Return the sum over some rows, and its gradient, for values of the parameters."""
        result: Any = self._function.as_theano(*rows, *values)
        return np.asarray(result)

    def of_all(self, values: Sequence[Any]) -> AnyArray:
        """Return the sum over all rows, and its gradient, computed in parts."""
        arrays = [np.asarray(one) for one in self._data]
        step = -(-self.n_rows // max(1, self.n_bytes // _CHUNK))
        parts = (slice(start, start + step) for start in range(0, self.n_rows, step))
        found: Any = sum(self.of([one[part] for one in arrays], values) for part in parts)
        return np.asarray(found)

    def magnitudes(self, values: Sequence[Any]) -> AnyArray:
        """Return about how large the terms of each entry are, which may cancel each other in the sum."""
        rows = self.sample()
        length = len(rows[0])
        bounds = np.linspace(0, length, min(_BLOCKS, length) + 1).astype(int)
        blocks = (slice(*each) for each in zip(bounds, bounds[1:]))
        found: Any = sum(np.abs(self.of([one[block] for one in rows], values)) for block in blocks)
        return np.asarray(found * (self.n_rows / length))

    def label(self, entry: int, values: Sequence[Any]) -> str:
        """Return what an entry is, for messages."""
        if not entry:
            return "the log-probability"
        for index in self._wrt:
            entry -= np.size(values[index])
            if entry <= 0:
                break
        return f"the derivative with respect to {self._parameters[index]}"


class PlainSum:
    """The sum and its gradient as a model without ranks computes them, from its own graph and data.

    Parameters
    ----------
    total : variable
        The sum, which depends on `parameters`, constants and shared variables.
    parameters, wrt
        As of `SerialSum`.
    mode : mode of PyTensor
        The mode in which it is compiled.
    """

    def __init__(self, total: Any, parameters: Sequence[Any], wrt: Sequence[int], mode: Any) -> None:
        # The script may give shared variables other values before the first evaluation, and Numba keeps
        # the constants of its functions.
        leaves = [one for one in ancestors([total]) if isinstance(one, SharedVariable) or _is_large(one)]
        self._data = [
            one.get_value(borrow=True) if isinstance(one, SharedVariable) else one.data for one in leaves
        ]
        stand_ins = [one.type() for one in leaves]
        self._function = pytensor.function(
            [*parameters, *stand_ins],
            value_and_gradient(total, parameters, wrt),
            givens=dict(zip(leaves, stand_ins)),
            mode=mode,
            on_unused_input="ignore",
        )

    def of_all(self, values: Sequence[Any]) -> AnyArray:
        """Return the sum over all rows, and its gradient."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Numba does not cache functions with arrays of constants
            return np.asarray(self._function(*values, *self._data))


def _is_large(variable: Any) -> bool:
    return isinstance(variable, TensorConstant) and variable.data.size >= _SAMPLE
