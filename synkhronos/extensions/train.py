"""Training steps on all ranks that equal the serial steps on the whole minibatch.

Each rank computes the gradient on its rows. The gradients are averaged, weighted by the numbers of rows,
and each rank applies the same update to its parameters. The step is a single command: the ranks
synchronize at one start and one finish barrier, and in the all-reduce.

:func:`make_train_function` builds a step from a loss and an update rule, :func:`parallel_function` from
the arguments of a script's own ``theano.function``.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal, Mapping, Sequence, Tuple, Union

import synkhronos as synk
from synkhronos._html import Facts, Shown
from synkhronos.engines.names import SharedVariable, Variable
from synkhronos.extensions.steps import arguments as step_arguments
from synkhronos.extensions.steps.arguments import Arguments, StepInputs
from synkhronos.extensions.steps.definition import define_function, define_training
from synkhronos.extensions.steps.reduced_expressions import gradients, reduced
from synkhronos.extensions.steps.step import SerialStep, Step
from synkhronos.functions.steps import check_indices

__all__ = [
    "ParallelFunction", "TrainFunction", "gradients", "make_train_function",
    "make_train_function_theano", "parallel_function", "reduced",
]  # fmt: skip

Variables = Union[Variable, Sequence[Variable]]
Updates = Union[Mapping[SharedVariable, Any], Sequence[Tuple[Any, ...]]]


class _StepFunction(Shown):
    """What the functions of this module have in common."""

    _step: Step | SerialStep
    _inputs: StepInputs

    def _matched(
        self, data: Sequence[Any], data_by_name: Mapping[str, Any], batch: Any, num_slices: int
    ) -> tuple[list[Any], Any, int]:
        return self._inputs.match(data, data_by_name), batch, num_slices

    def _shown(self) -> Facts:
        named = type(self).__name__ + ("" if self._step.name is None else f" {self._step.name}")
        return f"{named} of {self._inputs.described()}", self._step.described()

    def check(
        self,
        /,
        *data: Any,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int = 1,
        random: bool = False,
        rtol: float | None = None,
        atol: float | None = None,
        **data_by_name: Any,
    ) -> synk.Comparison:
        """Compare a step with the same step on one process, from the same state.

        Nothing changes. The outputs and the new values of updated variables on every rank are
        compared, as in :meth:`synkhronos.Function.check`.

        Parameters
        ----------
        *data, **data_by_name, batch, batch_s, num_slices
            As in a call; `batch_s` of a `ParallelFunction` only.
        random : bool, default: False
            Whether random numbers, such as those of dropout, are replaced by numbers that follow from
            the rows. Otherwise results that depend on random numbers are not compared, since every
            rank draws its own. The first such check compiles the step once more.
        rtol, atol : float, optional
            As for :meth:`synkhronos.Function.check`.

        Returns
        -------
        Comparison

        Raises
        ------
        MismatchError
            If an output or a new value differs. It names all that differ, how much, and the usual
            reason.
        ValueError
            If `random` is True, and the step draws no random numbers.
        TypeError
            If this is the serial step of `make_train_function_theano`.
        """
        values, batch, num_slices = self._matched(data, data_by_name, batch, num_slices)
        return self._step.check(values, batch, num_slices, batch_s, random, rtol, atol)


class TrainFunction(_StepFunction):
    """A training step, created by :func:`make_train_function`. Call it with the data of a minibatch.

    Attributes
    ----------
    functions : list of synkhronos.Function
        The functions that a step runs; empty for a step of plain Theano.
    """

    def __init__(self, step: Step | SerialStep, inputs: StepInputs, is_single: bool) -> None:
        self._step, self._inputs, self._is_single = step, inputs, is_single
        self._n_arguments = inputs.n_arguments
        self.functions = getattr(step, "functions", [])

    def __call__(
        self, /, *data: Any, batch: Any = None, num_slices: int = 1, **data_by_name: Any
    ) -> Any:
        """Take a step.

        Parameters
        ----------
        *data : array-like or Data, or list of these
            The data of `x`, of `y`, and of each of `bcast_inputs`: one array or list of numbers, or a
            list of arrays if a list of variables was given for `x` or `y`.
        **data_by_name
            The same data by the names of the variables, or as ``x_data`` and ``y_data``.
        batch : int, slice, 1-d array-like of int or bool, optional
            The rows of the minibatch. All rows by default. It may follow the data without its name.
        num_slices : int, default: 1
            The number of slices in which each rank computes on its rows, to use less memory.

        Returns
        -------
        numpy.ndarray or list of numpy.ndarray
            The loss before the step, in the dtype of the loss, or a list of the loss and the `outputs`.
        """
        values, batch, num_slices = self._matched(data, data_by_name, batch, num_slices)
        return self._step.reported(self._take, values, batch, num_slices)

    def _take(self, values: list[Any], batch: Any, num_slices: int) -> Any:
        outputs = self._step(values, batch, num_slices)
        return outputs[0] if self._is_single else outputs

    def _matched(
        self, data: Sequence[Any], data_by_name: Mapping[str, Any], batch: Any, num_slices: int
    ) -> tuple[list[Any], Any, int]:
        if len(data) > self._n_arguments:
            data, positional = data[: self._n_arguments], data[self._n_arguments :]
            if batch is not None or len(positional) > 2:
                raise TypeError(
                    f"train function: expected data for {self._n_arguments} arguments, then at "
                    f"most batch and num_slices, each once; got {len(positional)} more"
                )
            batch, num_slices = [*positional, num_slices][:2]
        return super()._matched(data, data_by_name, batch, num_slices)


class ParallelFunction(_StepFunction):
    """A function on all ranks, created by :func:`parallel_function`. Call it like the Theano function.

    Attributes
    ----------
    functions : list of synkhronos.Function
        The functions that a call runs.
    name : str or None
        The name that was given.
    """

    _step: Step

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = step_arguments.without_iterators(arguments)
        definition, self._form = define_function(self._arguments)
        self._step, self._inputs = Step(definition), definition.inputs
        self.functions = self._step.functions
        self.name = step_arguments.name_in(self._arguments)

    def __call__(
        self,
        /,
        *args: Any,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int = 1,
        output_subset: Sequence[int | str] | None = None,
        **inputs_by_name: Any,
    ) -> Any:
        """Compute on all ranks; return the results of the Theano function for all rows.

        Parameters
        ----------
        *args, **inputs_by_name : array-like or Data
            The inputs in the order in which the function was built, or by name.
        batch, batch_s, num_slices
            As in a call of a :class:`synkhronos.Function`.
        output_subset : list of int, optional
            The outputs to return, or their keys. All updates are made.

        Returns
        -------
        numpy.ndarray, or list or dict of these
            In the form of `outputs`.
        """
        values = self._inputs.match(args, inputs_by_name)
        subset = None
        if output_subset is not None:
            subset = check_indices(output_subset, self._step.n_outputs, self._form)
        return self._step.reported(self._take, values, batch, num_slices, batch_s, subset)

    def _take(
        self, values: list[Any], batch: Any, num_slices: int, batch_s: Any, subset: list[int] | None
    ) -> Any:
        outputs = self._step(values, batch, num_slices, batch_s)
        indices = range(len(outputs)) if subset is None else subset
        if isinstance(self._form, list):
            return {self._form[index]: outputs[index] for index in indices}
        return outputs[0] if not self._form and subset is None else [outputs[index] for index in indices]

    @property
    def maker(self) -> Any:
        """The ``maker`` of the function that each rank calls on its rows; the first of `functions`."""
        return self._step.function.maker

    @property
    def profile(self) -> Any:
        """Theano's profile of this function, or None."""
        return self._step.function.profile

    def copy(
        self,
        share_memory: bool = False,
        swap: Mapping[SharedVariable, SharedVariable] | None = None,
        delete_updates: bool = False,
        name: str | None = None,
        profile: Any = None,
    ) -> ParallelFunction:
        """Return a copy of this function, as the method of the same name of a ``theano.Function`` does.

        The copy uses the same shared variables, with the exception of those that are swapped. It is
        built again.

        Parameters
        ----------
        share_memory, swap, delete_updates, name, profile
            As for :meth:`synkhronos.Function.copy`.

        Returns
        -------
        ParallelFunction

        Raises
        ------
        TypeError, ValueError, ClosedError, WorldBrokenError
            As for :meth:`synkhronos.Function.copy`.
        """
        arguments = self._arguments
        return type(self)(step_arguments.copied(arguments, swap, delete_updates, name, profile))

    __copy__ = copy

    def get_shared(self) -> list[SharedVariable]:
        """Return the shared variables that the function reads or updates.

        Returns
        -------
        list of shared variables
        """
        return step_arguments.shareds_in(self._arguments)


def make_train_function(
    loss: Variable,
    params: Sequence[SharedVariable],
    x: Variables,
    y: Variables | None = None,
    update_rule: Any = None,
    *args: Any,
    outputs: Any = None,
    updates: Updates | None = None,
    givens: Any = None,
    bcast_inputs: Sequence[Variable] | None = None,
    loss_op: Literal["avg", "sum"] = "avg",
    function_options: Mapping[str, Any] | None = None,
    wire: str | synk.PowerSGD | synk.TopK | None = None,
    overlap: bool = False,
    **kwargs: Any,
) -> TrainFunction:
    """Build a function that trains on one minibatch, on all ranks.

    Parameters
    ----------
    loss : scalar variable
        The loss: a mean over the rows of the minibatch, or a sum if `loss_op` is ``"sum"``.
    params : list of shared variables
        The parameters. If they are identical on every rank, they remain identical.
    x : variable, or list of variables
        The inputs of `loss`, each split over the ranks along axis 0.
    y : variable, or list of variables, optional
        More inputs, such as the labels.
    update_rule : callable, optimizer, or updates
        One of

        - a rule of `synkhronos.extensions.updates`, or one with the same interface: called as
          ``update_rule(loss, params, *args, **kwargs)``, it returns
          ``(grad_updates, param_updates, grad_shared)``;
        - a function that returns updates, as a dict or a list of pairs, such as the functions of
          ``lasagne.updates``. If the name of its first parameter contains "grad", it gets a list of
          gradients, else the loss. The parameters may also come first;
        - an object with the method ``get_updates(loss, params)``, such as Keras's optimizers;
        - the updates themselves. Their gradients must be gradients of `loss`, from ``theano.grad`` or
          :func:`gradients`.
    *args, **kwargs
        Passed to the update rule.
    outputs : variable, (variable, op), or list of these, optional
        Further outputs, as in ``synkhronos.function``. An output without an operation that is computed
        from gradients or from the loss, such as their norm, has its serial value.
    updates : dict, or list of (shared, new) or (shared, new, op), optional
        Further updates, such as moving averages of batch normalization. Where the new value depends on
        the rows, `op` says how the values of the ranks are combined: ``"avg"`` (default; weighted by
        the numbers of rows), ``"sum"`` (of the changes), ``"min"``, ``"max"``, or None, with which each
        rank keeps its own value.
    givens : as in Theano, optional
        Substitutions in the graph.
    bcast_inputs : list of variables, optional
        Inputs whose whole value is sent to every rank, such as a learning rate. In a call they follow
        the data of `x` and `y`.
    loss_op : {"avg", "sum"}
        How the losses and gradients of the ranks are combined: ``"avg"`` for a mean over the rows,
        ``"sum"`` for a sum, also one that is divided by a fixed number. Terms that are the same on
        every rank, such as a penalty on the parameters, count once in either case.
    function_options : dict, optional
        Passed to ``theano.function``, such as ``{"allow_input_downcast": True}``.
    wire : {"float16", "bfloat16", "int8"}, PowerSGD or TopK, optional
        The format in which gradients are sent between machines, as in :func:`synkhronos.all_reduce`; by
        default they are sent unchanged. Needs float32 parameters.
    overlap : bool, default: False
        Whether gradients are sent between machines while the ranks compute others. It has an effect on
        CPUs of several machines that ``launch`` has connected, in calls without `num_slices`. The step
        is the same: bit-identical on two machines without `wire`, otherwise up to rounding. A rank
        without rows then computes on a row of another rank, as it does with collectives in graphs.

    Returns
    -------
    train_minibatch : TrainFunction
        ``train_minibatch(x_data, y_data, *bcast_data, batch=None, num_slices=1)`` takes a step on the
        rows `batch` and returns the loss before the step, as a 0-d array of the dtype of `loss`, or a
        list of the loss and the `outputs`. With `num_slices` each rank computes its gradient in slices;
        the step is the same, and takes less memory. The arguments and errors are the same as for a call
        of a `Function`.

    Warns
    -----
    SynkhronosWarning
        If the graph of a loss shows that it is a sum over the rows, and `loss_op` is ``"avg"``, or the
        other way round.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    TypeError, ValueError
        If `function` or the update rule does not accept an argument, or the step could not equal the
        serial one. The message names the update or output, and says what to do.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> import theano.tensor as T
    >>> from synkhronos.extensions import train
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x, w = T.dmatrix("x"), theano.shared(np.zeros(2), name="w")
    >>> loss = T.sqr(x - w).sum(axis=1).mean()
    >>> def descend(gradients, params, rate):
    ...     return [(param, param - rate * g) for param, g in zip(params, gradients)]
    >>> step = train.make_train_function(loss, [w], x, None, descend, 0.25)
    >>> data = np.arange(6.0).reshape(3, 2)
    >>> step(data)  # two rows on this process, one on the worker
    array(18.33333333)
    >>> step(data, batch=2)
    array(2.25)
    >>> synk.gather(w)
    array([[1.  , 1.75],
           [1.  , 1.75]])
    >>> synk.close()
    """
    definition = define_training(locals())
    return TrainFunction(Step(definition), definition.inputs, outputs is None)


def make_train_function_theano(*args: Any, **kwargs: Any) -> TrainFunction:
    """Build the same step as `make_train_function` with plain Theano, for this process only.

    The parameters are the same as for `make_train_function`. Operations of outputs and updates,
    `loss_op`, `wire` and `overlap` have no effect.

    Returns
    -------
    train_minibatch : TrainFunction
        ``train_minibatch(x_data, y_data, *bcast_data, batch=None)``, where the data are NumPy arrays.

    Examples
    --------
    >>> import numpy as np
    >>> import theano
    >>> import theano.tensor as T
    >>> from synkhronos.extensions import train, updates
    >>> x, w = T.dvector("x"), theano.shared(0.0, name="w")
    >>> loss = T.sqr(x - w).mean()
    >>> step = train.make_train_function_theano(loss, [w], x, None, updates.sgd, 0.25)
    >>> step(np.array([1.0, 3.0]))
    array(5.)
    >>> w.get_value()
    array(1.)
    """
    try:
        bound = _SIGNATURE.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"make_train_function_theano: {error}") from None
    bound.apply_defaults()
    definition = define_training(bound.arguments)
    return TrainFunction(SerialStep(definition), definition.inputs, bound.arguments["outputs"] is None)


_SIGNATURE = inspect.signature(make_train_function)
make_train_function_theano.__signature__ = _SIGNATURE  # type: ignore[attr-defined]  # of functions


def parallel_function(
    inputs: Sequence[Any],
    outputs: Any = None,
    *,
    updates: Updates | None = None,
    givens: Any = None,
    loss: Variable | Sequence[Variable] | None = None,
    params: Sequence[SharedVariable] | None = None,
    gradients: Sequence[Variable] | None = None,
    loss_op: Literal["avg", "sum"] = "avg",
    bcast_inputs: Sequence[Variable] | None = None,
    sliceable_shareds: Sequence[SharedVariable] | None = None,
    wire: str | synk.PowerSGD | synk.TopK | None = None,
    overlap: bool = False,
    **function_options: Any,
) -> ParallelFunction:
    """Build a function on all ranks that equals a ``theano.function``, updates included.

    Use it in a script in place of ``theano.function``. The updates are cut at the gradients in them.
    Each rank computes the gradients on its rows, they are averaged over the ranks, and every rank
    computes the rest of the updates from the average. The parameters remain identical on all ranks.

    Parameters
    ----------
    inputs : list of variables
        As in ``synkhronos.function``: each is split over the ranks along axis 0, scalars are given to
        every rank, and the rows that an index selects in `givens` are split.
    outputs : variable, (variable, op), or list or dict of these, optional
        As in ``synkhronos.function``. An output without an operation that is computed from gradients or
        from the loss, or does not depend on the rows, has its serial value.
    updates : dict, or list of (shared, new) or (shared, new, op), optional
        New values may contain gradients of `loss` with respect to `params`, in any expression. If a
        new value depends on the rows otherwise, as a moving average of batch normalization does, `op`
        says how the values of the ranks are combined: ``"avg"`` (default; weighted by the numbers of
        rows), ``"sum"`` (of the changes), ``"min"``, ``"max"``, or None, with which each rank keeps its
        own value.
    givens : as in Theano, optional
        Substitutions in the graph.
    loss : scalar variable, or list of these, optional
        The losses whose gradients the updates contain. By default, all scalar float outputs are tried.
    params : list of shared variables, optional
        The parameters of these gradients; by default all float shared variables in `updates`, and those
        from which the losses are computed.
    gradients : list of variables, optional
        The gradient expressions themselves, one for each of `params`. Not needed for the
        results of ``theano.grad(loss, params)`` or :func:`gradients`.
    loss_op : {"avg", "sum"}
        How the losses and gradients of the ranks are combined: ``"avg"`` for losses that are means over
        the rows, ``"sum"`` for sums. In a sum, terms that are the same on every rank count once. With
        ``"sum"`` and without `loss`, a scalar output whose gradients are not found is the loss if there
        is no other.
    bcast_inputs : list of variables, optional
        Inputs whose whole value is sent to every rank. Inputs that are not in `inputs` follow them.
    sliceable_shareds : list of shared variables, optional
        As in ``synkhronos.function``.
    wire : {"float16", "bfloat16", "int8"}, PowerSGD or TopK, optional
        The format in which gradients are sent between machines, as in :func:`synkhronos.all_reduce`; by
        default they are sent unchanged. Needs float32 parameters.
    overlap : bool, default: False
        Whether gradients are sent between machines while the ranks compute others, as in
        :func:`make_train_function`.
    **function_options
        Passed to ``theano.function``.

    Returns
    -------
    ParallelFunction
        Its calls take the arguments of a ``synkhronos.Function``, with the inputs in the order of
        `inputs`, and return the results of the Theano function.

    Warns
    -----
    SynkhronosWarning
        If the graph of a loss shows that it is a sum over the rows, and `loss_op` is ``"avg"``, or the
        other way round.

    Raises
    ------
    NotForkedError, ClosedError, WorldBrokenError
        If there are no processes that can be used.
    TypeError, ValueError
        If an argument is wrong, or the function could not equal the serial function because a new value
        depends on the rows in a way that cannot be averaged. The message names the update or output, and
        says what to do.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> import theano
    >>> import theano.tensor as T
    >>> from synkhronos.extensions import train
    >>> synk.fork(2, use_gpu=False)
    2
    >>> x, rate = T.dvector("x"), T.dscalar("rate")
    >>> w, velocity = theano.shared(0.0, name="w"), theano.shared(0.0, name="velocity")
    >>> loss = T.sqr(x - w).mean()
    >>> new_velocity = 0.5 * velocity - rate * T.grad(loss, w)
    >>> updates = [(velocity, new_velocity), (w, w + new_velocity)]
    >>> step = train.parallel_function([x, rate], loss, updates=updates)
    >>> step([1.0, 2.0, 3.0], 0.25)  # two rows on this process, one on the worker
    array(4.66666667)
    >>> step([1.0, 2.0, 3.0], rate=0.25)
    array(1.66666667)
    >>> synk.gather([w, velocity])
    [array([2., 2.]), array([1., 1.])]
    >>> synk.close()
    """
    return ParallelFunction({**locals()})
