"""The operations of compiled functions: their times as means over the ranks, and tables of them."""

from __future__ import annotations

from typing import Any, NamedTuple, Sequence

from synkhronos.engines.base import OperationTime

HEADER = ("operation", "class", "nodes", "ms", "share", "kernel")
_WIDEST = 52  # characters of an operation in a table


class Operation(NamedTuple):
    """The nodes of a compiled function that have the same operation.

    Attributes
    ----------
    function : str
        The name of the function.
    name : str
        The operation as the compiler writes it.
    kind : str
        Its class, with the module.
    kernel : str
        ``"fast"`` for an operation of `synkhronos.engines.theano.kernels`, which replaces an operation
        of Theano; else who has written it, such as ``"Theano's own"``.
    nodes : int
        The number of these nodes.
    seconds : float
        The time of all of them per step, as a mean over the ranks.
    share : float
        Of the time of all operations of the function.
    """

    function: str
    name: str
    kind: str
    kernel: str
    nodes: int
    seconds: float
    share: float


def of_ranks(
    found: Sequence[Sequence[tuple[str, Sequence[OperationTime]]]], steps: int
) -> list[Operation]:
    """Return the operations of all functions, in descending order of their times.

    Parameters
    ----------
    found : list of list of (str, list of OperationTime)
        For each rank, the name of each function, and the times of its operations.
    steps : int
        The number of steps that were measured.
    """
    functions: dict[str, dict[tuple[str, str, str], list[Any]]] = {}
    for by_function in found:
        own: dict[tuple[Any, ...], int] = {}  # of this rank: several functions may have the same name
        for function, times in by_function:
            sums = functions.setdefault(function, {})
            for name, kind, kernel, nodes, seconds in times:
                key = name, kind, kernel
                total = sums.setdefault(key, [0, 0.0])
                own[function, key] = own.get((function, key), 0) + nodes
                total[0] = max(total[0], own[function, key])
                total[1] += seconds / (len(found) * max(steps, 1))
    operations = []
    for function, sums in functions.items():
        whole = sum(seconds for _, seconds in sums.values())
        operations += [
            (whole, Operation(function, *key, nodes, seconds, seconds / whole if whole else 0.0))
            for key, (nodes, seconds) in sums.items()
        ]
    operations.sort(key=lambda one: (-one[0], one[1].function, -one[1].seconds, one[1].name))
    return [operation for _, operation in operations]


def by_function(operations: Sequence[Operation], most: int) -> dict[str, list[Operation]]:
    """Return the first operations of each function, and the sum of the others if there are any.

    Parameters
    ----------
    operations : list of Operation
        As `of_ranks` returns them.
    most : int
        How many operations of a function to return, besides the sum of the others.
    """
    found = {}
    for function in dict.fromkeys(operation.function for operation in operations):
        own = [operation for operation in operations if operation.function == function]
        found[function], others = own[:most], own[most:]
        if others:
            nodes, seconds, share = (
                sum(getattr(other, name) for other in others) for name in ("nodes", "seconds", "share")
            )
            rest = Operation(function, f"{len(others)} others", "", "", nodes, seconds, share)
            found[function].append(rest)
    return found


def cells(operation: Operation) -> tuple[str, ...]:
    """Return the cells of a row of a table."""
    return (
        shortened(operation.name),
        operation.kind.rpartition(".")[2],
        str(operation.nodes),
        f"{1e3 * operation.seconds:.3f}",
        f"{operation.share:.1%}",
        operation.kernel,
    )


def shortened(name: str) -> str:
    """Return the name of an operation without its middle if it is long."""
    if len(name) <= _WIDEST:
        return name
    tail = _WIDEST // 3
    return f"{name[: _WIDEST - tail - 3]}...{name[-tail:]}"


def title(function: str, operations: Sequence[Operation]) -> str:
    """Return the heading of a function's table."""
    seconds, nodes = sum(item.seconds for item in operations), sum(item.nodes for item in operations)
    return f"{function}: {1e3 * seconds:.3f} ms per step in {nodes} nodes, mean of the ranks"


def table(operations: Sequence[Operation], most: int) -> list[str]:
    """Return the lines of a table for each function."""
    lines = []
    for function, own in by_function(operations, most).items():
        rows = [HEADER, *map(cells, own)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
        lines += ["", title(function, own)]
        for row in rows:
            texts = [
                cell.rjust(width) if name in ("nodes", "ms", "share") else cell.ljust(width)
                for name, cell, width in zip(HEADER, row, widths)
            ]
            lines.append("  ".join(texts).rstrip())
    return lines
