"""Traverses graphs without recursion, because graphs are deeper than Python's stack."""

from __future__ import annotations

from typing import Any, Callable, Container, Iterable, Iterator, Mapping, Sequence

from synkhronos.engines.names import (
    GeneratorType,
    SharedVariable,
    Variable,
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


def is_random_state(variable: Any) -> bool:
    """Whether this is a shared variable that holds the state of a random stream."""
    return isinstance(variable, SharedVariable) and (
        isinstance(variable.type, GeneratorType) or getattr(variable.tag, "is_rng", False)
    )


def label(variable: Variable) -> str:
    """Return how messages refer to an input or a shared variable."""
    kind = "shared variable" if isinstance(variable, SharedVariable) else "input"
    return f"{kind} {variable.name!r}" if variable.name else f"{kind} {variable}"
