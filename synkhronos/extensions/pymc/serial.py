"""The sum over rows and its gradient on one process, with which those of the ranks are compared.

Two things are tested, as samplers do not show that a sum is wrong: at some points, whether the
log-probability is a sum over rows that do not depend on each other; and in the first evaluations on all
ranks, whether they equal those of one process, or of the model itself.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import get_mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.variable import TensorConstant

import synkhronos as synk
from synkhronos._typing import AnyArray
from synkhronos.arithmetic.comparison import tolerance
from synkhronos.engines import names
from synkhronos.engines.analysis.rules import Terms, rule_of
from synkhronos.engines.names import Variable

_SAMPLE = 1000  # rows on which a sum is tested
_BLOCKS = 8
_CHUNK = 64 << 20  # bytes of rows that are computed at once
_COMPARED = 3  # evaluations that are finite
_TRIED = 20  # and those that are not
_LARGE = 1 << 30  # bytes of rows; of more, one evaluation is compared


def value_and_gradient(total: Any, parameters: Sequence[Any], wrt: Sequence[int]) -> Any:
    """Return a vector of a sum and its derivatives, in the order of the parameters."""
    chosen = [parameters[index] for index in wrt]
    gradients = pt.grad(total, chosen, disconnected_inputs="ignore") if chosen else []
    return pt.concatenate([total[None], *(gradient.ravel() for gradient in gradients)])


def n_bytes(data: Sequence[synk.Data]) -> int:
    """Return the size of rows."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in data)


class SerialSum:
    """The sum and its gradient, by the function of the ranks, which the master calls alone.

    The first evaluations on all ranks are compared with it, or with what the model computes.

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
    plain : PlainSum or None
        What the model computes without ranks.
    """

    def __init__(
        self,
        name: str,
        function: synk.Function,
        data: Sequence[synk.Data],
        parameters: Sequence[Any],
        wrt: Sequence[int],
        plain: PlainSum | None,
    ) -> None:
        self.name = name
        self.take(data)
        self._computed_with = [parameter.type.dtype for parameter in parameters]
        self._dtypes = [array.dtype for array in data] + self._computed_with
        self._function, self._parameters, self._wrt = function, parameters, wrt
        self._plain, self._left = plain, _COMPARED if self.n_bytes <= _LARGE else 1
        self._tried = _TRIED

    def take(self, data: Sequence[synk.Data]) -> None:
        """Use these rows from now on."""
        self._data, self.n_rows, self.n_bytes = list(data), len(data[0]), n_bytes(data)

    def sample(self) -> list[AnyArray]:
        """Return at most 1000 of the rows, evenly spaced."""
        step = -(-self.n_rows // _SAMPLE)
        return [item[::step] for item in map(np.asarray, self._data)]

    def of(self, rows: Sequence[AnyArray], values: Sequence[Any]) -> AnyArray:
        """Return the sum over some rows, and its gradient, for values of the parameters."""
        result: Any = self._function.as_theano(*rows, *values)
        return np.asarray(result)

    def of_all(self, values: Sequence[Any]) -> AnyArray:
        """Return the sum over all rows, and its gradient, computed in parts."""
        arrays = [np.asarray(array) for array in self._data]
        step = -(-self.n_rows // max(1, self.n_bytes // _CHUNK))
        parts = (slice(start, start + step) for start in range(0, self.n_rows, step))
        found: Any = sum(self.of([array[part] for array in arrays], values) for part in parts)
        return np.asarray(found)

    def _magnitudes(self, values: Sequence[Any]) -> AnyArray:
        """Return about how large the terms of each entry are, which may cancel each other in the sum."""
        rows = self.sample()
        length = len(rows[0])
        bounds = np.linspace(0, length, min(_BLOCKS, length) + 1).astype(int)
        blocks = (slice(*each) for each in zip(bounds, bounds[1:]))
        found: Any = sum(np.abs(self.of([row[block] for row in rows], values)) for block in blocks)
        return np.asarray(found * (self.n_rows / length))

    def _that_differ(
        self, values: Sequence[Any], result: AnyArray, expected: AnyArray, dtypes: Sequence[Any]
    ) -> AnyArray:
        """Return in which entries a result differs from the expected one by more than rounding.

        Terms of both signs may nearly cancel each other, so that the terms are much larger than the sum.
        """
        rtol, finite = tolerance(expected.dtype, dtypes), np.isfinite(expected)
        with np.errstate(invalid="ignore"):
            apart = np.where(finite, abs(result - expected), 0)
        scale = np.where(finite, abs(expected), 0)
        wrong = (finite != np.isfinite(result)) | ~(apart <= rtol * scale)
        if wrong.any():
            scale = np.maximum(scale, self._magnitudes(values)[: len(expected)])
            scale[~np.isfinite(scale)] = 0
            least = 64 * float(np.finfo(scale.dtype).eps * scale.max())  # where they cancel exactly
            wrong = (finite != np.isfinite(result)) | ~(apart <= rtol * scale + least)
        return wrong

    def _label(self, entry: int, values: Sequence[Any]) -> str:
        """Return what an entry is, for messages."""
        if not entry:
            return "the log-probability"
        for index in self._wrt:
            entry -= np.size(values[index])
            if entry <= 0:
                break
        return f"the derivative with respect to {self._parameters[index]}"

    def is_finite_sum(self, values: Sequence[Any]) -> bool:
        """Return whether it is finite; raise if it, or its gradient, is no sum over the rows.

        The sums over two parts of the rows must add up to the sum over all: over the two halves, and
        over every other row. At most 1000 of the rows are tried, in this process.

        Parameters
        ----------
        values : list of array
            The values of the parameters.

        Returns
        -------
        bool
            Whether the point could be used: False if the log-probability is not finite there.

        Raises
        ------
        ValueError
            If it is finite, and it or a finite derivative is not a sum over the rows.
        """
        rows = self.sample()
        half = len(rows[0]) // 2
        divisions = [(slice(half), slice(half, None)), (slice(None, None, 2), slice(1, None, 2))]
        try:
            whole = self.of(rows, values)
            if not np.isfinite(whole[0]):
                return False
            divided = [
                [self.of([row[part] for row in rows], values) for part in division]
                for division in (divisions if half else ())
            ]
        except (ValueError, IndexError, TypeError, AssertionError) as error:
            raise ValueError(
                f"{self.name}: the log-probability cannot be computed for a part of the rows. Every "
                f"array of the data with an item for each row has to have the rows on axis 0, and of a "
                f"parameter each row has to select its item, as in theta[row]. With a part of the rows: "
                f"{str(error).splitlines()[0]}"
            ) from error
        for first, second in divided:
            wrong = np.isfinite(whole)
            wrong &= self._that_differ(values, first + second, whole, self._computed_with)
            if wrong.any():
                entry = int(np.argmax(wrong))
                what = self._label(entry, values) if entry else "it"
                raise ValueError(
                    f"{self.name}: the log-probability is not a sum over the rows: of {len(rows[0])} "
                    f"rows {what} is {whole[entry]:.10g}, of two parts of them {first[entry]:.10g} and "
                    f"{second[entry]:.10g}. The terms of different rows must not depend on each other, "
                    f"as they do if they are correlated, or contain a mean over the rows: compute that "
                    f"from the data before"
                )
        return True

    @property
    def was_compared(self) -> bool:
        """Whether no more evaluations on all ranks are compared."""
        return not self._left

    def compare(self, values: Sequence[Any], result: AnyArray) -> None:
        """Compare a result of all ranks, and raise MismatchError if it differs.

        Parameters
        ----------
        values : list of array
            The values of the parameters.
        result : array
            The sum over all rows, or the vector that also has its gradient.
        """
        result = np.atleast_1d(result)
        serial = (self._plain or self).of_all(values)[: len(result)]
        wrong = self._that_differ(values, result, serial, self._dtypes)
        if wrong.any():
            entry = int(np.argmax(wrong))
            what = self._label(entry, values)
            other = "the model without ranks" if self._plain else "one process"
            remedy = "name the arrays with rows by `data`"
            if "float32" in map(str, self._dtypes):
                remedy += "; or rounding errors may be as large, and double precision helps"
            raise synk.MismatchError(
                f"{self.name}: {what}, computed by {synk.size()} rank(s), differs from that of {other}: "
                f"{result[entry]:.10g} and {serial[entry]:.10g}. An array of the model that is as long "
                f"as the observed values may belong to something else: {remedy}",
                [what],
            )
        if np.isfinite(serial[0]):
            self._left -= 1
        else:
            self._tried -= 1
            self._left *= bool(self._tried)
        if self.was_compared:
            self._plain = None  # it holds the model's data


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
        self._total, self._parameters, self._wrt, self._mode = total, parameters, wrt, mode
        # Numba keeps the constants of its functions.
        self._leaves = [
            item for item in ancestors([total]) if isinstance(item, SharedVariable) or _is_large(item)
        ]

    @functools.cached_property
    def _function(self) -> Any:
        stand_ins = [variable.type() for variable in self._leaves]
        return pytensor.function(
            [*self._parameters, *stand_ins],
            value_and_gradient(self._total, self._parameters, self._wrt),
            givens=dict(zip(self._leaves, stand_ins)),
            mode=self._mode,
            on_unused_input="ignore",
        )

    def of_all(self, values: Sequence[Any]) -> AnyArray:
        """Return the sum over all rows, and its gradient."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Numba does not cache functions with arrays of constants
            return np.asarray(self._function(*values, *map(_value, self._leaves)))


def _value(leaf: Any) -> Any:
    return leaf.get_value(borrow=True) if isinstance(leaf, SharedVariable) else leaf.data


def _is_large(variable: Any) -> bool:
    return isinstance(variable, TensorConstant) and variable.data.size >= _SAMPLE


#: As in PyMC: a wrong parameter has the probability 0.
CHECKS = "local_check_parameter_to_ninf_switch"


class RowInputs(NamedTuple):
    """What the log-probabilities of rows depend on.

    Attributes
    ----------
    whole : list of variables
        The terms that have no log-probability for each row.
    by_row : dict
        The inputs whose items belong to one row each, with the axis of the rows.
    across : list of variables
        The inputs whose items belong to several rows, or to other rows.
    """

    whole: list[Variable]
    by_row: dict[Variable, int]
    across: list[Variable]


def dependence(
    log_probs: Mapping[Variable, Variable],
    n_rows: int,
    inputs: Mapping[Variable, Variable],
    values: Sequence[Any],
) -> RowInputs:
    """Return how log-probabilities depend on those of their inputs that have an item for each row.

    Parameters
    ----------
    log_probs : dict
        The log-probabilities of a term by the term's variable.
    n_rows : int
    inputs : dict
        The inputs of the log-probabilities, by the variables for which they stand.
    values : list
        The values of the inputs.
    """
    parts = [(term, part) for term, total in log_probs.items() for part in summands(total)]
    compute = pytensor.function(
        list(inputs.values()),
        [part for _, part in parts],
        mode=get_mode("FAST_COMPILE").including(CHECKS),
        on_unused_input="ignore",
    )
    before = compute(*values)
    known = [index for index in range(len(parts)) if np.shape(before[index])[:1] == (n_rows,)]
    whole = [term for number, (term, _) in enumerate(parts) if number not in known]
    random = np.random.default_rng(0)
    is_replaced = random.permutation(n_rows) < n_rows // 2
    replacement = random.integers(0, n_rows, n_rows)  # some of them twice, or a mean would be the same
    found = RowInputs(list(dict.fromkeys(whole)), {}, [])
    for number, (item, value) in enumerate(zip(inputs, values)):
        shape = (
            np.shape(value)[:1]
            if isinstance(item, (names.Constant, names.SharedVariable))
            else np.shape(value)
        )
        if n_rows not in shape:
            continue
        axis = shape.index(n_rows)
        new = np.array(value)
        items, source = np.moveaxis(new, axis, 0), np.moveaxis(np.asarray(value), axis, 0)
        items[is_replaced] = source[replacement[is_replaced]]
        after = compute(*values[:number], new, *values[number + 1 :])
        changed = np.zeros(n_rows, bool)
        for part in known:
            changed |= _changed_rows(before[part], after[part])
        if changed[~is_replaced].any():
            found.across.append(item)
        elif changed.any():
            found.by_row[item] = axis
    return found


def summands(total: Variable) -> list[Variable]:
    """Return what a log-probability sums up, if it is a sum."""
    node = total.owner
    rule = None if total.type.ndim or node is None else rule_of(node)
    if rule is not None and rule.reduced and isinstance(rule.values, Terms):
        return [node.inputs[0]]
    if rule is not None and rule.values == Terms():
        return [part for variable in node.inputs for part in summands(variable)]
    return [total]


def _changed_rows(before: AnyArray, after: AnyArray) -> AnyArray:
    changed = (before != after) & ~(np.isnan(before) & np.isnan(after))
    return changed.any(axis=tuple(range(1, changed.ndim)))
