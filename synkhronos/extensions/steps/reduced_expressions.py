"""The expressions that a training step reduces over the ranks, and the variables that hold their values.

These are gradients, the loss, and expressions with marks, which `gradients` and `reduced` set. Averages
are stored in the memory of a variable if one process computes the new value there, as the script may
have a reference to its array.
"""

from __future__ import annotations

import logging
from typing import Any, Callable, Iterable, NamedTuple, Sequence, Tuple

import numpy

from synkhronos.arithmetic import operations
from synkhronos.engines import names
from synkhronos.engines.analysis import graphs
from synkhronos.engines.analysis.graphs import inputs_first
from synkhronos.engines.names import Elemwise, SharedVariable, Variable, ViewOp, scalar
from synkhronos.engines.names import tensor as tt
from synkhronos.extensions._parameters import FLOAT_DTYPES, Layout, checked_parameters, gradients_of
from synkhronos.extensions.steps import errors

#: The operations with which the values of the ranks can be combined.
OPERATIONS = ("avg", "sum", "min", "max")


class Mark(ViewOp):
    """An operation that returns its input; a training step replaces its output in the updates.

    Parameters
    ----------
    op : str or None
        How the values of the ranks are combined; None to combine them like the gradients of the loss.
    shape : tuple of int
        The shape of the value.
    """

    __props__ = ("op", "shape")

    def __init__(self, op: str | None, shape: tuple[int, ...]) -> None:
        self.op, self.shape = op, shape


def gradients(loss: Variable, params: Iterable[SharedVariable]) -> list[Variable]:
    """Return the gradients of a loss, marked for a training step.

    Use it in place of ``theano.grad`` if a step does not find the gradients in your updates by itself,
    or to build updates by hand. In a plain ``theano.function`` the marks have no effect.

    Parameters
    ----------
    loss : scalar variable, or list of variables
        The loss; or expressions of gradients, one for each parameter.
    params : list of shared variables
        Distinct float tensors. Their shapes must not change afterwards.

    Returns
    -------
    list of variables
        One gradient per parameter, in its dtype.

    Raises
    ------
    TypeError
        If the loss is not a float expression, or a parameter is not a shared float tensor.
    ValueError
        If the loss is not a scalar or does not depend on a parameter, `params` is empty or has
        duplicates, or gradients do not match `params`.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> import theano.tensor as T
    >>> from synkhronos.extensions import train
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x, w = T.dvector("x"), theano.shared(4.0, name="w")
    >>> [gradient] = train.gradients(T.sqr(x - w).mean(), [w])
    >>> step = train.parallel_function([x], updates=[(w, w - 0.25 * gradient)])
    >>> for _ in range(2):
    ...     _ = step([1.0, 2.0, 3.0])  # two rows on this process, one on the worker
    >>> synk.gather(w)
    array([2.5, 2.5])
    >>> synk.close()
    """
    params = checked_parameters(params)
    expressions = gradients_of(loss, params)
    shapes = [param.get_value(borrow=True).shape for param in params]
    return [_marked(expression, None, shape) for expression, shape in zip(expressions, shapes)]


def reduced(expression: Variable, op: str = "avg", shape: Sequence[int] = ()) -> Variable:
    """Mark an expression whose value over all ranks the updates of a training step use.

    Each rank computes the expression on its own rows. The values are combined together with the
    gradients, and updates and outputs that use the expression get the combined value. In a plain
    ``theano.function`` the mark has no effect.

    Parameters
    ----------
    expression : variable
        A tensor, computed from the rows, as in ``reduced(x.shape[0], "sum")`` for the number of all
        rows of the minibatch.
    op : {"avg", "sum", "min", "max"}
        ``"avg"`` is weighted by the numbers of rows, and needs a float.
    shape : tuple of int, optional
        The shape of the value, if it is not a scalar.

    Returns
    -------
    variable
        The same tensor, marked.

    Raises
    ------
    TypeError
        If `expression` is not a tensor variable, `op` is not a str, or the dtype cannot be averaged.
    ValueError
        If the operation does not exist, or `shape` has another number of dimensions.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> import theano.tensor as T
    >>> from synkhronos.extensions import train
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x, largest = T.dvector("x"), theano.shared(0.0, name="largest")
    >>> scale = train.reduced(abs(x).max(), "max")
    >>> step = train.parallel_function([x], x.mean(), updates=[(largest, scale**2)])
    >>> step([1.0, 2.0, -3.0])
    array(0.)
    >>> largest.get_value()
    array(9.)
    >>> synk.close()
    """
    if not isinstance(expression, Variable) or not hasattr(expression.type, "broadcastable"):
        raise TypeError(
            f"reduced: expected a tensor variable, got {type(expression).__name__}; numbers are the "
            f"same on every rank and need no mark"
        )
    check_operation(op, "reduced", "op", expression.dtype)
    shape = tuple(int(extent) for extent in shape)
    if len(shape) != expression.ndim:
        raise ValueError(
            f"reduced: shape: expected the extents of {expression.ndim} dimensions, got {shape}; give "
            f"the shape that {expression} will have, as in shape=(10,)"
        )
    return _marked(expression, op, shape)


def marks_in(expressions: Iterable[Variable]) -> list[Variable]:
    """Return the marked expressions from which some expressions are computed."""
    variables = inputs_first(expressions)
    return [item for item in variables if item.owner is not None and isinstance(item.owner.op, Mark)]


def check_operation(op: Any, what: str, where: str, dtype: str | None = None) -> None:
    """Raise an error if the values of ranks, of this dtype, cannot be combined with `op`."""
    if not isinstance(op, str) or op not in OPERATIONS:
        error = ValueError if isinstance(op, str) else TypeError
        raise error(f"{what}: {where}: expected one of {', '.join(OPERATIONS)}, got {op!r}")
    if op == "avg" and dtype is not None and not dtype.startswith(("float", "complex")):
        raise TypeError(
            f"{what}: {dtype} cannot be averaged; give another operation, such as 'sum', or cast it "
            f"to a float"
        )


def _marked(expression: Variable, op: str | None, shape: tuple[int, ...]) -> Variable:
    marked = Mark(op, shape)(expression)
    marked.name = expression.name
    return marked


_logger = logging.getLogger(__name__)

#: The parameters of a loss, and shared variables that may be further parameters.
Params = Tuple[Sequence[SharedVariable], Sequence[SharedVariable]]


class ReducedExpression(NamedTuple):
    """An expression of each rank whose value over all ranks replaces it in the updates."""

    expression: Variable
    op: str
    shape: tuple[int, ...] = ()
    is_gradient: bool = False
    key: tuple[int, str] | None = None  # equal for equal expressions and operations


class ReducedExpressions:
    """The expressions that are reduced where updates use them, found by their structure.

    Parameters
    ----------
    loss_op : {"avg", "sum"}
        How losses and their gradients are combined.

    Attributes
    ----------
    losses : list of variables
        The losses that are reduced.
    numbering : Numbering
        The numbers by which equal expressions are found.
    """

    def __init__(self, loss_op: str) -> None:
        self.loss_op = loss_op
        self.losses: list[Variable] = []
        self.numbering = graphs.Numbering()
        self._known: dict[int, SharedVariable | None] = {}  # gradients by a parameter, or losses

    def add_loss(self, loss: Variable, params: Sequence[Variable]) -> None:
        """Reduce a loss of some parameters."""
        self._check_collectives(loss, params)
        if not self.is_loss(loss):
            self.losses.append(loss)
            self._known[self.numbering.of(loss)] = None

    def add_gradients(
        self, expressions: Iterable[Variable | None], params: Sequence[SharedVariable]
    ) -> None:
        """Reduce expressions in the shapes of parameters. None stands for no gradient."""
        for expression, param in zip(expressions, params):
            if expression is not None:
                for item in (expression, names.dense(expression)):
                    self._known[self.numbering.of(item)] = param

    def add_gradients_of(
        self, loss: Variable, params: Sequence[SharedVariable], others: Sequence[SharedVariable] = ()
    ) -> None:
        """Reduce a loss and its gradients, also by the variables in `others` on which it depends."""
        expressions, params = _gradients(loss, params, others)
        self.add_gradients(expressions, params)
        self.add_loss(loss, params)

    def add_gradients_of_losses_in(
        self,
        expressions: Sequence[Variable],
        outputs: Iterable[Variable],
        params_of: Callable[[Variable], Params],
    ) -> None:
        """Reduce the outputs whose gradients are in the expressions, and these gradients.

        ``params_of(output)`` returns the last two arguments of `add_gradients_of`.
        """
        numbers = {self.numbering.of(variable) for variable in inputs_first(expressions)}
        for output in outputs:
            try:
                gradients, params = _gradients(output, *params_of(output))
            except Exception as error:  # any exception; each operation may refuse in its own way
                _logger.debug("output %s is no loss: %s", output, error)
                continue
            if any(self.numbering.of(item) in numbers for item in gradients if item is not None):
                self.add_gradients(gradients, params)
                self.add_loss(output, params)

    def numbers_of_gradients(self, loss: Variable) -> set[int]:
        """Return the numbers of the gradients of a loss by the variables that may be its parameters."""
        gradients, _ = _gradients(loss, (), parameters_under(loss))
        return {self.numbering.of(gradient) for gradient in gradients if gradient is not None}

    def add_losses_of(self, expressions: Iterable[Variable]) -> None:
        """Reduce the losses of the gradients that expressions are computed from."""
        for loss in graphs.gradient_seeds(expressions).values():
            self.add_loss(loss, parameters_under(loss))

    def _check_collectives(self, loss: Variable, params: Sequence[Variable]) -> None:
        """Raise if gradients go through collectives that are for losses combined in another way."""
        depending = graphs.Dependence(params, {})
        for variable in inputs_first([loss]):
            built = getattr(variable.owner and variable.owner.op, "loss_op", None)
            if built not in (None, self.loss_op) and depending.of(variable):
                op = variable.owner.op
                raise errors.refusal("other loss_op", op=op, built=built, loss_op=self.loss_op)

    def is_loss(self, variable: Variable) -> bool:
        """Whether a variable is a loss, or is computed like one."""
        number = self.numbering.of(variable) if self.losses else None
        return any([self.numbering.of(loss) == number for loss in self.losses])

    def find(self, variable: Variable) -> ReducedExpression | None:
        """Return how a variable is reduced, or None."""
        node = variable.owner
        if node is not None and isinstance(node.op, Mark):
            expression, op, shape = node.inputs[0], node.op.op or self.loss_op, node.op.shape
            is_gradient = node.op.op is None
        elif self._known and self.numbering.of(variable) in self._known:
            expression, op = variable, self.loss_op
            param = self._known[self.numbering.of(variable)]
            shape = () if param is None else param.get_value(borrow=True).shape
            is_gradient = not self.is_loss(variable)
        else:
            return None
        expression = names.dense(expression)
        return ReducedExpression(expression, op, shape, is_gradient, (self.numbering.of(expression), op))


def _gradients(
    loss: Variable, params: Sequence[SharedVariable], others: Sequence[SharedVariable]
) -> tuple[list[Variable | None], list[SharedVariable]]:
    """Return the gradients of a loss, and the variables by which they are."""
    every = [*params, *others]
    try:
        return names.gradients(loss, every), every
    except Exception as error:  # any exception; each operation may refuse in its own way
        if not others:
            raise
        _logger.debug("a gradient of %s by one of %s: %s", loss, others, error)
    found = list(zip(names.gradients(loss, list(params)), params))
    for other in others:
        try:
            found += zip(names.gradients(loss, [other]), [other])
        except Exception as error:
            _logger.debug("%s is no parameter of %s: %s", other, loss, error)
    return [gradient for gradient, _ in found], [param for _, param in found]


def parameters_under(loss: Variable) -> list[SharedVariable]:
    """Return the shared variables from which a loss is computed and which may be parameters."""
    return [
        variable
        for variable in inputs_first([loss])
        if isinstance(variable, SharedVariable) and is_float_tensor(variable)
    ]


def is_float_scalar(variable: Variable) -> bool:
    """Whether a variable may be a loss."""
    kind = variable.type
    return getattr(kind, "ndim", None) == 0 and kind.dtype in FLOAT_DTYPES


def is_float_tensor(shared: SharedVariable) -> bool:
    """Whether a shared variable may be a parameter."""
    return hasattr(shared.type, "broadcastable") and shared.type.dtype in FLOAT_DTYPES


class ReducedVectors:
    """Vectors that hold the values to reduce, one for each dtype and operation; gradients are separate.

    Attributes
    ----------
    updates : list of (shared, new, op)
        What each rank computes on its rows; `op` combines slices of the rows.
    reduced : dict
        For each operation, the shared variables to reduce.
    gradients : list of shared variables
        The variables that hold gradients.
    """

    def __init__(self) -> None:
        self.updates: list[tuple[SharedVariable, Variable, str | None]] = []
        self.reduced: dict[str, list[SharedVariable]] = {}
        self.gradients: list[SharedVariable] = []

    def add(self, items: Sequence[ReducedExpression]) -> list[Variable]:
        """Have expressions reduced in one vector for each dtype and operation; return their values."""
        groups: dict[tuple[str, str, bool], list[int]] = {}
        for place, item in enumerate(items):
            key = item.expression.dtype, item.op, item.is_gradient
            groups.setdefault(key, []).append(place)
        found: dict[int, Variable] = {}
        for (dtype, op, is_gradient), places in groups.items():
            expressions = [items[place].expression for place in places]
            patterns = [expression.type.broadcastable for expression in expressions]
            layout = Layout([items[place].shape for place in places], patterns)
            vector = layout.new_vector(dtype, f"flat_{op}")
            if is_gradient:
                self.gradients.append(vector)
            self.add_update(vector, layout.filled(vector, expressions), op)
            found.update(zip(places, layout.pieces(vector)))
        return [found[place] for place in range(len(items))]

    def add_whole(self, new: Variable, op: str, like: SharedVariable) -> SharedVariable:
        """Return a new shared variable for an expression of the type of `like`, to be reduced."""
        value = numpy.zeros_like(like.get_value(borrow=True))
        name = f"new_{like.name}" if like.name else None
        shared = names.shared(value, name, like.type.broadcastable)
        self.add_update(shared, new, op)
        return shared

    def add_update(self, shared: SharedVariable, new: Variable, op: str) -> None:
        """Let each rank compute `shared`, which is then reduced."""
        self.updates.append((shared, new, op))
        self.reduced.setdefault(op, []).append(shared)

    def clearing(self) -> list[tuple[SharedVariable, Variable]]:
        """Return updates that keep ranks without rows from taking part in the reduction.

        An average ignores these ranks. In other operations they take part with the values of their
        variables, which must therefore be neutral.
        """
        return [
            (shared, _filled_with(shared, operations.OPERATIONS[op].neutral(shared.dtype)))
            for op, shareds in self.reduced.items()
            if op != "avg"
            for shared in shareds
        ]


def _filled_with(shared: SharedVariable, value: Any) -> Variable:
    number = tt.constant(numpy.asarray(value, shared.dtype))
    if not shared.ndim:
        return number
    return tt.set_subtensor(shared[:], number)  # in place, so that it stays in shared memory


class _Replaced(scalar.Second):
    """``(old, new)`` to `new`, in the memory of `old` if the mode computes in place.

    As it is not ``fill`` itself, the compiler does not replace it by `new`.
    """


_replaced = Elemwise(_Replaced(scalar.second.output_types_preference, name="replaced"))


def is_in_place(target: SharedVariable, new: Variable) -> bool:
    """Whether one process computes the new value of a variable in the memory of the old value."""

    def elements(variable: Variable) -> Sequence[Variable]:
        is_elementwise = variable.owner is not None and isinstance(variable.owner.op, Elemwise)
        return variable.owner.inputs if is_elementwise else ()

    reached = list(inputs_first([new], elements))
    written = [node.inputs[0] for node in graphs.nodes_of(reached) if isinstance(node.op, names.WRITES)]
    return new is not target and target in [*reached, *written]


def in_place(target: SharedVariable, new: Variable) -> Variable:
    """Return a value of the shape of a variable, computed in the memory of its old value."""
    return _replaced(target, new)
