"""Errors for graphs with a fixed number of rows, or all rows, where a rank has only a part of them."""

from __future__ import annotations

import re
from typing import Sequence

from synkhronos._errors import SynkhronosError, text_of
from synkhronos.engines.base import HardcodedRowCount
from synkhronos.functions.replica import Replica
from synkhronos.host.handler_errors import reraise_if_handlers

_MOST = 3  # operations that a message names
_SHAPES = re.compile("^Inputs shapes: (.*)$", re.MULTILINE)  # where the compiler's errors list them


def check_all_are_used(replica: Replica, n_all: int | None, n_rows: int) -> None:
    """Raise an error if a graph uses fewer rows than a call has, or divides them into as many groups.

    Parameters
    ----------
    n_all : int or None
        The number of rows of the call, if it is known.
    n_rows : int
        The number of rows with which this rank computes the graph.
    """
    if n_all is not None and n_all != n_rows:
        found = [item for item in replica.fixed if item.regroups and item.number == n_all]
        if found:
            raise ValueError(f"reshape: {_words(found, n_all, n_rows)}")
        steps = min([item.number for item in replica.fixed if item.cuts], default=n_all)
        if steps < n_all:
            raise ValueError(
                f"scan: n_steps={steps} uses the first {steps} of the {n_all} rows of the call, but "
                f"each rank would use {steps} of its own. Leave out n_steps, and choose rows by "
                f"batch={steps}"
            )


def explained(error: Exception, replica: Replica, n_all: int | None, n_rows: int) -> Exception | None:
    """Return an error that says why this rank's rows do not fit the graph; None if that is not known."""
    is_other = isinstance(error, (MemoryError, SynkhronosError))  # such as that another rank has failed
    if n_all is None or n_all in (1, n_rows) or is_other:
        return None
    reraise_if_handlers(error)
    found = [
        item
        for item in replica.fixed
        if item.number == n_all or (item.is_product and item.number % n_all == 0)
    ]
    text = text_of(error)
    first, _, rest = text.partition("\n")
    if found:
        return ValueError(f"{first}\n{_words(found, n_all, n_rows)}")
    if isinstance(error, ValueError) and _has_all_rows(text, n_all, n_rows):
        return ValueError(
            f"{first}\nthis rank computes {n_rows} of the {n_all} rows of the call, and the "
            f"operation also has an operand of {n_all}. If these are rows that are not divided, such as "
            f"a part of a shared variable that an index selects, give them as an input; if an input is "
            f"no rows, and every rank needs all of it, give it in bcast_inputs\n{rest}"
        )
    return None


def _has_all_rows(text: str, n_all: int, n_rows: int) -> bool:
    """Whether an operation has failed with operands of all rows and operands of this rank's rows."""
    shapes = _SHAPES.search(text)
    return shapes is not None and {n_all, n_rows} <= set(map(int, re.findall(r"\d+", shapes[1])))


def _words(found: Sequence[HardcodedRowCount], n_all: int, n_rows: int) -> str:
    numbers = ", ".join(map(str, dict.fromkeys(item.number for item in found)))
    listed = "; ".join([item.text for item in found[:_MOST]])
    return (
        f"this rank computes {n_rows} of the {n_all} rows of the call; the graph fixes {numbers}, by "
        f"{listed}. Use the number of rows of an array, as x.shape[0], in its place, or flatten(2) in "
        f"place of a reshape"
    )
