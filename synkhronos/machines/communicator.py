"""Collectives of ranks on several machines: inside each machine, then between the leaders.

Each machine's ranks reduce to their leader, in shared memory. The leaders reduce among themselves, so
that each byte is sent between two machines once in each direction, however many ranks they have. Then
the ranks of each machine get the leader's result.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Callable, Sequence

import numpy as np

from synkhronos._errors import CollectiveAbortedError
from synkhronos.arithmetic.operations import find_operation, normalized
from synkhronos.comms.base import ArraySpec, Communicator
from synkhronos.comms.wires import WireReduction

if TYPE_CHECKING:
    from synkhronos._typing import Array, T
    from synkhronos.comms.base import Broadcast, Group, Reduction
    from synkhronos.comms.linked import LinkedCommunicator
    from synkhronos.comms.wires import Wire
    from synkhronos.machines.leaders import Leaders
    from synkhronos.transports.base import Transport

_TAKEN = 4096  # bytes; larger outputs are reduced here and not sent to the master


class MachineGroup:
    """The ranks of one machine, as a `Group`. The leader reports their failures to the other leaders."""

    def __init__(self, local: Transport, leaders: Leaders) -> None:
        self._local, self._all_leaders = local, leaders
        self.size = local.size

    @property
    def rank(self) -> int:
        return self._local.rank

    @property
    def leaders(self) -> Leaders | None:
        """The `Leaders` if this rank is a leader, else None. A forked rank has the leader's objects."""
        return self._all_leaders if self._local.rank == self._local.master_rank else None

    def barrier(self) -> None:
        self.guard(self._local.barrier)

    def exchange(self, item: bytes) -> list[bytes]:
        return self.guard(self._local.exchange, item)

    def guard(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that raises if another rank of this machine has failed."""
        try:
            return function(*args)
        except CollectiveAbortedError:
            if self.leaders is not None and not self.leaders.is_aborted:
                self.leaders.abort()
            raise


class MachinesCommunicator(Communicator):
    """Hierarchical collectives.

    Parameters
    ----------
    group : Group
        All ranks.
    local : Communicator
        The communicator of the ranks of this machine.
    leaders : Communicator
        The communicator of the leaders, used only by leaders.
    leader : int
        The leader's rank in `local`.
    machines : list of range
        The ranks of each machine.
    """

    reduces_in_place = has_wires = True

    def __init__(
        self,
        group: Group,
        local: Communicator,
        leaders: LinkedCommunicator,
        leader: int,
        machines: Sequence[range],
    ) -> None:
        super().__init__(group)
        self._local, self._leaders, self._leader, self._machines = local, leaders, leader, machines
        self._wires = WireReduction(leaders)
        self._machine, _ = self._place_of(self.rank)
        self._has_only_leaders = all(len(ranks) == 1 for ranks in machines)

    @property
    def _is_leader(self) -> bool:
        return self._local.rank == self._leader

    def _place_of(self, rank: int) -> tuple[int, int]:
        """Return the machine of a rank, and its rank there."""
        machine = next(number for number, ranks in enumerate(self._machines) if rank in ranks)
        return machine, self._machines[machine].index(rank)

    def takes(self, array: Array) -> bool:
        return isinstance(array, np.ndarray) and array.nbytes > _TAKEN and array.dtype.kind in "fc"

    def prepare_broadcast(self, root: int) -> Broadcast:
        machine, rank = self._place_of(root)
        is_here = machine == self._machine
        near = self._local.prepare_broadcast(rank if is_here else self._leader)
        far = self._leaders.prepare_broadcast(machine)

        def broadcast(arrays: Sequence[Array]) -> Sequence[Array]:
            if is_here:
                arrays = near(arrays)
            if self._is_leader:
                arrays = far(arrays)
            return arrays if is_here else near(arrays)

        return broadcast

    def gather(self, arrays: Sequence[Array], root: int) -> list[list[Array]] | None:
        machine, _ = self._place_of(root)
        gathered = self._gather_to_leaders(arrays, lambda own: self._leaders.gather(own, machine))
        if machine != self._machine:
            return None
        gathered = self._share(gathered, len(arrays))
        return gathered if self.rank == root else None

    def all_gather(self, arrays: Sequence[Array]) -> list[list[Array]]:
        return self._share(self._gather_to_leaders(arrays, self._leaders.all_gather), len(arrays))

    def _gather_to_leaders(
        self, arrays: Sequence[Array], gather: Callable[[Sequence[Array]], list[list[Array]] | None]
    ) -> list[list[Array]] | None:
        """Return, on the leaders for which `gather` has it, a list of arrays by rank for each array."""
        here: Any = self._local.gather(arrays, self._leader)
        if not self._is_leader:
            return None
        # Machines with fewer ranks send empty arrays for the missing ranks.
        most = max(len(ranks) for ranks in self._machines)
        own = [array for by_rank in here for array in by_rank + [np.empty(0)] * (most - len(by_rank))]
        met = gather(own)
        if met is None:
            return None
        places = [self._place_of(rank) for rank in range(self.size)]
        return [
            [met[position * most + index][machine] for machine, index in places]
            for position in range(len(arrays))
        ]

    def _share(self, gathered: Any, count: int) -> list[list[Array]]:
        """Return the leader's lists of arrays on every rank of this machine."""
        if self._local.size == 1:
            return gathered
        flat = [item for each in gathered for item in each] if self._is_leader else None
        room = [np.empty(0)] * (count * self.size) if flat is None else flat
        shared = [np.array(array) for array in self._local.broadcast(room, self._leader)]
        return [shared[start : start + self.size] for start in range(0, len(shared), self.size)]

    def prepare_reduction(self, op: str, root: int | None = None) -> Reduction:
        find_operation(op)  # every rank refuses an unknown one, and not the leaders alone
        machine, rank = (None, None) if root is None else self._place_of(root)
        between = self._leaders.prepare_reduction(op, machine) if self._is_leader else None
        prepared, share = self._prepare(op), self._local.prepare_broadcast(self._leader)

        def all_reduce(
            arrays: Sequence[Array], weight: float = 1, wires: Sequence[Wire] | None = None
        ) -> Sequence[Array]:
            def in_wires(given: Sequence[Array], total: float) -> Sequence[Array]:
                return self._wires.all_reduce(given, op, total, wires)  # type: ignore[arg-type]  # not None

            return share(prepared(arrays, weight, between if wires is None else in_wires))

        def reduce(arrays: Sequence[Array], weight: float = 1) -> Sequence[Array]:
            # Only the root's arrays may change.
            staged = arrays
            if self._is_leader and self.rank != root:
                staged = [np.array(array, order="C") for array in arrays]
            reduced = prepared(staged, weight, between)
            if machine == self._machine and rank != self._leader:
                gathered: Any = self._local.gather(reduced, rank)  # type: ignore[arg-type]  # not None
                if self.rank == root:
                    return [item[self._leader] for item in gathered]
            return reduced if self.rank == root else arrays

        return all_reduce if root is None else reduce

    def timed(self) -> list[tuple[str, object, str]]:
        return [*self._local.timed(), *(self._leaders.timed() if self._is_leader else [])]

    def _prepare(self, op: str) -> Callable[[Sequence[Array], float, Any], Sequence[Array]]:
        """Return a function that reduces on this machine, and then between the leaders.

        The latter by its third argument, ``between(arrays, weight)``.
        """
        if self._has_only_leaders:
            return lambda arrays, weight, between: between(arrays, weight)
        near = self._local.prepare_reduction(op, self._leader)

        def reduce(arrays: Sequence[Array], weight: float, between: Any) -> Sequence[Array]:
            # This machine's reduction writes to an array, so all ranks have to agree before it.
            by_rank, weights = self._exchange(arrays, weight)
            self.check_reducible(op, by_rank, weights)
            weights = normalized(weights)
            total = sum(weights[rank] for rank in self._machines[self._machine])
            if self._local.size > 1 and (total or not find_operation(op).weighted):
                arrays = near(arrays, weight)
            return between(arrays, total) if self._is_leader else arrays

        return reduce

    def _exchange(
        self, arrays: Sequence[Array], weight: float
    ) -> tuple[list[list[ArraySpec]], Sequence[float]]:
        """Return the types of the arrays, and the weights, of all ranks."""
        types = [ArraySpec(array.shape, array.dtype) for array in arrays]
        met = [pickle.loads(payload) for payload in self.group.exchange(pickle.dumps((types, weight)))]
        return [item for item, _ in met], [item for _, item in met]
