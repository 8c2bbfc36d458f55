"""A training step that is taken again, on other rows, without being checked and recorded again."""

from __future__ import annotations

from typing import Any, Sequence

import synkhronos as synk


def is_observed(functions: Sequence[synk.Function]) -> bool:
    """Whether the next call of a function observes something, so that it differs from the ones after."""
    for function in functions:  # noqa: SIM110 - any() would take longer
        if function.watch is not None:
            return True
    return False


def are_in_store(values: Sequence[Any]) -> bool:
    """Whether all values are `Data` that have been used in calls."""
    return all([type(value) is synk.Data and value.last_handle is not None for value in values])


class Repetition:
    """A step that was recorded, and what must be as it was for the next one to differ only in its rows.

    Parameters
    ----------
    recorded : object
        The calls of the step, as ``synk.fuse()`` has recorded them.
    functions : list of Function
        The functions that it called.
    place : int
        The place among the calls, and among the functions, of the function of the rows.
    values : list of Data
        The data of each input.
    """

    def __init__(
        self, recorded: Any, functions: Sequence[synk.Function], place: int, values: Sequence[synk.Data]
    ) -> None:
        self._recorded, self._functions, self._place = recorded, functions, place
        self._plan: Any = functions[place].plan
        self._handles = [value.last_handle for value in values]

    def take(self, values: Sequence[Any], batch: Any) -> list[Any] | None:
        """Return the results of the calls; None, without having run anything, if it has to be recorded.

        Raises
        ------
        TypeError, IndexError
            For a wrong batch.
        ValueError
            If the script has changed the layout of an array.
        """
        if is_observed(self._functions) or not self._recorded.is_valid():
            return None
        for value, handle in zip(values, self._handles):
            if type(value) is not synk.Data or value.last_handle is not handle:
                return None
            if value.is_shown:
                value.check_layout()
        command = self._plan.on_batch(batch)
        return None if command is None else self._recorded.run_with(self._place, command.change)
