"""What messages say about graphs: the names of variables, what is suspect, and what to write."""

from __future__ import annotations

from synkhronos._typing import Variable

#: What in a graph may make the value of all rows another one than the values of parts of them give.
CONSTANT, QUOTIENT, STATISTICS, NONLINEAR, CLIPPED, RECURRENT, FIXED_BATCH = SUSPECTS = (
    "constant", "quotient", "statistics", "nonlinear", "clipped", "recurrent", "fixed batch",
)  # fmt: skip


def name_of(variable: Variable) -> str:
    """Return how messages refer to a variable."""
    return variable.name or str(variable)


def how_to_select(replaced: str, index: str) -> str:
    """Return what to write if rows that an index selects for a variable cannot be divided."""
    return (
        f"Let givens replace a variable by rows of a shared variable alone, as in "
        f"data[{index} * size : ({index} + 1) * size] or data[numbers], and compute the rest from this "
        f"variable in the graph; or make {replaced} an input, and give the selected rows in each call. "
        f"To have every rank compute on all of them, give {index} in bcast_inputs"
    )
