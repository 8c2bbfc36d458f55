"""The last call of a function, which is often repeated: with the same data, on other rows."""

from __future__ import annotations

from typing import Any, Sequence

from synkhronos._typing import Batch
from synkhronos.arithmetic.partition import select
from synkhronos.arrays.data import Data
from synkhronos.functions.call import CallFunction


class LastCall:
    """The command of a call without options other than a batch, and how it can be repeated.

    Parameters
    ----------
    function : Function
    datas : list
        The arguments, in the store.
    command : CallFunction
    batch : batch or None
    size : int
        The number of ranks.
    """

    def __init__(
        self,
        function: Any,
        datas: Sequence[Any],
        command: CallFunction,
        batch: Batch | None,
        size: int,
    ) -> None:
        self._command, self._is_whole, self._size = command, batch is None, size
        #: The number of rows of which a batch selects some, or None if the data do not have the same
        self._length: int | None = None
        split = [(one, data) for one, data in zip(function.inputs, datas) if one.axis is not None]
        if split and not any([data.minibatch for _, data in split]):
            one, data = split[0]
            self._length = data.shape[one.axis]

    def repeated(self, args: Sequence[Any], batch: Batch | None) -> CallFunction | None:
        """Return the command of the next call, or None if its arguments have to be checked.

        Arguments that are the same `Data`, and have not moved, have passed all checks before.

        Raises
        ------
        TypeError, IndexError
            For a wrong batch.
        ValueError
            If the script has changed the layout of an array.
        """
        command = self._command
        if len(args) != len(command.handles):
            return None
        for arg, handle in zip(args, command.handles):
            if type(arg) is not Data or arg.last_handle is not handle:
                return None
            if arg.is_shown:
                arg.check_layout()
        return command if batch is None and self._is_whole else self.on_batch(batch)

    def on_batch(self, batch: Batch | None) -> CallFunction | None:
        """Like `repeated`, with the same arguments."""
        if batch is None and self._is_whole:
            return self._command
        if self._length is None:
            return None
        rows = select(batch, self._length)
        if len(rows) < self._size:  # functions may require that some ranks have rows
            return None
        self._command, self._is_whole = self._command.on_rows(rows), batch is None
        return self._command
