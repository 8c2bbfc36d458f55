"""Which items of constants and parameters the log-probability of a row depends on, found by trial.

Half of the items are replaced by others of the same array, one array at a time. An array has rows if the
log-probabilities of other rows keep their values exactly. Nothing is concluded from equal items.
"""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np
import pytensor
from pytensor.compile.mode import get_mode

from synkhronos._typing import AnyArray
from synkhronos.engines import names
from synkhronos.engines.names import Variable

_CHECKS = "local_check_parameter_to_ninf_switch"  # as in PyMC: a wrong parameter has the probability 0


class RowInputs(NamedTuple):
    """What the log-probabilities of rows depend on.

    Attributes
    ----------
    whole : list of variables
        The terms that have no log-probability for each row.
    by_row : dict
        The inputs whose items belong to one row each, with the axis of the rows.
    across : list of variables
        The inputs whose items belong to several rows, or to other rows.
    """

    whole: list[Variable]
    by_row: dict[Variable, int]
    across: list[Variable]


def dependence(
    log_probs: Mapping[Variable, Variable],
    n_rows: int,
    inputs: Mapping[Variable, Variable],
    values: Sequence[Any],
) -> RowInputs:
    """Return how log-probabilities depend on those of their inputs that have an item for each row.

    Parameters
    ----------
    log_probs : dict
        The log-probabilities of a term by the term's variable.
    n_rows : int
    inputs : dict
        The inputs of the log-probabilities, by the variables for which they stand.
    values : list
        The values of the inputs.
    """
    parts = [(term, part) for term, total in log_probs.items() for part in _parts(total)]
    compute = pytensor.function(
        list(inputs.values()),
        [part for _, part in parts],
        mode=get_mode("FAST_COMPILE").including(_CHECKS),
        on_unused_input="ignore",
    )
    before = compute(*values)
    known = [index for index in range(len(parts)) if np.shape(before[index])[:1] == (n_rows,)]
    whole = [term for number, (term, _) in enumerate(parts) if number not in known]
    random = np.random.default_rng(0)
    is_replaced = random.permutation(n_rows) < n_rows // 2
    replacement = random.integers(0, n_rows, n_rows)  # some of them twice, or a mean would be the same
    found = RowInputs(list(dict.fromkeys(whole)), {}, [])
    for number, (item, value) in enumerate(zip(inputs, values)):
        shape = (
            np.shape(value)[:1]
            if isinstance(item, (names.Constant, names.SharedVariable))
            else np.shape(value)
        )
        if n_rows not in shape:
            continue
        axis = shape.index(n_rows)
        new = np.array(value)
        items, source = np.moveaxis(new, axis, 0), np.moveaxis(np.asarray(value), axis, 0)
        items[is_replaced] = source[replacement[is_replaced]]
        after = compute(*values[:number], new, *values[number + 1 :])
        changed = np.zeros(n_rows, bool)
        for part in known:
            changed |= _changed_rows(before[part], after[part])
        if changed[~is_replaced].any():
            found.across.append(item)
        elif changed.any():
            found.by_row[item] = axis
    return found


def _parts(total: Variable) -> list[Variable]:
    """Return what a log-probability sums up, if it is a sum."""
    node = total.owner
    if total.type.ndim or node is None:
        return [total]
    if isinstance(node.op, names.Sum):
        return [node.inputs[0]]
    if isinstance(node.op, names.Elemwise) and str(node.op.scalar_op) == "add":
        return [part for variable in node.inputs for part in _parts(variable)]
    return [total]


def _changed_rows(before: AnyArray, after: AnyArray) -> AnyArray:
    changed = (before != after) & ~(np.isnan(before) & np.isnan(after))
    return changed.any(axis=tuple(range(1, changed.ndim)))
