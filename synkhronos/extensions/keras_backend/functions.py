"""The functions of a Keras model on all ranks, called in the same way as Keras's own.

`Trial` finds whether losses and metrics are means or sums over the rows of a batch.
"""

from __future__ import annotations

from typing import Any, Iterable, NamedTuple, Sequence

import numpy
import theano
import theano.tensor as tt
from scipy import sparse
from theano.compile.sharedvalue import SharedVariable
from theano.gof import Variable

import synkhronos as synk
from synkhronos.arithmetic.comparison import Tolerance
from synkhronos.engines.analysis import graphs
from synkhronos.engines.analysis.difference_causes import difference_causes
from synkhronos.engines.analysis.graphs import Dependence, inputs_first, rebuilt
from synkhronos.extensions.steps.losses import terms
from synkhronos.extensions.steps.step import SAME_FOR_PAIRS
from synkhronos.extensions.train import parallel_function
from synkhronos.functions.comparing.serial_comparison import causes_in_words, combined
from synkhronos.functions.steps import shares


class Term(NamedTuple):
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


def terms_of(label: str, expression: Variable, local: Dependence) -> list[Term]:
    """Return the terms of an expression that depend on the rows."""
    found = terms(expression, local, until_sums=True) if local.of(expression) else ()
    return [Term(label, leaf, "sum" if is_sum else "avg") for leaf, is_sum in found]


class Trial:
    """Compares the terms of a batch with the terms of its two halves.

    Random numbers are replaced by a constant, because parts of a batch draw different numbers.

    Parameters
    ----------
    inputs : list of variables
        The inputs of the model.
    terms : list of Term
        The terms to compare.
    options : dict
        Keywords of ``theano.function``.
    """

    def __init__(
        self, inputs: Sequence[Variable], terms: Sequence[Term], options: dict[str, Any]
    ) -> None:
        variables = [spec.variable for spec in terms]
        drawn = graphs.draws_in(inputs_first(variables))
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


#: How Keras itself builds functions.
OPTIONS = {"allow_input_downcast": True, "on_unused_input": "ignore"}


class Request(NamedTuple):
    """The arguments with which Keras calls ``K.function``."""

    inputs: list[Variable]
    outputs: list[Variable]
    updates: dict[SharedVariable, Variable]
    options: dict[str, Any]


def request_of(
    inputs: Iterable[Variable],
    outputs: Iterable[Variable],
    updates: Iterable[tuple],
    options: dict[str, Any],
) -> Request:
    """Return the arguments of a call of ``K.function``; the first of several updates counts."""
    first: dict[SharedVariable, Variable] = {}
    for target, new in updates:
        first.setdefault(target, new)
    return Request(list(inputs), list(outputs), first, {**OPTIONS, **options})


class _Data:
    """Converts the arguments of a call to the types of the inputs, as Theano would."""

    def __init__(self, inputs: Sequence[Variable]) -> None:
        self.inputs = inputs

    def of(self, values: Sequence[Any]) -> list[Any]:
        if not isinstance(values, (list, tuple)) or len(values) != len(self.inputs):
            got = len(values) if isinstance(values, (list, tuple)) else type(values).__name__
            raise TypeError(f"expected a list of {len(self.inputs)} arrays, got {got}")
        return [_converted(value, variable) for value, variable in zip(values, self.inputs)]

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


class PredictFunction:
    """Computes outputs on all ranks, each on its own rows, and joins them."""

    functions: list[synk.Function]

    def __init__(self, request: Request) -> None:
        self._data = _Data(request.inputs)
        rows, others = self._data.split(request.inputs)
        function = synk.function(
            rows,
            [(output, "gather") for output in request.outputs],
            bcast_inputs=others,
            updates=list(request.updates.items()),
            **request.options,
        )
        self.functions = [function]
        shares(self.functions)

    def __call__(self, inputs: Sequence[Any]) -> list[numpy.ndarray]:
        """Return the outputs for all rows."""
        rows, others = self._data.split(self._data.of(inputs))
        return self.functions[0](*rows, *others)


class Metrics:
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
        self.terms: list[Term] = []
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
        operations = {term.op for term in terms_of(f"metric {target.name}", change, local)}
        if len(operations) > 1:
            raise ValueError(
                f"metric {target.name}: it adds a sum over the rows and a mean of the rows; split it "
                f"into two metrics"
            )
        [op] = operations
        self.terms.append(Term(f"metric {target.name}", change, op))
        return op

    def add(self, changes: Sequence[Any]) -> list[numpy.ndarray]:
        """Add the changes of all ranks; return the values of the metrics."""
        return self._function(*changes)


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


class StepFunction:
    """Trains or evaluates on a batch on all ranks; returns the loss and the metrics.

    Its attribute ``functions`` lists the functions of Synkhronos that a call runs.

    Parameters
    ----------
    request : Request
        The request without the metrics.
    metrics : Metrics
        The metrics.
    order : list of bool
        For each output, whether it is a metric.
    params : list of shared variables or None
        The variables that are trained.
    all_rows : variable or None
        The input that gets the number of rows.
    trial : Trial or None
        Runs with the first batch.
    weights : list of (str, variable)
        Sample weights that have to be equal in each batch, and the names of their outputs.
    """

    def __init__(
        self,
        request: Request,
        metrics: Metrics,
        order: list[bool],
        params: list[SharedVariable] | None,
        all_rows: Variable | None,
        trial: Trial | None,
        weights: list[tuple[str, Variable]],
    ) -> None:
        self._data, self._metrics, self._order = _Data(request.inputs), metrics, order
        self._counts, self._trial = all_rows is not None, trial
        self._weights = [(name, request.inputs.index(item)) for name, item in weights]
        self._n_outputs = len(request.outputs)
        training = {} if params is None else {"loss": request.outputs[0], "params": params}
        function = self._function = parallel_function(
            request.inputs + ([] if all_rows is None else [all_rows]),
            [*request.outputs, *metrics.outputs],
            updates=list(request.updates.items()),
            **training,
            **request.options,
        )
        self.functions = function.functions

    def __call__(self, inputs: Sequence[Any]) -> list[numpy.ndarray]:
        """Return the loss and the metrics."""
        values = self._data.of(inputs)
        length = values[0].shape[0]
        for name, position in self._weights:
            if numpy.ptp(values[position]):
                raise ValueError(
                    f"sample weights: expected equal ones, as the loss of the output {name!r} returns "
                    f"one number for a batch; have it return one number per row"
                )
        if self._trial is not None and length > 1:
            rows, others = self._data.split(values)
            self._trial.check(rows, list(map(numpy.zeros_like, others)))  # in the test phase
            self._trial = None
        results = self._function(*values, *([length] if self._counts else []))
        own = iter(results[: self._n_outputs])
        metrics = iter(self._metrics.add(results[self._n_outputs :]))
        return [next(metrics if is_metric else own) for is_metric in self._order]
