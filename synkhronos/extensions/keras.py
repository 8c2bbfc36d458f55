"""Models of Keras 2.3.1, on its Theano back end, on all ranks.

Importing this module imports Keras and makes it compatible with newer versions of Python and h5py. It
selects Keras's Theano back end, like ``KERAS_BACKEND=theano``.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, Iterable, Iterator

import theano.tensor as tt
from theano.gof import Variable

from synkhronos._text import listed
from synkhronos.engines.analysis.graphs import Dependence, inputs_first, is_random_state, rebuilt
from synkhronos.extensions.keras_backend import functions
from synkhronos.extensions.keras_backend.functions import Request
from synkhronos.extensions.keras_backend.imports import import_keras
from synkhronos.extensions.steps.losses import times

if TYPE_CHECKING:
    from theano.compile.sharedvalue import SharedVariable

__all__ = ["parallelize"]

_keras = import_keras()
_THEIRS = ("keras.losses", "keras.metrics")
_KINDS = ("train", "test", "predict")


def parallelize(model: Any) -> Any:
    """Make a Keras model train, evaluate and predict on all ranks.

    Each batch is divided among the ranks. ``fit``, ``fit_generator``, ``evaluate``, ``predict``, and
    their variants for one batch, are then used as before, with any callbacks. They give the same results
    as one process, except as described in the notes.

    Parameters
    ----------
    model : keras.models.Model
        A ``Sequential`` or a functional model. It may be compiled before or after, and compiled again.
        Call :func:`synkhronos.fork` before the first batch. After another `fork`, call `parallelize`
        again.

    Returns
    -------
    keras.models.Model
        The same model.

    Raises
    ------
    TypeError
        If `model` is not a Keras model.
    ValueError
        If a layer keeps states of the rows from batch to batch (``stateful=True``), because the rows of
        the ranks have no common state.

    Notes
    -----
    Losses, sample weights, class weights, masks, regularizers and metrics give the serial numbers for
    batches of any length, up to rounding. If the model uses custom losses or metrics, ``add_loss``,
    ``add_metric`` or activity regularizers, these are tested on the first batch: the values of its two
    halves must give the value of the whole batch, as a mean or as a sum, and their graphs must not show
    that other batches differ, as a quotient of two sums does. Otherwise the call raises
    ``ValueError``, which names the loss or metric.

    Dropout and other noise are drawn from random streams of each rank. So no two ranks drop the same
    units, and the numbers differ from a run on one process.

    Batch normalization uses the mean and the variance of each rank's own rows of the batch. The moving
    averages of the ranks are averaged, weighted by their rows, in every step, so they are the same on
    all ranks. The numbers differ from a run on one process, as with a smaller batch.

    Values set by callbacks, ``set_weights``, ``load_weights``, ``K.set_value`` and ``K.batch_set_value``
    are sent to every rank before the next batch. A variable's own ``set_value``, and another model that
    trains the same layers on one process, change the master only: call :func:`synkhronos.broadcast`.

    Examples
    --------
    >>> import numpy as np
    >>> import synkhronos as synk
    >>> from synkhronos.extensions.keras import parallelize
    >>> from keras.models import Sequential
    >>> from keras.layers import Dense
    >>> synk.fork(2, use_gpu=False)
    2
    >>> model = Sequential([Dense(1, input_shape=(2,), kernel_initializer="zeros")])
    >>> model.compile("sgd", "mse")
    >>> _ = parallelize(model)
    >>> x = np.arange(6.0).reshape(3, 2)
    >>> loss = model.train_on_batch(x, x.sum(axis=1))  # two rows on this process, one on the worker
    >>> print(loss.round(2))
    35.67
    >>> print(model.predict(x).round(2).ravel())
    [0.51 1.93 3.36]
    >>> synk.close()
    """
    if not isinstance(model, _keras.models.Model):
        raise TypeError(f"model: expected a Keras model, got {type(model).__name__}")
    if model.stateful:
        names = [layer.name for layer in model.layers if getattr(layer, "stateful", False)]
        raise ValueError(
            f"model: layers {listed(names)} keep states of the rows from batch to batch, which cannot "
            f"be divided among the ranks; build them with stateful=False"
        )
    kept = None
    if getattr(model, "train_function", None) is not None:
        kept = model.optimizer, model.optimizer.get_weights()
    for kind in _KINDS:
        if hasattr(model, f"{kind}_function"):
            setattr(model, f"{kind}_function", None)
        setattr(model, f"_make_{kind}_function", functools.partial(_make_function, model, kind))
    model._make_train_function = functools.partial(_make_train_function, model, [kept])
    return model


def _make_train_function(model: Any, kept: list[Any]) -> None:
    """Make the training function, and restore the optimizer's state from before `parallelize`."""
    is_new = getattr(model, "train_function", None) is None
    _make_function(model, "train")
    if is_new and kept:
        state = kept.pop()
        if state is not None and state[0] is model.optimizer:
            model.optimizer.set_weights(state[1])


def _make_function(model: Any, kind: str) -> None:
    """Make a function of a model as Keras does, but on all ranks."""
    if getattr(model, f"{kind}_function", None) is not None:
        return
    make = getattr(type(model), f"_make_{kind}_function")
    if kind == "predict" or not hasattr(model, "total_loss"):
        with _functions_built_by(functions.PredictFunction):
            make(model)
        return
    loss = _Loss(model)
    params = model._collected_trainable_weights if kind == "train" else None
    with _functions_built_by(functools.partial(_step_function, model, loss, params)), loss.in_use():
        make(model)


@contextlib.contextmanager
def _functions_built_by(build: Any) -> Iterator[None]:
    """Have ``K.function`` call `build` with a `Request`."""
    backend = _keras.backend
    usual = backend.function

    def function(
        inputs: Iterable[Variable],
        outputs: Iterable[Variable],
        updates: Iterable[tuple[Any, Any]] = (),
        **options: Any,
    ) -> Any:
        return build(functions.request_of(inputs, outputs, updates, options))

    backend.function = function
    try:
        yield
    finally:
        backend.function = usual


class _Loss:
    """The loss of a model, and a loss with the same value as an average over the ranks, by their rows.

    Its terms that are sums over the rows are multiplied by the number of all rows and divided by the
    number of the rank's rows.

    Attributes
    ----------
    local : Dependence
        Which expressions depend on the rows.
    terms : list of Term
        The terms of the loss.
    all_rows : variable or None
        An input for the number of rows of the batch, if the loss needs it.
    """

    def __init__(self, model: Any) -> None:
        rows = [
            *model._feed_inputs,
            *model._feed_targets,
            *model._feed_sample_weights,
        ]
        self._model, self._usual = model, model.total_loss
        changes = [new for metric in model._get_training_eval_metrics() for _, new in metric.updates]
        random = [item for item in inputs_first([self._usual, *changes]) if is_random_state(item)]
        self.local: Dependence = Dependence([*rows, *random], {})
        # In a whole batch these weights are equal, which the graph then shows.
        equal = {item: tt.fill(item, item[0]) for _, item in _weights_of_whole_batches(model)}
        self._averaged = rebuilt([self._usual], equal, {})[0]
        self.terms: list[functions.Term] = functions.terms_of("loss", self._averaged, self.local)
        self.all_rows: Variable | None = None
        if any(term.op == "sum" for term in self.terms):
            self.all_rows = tt.lscalar("all_rows")
            dtype = self._averaged.dtype
            share = tt.cast(self.all_rows, dtype) / tt.cast(rows[0].shape[0], dtype)
            sums = [term.variable for term in self.terms if term.op == "sum"]
            [self._averaged] = rebuilt([self._averaged], {item: times(item, share) for item in sums}, {})

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Give the model the loss that can be averaged over ranks."""
        self._model.total_loss = self._averaged
        try:
            yield
        finally:
            self._model.total_loss = self._usual


def _step_function(
    model: Any, loss: _Loss, params: list[SharedVariable] | None, request: Request
) -> functions.StepFunction:
    metrics = model._get_training_eval_metrics()
    states = {state for metric in metrics for state in metric.weights}
    of_metrics = {target: new for target, new in request.updates.items() if target in states}
    order = [hasattr(output, "_is_metric") for output in request.outputs]
    results = [output for output, is_metric in zip(request.outputs, order) if is_metric]
    kept = functions.Metrics(results, of_metrics, states, loss.local)
    trial = None
    if not _is_known(model, loss):
        options = {name: value for name, value in request.options.items() if name != "name"}
        trial = functions.Trial(request.inputs, [*loss.terms, *kept.terms], options)
    request = request._replace(
        outputs=[output for output, is_metric in zip(request.outputs, order) if not is_metric],
        updates={target: new for target, new in request.updates.items() if target not in states},
    )
    weights = _weights_of_whole_batches(model)
    return functions.StepFunction(request, kept, order, params, loss.all_rows, trial, weights)


def _weights_of_whole_batches(model: Any) -> list[tuple[str, Variable]]:
    """Return the names and sample weights of outputs whose loss is one number per batch."""
    found = []
    for name, loss, target, output, weights in zip(
        model.output_names, model.loss_functions, model.targets, model.outputs, model.sample_weights
    ):
        is_own = isinstance(loss, _keras.losses.Loss) and _origin(loss) not in _THEIRS
        if is_own and weights is not None and not loss.call(target, output).ndim:
            found.append((name, weights))
    return found


def _origin(function: Any) -> str:
    """Return the name of the module that defines a loss or a metric."""
    return getattr(function, "fn", getattr(function, "_fn", type(function))).__module__


def _is_known(model: Any, loss: _Loss) -> bool:
    """Whether all losses and metrics are Keras's own, for each row."""
    given = [loss_function for loss_function in model.loss_functions if loss_function is not None]
    given += model._compile_metric_functions
    added = [item for item in model.losses if loss.local.of(item)]
    is_added = len(model.metrics) > len(model._compile_metric_functions)
    return not added and not is_added and all(_origin(function) in _THEIRS for function in given)
