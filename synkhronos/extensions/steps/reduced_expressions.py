"""The expressions that a training step reduces over the ranks: gradients, the loss, and marked ones."""

from __future__ import annotations

import logging
from typing import Callable, Iterable, NamedTuple, Sequence, Tuple

from synkhronos.engines import names
from synkhronos.engines.analysis.graphs import Dependence, Numbering, gradient_seeds, inputs_first
from synkhronos.engines.names import SharedVariable, Variable
from synkhronos.extensions._parameters import FLOAT_DTYPES
from synkhronos.extensions.steps import errors
from synkhronos.extensions.steps.marked_expressions import Mark

_logger = logging.getLogger(__name__)

#: The parameters of a loss, and shared variables that may be further parameters.
Params = Tuple[Sequence[SharedVariable], Sequence[SharedVariable]]


class ReducedExpression(NamedTuple):
    """An expression of each rank whose value over all ranks replaces it in the updates."""

    expression: Variable
    op: str
    shape: tuple[int, ...]
    key: tuple[int, str]  # equal for equal expressions and operations
    is_gradient: bool


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
    """

    def __init__(self, loss_op: str) -> None:
        self.loss_op = loss_op
        self.losses: list[Variable] = []
        self._numbering = Numbering()
        self._known: dict[int, SharedVariable | None] = {}  # gradients by a parameter, or losses

    def add_loss(self, loss: Variable, params: Sequence[Variable]) -> None:
        """Reduce a loss of some parameters."""
        self._check_collectives(loss, params)
        if not self.is_loss(loss):
            self.losses.append(loss)
            self._known[self._numbering.of(loss)] = None

    def add_gradients(
        self, expressions: Iterable[Variable | None], params: Sequence[SharedVariable]
    ) -> None:
        """Reduce expressions in the shapes of parameters. None stands for no gradient."""
        for expression, param in zip(expressions, params):
            if expression is not None:
                for item in (expression, names.dense(expression)):
                    self._known[self._numbering.of(item)] = param

    def add_gradients_of(
        self,
        loss: Variable,
        params: Sequence[SharedVariable],
        others: Sequence[SharedVariable] = (),
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
        numbers = {self._numbering.of(variable) for variable in inputs_first(expressions)}
        for output in outputs:
            try:
                gradients, params = _gradients(output, *params_of(output))
            except Exception as error:  # any exception; each operation may refuse in its own way
                _logger.debug("output %s is no loss: %s", output, error)
                continue
            if any(self._numbering.of(item) in numbers for item in gradients if item is not None):
                self.add_gradients(gradients, params)
                self.add_loss(output, params)

    def number_of(self, variable: Variable) -> int:
        """Return the number of a variable, which is equal for equal expressions."""
        return self._numbering.of(variable)

    def numbers_of_gradients(self, loss: Variable) -> set[int]:
        """Return the numbers of the gradients of a loss by the variables that may be its parameters."""
        gradients, _ = _gradients(loss, (), parameters_under(loss))
        return {self.number_of(gradient) for gradient in gradients if gradient is not None}

    def add_losses_of(self, expressions: Iterable[Variable]) -> None:
        """Reduce the losses of the gradients that expressions are computed from."""
        for loss in gradient_seeds(expressions).values():
            self.add_loss(loss, parameters_under(loss))

    def _check_collectives(self, loss: Variable, params: Sequence[Variable]) -> None:
        """Raise if gradients go through collectives that are for losses combined in another way."""
        depending = Dependence(params, {})
        for variable in inputs_first([loss]):
            built = getattr(variable.owner and variable.owner.op, "loss_op", None)
            if built not in (None, self.loss_op) and depending.of(variable):
                raise errors.collective_of_other_loss(variable, built, self.loss_op)

    def is_loss(self, variable: Variable) -> bool:
        """Whether a variable is a loss, or is computed like one."""
        number = self._numbering.of(variable) if self.losses else None
        return any([self._numbering.of(loss) == number for loss in self.losses])

    def find(self, variable: Variable) -> ReducedExpression | None:
        """Return how a variable is reduced, or None."""
        node = variable.owner
        if node is not None and isinstance(node.op, Mark):
            expression, op, shape = node.inputs[0], node.op.op or self.loss_op, node.op.shape
            is_gradient = node.op.op is None
        elif self._known and self._numbering.of(variable) in self._known:
            expression, op = variable, self.loss_op
            param = self._known[self._numbering.of(variable)]
            shape = () if param is None else param.get_value(borrow=True).shape
            is_gradient = not self.is_loss(variable)
        else:
            return None
        expression = names.dense(expression)
        return ReducedExpression(
            expression, op, shape, (self._numbering.of(expression), op), is_gradient
        )


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
