"""The plan of a call, which is often repeated: with the same data, on other rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Sequence

from synkhronos._typing import Batch, Rows
from synkhronos.arithmetic.partition import select
from synkhronos.arrays.data import Data
from synkhronos.functions.call import CallFunction
from synkhronos.world.plans import ChangedPlan, Plan
from synkhronos.world.world import World

if TYPE_CHECKING:
    import numpy as np


class CallPlan(Plan):
    """The plan of a call of a function on `Data`, without options other than a batch.

    Parameters
    ----------
    world : World
        The world of the function.
    function : Function
        The function that is called.
    datas : list
        The arguments, in the store.
    command : CallFunction
        The call.
    is_whole : bool
        Whether the call was on all rows, without a batch.
    """

    command: CallFunction

    def __init__(
        self, world: World, function: Any, datas: Sequence[Any], command: CallFunction, is_whole: bool
    ) -> None:
        super().__init__(world.registry, command)
        self._size, self._is_whole = world.size, is_whole
        #: The number of rows of which a batch selects some, or None if the data do not have the same
        self._length: int | None = None
        split = [(one, data) for one, data in zip(function.inputs, datas) if one.axis is not None]
        if split and not any([data.minibatch for _, data in split]):
            one, data = split[0]
            self._length = data.shape[one.axis]

    def again(self, args: Sequence[Any], batch: Batch | None) -> Plan | ChangedPlan | None:
        """Return the command of another call, or None if the call has to be checked.

        If the arguments are the same `Data`, in the same place, the checks have been made before.

        Raises
        ------
        TypeError, IndexError
            For a wrong batch.
        ValueError
            If the script has changed the layout of an array.
        """
        if not are_unmoved(args, self.command.handles):
            return None
        return self if batch is None and self._is_whole else self.on_batch(batch)

    def on_batch(self, batch: Batch | None) -> Plan | ChangedPlan | None:
        """Like `again`, on the same arguments."""
        if batch is None and self._is_whole:
            return self
        if self._length is None:
            return None
        rows = select(batch, self._length)
        if len(rows) < self._size:  # functions may require that some ranks have rows
            return None
        return ChangedPlan(self, _change_to(rows))


def are_unmoved(values: Sequence[Any], handles: Sequence[Any]) -> bool:
    """Whether the values are `Data` with these handles.

    Raises
    ------
    ValueError
        If the script has changed the layout of an array.
    """
    if len(values) != len(handles):
        return False
    for value, handle in zip(values, handles):
        if type(value) is not Data or value.last_handle is not handle:
            return False
        if value.is_shown:
            value.check_layout()
    return True


def _change_to(rows: Rows) -> tuple[int, int, int] | np.ndarray:
    return (rows.start, rows.stop, rows.step) if type(rows) is range else rows
