"""`Rule`: how the ranks' parameters depend on each other; the steps that it takes; what rules share."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Iterator, Mapping, Sequence

import numpy

import synkhronos as synk
from synkhronos._html import Facts, Shown, table
from synkhronos._text import as_call, listed
from synkhronos._typing import AnyArray
from synkhronos.engines.names import In, SharedVariable, Variable
from synkhronos.extensions._parameters import FlatGradient, checked_parameters
from synkhronos.extensions.steps.definition import apply_rule
from synkhronos.functions.steps import reduces, shares, verify_step

Params = Sequence[SharedVariable]
#: The clock of a rank that takes no more steps.
END = 1 << 62


@dataclasses.dataclass(repr=False, eq=False)
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

    params: list[SharedVariable]
    gradient: list[SharedVariable]
    compute: synk.Function
    update: synk.Function

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
            ("parameters", listed([param.name or param for param in self.params])),
            ("inputs", listed([variable.name for variable in self.compute.inputs])),
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
    loss: Variable, params: Params, inputs: Sequence[Variable], update: Any, **hyper: Any
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
    reduces(compute, {item: ("the gradient", "avg") for item in gradient})
    update_params = synk.function([], updates=_pairs(param_updates), name="update")
    shares([compute, update_params])
    return TrainingStep(params, gradient, compute, update_params)


def _pairs(updates: Any) -> list[Any]:
    return list(updates.items()) if hasattr(updates, "items") else list(updates)


def updated_by(step: Any) -> list[SharedVariable]:
    """Return the shared variables that a step, or a function, updates."""
    functions = [step.compute, step.update] if isinstance(step, TrainingStep) else [step]
    return [
        spec.variable
        for function in functions
        for spec in function.maker.expanded_inputs
        if isinstance(spec, In) and spec.update is not None
    ]


class Rule:
    """A training rule: what the ranks exchange, and when. The base class of all rules.

    A custom rule is a class with ``start``, ``after_step`` and ``finish``. In this class all of them do
    nothing, so each rank trains by itself. Every rank has its own copy of the rule, and `params` are the
    rank's own replicas. `train` calls the methods; your own programs can call them, too.

    The hyper-parameters of a rule are its attributes without an underscore. They may be changed while it
    runs, between two steps; if the rule is synchronous, on all ranks after the same step.

    Attributes
    ----------
    is_synchronous : bool
        Whether the ranks meet in collectives in ``after_step``. Then they are asked to stop together,
        and validate together by default. False unless a class changes it.
    seed : int or None
        The seed for rules that draw random numbers. `train` sets it if it is None.
    restored : dict or None
        In `start`, the return value of `state` on this rank, if training continues from a checkpoint.

    Examples
    --------
    Ranks average their parameters after every third step:

    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> import theano.tensor as T
    >>> from synkhronos.extensions import rules
    >>> class Average(rules.Rule):
    ...     is_synchronous = True
    ...     def start(self, rank, params):
    ...         self.period = 3
    ...     def after_step(self, rank, params, step):
    ...         if step % self.period == 0:
    ...             rank.all_reduce(params, "avg")
    ...     def finish(self, rank, params):
    ...         rank.all_reduce(params, "avg")
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x, w = T.dvector("x"), theano.shared(0.0, name="w")
    >>> loss = T.sqr(x - w).mean()
    >>> step = synk.function([x], loss, updates=[(w, w - 0.2 * T.grad(loss, w))])
    >>> data = np.random.RandomState(0).normal(3, 1, 1000)
    >>> record = rules.train(step, [w], [data], Average(), batch_size=50, epochs=5, seed=1)
    >>> [len(losses) for losses in record.losses], round(float(w.get_value()))
    ([50, 50], 3)
    >>> synk.close()
    """

    is_synchronous = False
    seed: int | None = None
    restored: Mapping[str, Any] | None = None
    _rows = 0  # rows that this rank has used since the last average

    def prepare(self, step: Any) -> None:
        """Raise an error that says why if the rule cannot train with this step.

        `train` calls it before anything starts, and on every rank before `start`.

        Parameters
        ----------
        step : Function or TrainingStep
            The step with which the ranks train.
        """

    def verify(self, data: Sequence[Any], n_rows: int) -> None:  # noqa: B027
        """Compare a step of all ranks with the same step on one rank, if they should be equal.

        `train` calls it on the master before anything starts; a difference is a warning.

        Parameters
        ----------
        data : list of Data
            The inputs of the step.
        n_rows : int
            The number of rows of a step of all ranks.
        """

    def start(self, rank: synk.Rank, params: Params) -> None:
        """Begin, on every rank; `params` have the same values on all of them, unless it is `restored`.

        Parameters
        ----------
        rank : Rank
            The rank on which the method is called.
        params : list of shared variables
            The parameters that are trained.
        """

    def take_step(self, rank: synk.Rank, step: Any, data: Sequence[Any], rows: AnyArray) -> Any:
        """Take a step on this rank's own rows, and return its outputs, the loss first.

        Parameters
        ----------
        rank : Rank
            The rank on which the method is called.
        step : Function or TrainingStep
            The step with which the ranks train.
        data : list of Data or arrays
            The inputs.
        rows : numpy.ndarray of int
            The minibatch.
        """
        self._rows += len(rows)
        if isinstance(step, TrainingStep):
            return step(rank, *data, batch=rows)
        return rank.call(step, *data, batch=rows)

    def after_step(self, rank: synk.Rank, params: Params, step: int) -> None:
        """Exchange, after a step on this rank.

        Parameters
        ----------
        rank : Rank
            The rank on which the method is called.
        params : list of shared variables
            The parameters that are trained.
        step : int
            The number of the step on this rank, from 1.
        """

    def finish(self, rank: synk.Rank, params: Params) -> None:
        """Give the parameters of every rank their final values, after the last step.

        Parameters
        ----------
        rank : Rank
            The rank on which the method is called.
        params : list of shared variables
            The parameters that are trained.
        """

    def value(self, rank: synk.Rank, params: Params) -> list[AnyArray] | None:
        """Return the values to validate, or None for the current values of this rank's parameters.

        If the rule is synchronous, all ranks call it at the same point; otherwise one rank may call it
        alone.

        Parameters
        ----------
        rank : Rank
            The rank on which the method is called.
        params : list of shared variables
            The parameters that are trained.
        """
        return None

    def state(self, rank: synk.Rank, params: Params) -> dict[str, Any]:
        """Return the state, besides shared variables, with which this rank continues from a checkpoint.

        It is called on all ranks after their last step before a checkpoint. Messages in transit between
        ranks must arrive in it. The hyper-parameters are always saved.

        Parameters
        ----------
        rank : Rank
            The rank on which the method is called.
        params : list of shared variables
            The parameters that are trained.

        Returns
        -------
        dict
            Arrays, numbers and strings by name.
        """
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, which is in `restored` when `start` is called.

        Parameters
        ----------
        state : dict
            The state, as returned by `state` on this rank.
        """
        self.restored = dict(state)

    @property
    def hyper_parameters(self) -> dict[str, Any]:
        """The hyper-parameters that are numbers, strings or None, by name."""
        return {
            name: value
            for name, value in vars(self).items()
            if not name.startswith("_")
            and (value is None or isinstance(value, (int, float, str)))
            and name != "restored"
        }

    def __repr__(self) -> str:
        return as_call(self, self.hyper_parameters)

    def _repr_html_(self) -> str:
        return table(f"Training rule {type(self).__name__}", self.hyper_parameters.items())

    def _average(self, rank: synk.Rank, params: Params, wire: Any = None) -> None:
        """Set the parameters of all ranks to their average, weighted by rows since the last one."""
        rank.all_reduce(params, "avg", weight=self._rows or 1, wire=wire)
        self._rows = 0


# The parameters of a rank, for rules


def values_of(params: Params) -> list[AnyArray]:
    """Return copies of this rank's values."""
    return [numpy.array(param.get_value(borrow=True)) for param in params]


def assign(params: Params, values: Sequence[AnyArray]) -> None:
    """Set this rank's parameters to copies of values."""
    for param, value in zip(params, values):
        param.set_value(value)


@contextlib.contextmanager
def with_values(params: Params, values: Sequence[AnyArray] | None) -> Iterator[None]:
    """Let this rank's parameters have other values meanwhile, unless these are None."""
    own = None if values is None else values_of(params)
    if values is not None:
        assign(params, values)
    yield
    if own is not None:
        assign(params, own)


def pack(name: str, values: Sequence[AnyArray] | None) -> dict[str, AnyArray]:
    """Return arrays for each parameter as items of a rule's state."""
    return {f"{name} {position}": value for position, value in enumerate(values or ())}


def unpack(name: str, params: Sequence[Any], state: Mapping[str, Any] | None) -> list[AnyArray] | None:
    """Return the arrays that were given to `pack`, or None if the state does not have them."""
    if not state or f"{name} 0" not in state:
        return None
    return [numpy.array(state[f"{name} {position}"]) for position in range(len(params))]


def meet(rank: synk.Rank) -> None:
    """Wait until every rank has taken its last step, even in programs without collectives."""
    rank.clock = END
    rank.wait_for_clocks(END)
