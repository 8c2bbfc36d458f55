"""The terms of a model with equal numbers of rows, and their sum over the rows of all ranks."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Collection, Iterator, Mapping, Sequence

import numpy as np
import pytensor.tensor as pt

from synkhronos._text import listed
from synkhronos._typing import AnyArray
from synkhronos.engines.names import Constant, SharedVariable, Variable, ancestors
from synkhronos.extensions.pymc.dependence import RowInputs, dependence
from synkhronos.extensions.pymc.leaves import are_equal, array_of, freed, has_length, label_of
from synkhronos.extensions.pymc.point import Point
from synkhronos.extensions.pymc.points import points_of
from synkhronos.extensions.pymc.potential import like, substitute, total_of
from synkhronos.extensions.pymc.rows import Rows
from synkhronos.extensions.pymc.sources import Sources
from synkhronos.extensions.pymc.terms import Term, log_prob_of, plain_log_prob_of

_REMOVED = "local_remove_check_parameter"  # as PyMC does with check_bounds=False


class Group:
    """Terms with equal numbers of rows.

    Parameters
    ----------
    model : pymc.Model
    terms : list of Term
    given : dict or None
        The script's arrays for constants and shared variables, which alone have rows then.
    point : Point
        Values with which it is tried.
    mode : mode of PyTensor or None
        The mode in which the ranks compile.

    Attributes
    ----------
    name : str
        The names of the terms.
    """

    def __init__(
        self,
        model: Any,
        terms: Sequence[Term],
        given: Mapping[Variable, Any] | None,
        point: Point,
        mode: Any,
    ) -> None:
        self.name = "_and_".join(term.variable.name for term in terms)
        self._title = f"parallelize({self.name})"
        self._model, self._terms, self._point = model, terms, point
        self._given, self._mode = given, mode
        self._n_rows = terms[0].n_rows
        leaves = list(dict.fromkeys(itertools.chain(*(term.leaves for term in terms))))
        stand_ins = {variable: variable.type(variable.name) for variable in leaves}
        self._log_probs = [log_prob_of(term, stand_ins) for term in terms]
        used = {*ancestors(self._log_probs)}
        self._stand_ins = {item: new for item, new in stand_ins.items() if new in used}
        for log_prob in self._log_probs:
            total_of(self._title, log_prob)  # before anything is tried: random numbers are refused

    def summed(self) -> tuple[Rows, list[Variable], list[Variable]]:
        """Return the sum over the rows, its inputs in the model, and the leaves that are rows.

        Raises
        ------
        ValueError
            If it is not a sum over rows.
        """
        rows = [item for item in self._stand_ins if self._has_rows(item)]
        made, inputs = self._made(rows)
        try:
            made.test(self._points(inputs))
            return made, inputs, rows
        except ValueError as error:
            reason = error
        found = self._dependence()
        fewer = [row for row in rows if row not in found.across]
        fewer += self._indexed({item: axis for item, axis in found.by_row.items() if item not in rows})
        if self._given is None and 0 < len(fewer) != len(rows):
            made, inputs = self._made(fewer)
            with contextlib.suppress(ValueError):  # the first error is raised
                made.test(self._points(inputs))
                return made, inputs, fewer
        raise self._refusal(found, reason) from reason

    def _indexed(self, parameters: Mapping[Variable, int]) -> list[Variable]:
        """Have each row use its item of parameters with an item for each row, and return its number."""
        parameters = {item: axis for item, axis in parameters.items() if item in self._point.parameters}
        if not parameters:
            return []
        numbers = pt.constant(np.arange(self._n_rows), "row")
        row = self._stand_ins[numbers] = numbers.type("row")
        known = self._point.parameters
        by_row = {known[item]: known[item].take(row, axis) for item, axis in parameters.items()}
        kept = {value: value for value in [*known.values(), *self._stand_ins.values()]}
        self._log_probs = substitute(self._log_probs, {**kept, **by_row})
        return [numbers]

    def _has_rows(self, leaf: Variable) -> bool:
        return has_length(leaf, self._n_rows) if self._given is None else leaf in self._given

    def _made(self, rows: Sequence[Variable]) -> tuple[Rows, list[Variable]]:
        """Return the sum over these rows, and its inputs in the model."""
        computed = {item: graph for term in self._terms for item, graph in term.computed.items()}
        arrays, variables, by_leaf = arrays_of(rows, self._given or {}, computed)
        if not variables:
            raise ValueError(f"{self._title}: data: expected the names of arrays that have rows")
        log_probs = with_rows(self._model, self._log_probs, self._stand_ins, self._n_rows, by_leaf)
        n_rows = len(arrays[0])
        total = sum(
            total_of(self._title, log_prob) * (term.scale(n_rows) if term.scale else 1)
            for term, log_prob in zip(self._terms, log_probs)
        )
        used = {*ancestors([total])}
        known = {**self._point.parameters, **self._stand_ins}
        inputs = [item for item, new in known.items() if new in used]
        free = self._model.free_RVs
        made = Rows(
            self._title,
            total,
            [known[variable] for variable in inputs],
            [variable in free and variable.type.dtype.startswith("float") for variable in inputs],
            variables,
            arrays,
            self._mode,
            **({} if self._model.check_bounds else {"checks": _REMOVED}),
            plain=self._plain(inputs),
            sources=self._sources(variables, by_leaf, computed),
            model=self._model,
        )
        return made, inputs

    def _sources(
        self,
        variables: Sequence[Variable],
        by_leaf: Mapping[Variable, Variable],
        computed: Mapping[Variable, Variable],
    ) -> Sources:
        """Return what the model computes the rows from, unless they are the script's."""
        given = self._given or {}
        graphs = {
            variables.index(variable): self._with_sources(computed.get(leaf, leaf))
            for leaf, variable in by_leaf.items()
            if given.get(leaf) is None and (leaf in computed or isinstance(leaf, SharedVariable))
        }
        fixed = [item for term in self._terms for item in term.fixed]
        if any(term.scale for term in self._terms):  # which is that of a number of rows
            fixed += [item for item in ancestors(graphs.values()) if isinstance(item, SharedVariable)]
        return Sources(graphs, [self._point.source_of(item) for item in fixed])

    def _with_sources(self, graph: Variable) -> Variable:
        """Return a graph of the model's own variables, for one of stand-ins."""
        tensors = {
            variable: getattr(self._point.source_of(variable), "values", variable)
            for variable in ancestors([graph])
            if isinstance(variable, SharedVariable) and self._point.source_of(variable) is not variable
        }
        return substitute([graph], tensors)[0] if tensors else graph

    def _plain(self, inputs: Sequence[Variable]) -> Any:
        """Return the sum in the model's own graph, or None if the rows are the script's."""
        if self._given is not None and any(array is not None for array in self._given.values()):
            return None
        shared = {item: new for item, new in self._stand_ins.items() if item in inputs}
        graphs = [plain_log_prob_of(term, self._point, shared) for term in self._terms]
        return sum(total_of(self._title, graph) for graph in graphs)

    def _points(self, inputs: Sequence[Variable]) -> Iterator[list[AnyArray]]:
        return points_of(self._model, [self._point.source_of(variable) for variable in inputs])

    # Why it is not a sum over rows

    def _dependence(self) -> RowInputs:
        parameters, leaves = self._point.parameters, self._stand_ins
        return dependence(
            {term.variable: log_prob for term, log_prob in zip(self._terms, self._log_probs)},
            self._n_rows,
            {**parameters, **leaves},
            [*self._point.values(list(parameters)), *map(array_of, leaves)],
        )

    def _refusal(self, found: RowInputs, reason: Exception) -> ValueError:
        """Return an error that names the variables and what helps, or what was found by trial."""
        latent = [item.name for item in found.across if item in self._point.parameters]
        data = [label_of(item) for item in found.across if item not in self._point.parameters]
        whole = [item for item in found.whole if item not in self._model.potentials]
        causes = []
        if whole:
            terms = listed(f"{variable.name!r} ({_distribution(variable)})" for variable in whole)
            causes.append(
                f"{terms} has one log-probability for all of its {self._n_rows} rows, as one time "
                f"series or a Gaussian process has; leave it out by observed=[...], with the names of "
                f"the others, or sample the model without ranks"
            )
        if latent:
            causes.append(
                f"rows depend on items of {listed(map(repr, latent))} in other rows; let each row "
                f"select its item of what is computed from them, as in "
                f"pt.cumsum(...)[np.arange({self._n_rows})]"
            )
        if data:
            causes.append(
                f"rows depend on items of {listed(data)} in other rows; compute what depends on "
                f"several rows from the data before, or, if it only happens to be as long as the rows, "
                f"name the arrays that have rows by data={{...}}"
            )
        if causes:
            return ValueError(f"{self._title}: {'. '.join(causes)}")
        return ValueError(f"{self._title}: {str(reason).partition(': ')[2]}")


def _distribution(variable: Variable) -> str:
    """Return the name of a variable's distribution, or of another operation."""
    op = variable.owner.op
    return str(getattr(op, "_print_name", [type(op).__name__])[0])


def arrays_of(
    rows: Sequence[Variable], given: Mapping[Variable, Any], computed: Collection[Variable] = ()
) -> tuple[list[Any], list[Variable], dict[Variable, Variable]]:
    """Return arrays, variables for their rows, and the variable by leaf.

    Constants that are equal, such as an index that is used twice, have one array, unless they are
    computed from shared variables.
    """
    arrays: list[Any] = []
    variables: list[Variable] = []
    kept: list[Variable | None] = []
    replaced: dict[Variable, Variable] = {}
    for leaf in rows:
        array = given.get(leaf)
        is_alone = array is not None or leaf in computed
        same = [weights for weights in kept if not is_alone and are_equal(weights, leaf)]
        if same:
            variable = variables[kept.index(same[0])]
        else:
            kept.append(None if is_alone else leaf)
            arrays.append(array_of(leaf) if array is None else array)
            label = leaf.name or label_of(leaf)
            variables.append(like(arrays[-1], label, leaf.type.shape))
            variable = variables[-1]
        replaced[leaf] = variable
    return arrays, variables, replaced


def with_rows(
    model: Any,
    outputs: Sequence[Variable],
    stand_ins: Mapping[Variable, Variable],
    n_rows: int,
    by_leaf: Mapping[Variable, Variable],
) -> list[Variable]:
    """Return a graph of any number of rows.

    Parameters
    ----------
    model : pymc.Model
    outputs : list of variables
        A graph of the number of rows in the model.
    stand_ins : dict
        The variables of the graph by the leaves for which they stand.
    n_rows : int
        The number of rows in the model.
    by_leaf : dict
        The variables of the new graph that are rows, by leaf.
    """
    count = next(iter(by_leaf.values())).shape[0]
    extents = [item for item in model.dim_lengths.values() if isinstance(item, SharedVariable)]
    extents = [extent for extent in extents if int(extent.get_value()) == n_rows]
    replaced: dict[Variable, Variable] = {}
    for leaf, stand_in in stand_ins.items():
        if leaf in by_leaf:
            replaced[stand_in] = by_leaf[leaf]
        elif leaf in extents:
            replaced[stand_in] = count
        elif isinstance(leaf, Constant):
            replaced[stand_in] = leaf
    return freed(substitute(outputs, replaced), n_rows, count)
