"""Finds whether the losses and metrics of a Keras model are means or sums over the rows of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

import numpy
import theano
import theano.tensor as tt
from theano.gof import Variable
from theano.sandbox.rng_mrg import mrg_uniform_base
from theano.tensor.raw_random import RandomFunction

from synkhronos.arithmetic.comparison import Tolerance
from synkhronos.engines.analysis.difference_causes import difference_causes
from synkhronos.engines.analysis.graphs import Dependence, inputs_first, is_random_state, rebuilt
from synkhronos.extensions.steps.linear import terms


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


def dependence_on_rows(rows: Sequence[Variable], roots: Sequence[Variable]) -> Dependence:
    """Return which rows and random numbers, which may differ by rank, expressions depend on."""
    random = [variable for variable in inputs_first(roots) if is_random_state(variable)]
    return Dependence([*rows, *random], {})


def terms_of(label: str, expression: Variable, local: Dependence) -> list[Term]:
    """Return the terms of an expression that depend on the rows."""
    found = terms(expression, local, until_sums=True) if local.of(expression) else ()
    return [Term(label, leaf, "sum" if is_sum else "avg") for leaf, is_sum in found]


def as_mean(total: Variable, parts: Sequence[Term], rows: Variable, all_rows: Variable) -> Variable:
    """Return a loss whose average over the ranks, weighted by their rows, is `total` of all rows.

    Its terms that are sums over the rows are multiplied by the number of all rows and divided by the
    number of the rank's rows.
    """
    share = tt.cast(all_rows, total.dtype) / tt.cast(rows.shape[0], total.dtype)
    replacements = {
        spec.variable: spec.variable.type.filter_variable(
            tt.cast(spec.variable * share, spec.variable.dtype)
        )
        for spec in parts
        if spec.op == "sum"
    }
    return rebuilt([total], replacements, {})[0]


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
        drawn = [
            variable
            for variable in inputs_first(variables)
            if variable.owner is not None
            and isinstance(variable.owner.op, (mrg_uniform_base, RandomFunction))
            and variable is variable.owner.outputs[1]
        ]
        fixed = {item: item.type.filter_variable(_constant(item)) for item in drawn}
        self._terms = terms
        variables = rebuilt(variables, fixed, {})
        axes = [0 if variable.ndim else None for variable in inputs]
        self._causes = [cause.certain for cause in difference_causes(inputs, axes, variables)]
        self._function = theano.function(
            list(inputs),
            variables,
            no_default_updates=True,
            **options,
        )

    def check(self, rows: Sequence[Any], others: Sequence[Any]) -> None:
        """Raise ``ValueError`` unless the terms of this batch follow from the terms of its halves."""
        length = rows[0].shape[0]
        half = (length + 1) // 2
        whole = self._function(*rows, *others)
        first = self._function(*[row[:half] for row in rows], *others)
        second = self._function(*[row[half:] for row in rows], *others)
        weights = {"sum": (1, 1), "avg": (half / length, 1 - half / length)}
        for term, causes, value, *parts in zip(self._terms, self._causes, whole, first, second):
            expected = sum(weight * part for weight, part in zip(weights[term.op], parts))
            value, expected = numpy.asarray(value), numpy.asarray(expected)
            least = 10 * float(numpy.finfo(value.dtype).eps)
            agrees = Tolerance(None, least, set()).allows(value, expected)
            if causes or not agrees:
                raise ValueError(_refusal(term, value, parts, agrees))


def _constant(like: Variable) -> Variable:
    # A pair of normal numbers is made of the cosine and the sine of 2 pi times a uniform number, which
    # are equal for this number.
    return tt.fill(like, tt.constant(0.125, dtype=like.dtype))


def _refusal(term: Term, value: Any, parts: Sequence[Any], agrees: bool) -> str:
    kind = "mean of" if term.op == "avg" else "sum over"
    why = f"as it is {value} for a batch, and {parts[0]} and {parts[1]} for its halves"
    if agrees:
        why = "but a quotient or another nonlinear function of one, although this batch does not show it"
    return (
        f"{term.label}: it is no {kind} the rows, {why}, so that the ranks' values do not give the "
        f"value for all rows. Have the function return one value per row, which Keras then averages, or "
        f"take K.mean over the rows"
    )
