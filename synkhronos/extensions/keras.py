"""Models of Keras 2.3.1, on its Theano back end, on all ranks.

Importing this module imports Keras and makes it compatible with newer versions of Python and h5py. It
selects Keras's Theano back end, like ``KERAS_BACKEND=theano``.

While Keras builds the functions of a model, ``K.function`` returns functions on all ranks that are
called in the same way. `_Trial` finds whether losses and metrics are means or sums over the rows.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Iterable, Iterator, NamedTuple, Sequence

import numpy
import theano
import theano.tensor as tt
from scipy import sparse
from theano.compile.sharedvalue import SharedVariable
from theano.gof import Variable

import synkhronos as synk
from synkhronos._text import listed
from synkhronos._typing import AnyArray
from synkhronos.arithmetic.comparison import Tolerance
from synkhronos.engines.analysis.difference_causes import difference_causes
from synkhronos.engines.analysis.graphs import (
    Dependence,
    draws_in,
    inputs_first,
    is_random_state,
    rebuilt,
)
from synkhronos.extensions.keras_backend import import_keras
from synkhronos.extensions.steps.losses import terms, times
from synkhronos.extensions.steps.step import SAME_FOR_PAIRS
from synkhronos.extensions.train import parallel_function
from synkhronos.functions.comparing.serial_comparison import causes_in_words, combined
from synkhronos.functions.steps import shares

__all__ = ["parallelize"]

_keras = import_keras()
_THEIRS = ("keras.losses", "keras.metrics")
_KINDS = ("train", "test", "predict")
#: How Keras itself builds functions.
_OPTIONS = {"allow_input_downcast": True, "on_unused_input": "ignore"}


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
        with _functions_built_by(_PredictFunction):
            make(model)
        return
    loss = _Loss(model)
    params = model._collected_trainable_weights if kind == "train" else None
    with _functions_built_by(functools.partial(_StepFunction, model, loss, params)), loss.in_use():
        make(model)


class _Request(NamedTuple):
    """The arguments with which Keras calls ``K.function``."""

    inputs: list[Variable]
    outputs: list[Variable]
    updates: dict[SharedVariable, Variable]
    options: dict[str, Any]

    def values(self, given: Sequence[Any]) -> list[Any]:
        """Return the arguments of a call in the types of the inputs, as Theano would convert them."""
        if not isinstance(given, (list, tuple)) or len(given) != len(self.inputs):
            got = len(given) if isinstance(given, (list, tuple)) else type(given).__name__
            raise TypeError(f"expected a list of {len(self.inputs)} arrays, got {got}")
        return [_converted(value, variable) for value, variable in zip(given, self.inputs)]

    def split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the values of the inputs with rows, and of the others."""
        pairs = list(zip(values, self.inputs))
        rows = [value for value, variable in pairs if variable.ndim]
        return rows, [value for value, variable in pairs if not variable.ndim]


def _converted(value: Any, variable: Variable) -> Any:
    if value is None:  # which NumPy would convert to NaN
        raise TypeError(f"input {variable}: expected an array or a number, got None")
    if sparse.issparse(value):
        return value.astype(variable.dtype)
    return numpy.asarray(value, variable.dtype)


@contextlib.contextmanager
def _functions_built_by(build: Any) -> Iterator[None]:
    """Have ``K.function`` call `build` with a `_Request`."""
    backend = _keras.backend
    usual = backend.function

    def function(
        inputs: Iterable[Variable],
        outputs: Iterable[Variable],
        updates: Iterable[tuple[Any, Any]] = (),
        **options: Any,
    ) -> Any:
        first: dict[SharedVariable, Variable] = {}
        for target, new in updates:
            first.setdefault(target, new)  # the first of several updates counts
        return build(_Request(list(inputs), list(outputs), first, {**_OPTIONS, **options}))

    backend.function = function
    try:
        yield
    finally:
        backend.function = usual


class _PredictFunction:
    """Computes outputs on all ranks, each on its own rows, and joins them."""

    functions: list[synk.Function]

    def __init__(self, request: _Request) -> None:
        self._request = request
        rows, others = request.split(request.inputs)
        function = synk.function(
            rows,
            [(output, "gather") for output in request.outputs],
            bcast_inputs=others,
            updates=list(request.updates.items()),
            **request.options,
        )
        self.functions = [function]
        shares(self.functions)

    def __call__(self, inputs: Sequence[Any]) -> list[AnyArray]:
        """Return the outputs for all rows."""
        rows, others = self._request.split(self._request.values(inputs))
        result: list[AnyArray] = self.functions[0](*rows, *others)
        return result


# Losses and metrics, as sums or means over the rows


class _Term(NamedTuple):
    """A number, or an array without rows, that is computed from the rows of a batch.

    Attributes
    ----------
    label : str
        How messages refer to it.
    variable : variable
        The term in the graph.
    op : {"avg", "sum"}
        How the values of parts of the batch give the value of the whole batch.
    """

    label: str
    variable: Variable
    op: str


def _terms_of(label: str, expression: Variable, local: Dependence) -> list[_Term]:
    """Return the terms of an expression that depend on the rows."""
    found = terms(expression, local, until_sums=True) if local.of(expression) else ()
    return [_Term(label, leaf, "sum" if is_sum else "avg") for leaf, is_sum in found]


class _Trial:
    """Compares the terms of a batch with the terms of its two halves.

    Random numbers are replaced by a constant, because parts of a batch draw different numbers.

    Parameters
    ----------
    inputs : list of variables
        The inputs of the model.
    terms : list of _Term
        The terms to compare.
    options : dict
        Keywords of ``theano.function``.
    """

    def __init__(
        self, inputs: Sequence[Variable], terms: Sequence[_Term], options: dict[str, Any]
    ) -> None:
        variables = [spec.variable for spec in terms]
        drawn = draws_in(inputs_first(variables))
        # With this number, pairs of normal numbers are equal, too.
        same = {item: tt.constant(SAME_FOR_PAIRS, dtype=item.dtype) for item in drawn}
        fixed = {item: item.type.filter_variable(tt.fill(item, same[item])) for item in drawn}
        self._terms = terms
        variables = rebuilt(variables, fixed, {})
        axes = [0 if variable.ndim else None for variable in inputs]
        self._causes = difference_causes(inputs, axes, variables)
        self._computed_with = {variable.dtype for variable in inputs}
        options = {**options, "no_default_updates": True}
        self._function = theano.function(list(inputs), variables, **options)

    def check(self, rows: Sequence[Any], others: Sequence[Any]) -> None:
        """Raise ``ValueError`` unless the terms of this batch follow from the terms of its halves."""
        length = rows[0].shape[0]
        half = (length + 1) // 2
        parts = [slice(None), slice(half), slice(half, None)]
        values = zip(*[self._function(*[row[part] for row in rows], *others) for part in parts])
        for term, causes, (whole, *halves) in zip(self._terms, self._causes, values):
            expected = combined(term.op, halves, [half, length - half])
            least = 10 * float(numpy.finfo(whole.dtype).eps)
            agrees = Tolerance(None, least, self._computed_with).allows(expected, whole)
            if agrees and not causes.certain:
                continue
            kind = "mean of" if term.op == "avg" else "sum over"
            shown = "although this batch does not show it"
            if not agrees:
                shown = f"as it is {whole} for a batch, and {halves[0]} and {halves[1]} for its halves"
            found = f". {causes_in_words(causes.possible)}" if causes.possible else ""
            raise ValueError(
                f"{term.label}: it is no {kind} the rows, {shown}, so that the ranks' values do not "
                f"give the value for all rows. Have the function return one value per row, which Keras "
                f"then averages, or take K.mean over the rows{found}"
            )


class _Loss:
    """The loss of a model, and a loss with the same value as an average over the ranks, by their rows.

    Its terms that are sums over the rows are multiplied by the number of all rows and divided by the
    number of the rank's rows.

    Attributes
    ----------
    local : Dependence
        Which expressions depend on the rows.
    terms : list of _Term
        The terms of the loss.
    all_rows : variable or None
        An input for the number of rows of the batch, if the loss needs it.
    """

    def __init__(self, model: Any) -> None:
        rows = [*model._feed_inputs, *model._feed_targets, *model._feed_sample_weights]
        self._model, self._usual = model, model.total_loss
        changes = [new for metric in model._get_training_eval_metrics() for _, new in metric.updates]
        random = [item for item in inputs_first([self._usual, *changes]) if is_random_state(item)]
        self.local: Dependence = Dependence([*rows, *random], {})
        # In a whole batch these weights are equal, which the graph then shows.
        equal = {item: tt.fill(item, item[0]) for _, item in _weights_of_whole_batches(model)}
        self._averaged = rebuilt([self._usual], equal, {})[0]
        self.terms: list[_Term] = _terms_of("loss", self._averaged, self.local)
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


class _Metrics:
    """The metrics of a model. Their state is on the master only, which adds the changes of all ranks.

    Parameters
    ----------
    results : list of variables
        The values of the metrics, computed from their states.
    updates : dict
        From each state to its new value.
    states : set of shared variables
        The states.
    local : Dependence
        Which expressions depend on the rows.
    """

    def __init__(
        self,
        results: Sequence[Variable],
        updates: dict[SharedVariable, Variable],
        states: set[SharedVariable],
        local: Dependence,
    ) -> None:
        self.terms: list[_Term] = []
        self.outputs: list[tuple[Variable, str | None]] = []
        values, news = [], {}
        for target, new in updates.items():
            change = _change(target, new, states)
            op = self._operation(target, change, local)
            value = change.type()
            self.outputs.append((change, op))
            values.append(value)
            news[target] = target.type.filter_variable(target + value)
        replaced = rebuilt(results, news, {}) if results else []
        self._function = theano.function(values, replaced, updates=list(news.items()))

    def _operation(self, target: SharedVariable, change: Variable, local: Dependence) -> str | None:
        """Return how the changes of the ranks are combined, or None if they are equal on all ranks."""
        if not local.of(change):
            return None
        operations = {term.op for term in _terms_of(f"metric {target.name}", change, local)}
        if len(operations) > 1:
            raise ValueError(
                f"metric {target.name}: it adds a sum over the rows and a mean of the rows; split it "
                f"into two metrics"
            )
        [op] = operations
        self.terms.append(_Term(f"metric {target.name}", change, op))
        return op

    def add(self, changes: Sequence[Any]) -> list[AnyArray]:
        """Add the changes of all ranks; return the values of the metrics."""
        values: list[AnyArray] = self._function(*changes)
        return values


def _change(target: SharedVariable, new: Variable, states: set[SharedVariable]) -> Variable:
    """Return what an update adds to the state of a metric."""
    node = new.owner
    if node is not None and node.op == tt.add and len(node.inputs) == 2 and target in node.inputs:
        first, second = node.inputs
        change = second if first is target else first
        if states.isdisjoint(inputs_first([change])):
            return change
    raise ValueError(
        f"metric {target.name}: its update does not add to its state what it finds in the batch, so "
        f"that the ranks cannot share the batch; use K.update_add(state, change), where the change does "
        f"not depend on states, or compute this metric after predict()"
    )


class _StepFunction:
    """Trains or evaluates on a batch on all ranks; returns the loss and the metrics.

    Its attribute ``functions`` lists the functions of Synkhronos that a call runs.

    Parameters
    ----------
    model : keras.models.Model
    loss : _Loss
    params : list of shared variables or None
        The variables that are trained.
    request : _Request
    """

    def __init__(
        self, model: Any, loss: _Loss, params: list[SharedVariable] | None, request: _Request
    ) -> None:
        self._request, self._counts = request, loss.all_rows is not None
        self._order = [hasattr(output, "_is_metric") for output in request.outputs]
        pairs = list(zip(request.outputs, self._order))
        outputs = [output for output, is_metric in pairs if not is_metric]
        states = {state for metric in model._get_training_eval_metrics() for state in metric.weights}
        of_metrics = {target: new for target, new in request.updates.items() if target in states}
        results = [output for output, is_metric in pairs if is_metric]
        self._metrics = metrics = _Metrics(results, of_metrics, states, loss.local)
        self._trial = None  # runs with the first batch
        if not _is_known(model, loss):
            options = {name: value for name, value in request.options.items() if name != "name"}
            self._trial = _Trial(request.inputs, [*loss.terms, *metrics.terms], options)
        # They have to be equal in each batch.
        weights = _weights_of_whole_batches(model)
        self._weights = [(name, request.inputs.index(item)) for name, item in weights]
        self._n_outputs = len(outputs)
        training = {} if params is None else {"loss": outputs[0], "params": params}
        self._function = parallel_function(
            request.inputs + ([loss.all_rows] if self._counts else []),
            [*outputs, *metrics.outputs],
            updates=[item for item in request.updates.items() if item[0] not in states],
            **training,
            **request.options,
        )
        self.functions = self._function.functions

    def __call__(self, inputs: Sequence[Any]) -> list[AnyArray]:
        """Return the loss and the metrics."""
        values = self._request.values(inputs)
        length = values[0].shape[0]
        for name, position in self._weights:
            if numpy.ptp(values[position]):
                raise ValueError(
                    f"sample weights: expected equal ones, as the loss of the output {name!r} returns "
                    f"one number for a batch; have it return one number per row"
                )
        if self._trial is not None and length > 1:
            rows, others = self._request.split(values)
            self._trial.check(rows, list(map(numpy.zeros_like, others)))  # in the test phase
            self._trial = None
        results = self._function(*values, *([length] if self._counts else []))
        own = iter(results[: self._n_outputs])
        metrics = iter(self._metrics.add(results[self._n_outputs :]))
        return [next(metrics if is_metric else own) for is_metric in self._order]


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
