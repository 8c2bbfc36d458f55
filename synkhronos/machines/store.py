"""The store of ranks on several machines: each machine has its own, and arrays are sent between them.

Arrays that the master puts into its store are sent with a command, to the machines whose ranks need
them. Arrays that a rank puts there inside a command are sent with the handle, in its next exchange and
in its reply. So a rank gets the current values of an array of its own machine, and for another machine,
the values at the time of sending.
"""

from __future__ import annotations

import itertools
from typing import Any, Hashable, Iterable, NamedTuple, Sequence

import numpy as np

from synkhronos._typing import DTypeLike, Rows
from synkhronos.arithmetic.partition import take_along
from synkhronos.stores.base import Store
from synkhronos.stores.handle import FileHandle, Handle, RequiredRows, positions
from synkhronos.stores.named_memory import NamedMemory


class MachineHandle(Handle):
    """The handle of a machine's own store, and the rank that put the array there."""

    __slots__ = ("machine", "key", "local", "shape", "dtype", "dropped")

    def __init__(
        self,
        machine: int,
        key: tuple[int, int],
        local: Handle,
        dropped: list[tuple[int, int]] | None = None,
    ) -> None:
        self.machine, self.key, self.local = machine, key, local
        self.shape, self.dtype = local.shape, local.dtype
        self.dropped = dropped  # receives the key of a constant array that is no longer needed

    def __reduce__(self) -> tuple[Any, ...]:
        return MachineHandle, (self.machine, self.key, self.local)

    def __del__(self) -> None:
        if self.dropped is not None:
            self.dropped.append(self.key)

    def __eq__(self, other: object) -> bool:
        return type(other) is MachineHandle and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


def name_of(handle: Handle) -> Hashable:
    """Return the name that identifies the array of a handle on any machine."""
    return handle.key if isinstance(handle, MachineHandle) else handle


def lasts(handle: Handle) -> bool:
    """Whether other machines keep the array of a handle: it is constant, or in a file that they have."""
    return isinstance(handle, FileHandle) or getattr(handle, "dropped", None) is not None


class ReceivedRows(NamedTuple):
    """Rows of another machine's array, in this machine's store or in one of its files."""

    need: RequiredRows
    local: Handle


class MachinesStore(Store):
    """A rank's access to the store of its machine, and to rows received from other machines.

    Parameters
    ----------
    local : Store
        The store of the machine.
    machine, rank : int
        Of this rank.

    Attributes
    ----------
    dropped : list
        The keys of constant arrays of this rank that are no longer needed.
    """

    def __init__(self, local: Store, machine: int, rank: int) -> None:
        super().__init__()
        self.local, self._machine, self.rank = local, machine, rank
        self.ranks, self.named_memory = local.ranks, local.named_memory
        self.epoch = local.epoch
        self._numbers, self._epochs = itertools.count(), itertools.count(1)
        self.dropped: list[tuple[int, int]] = []
        self._received: dict[Hashable, ReceivedRows] = {}
        self._lasting: dict[Hashable, ReceivedRows] = {}
        self._exports: list[MachineHandle] | None = None
        self._of_command: Sequence[ReceivedRows] = ()  # that came with the last command

    def use(self, rank: int, named_memory: NamedMemory | None) -> None:
        """Let this rank use the store, and this named memory in place of the machine's own."""
        self.rank = rank
        if self.named_memory is not self.local.named_memory:  # of a former progress process
            self.named_memory.close()
        self.named_memory = self.local.named_memory if named_memory is None else named_memory

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        return self.local.empty(shape, dtype)

    def put(self, array: np.ndarray, constant: bool = False) -> MachineHandle:
        key = self.rank, next(self._numbers)
        dropped = self.dropped if constant else None
        handle = MachineHandle(self._machine, key, self.local.put(array), dropped)
        if self._exports is not None:
            self._exports.append(handle)
        return handle

    def get(self, handle: Handle) -> np.ndarray:
        received = self._find_received(handle)
        if received is None:
            return super().get(handle)
        if received.need.rows is not None:
            raise LookupError(f"of the array of {handle.shape} only some rows were sent")
        return self.local.get(received.local)

    def _find_received(self, handle: Handle) -> ReceivedRows | None:
        name = name_of(handle)
        return self._received.get(name) or self._lasting.get(name)

    def _get(self, handle: MachineHandle) -> np.ndarray:
        if handle.machine != self._machine:
            raise LookupError(
                f"an array of {handle.shape} on machine {handle.machine} was not sent to machine "
                f"{self._machine}"
            )
        return self.local.get(handle.local)

    def find(self, handle: Handle, rows: Rows) -> tuple[np.ndarray, Rows]:
        received = self._find_received(handle)
        if received is None or received.need.rows is None:
            return self.get(handle), rows
        return self.local.get(received.local), positions(rows, received.need.rows)

    def free(self, handle: Handle) -> None:
        self.local.free(handle.local)  # type: ignore[attr-defined]  # a `MachineHandle`

    def __contains__(self, array: np.ndarray) -> bool:
        return array in self.local

    def collect(self) -> None:
        self.local.collect()

    def trim(self) -> None:
        self.local.trim()

    def trim_others(self) -> None:
        super().trim_others()
        self.local.trim_others()

    def close(self) -> None:
        super().close()
        self.local.close()

    # What travels

    def begin(self) -> None:
        """Forget the rows for the last command; arrays put from now on are exported."""
        self._received.clear()
        self._exports = []

    def end(self) -> list[MachineHandle]:
        """Return the exports since the last call; arrays put from now on are not exported."""
        exports, self._exports = self.take_exports(), None
        return exports

    def take_exports(self) -> list[MachineHandle]:
        """Return the exports since the last call."""
        if self._exports is None:
            return []
        exports, self._exports = self._exports, []
        return exports

    def cut(self, need: RequiredRows) -> np.ndarray:
        """Return the rows of a need, C-contiguous: a view, if possible."""
        array = self.get(need.handle)
        if need.rows is not None:
            array = take_along(array, need.rows, need.axis)
        return np.asarray(array, order="C")

    def receive(self, needs: Sequence[RequiredRows], arrays: Sequence[np.ndarray]) -> list[ReceivedRows]:
        """Leader: put rows of arrays of other machines into this machine's store."""
        rows = []
        for need, array in zip(needs, arrays):
            local: Any = self.local.put(array)
            if local.copy is None:  # it is in the store
                local.copy = array  # which lives as long as this handle
            rows.append(ReceivedRows(need, local))
        self.keep(rows)
        return rows

    def keep(self, every: Iterable[ReceivedRows]) -> None:
        """Let handles refer to these rows, until the next `begin`, or until `drop` if they are kept."""
        for rows in every:
            by_name = self._lasting if rows.need.lasts else self._received
            by_name[name_of(rows.need.handle)] = rows

    def keep_for_command(self, every: Sequence[ReceivedRows]) -> None:
        """Keep the rows that came with a command: the same list if they are in the same memory."""
        if every is not self._of_command:
            self._of_command = every
            # Of other rows than a range there are no views.
            are_views = all([type(rows.need.rows) is not np.ndarray for rows in every])
            self.epoch = next(self._epochs) if are_views and self.local.epoch is not None else None
        self.keep(every)

    def drop(self, keys: Iterable[tuple[int, int]]) -> None:
        """Forget kept rows."""
        for key in keys:
            self._lasting.pop(key, None)
