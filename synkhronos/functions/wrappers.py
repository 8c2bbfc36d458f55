"""`In` and `Out`: an input or output variable with options, as Theano's classes of these names."""

from __future__ import annotations

from typing import Any

from synkhronos._checks import check_extent, check_string
from synkhronos._typing import OutputOp, Variable


class In:
    """An input of a function, with options. A ``theano.In`` may be given instead.

    Parameters
    ----------
    variable : variable
    axis : int, default: 0
        The axis along which the value is split over the ranks: 1 for data whose axis 0 is time. The
        `batch` of a call then selects along this axis.
    value : array-like, optional
        The value to use if a call gives none. None stands for no value, as in ``theano.In``.
    name : str, optional
        The keyword of this input in calls; by default the name of the variable.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano.tensor as T
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x = T.dmatrix("x")  # of shape (time, rows)
    >>> f = synk.function([synk.In(x, axis=1)], synk.Out(x.cumsum(axis=0), "gather", axis=1))
    >>> f(np.ones((2, 3)))  # two columns on this process, one on the worker
    array([[1., 1., 1.],
           [2., 2., 2.]])
    >>> synk.close()
    """

    def __init__(
        self, variable: Variable, axis: int = 0, value: Any = None, name: str | None = None
    ) -> None:
        if name is not None:
            check_string(name, "In: name")
        self.variable = variable
        self.axis = check_extent(axis, "In: axis")
        self.value = value
        self.name = name


class Out:
    """An output of a function, with options. A ``theano.Out`` may be given instead.

    Parameters
    ----------
    variable : variable
    op : str or None, default: "avg"
        As in the pairs ``(variable, op)`` of `function`.
    axis : int, default: 0
        With ``"gather"``, the axis along which the values of the ranks are concatenated.
    """

    def __init__(self, variable: Variable, op: OutputOp | None = "avg", axis: int = 0) -> None:
        self.variable = variable
        self.op = op
        self.axis = check_extent(axis, "Out: axis")
