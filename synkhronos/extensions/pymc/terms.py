"""The terms of a model's log-probability that are divided, and their sums over rows.

Graphs of their own stand for the model's variables, and are tried with values near the initial point.
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Collection, Iterator, Mapping, NamedTuple, Sequence

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
from pymc.logprob.basic import conditional_logp
from pymc.variational.minibatch_rv import MinibatchRandomVariable, get_scaling
from pytensor.graph.rewriting.utils import rewrite_graph

from synkhronos._text import listed
from synkhronos._typing import AnyArray
from synkhronos.engines import names
from synkhronos.engines.names import Constant, SharedVariable, Variable, ancestors, io_toposort
from synkhronos.extensions.pymc.graphs import (
    SELECTIONS,
    array_of,
    computed_once,
    folded,
    freed,
    has_dims,
    has_length,
    is_leaf,
    is_sparse,
    joined_by_row,
    label_of,
    padded,
    rows_first,
    selected_first,
    shapes_in,
    value_of,
)
from synkhronos.extensions.pymc.potential import like, substitute, total_of
from synkhronos.extensions.pymc.rows import RecurrenceError, Rows, Sources
from synkhronos.extensions.pymc.serial import RowInputs, dependence, summands

_REMOVED = "local_remove_check_parameter"  # as PyMC does with check_bounds=False
#: By how much values differ from the initial point, before and after points of the prior are tried.
_NEAR, _FAR = (0.5, 0.5, 0.5, 0.1, 0.0, 1.0, 1.0, 1.0), (2.0, 0.2, 1.0, 4.0)
_DRAWS, _ROUNDS = 64, 8


class Term(NamedTuple):
    """A part of the log-probability that is a sum over rows.

    Attributes
    ----------
    variable : variable
        The observed variable, or the potential.
    graph : variable
        The variable as a function of the parameters, without operations on constants alone.
    value : variable or None
        The observed values, in a graph; None for a potential.
    observed : Constant, SharedVariable or None
        The observed values.
    n_rows : int
        The number of rows in the model.
    leaves : list of Constant or SharedVariable
        Shared variables that it depends on, and constants of as many rows.
    sources : list of Constant or SharedVariable
        Variables of the model that have rows, some of which the graph no longer contains.
    scale : callable or None
        Returns the factor that ``total_size`` gives the log-probability of a number of rows.
    computed : dict
        What the model computes from data, by the constant that has its value.
    fixed : list of SharedVariable
        Variables whose values were used to find the rows.
    """

    variable: Variable
    graph: Variable
    value: Variable | None
    observed: Variable | None
    n_rows: int
    leaves: list[Variable]
    sources: list[Variable]
    scale: Callable[[int], float] | None
    computed: dict[Variable, Variable]
    fixed: list[SharedVariable]


def terms_of(
    model: Any, observed: Sequence[str] | None, point: Point, has_data: bool = False
) -> list[Term]:
    """Return the terms of a model that are divided, which keep all data if the script gives others."""
    kept: list[Variable] = []
    if has_data:
        values = [_observed(point.value_of(variable)) for variable in model.observed_RVs]
        kept += [
            value for value in [*values, *map(point.stand_in_of, model.data_vars)] if value is not None
        ]
    return [_term(model, item, point, kept) for item in _chosen(model, observed)]


def _chosen(model: Any, observed: Sequence[str] | None) -> list[Variable]:
    """Return the observed variables and potentials with these names; by default those that have rows."""
    known = {variable.name: variable for variable in [*model.observed_RVs, *model.potentials]}
    for name in model.named_vars:  # of a variable with missing values
        known.setdefault(name, known.get(f"{name}_observed"))
    known = {name: item for name, item in known.items() if item is not None}
    if observed is not None:
        if isinstance(observed, str) or not observed or {*observed} - {*known}:
            raise ValueError(
                f"parallelize: observed: expected a list of observed variables and potentials, of which "
                f"the model has {list(known)}, got {observed!r}"
            )
        return list(dict.fromkeys(known[name] for name in observed))
    if not known:
        raise ValueError(
            "parallelize: expected a model with observed variables or potentials, whose rows are "
            "divided, got one without"
        )
    values = model.rvs_to_values
    chosen = [item for item in model.observed_RVs if _number_of_rows(values[item]) > 1]
    return chosen or list(model.observed_RVs or model.potentials)


def _number_of_rows(value: Variable) -> int:
    """Return the number of rows of observed values; 0 if they have no rows, or draw random numbers."""
    known, leaf = value_of(value), _observed(value)
    if known is None and leaf is not None:
        known = array_of(leaf)
    return len(known) if known is not None and np.ndim(known) else 0


def _observed(value: Variable) -> Variable | None:
    """Return the observed values in a graph, if they have rows."""
    return next((item for item in ancestors([value]) if is_leaf(item) and item.type.ndim), None)


def _term(model: Any, variable: Variable, point: Point, kept: Sequence[Variable]) -> Term:
    value = None if variable in model.potentials else point.value_of(variable)
    _check_is_whole(model, variable)
    graph, scale = _without_scale(of_parameters(variable, point), value)
    n_rows = _number_of_items(graph, point) if value is None else _number_of_rows(value)
    if not n_rows:
        raise ValueError(
            f"parallelize: expected that {variable.name!r} has observed values with rows on axis 0, got "
            f"{value}; leave it out by observed=[...], with the names of the others"
        )
    sources = [leaf for leaf in ancestors([graph]) if is_leaf(leaf) and n_rows in array_of(leaf).shape]
    original = [point.graph_of(variable)]
    before = _shared_in(original if value is None else [*original, value])
    graph = padded(f"parallelize({variable.name})", graph, n_rows)
    graph, selected = selected_first(graph, n_rows, list(point.parameters.values()), point.values)
    outputs = folded([graph] if value is None else [graph, value], kept)
    outputs, computed = computed_once(outputs, n_rows, kept)
    sources += [item for item in ancestors(computed.values()) if isinstance(item, SharedVariable)]
    after = _shared_in([*outputs, *computed.values()])
    outputs[0] = rows_first(outputs[0], n_rows)
    return Term(
        variable,
        outputs[0],
        None if value is None else outputs[1],
        None if value is None else _observed(outputs[1]),
        n_rows,
        leaves_of(outputs, n_rows),
        [*sources, *selected],
        scale,
        computed,
        [item for item in before if item not in after],
    )


def _shared_in(outputs: Sequence[Variable]) -> list[SharedVariable]:
    found = dict.fromkeys(ancestors(outputs))
    return [item for item in found if isinstance(item, SharedVariable) and hasattr(item.type, "ndim")]


def _without_scale(
    graph: Variable, value: Variable | None
) -> tuple[Variable, Callable[[int], float] | None]:
    """Return a graph without ``total_size``, and the factor by the number of rows."""
    if graph.owner is None or not isinstance(graph.owner.op, MinibatchRandomVariable):
        return graph, None
    variable, *total_size = graph.owner.inputs
    shape: Any = value
    (others,) = pytensor.function([], [shape.shape[1:]], mode="FAST_COMPILE")()

    def scale(n_rows: int) -> float:
        return float(get_scaling(total_size, pt.constant([n_rows, *others])).eval(mode="FAST_COMPILE"))

    return variable, scale


def _check_is_whole(model: Any, variable: Variable) -> None:
    """Raise ValueError if missing values have one log-probability with observed ones."""
    if variable.owner and {*variable.owner.outputs} & {*model.free_RVs}:
        raise ValueError(
            f"parallelize: {variable.name!r} has missing values that cannot be computed separately, as "
            f"those within vectors; leave out these rows, or the variable by observed=[...], with the "
            f"names of the others, or write its log-probability with rows_potential"
        )


def _number_of_items(graph: Variable, point: Point) -> int:
    """Return the number of items of a potential, of what it sums up, or of the rows that it has."""
    items = [part for part in summands(graph) if part.type.ndim]
    if not items:
        shapes, above = shapes_in([graph]), ancestors(computed_once([graph])[0])
        items = [item for item in above if is_leaf(item) and item.type.ndim and item not in shapes]
    return max(map(int, point.computed([item.shape[0] for item in items])), default=0)


def of_parameters(variable: Variable, point: Point) -> Variable:
    """Return a variable as a function of the parameters and of observed values, item by item."""
    return joined_by_row(point.graph_of(variable), list(point.parameters.values()))


def leaves_of(outputs: Sequence[Variable], n_rows: int) -> list[Variable]:
    """Return the shared variables of a graph, and its constants of this number of rows."""
    shapes = shapes_in(outputs)
    return [
        variable
        for variable in dict.fromkeys(ancestors(outputs))
        if is_leaf(variable) and not is_sparse(variable) and variable not in shapes
        if isinstance(variable, SharedVariable) or has_length(variable, n_rows)
    ]


def log_prob_of(term: Term, stand_ins: Mapping[Variable, Variable]) -> Variable:
    """Return the log-probability of a term, with stand-ins for its leaves.

    PyMC rewrites everything in the graph, including constants, so it gets a copy.
    """
    if term.value is None:
        return substitute([term.graph], stand_ins)[0]
    graph, value = substitute([term.graph, term.value], stand_ins)
    if getattr(graph.owner.op, "n_dependent_rvs", 1) > 1:  # of pymc_extras.marginalize
        raise ValueError(
            f"parallelize: {term.variable.name!r} and other observed variables share the marginalized "
            f"variable {graph.owner.op.marginalized_name!r}, and have one log-probability; leave it out "
            f"by observed=[...], or observe them as the columns of one variable"
        )
    found = pm.logp(graph, value, warn_rvs=False)
    found = found[0] if isinstance(found, (list, tuple)) else found
    return folded([found], only_shapes=True)[0]  # other constants may have the number of rows


def plain_log_prob_of(term: Term, point: Point, stand_ins: Mapping[Variable, Variable]) -> Variable:
    """Return the log-probability of a term as PyMC computes that of the model."""
    variable = term.variable
    if term.value is None:
        return substitute([point.graph_of(variable)], stand_ins)[0]
    graph, value = substitute([point.graph_of(variable), point.value_of(variable)], stand_ins)
    return conditional_logp({graph: value}, warn_rvs=False)[value]


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
    rows : Rows
        The sum of their log-probabilities.
    inputs : list of variables
        The variables of the model whose values are its parameters.
    leaves : list of Constant or SharedVariable
        The values that the rows replace.
    """

    rows: Rows
    inputs: list[Variable]
    leaves: list[Variable]

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
        self._whole: dict[Variable, Variable] = {}  # what every rank computes, by what stands for it
        self._n_rows = terms[0].n_rows
        leaves = list(dict.fromkeys(itertools.chain(*(term.leaves for term in terms))))
        stand_ins = {variable: variable.type(variable.name) for variable in leaves}
        self._log_probs = [log_prob_of(term, stand_ins) for term in terms]
        # A function that the script gives as logp= may have others.
        inside = {item: item.type(item.name) for item in leaves_of(self._log_probs, self._n_rows)}
        self._log_probs = substitute(
            self._log_probs, {**{new: new for new in stand_ins.values()}, **inside}
        )
        stand_ins.update(inside)
        used = {*ancestors(self._log_probs)}
        self._stand_ins = {item: new for item, new in stand_ins.items() if new in used}
        for log_prob in self._log_probs:
            total_of(self._title, log_prob)  # before anything is tried: random numbers are refused

    def sum_up(self) -> None:
        """Make the sum over the rows.

        Raises
        ------
        ValueError
            If it is not a sum over rows.
        """
        reason: ValueError | None = None
        for leaves in self._choices():
            try:
                self._make(leaves)
                self.rows.test(self._point.tried(self.inputs))
                return
            except ValueError as error:  # the first one is raised
                reason = reason or error
        raise self._refusal(reason) from reason

    def _choices(self) -> Iterator[list[Variable]]:
        """Yield leaves that may be the rows, after changes of the log-probabilities."""
        leaves = [item for item in self._stand_ins if self._has_rows(item)]
        yield leaves
        self._found = self._dependence()
        if self._given is not None or self._found.whole:
            return
        fewer = [leaf for leaf in leaves if leaf not in self._found.across]
        fewer += self._indexed(leaves)
        if fewer and fewer != leaves:
            yield fewer
        selected = self._selected_from_whole(fewer)
        if selected:
            yield fewer + selected

    def _number_rows(self) -> Variable:
        """Return a leaf that has the numbers of the rows."""
        numbers = pt.constant(np.arange(self._n_rows), "row")
        self._stand_ins[numbers] = numbers.type("row")
        return numbers

    def _indexed(self, leaves: Sequence[Variable]) -> list[Variable]:
        """Have each row use its item of parameters with an item for each row, and return its number."""
        known, found = self._point.parameters, self._found.by_row
        parameters = {item: axis for item, axis in found.items() if item in known and item not in leaves}
        if not parameters:
            return []
        numbers = self._number_rows()
        row = self._stand_ins[numbers]
        self._replace({known[item]: known[item].take(row, axis) for item, axis in parameters.items()})
        return [numbers]

    def _selected_from_whole(self, leaves: Sequence[Variable]) -> list[Variable]:
        """Have each row use its item of what is computed from other leaves, and return its number.

        Every rank computes all items of that.
        """
        by_row = {self._stand_ins[leaf] for leaf in leaves}
        found: dict[Variable, None] = {}
        for node in io_toposort([], self._log_probs):
            if by_row.intersection(node.inputs):
                by_row.update(node.outputs)
                if isinstance(node.op, names.Elemwise):
                    found.update(dict.fromkeys(item for item in node.inputs if item not in by_row))
        arrays = [item for item in found if item.type.ndim and not isinstance(item, Constant)]
        now = {new: array_of(leaf) for leaf, new in self._stand_ins.items()}
        lengths = self._point.computed([array.shape[0] for array in arrays], now)
        whole = [array for array, length in zip(arrays, lengths) if length == self._n_rows]
        if not whole:
            return []
        numbers = self._number_rows()
        self._whole = {like(array, None, array.type.shape): array for array in whole}
        self._replace({array: item[self._stand_ins[numbers]] for item, array in self._whole.items()})
        return [numbers]

    def _replace(self, new: Mapping[Variable, Variable]) -> None:
        """Replace variables in the log-probabilities."""
        kept = {value: value for value in [*self._point.parameters.values(), *self._stand_ins.values()]}
        self._log_probs = substitute(self._log_probs, {**kept, **new})

    def _has_rows(self, leaf: Variable) -> bool:
        return has_length(leaf, self._n_rows) if self._given is None else leaf in self._given

    def _make(self, leaves: list[Variable]) -> None:
        """Make the sum over these rows."""
        computed = {item: graph for term in self._terms for item, graph in term.computed.items()}
        arrays, variables, by_leaf = arrays_of(leaves, self._given or {}, computed)
        if not variables:
            raise ValueError(f"{self._title}: data: expected the names of arrays that have rows")
        log_probs = with_rows(self._model, self._log_probs, self._stand_ins, self._n_rows, by_leaf)
        if self._whole:
            constant = {new: old for old, new in self._stand_ins.items() if isinstance(old, Constant)}
            whole = substitute(list(self._whole.values()), constant)
            log_probs = substitute(log_probs, dict(zip(self._whole, whole)))
        n_rows = len(arrays[0])
        total = sum(
            total_of(self._title, log_prob) * (term.scale(n_rows) if term.scale else 1)
            for term, log_prob in zip(self._terms, log_probs)
        )
        used = {*ancestors([total])}
        known = {**self._point.parameters, **self._stand_ins}
        self.inputs, self.leaves = [item for item, new in known.items() if new in used], leaves
        free = self._model.free_RVs
        self.rows = Rows(
            self._title,
            total,
            [known[variable] for variable in self.inputs],
            [variable in free and variable.type.dtype.startswith("float") for variable in self.inputs],
            variables,
            arrays,
            self._mode,
            **({} if self._model.check_bounds else {"checks": _REMOVED}),
            plain=self._plain(self.inputs),
            sources=self._sources(variables, by_leaf, computed),
            model=self._model,
        )

    def _sources(
        self,
        variables: Sequence[Variable],
        by_leaf: Mapping[Variable, Variable],
        computed: Mapping[Variable, Variable],
    ) -> Sources:
        """Return what the model computes the rows from, unless they are the script's."""
        given = self._given or {}
        graphs = {
            variables.index(variable): computed.get(leaf, leaf)
            for leaf, variable in by_leaf.items()
            if given.get(leaf) is None and (leaf in computed or isinstance(leaf, SharedVariable))
        }
        fixed = [item for term in self._terms for item in term.fixed]
        if any(term.scale for term in self._terms):  # which is that of a number of rows
            fixed += [item for item in ancestors(graphs.values()) if isinstance(item, SharedVariable)]
        return Sources(graphs, fixed)

    def _plain(self, inputs: Sequence[Variable]) -> Any:
        """Return the sum in the model's own graph, or None if the rows are the script's."""
        if self._given is not None and any(array is not None for array in self._given.values()):
            return None
        shared = {item: new for item, new in self._stand_ins.items() if item in inputs}
        graphs = [plain_log_prob_of(term, self._point, shared) for term in self._terms]
        return sum(total_of(self._title, graph) for graph in graphs)

    # Why it is not a sum over rows

    def _dependence(self) -> RowInputs:
        parameters, leaves = self._point.parameters, self._stand_ins
        return dependence(
            {term.variable: log_prob for term, log_prob in zip(self._terms, self._log_probs)},
            self._n_rows,
            {**parameters, **leaves},
            [*self._point.values(), *map(array_of, leaves)],
        )

    def _refusal(self, reason: ValueError | None) -> ValueError:
        """Return an error that names the variables and what helps, or what was found by trial."""
        found = self._found
        latent = [item.name for item in found.across if item in self._point.parameters]
        series = [
            item for item in self._terms if item.value is not None and item.observed in found.across
        ]
        known = {*self._point.parameters, *(term.observed for term in series)}
        data = [label_of(item) for item in found.across if item not in known]
        whole = [*found.whole, *(term.variable for term in series)]
        whole = [item for item in whole if item not in self._model.potentials]
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
        for term in self._terms:
            if not causes and _selects_inside(term.graph):
                causes.append(
                    f"rows of the data are selected inside of the marginalized variable "
                    f"{term.graph.owner.op.marginalized_name!r}, on which {term.variable.name!r} "
                    f"depends; select them before, as in pm.Data(..., array[mask])"
                )
        if not causes or isinstance(reason, RecurrenceError):
            causes = [str(reason).partition(": ")[2]]
        return ValueError(f"{self._title}: {'. '.join(causes)}")


def _selects_inside(graph: Variable) -> bool:
    """Whether a marginalized variable, which has a graph of its own, selects rows of data in it."""
    node = graph.owner
    if node is None or not hasattr(node.op, "marginalized_name"):
        return False
    given = dict(zip(node.op.inner_inputs, node.inputs))
    inside = [item.owner for item in ancestors(node.op.inner_outputs) if item.owner]
    selections = [item.inputs[0] for item in inside if isinstance(item.op, SELECTIONS)]
    return any(is_leaf(given.get(operand, operand)) for operand in selections)


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
    known: dict[Any, Variable] = {}
    replaced: dict[Variable, Variable] = {}
    for leaf in rows:
        array, key = given.get(leaf), leaf
        if isinstance(leaf, Constant) and array is None and leaf not in computed:
            key = leaf.signature()
        if key not in known:
            arrays.append(array_of(leaf) if array is None else array)
            known[key] = like(arrays[-1], leaf.name or label_of(leaf), leaf.type.shape)
            variables.append(known[key])
        replaced[leaf] = known[key]
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


# Values


class Point:
    """A model's variables as functions of parameters, and values of these near the initial point.

    Parameters
    ----------
    model : pymc.Model

    Attributes
    ----------
    parameters : dict
        The tensors that stand for the free variables.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._sources: dict[Variable, Variable] = {}
        self.parameters: dict[Variable, Variable] = {
            item: names.TensorType(item.type.dtype, item.type.shape)(
                item.name
            )  # a name may look like a dtype
            for item in model.free_RVs
        }
        self._known: dict[Variable, Variable] = {
            variable: _with_dims(tensor, variable) for variable, tensor in self.parameters.items()
        }
        parts = [
            *model.basic_RVs,
            *model.rvs_to_values.values(),
            *model.potentials,
            *model.deterministics,
        ]
        for variable in [item for item in ancestors(parts) if is_leaf(item) and has_dims(item)]:
            tensor = _tensor_of(variable)
            self._sources[tensor] = variable
            self._known[variable] = _with_dims(tensor, variable)
        for variable in model.observed_RVs:
            (self._known[variable],) = substitute([model.rvs_to_values[variable]], self._known)

    def graph_of(self, variable: Variable) -> Variable:
        """Return a variable as a function of the parameters and of observed values."""
        known = {item: value for item, value in self._known.items() if item is not variable}
        return lowered(substitute([variable], known)[0])

    def value_of(self, variable: Variable) -> Variable:
        """Return the values of an observed variable."""
        return lowered(self._known[variable])

    def source_of(self, leaf: Variable) -> Variable:
        """Return the variable of the model for which a leaf of a graph stands."""
        return self._sources.get(leaf, leaf)

    def stand_in_of(self, variable: Variable) -> Variable:
        """Return the leaf in graphs for ``pm.Data`` of the model."""
        return next((leaf for leaf, source in self._sources.items() if source is variable), variable)

    def values(self, inputs: Sequence[Variable] | None = None) -> list[AnyArray]:
        """Return the values of variables near the initial point; by default, of the free variables."""
        return next(self.tried(list(self.parameters) if inputs is None else inputs))

    def computed(
        self, outputs: Sequence[Variable], others: Mapping[Variable, AnyArray] | None = None
    ) -> list[AnyArray]:
        """Return the values of graphs there, which may also depend on others with these values."""
        others = others or {}
        inputs = [*self.parameters.values(), *others]
        compute = pytensor.function(inputs, list(outputs), mode="FAST_COMPILE", on_unused_input="ignore")
        return list(compute(*self.values(), *others.values()))

    def tried(self, inputs: Sequence[Variable]) -> Iterator[list[AnyArray]]:
        """Yield values at which a log-probability may be finite: near the initial point, then others."""
        model, variables = self._model, [self.source_of(variable) for variable in inputs]
        compute = model.compile_fn(
            model.replace_rvs_by_values(variables),
            inputs=model.value_vars,
            mode="FAST_COMPILE",
            on_unused_input="ignore",
        )
        random, initial = np.random.default_rng(0), model.initial_point(random_seed=0)

        def near(width: float) -> list[AnyArray]:
            point = {
                name: value + random.uniform(-width, width, value.shape).astype(value.dtype)
                if value.dtype.kind == "f"
                else value
                for name, value in initial.items()
            }
            return _typed(compute(point), inputs)

        yield from map(near, _NEAR)
        for drawn in _draws(variables):
            yield _typed(drawn, inputs)
        yield from map(near, itertools.chain(*[_FAR] * _ROUNDS))


def _tensor_of(leaf: Variable) -> Variable:
    """Return a tensor with the value of a leaf whose dimensions have names."""
    if isinstance(leaf, Constant):
        return pt.constant(leaf.data, leaf.name)
    tensor = pytensor.shared(leaf.get_value(borrow=True), leaf.name, borrow=True)
    tensor.container = leaf.container  # so that it always has the same value
    return tensor


def _with_dims(tensor: Variable, variable: Variable) -> Variable:
    """Return a tensor with the dimensions of a variable, if these have names."""
    if not has_dims(variable):
        return tensor
    from pytensor.xtensor import as_xtensor

    return as_xtensor(tensor, dims=variable.type.dims)


def lowered(graph: Variable) -> Variable:
    """Return a graph of tensors, for one that may have dimensions with names."""
    if not any(map(has_dims, ancestors([graph]))):
        return graph
    return rewrite_graph(graph.values if has_dims(graph) else graph, include=("lower_xtensor",))


def _draws(variables: Sequence[Variable]) -> Iterator[Sequence[Any]]:
    """Return values drawn from the prior, if it can be drawn from."""
    try:
        return zip(*pm.draw(list(variables), draws=_DRAWS, random_seed=0, mode="FAST_COMPILE"))
    except Exception:  # as pm.Flat raises; the draws only help to find a point
        return iter(())


def _typed(values: Sequence[Any], inputs: Sequence[Any]) -> list[AnyArray]:
    return [np.asarray(value, kind.type.dtype) for value, kind in zip(values, inputs)]
