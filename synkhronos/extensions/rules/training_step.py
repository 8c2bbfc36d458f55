"""Training steps in two parts: the gradients, and the update by them."""

from __future__ import annotations

from typing import Any, Sequence

import synkhronos as synk
from synkhronos._html import Facts, Shown
from synkhronos._text import listed
from synkhronos.engines.names import In, SharedVariable, Variable
from synkhronos.extensions._flat_gradient import FlatGradient
from synkhronos.extensions._parameters import checked_parameters
from synkhronos.extensions.steps.update_rules import apply_rule
from synkhronos.functions.steps import reduces, shares, verify_step


class TrainingStep(Shown):
    """A step in two parts, created by `make_step`. It can be used with every rule.

    Attributes
    ----------
    params : list of shared variables
        The parameters.
    gradient : list of shared variables
        The variables into which the first part writes the gradients: one vector.
    compute : Function
        The first part. It returns the loss.
    update : Function
        The second part: it updates the parameters by `gradient`. It has no inputs.
    """

    def __init__(
        self,
        params: list[SharedVariable],
        gradient: list[SharedVariable],
        compute: synk.Function,
        update: synk.Function,
    ) -> None:
        self.params, self.gradient = params, gradient
        self.compute, self.update = compute, update

    def __call__(self, rank: synk.Rank, *data: Any, batch: Any = None) -> Any:
        """Take both parts of a step on one rank, in a program; return the loss.

        Parameters
        ----------
        rank : Rank
            The rank that takes the step.
        *data : Data or array-like
            The inputs.
        batch : as in ``rank.call``, optional
            The rows of this rank.
        """
        loss = rank.call(self.compute, *data, batch=batch)
        rank.call(self.update)
        return loss

    def _shown(self) -> Facts:
        rows: list[tuple[object, ...]] = [
            ("parameters", listed([one.name or one for one in self.params])),
            ("inputs", listed([one.name for one in self.compute.inputs])),
            ("first part", self.compute.name),
            ("second part", self.update.name),
        ]
        return f"TrainingStep of {len(self.params)} parameters", rows

    def verify(self, data: Sequence[Any], n_rows: int) -> None:
        """Compare the average of the ranks' gradients with the gradient of one rank.

        Parameters
        ----------
        data : list of Data
            The inputs.
        n_rows : int
            The number of the first rows to use.
        """

        def take_step() -> None:
            self.compute(*data, batch=n_rows)
            synk.all_reduce(self.gradient, weights=self.compute)

        verify_step(take_step)


def make_step(
    loss: Variable,
    params: Sequence[SharedVariable],
    inputs: Sequence[Variable],
    update: Any,
    **hyper: Any,
) -> TrainingStep:
    """Build a training step in two parts, which each rank of a program takes on its own.

    Parameters
    ----------
    loss : scalar variable
        The mean over the rows of a minibatch.
    params : list of shared variables
        Distinct variables, all of one dtype: float16, float32 or float64.
    inputs : list of variables
        The inputs of the loss.
    update : callable
        A rule of `synkhronos.extensions.updates`, or a function ``update(gradients, params, **hyper)``
        that returns updates, such as the functions of ``lasagne.updates``.
    **hyper
        Hyper-parameters of `update`, such as ``learning_rate=0.1``; they may be shared variables.

    Returns
    -------
    TrainingStep

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    TypeError, ValueError
        For wrong arguments.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> import theano.tensor as T
    >>> from synkhronos.extensions import rules, updates
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x, w = T.dvector("x"), theano.shared(0.0, name="w")
    >>> step = rules.make_step(T.sqr(x - w).mean(), [w], [x], updates.sgd, learning_rate=0.25)
    >>> data = np.array([1.0, 2.0, 6.0])  # two rows for the first rank, one for the second
    >>> record = rules.train(step, [w], [data], rules.BSP(), batch_size=2, epochs=3)
    >>> round(float(w.get_value()), 3)  # as by gradient descent on all three rows
    2.625
    >>> synk.close()
    """
    params = checked_parameters(params)
    result = apply_rule(update, loss, params, (), hyper)
    grad_updates, gradient, param_updates = result.grad_updates, result.grad_shared, result.updates
    if not gradient:
        flat = FlatGradient(loss, params)
        grad_updates, gradient = flat.gradient_updates(), [flat.gradient]
        param_updates = update(list(flat.pieces(flat.gradient)), params, **hyper)
    compute = synk.function(list(inputs), loss, updates=_pairs(grad_updates), name="compute gradients")
    reduces(compute, {one: ("the gradient", "avg") for one in gradient})
    update_params = synk.function([], updates=_pairs(param_updates), name="update")
    shares([compute, update_params])
    return TrainingStep(params, gradient, compute, update_params)


def _pairs(updates: Any) -> list[Any]:
    return list(updates.items()) if hasattr(updates, "items") else list(updates)


def updated_by(step: Any) -> set[SharedVariable]:
    """Return the shared variables that a step updates."""
    functions = [step.compute, step.update] if isinstance(step, TrainingStep) else [step]
    return {
        one.variable
        for function in functions
        for one in function.maker.expanded_inputs
        if isinstance(one, In) and one.update is not None
    }
