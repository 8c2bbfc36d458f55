"""Traverses graphs without recursion, because graphs are deeper than Python's stack."""

from __future__ import annotations

from typing import Any, Callable, Container, Iterable, Iterator, Mapping, Sequence

from synkhronos.engines.names import (
    DimShuffle,
    Elemwise,
    GeneratorType,
    SharedVariable,
    Subtensor,
    Variable,
    get_idx_list,
)


def operands(variable: Variable) -> Sequence[Variable]:
    """Return the variables from which a variable is computed directly."""
    return () if variable.owner is None else variable.owner.inputs


def operands_with(
    givens: Mapping[Variable, Variable],
) -> Callable[[Variable], Sequence[Variable]]:
    """Return a function like `operands`, for graphs in which the compiler will substitute `givens`."""

    def parents(variable: Variable) -> Sequence[Variable]:
        return (givens[variable],) if variable in givens else operands(variable)

    return parents


def inputs_first(
    roots: Iterable[Variable],
    parents: Callable[[Variable], Sequence[Variable]] = operands,
    done: Container[Variable] = (),
) -> Iterator[Variable]:
    """Yield each variable that the roots are computed from, and the roots, after its parents.

    Variables in `done`, which may grow meanwhile, are not visited.
    """
    seen = set()
    for root in roots:
        stack = [(root, False)]
        while stack:
            variable, are_parents_done = stack.pop()
            if are_parents_done:
                yield variable
            elif variable not in seen and variable not in done:
                seen.add(variable)
                stack.append((variable, True))
                stack.extend([(one, False) for one in reversed(parents(variable))])


def is_window(variable: Variable, inputs: Container[Variable]) -> bool:
    """Whether a variable is a slice of rows whose bounds depend on inputs, or is computed from one.

    Computed row by row, such as by a cast or a selection of columns: then each of its rows depends on
    one row of the slice. ``synkhronos.function`` divides the rows of such a variable among the ranks, if
    it replaces another by `givens`.
    """
    bounds: list[Any] = []
    for one in inputs_first([variable], _of_same_rows):
        if one.owner and isinstance(one.owner.op, Subtensor):
            rows = _selected_rows(one)
            if isinstance(rows, slice):
                bounds += [rows.start, rows.stop]
    bounds = [one for one in bounds if isinstance(one, Variable)]
    return any(one in inputs for one in inputs_first(bounds))


def _of_same_rows(variable: Variable) -> Sequence[Variable]:
    """Return the operands from whose rows an operation computes the same rows."""
    op = variable.owner.op if variable.owner else None
    moves_rows = isinstance(op, DimShuffle) and op.new_order[:1] != (0,)
    if isinstance(op, (Elemwise, DimShuffle)) and not moves_rows:
        return operands(variable)
    if isinstance(op, Subtensor) and _selected_rows(variable) == slice(None):
        return operands(variable)[:1]
    return ()


def _selected_rows(variable: Variable) -> Any:
    return get_idx_list(variable.owner.inputs, variable.owner.op.idx_list)[0]


def is_random_state(variable: Any) -> bool:
    """Whether this is a shared variable that holds the state of a random stream."""
    return isinstance(variable, SharedVariable) and (
        isinstance(variable.type, GeneratorType) or getattr(variable.tag, "is_rng", False)
    )


def label(variable: Variable) -> str:
    """Return how messages refer to an input or a shared variable."""
    kind = "shared variable" if isinstance(variable, SharedVariable) else "input"
    return f"{kind} {variable.name!r}" if variable.name else f"{kind} {variable}"
