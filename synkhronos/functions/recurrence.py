"""Refuses loops along rows whose steps depend on earlier ones: they would begin anew on every rank."""

from __future__ import annotations

from typing import Sequence

from synkhronos._typing import Compiled, SharedVariable, Variable
from synkhronos.engines.base import Engine, name_of
from synkhronos.functions.analysis import axes_of
from synkhronos.functions.signature import Input


def check_recurrence(
    engine: Engine,
    compiled: Compiled,
    inputs: Sequence[Input],
    selected: Sequence[Variable],
    sliceable: Sequence[SharedVariable],
) -> None:
    """Raise if a loop depends on earlier steps along an axis that is divided among the ranks.

    Parameters
    ----------
    engine : Engine
    compiled : compiled function
    inputs : list of Input
    selected : list of variables
        Those that are replaced by rows which an index selects.
    sliceable : list of shared variables

    Raises
    ------
    ValueError
    """
    found = engine.recurrent(compiled, axes_of(inputs, bool(selected), len(sliceable)))
    if not found:
        return
    position = found[0]
    if position < len(inputs):
        what, remedy = _of_input(inputs[position])
    elif selected and position < len(inputs) + 2:
        names = ", ".join(map(name_of, selected))
        what = f"givens: the value of {names}"
        remedy = "An index that selects steps of time, and no rows, is given in bcast_inputs"
    else:
        what = f"sliceable_shareds: {name_of(sliceable[position - len(inputs) - 2 * bool(selected)])}"
        remedy = "Leave it out, and give the rows as an input along their axis, as in synk.In(x, axis=1)"
    raise ValueError(
        f"{what} is divided among the ranks along an axis along which a scan computes each step from "
        f"earlier ones, so that it would begin anew on every rank. {remedy}"
    )


def _of_input(one):
    name, other = name_of(one.variable), 0 if one.axis else 1
    remedy = "If every rank shall have all of it, give it in bcast_inputs"
    if one.type.ndim > 1:
        remedy = (
            f"If axis {one.axis} is time, and the rows are along axis {other}, give it as "
            f"synk.In({name}, axis={other}). {remedy}"
        )
    return f"inputs: {one.label}", remedy
