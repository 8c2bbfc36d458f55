"""The shared variables of a model from which rows are computed; a script may replace their values."""

from __future__ import annotations

from typing import Any, Iterator, Mapping, Sequence

import pytensor
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.traversal import ancestors

from synkhronos._text import listed
from synkhronos._typing import AnyArray


class Sources:
    """What rows are computed from, as by ``pm.Data`` whose values ``pm.set_data`` replaces.

    Parameters
    ----------
    graphs : dict
        Graphs of shared variables, by the number of the array of rows that they compute.
    fixed : list of SharedVariable
        Others, whose values were used to find the rows.
    """

    def __init__(
        self, graphs: Mapping[int, Any] | None = None, fixed: Sequence[SharedVariable] = ()
    ) -> None:
        self._graphs, self._fixed = dict(graphs or {}), list(fixed)
        found = dict.fromkeys([*ancestors(self._graphs.values()), *fixed])
        self._shared = [variable for variable in found if isinstance(variable, SharedVariable)]
        self._seen = self._new = [_value(item) for item in self._shared]
        self._compute: Any = None

    def __iter__(self) -> Iterator[SharedVariable]:
        return iter(self._shared)

    def __contains__(self, item: Any) -> bool:
        return item in self._shared

    def changed(self) -> dict[int, AnyArray]:
        """Return the rows whose sources have other values than those in use, by number.

        Raises
        ------
        ValueError
            If the rows cannot be computed from the new values.
        """
        values = [_value(item) for item in self._shared]
        new = [item for item, old, now in zip(self._shared, self._seen, values) if old is not now]
        if not new:
            return {}
        fixed = [str(item) for item in new if item in self._fixed]
        if fixed:
            raise ValueError(
                f"the rows were chosen by the values of {listed(fixed)}, which have changed; call "
                f"parallelize again"
            )
        if self._compute is None:
            graphs = list(self._graphs.values())
            self._compute = pytensor.function([], graphs, mode="FAST_COMPILE")
        self._new = values
        return dict(zip(self._graphs, self._compute()))

    def use(self) -> None:
        """Note that the rows that were returned last are in use."""
        self._seen = self._new


def _value(shared: SharedVariable) -> Any:
    """Return the value of a shared variable itself; another one takes its place when it is set."""
    return shared.get_value(borrow=True)
