"""Commands, and the state of a rank on which they run.

A command is an object with one method, ``run(here)``. The master creates it, the transport sends it to
every worker, and each rank runs it on its own state `here`. The return value of ``run``, or the
exception that it raises, is sent to the master at the finish barrier. A public function and its command
are in the same module; there is no other list of the commands.
"""

from __future__ import annotations

import math
import pickle
import weakref
from abc import ABC, abstractmethod
from typing import Any, Iterable, MutableMapping, Sequence

import numpy as np

from synkhronos._errors import CollectiveAbortedError
from synkhronos._typing import Array, Rows, SharedVariable
from synkhronos.comms.base import Communicator
from synkhronos.comms.formats import make_wire
from synkhronos.comms.wires import Wire
from synkhronos.engines.base import Engine
from synkhronos.host.handler_errors import suppress
from synkhronos.stores.handle import Composite, Handle
from synkhronos.stores.required_rows import Need
from synkhronos.transports.base import Transport
from synkhronos.world.replies import failure, success

_SMALL = 4096  # bytes of a pickled command that is kept
_MOST_KEPT = 64  # commands


class Command(ABC):
    """Something that every rank executes. It does not change once it has been run.

    Keep it small: it is pickled for each call.

    Attributes
    ----------
    is_rehearsed : bool
        Whether the next command is often one like this, so that `rehearse` is useful.
    is_like_serial : bool
        Whether it can be run on one rank alone to compare what it does.
    takes_master : bool
        Whether what it changes depends on the master's values only.
    """

    is_rehearsed = False
    is_like_serial = takes_master = False

    _packed: bytes | None = None

    def packed(self) -> bytes:
        """Return the bytes that are sent. A command that is repeated is pickled once."""
        if self._packed is None:
            base, rest = self.parted()
            # A tuple is pickled faster than an object, by 20 microseconds when the caches are cold.
            sent = self if rest is None else (base.packed(), rest)
            self._packed = pickle.dumps(sent, pickle.HIGHEST_PROTOCOL)
        return self._packed

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_packed"}

    def parted(self) -> tuple[Command, Any]:
        """Return two parts: a command that is often sent, and the rest; None if nothing is left."""
        return self, None

    def joined(self, rest: Any, here: Here) -> Command:
        """Return the command whose parts are this one and `rest`."""
        raise NotImplementedError(f"{type(self).__name__}: it is always sent as a whole")

    @abstractmethod
    def run(self, here: Here) -> Any:
        """Execute the command on the state of this rank, and return a value for the master."""

    def needs(self, ranks: range, size: int) -> Iterable[Need]:
        """Return which rows of the master's arrays some of the `size` ranks need: by default, none."""
        return ()

    def forget_arrays(self) -> None:
        """Free what it keeps for its repetition."""
        vars(self).pop("_prepared", None)

    @property
    def plain(self) -> Command:
        """The command without what observes it."""
        return self

    def exact(self) -> Command:
        """Return the command without what makes its results depend on former ones, or inexact."""
        return self

    def rehearse(self, here: Here) -> None:  # noqa: B027
        """Do the steps of `run` before it computes: nothing changes, and nothing is waited for."""

    def describe(self, here: Here) -> str:
        """Return what the command does, in a few words, for the log."""
        return type(self).__name__


class Here:
    """The state of a rank, on which commands run.

    Attributes
    ----------
    transport : Transport
    store : Store
    comm : Communicator
    engine : Engine
    rank, size, master_rank : int
    functions : dict of Replica
        This rank's replicas of functions, by number.
    shareds : mapping of shared variables
        This rank's replicas of shared variables, by number. The master's does not keep them alive.
    rows : dict
        The number of rows of each function, by number, in its last call on this rank.
    peers : dict
        The other ranks, as functions with collectives in their graphs see them, by number.
    sent : list
        Keeps the arrays that this rank has sent alive until the next command.
    log : object or None
        The measurements, inside a `profile` block.
    device : str
        The name of this rank's device.
    wires : dict
        What this rank keeps of reductions in wire formats, by the number of the variable and the format.
    prepared : weakref.WeakSet
        The commands that keep arrays of the store for their repetition.
    restarts : int
        How often this rank was replaced in the program that is running.
    """

    def __init__(self, transport: Transport, engine: Engine) -> None:
        self.transport = transport
        self.ahead = transport.ahead
        self.store = transport.store
        self.comm = transport.communicator()
        self.engine = engine
        self.size = transport.size
        self.master_rank = transport.master_rank
        self.functions: dict[int, Any] = {}
        self.shareds: MutableMapping[int, SharedVariable] = {}
        self.rows: dict[int, int] = {}
        self.peers: dict[int, Any] = {}
        self.sent: list[Any] = []
        self.log: Any = None
        self.device = "cpu"
        self.restarts = 0
        self.prepared: weakref.WeakSet[Any] = weakref.WeakSet()
        self.wires: dict[tuple[int, Any], Any] = {}
        self._buffers: dict[tuple, np.ndarray] = {}
        self._payload: bytes | None = None
        self._command: Any = None
        self._succeeded = False  # whether that command has
        self._kept: dict[bytes, Any] = {}

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def is_master(self) -> bool:
        return self.rank == self.master_rank

    @property
    def stream_index(self) -> int:
        """The index of this rank's random substreams; 0 for the master."""
        return self.transport.distance

    def wire(self, number: int, wire: Any, shape: Sequence[int]) -> Wire:
        """Return what this rank keeps of reductions of a shared variable in a wire format."""
        pieces = self.pieces(number, shape)
        kept = self.wires.get((number, wire))
        if kept is None or kept[0] != pieces:
            kept = self.wires[number, wire] = pieces, make_wire(wire, pieces)
        kept[1].check(math.prod(shape))
        return kept[1]

    def pieces(self, number: int, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays that a shared variable of some shape holds."""
        return self.engine.pieces_of(self.shareds[number]) or (tuple(shape),)

    def keep_replicas(self) -> None:
        """Keep replicas alive until the master sends a command to drop them."""
        self.functions, self.shareds = dict(self.functions), dict(self.shareds)

    def take(self, key: tuple, source: Any, rows: Rows, axis: int = 0) -> Any:
        """Return rows of an array, or of the array or object of a handle.

        A ``range`` of rows is a view. Other rows are copied to a buffer, which is reused by the next
        call with the same `key`, a tuple that starts with the number of the function. `axis` is the axis
        of the rows.
        """
        if isinstance(source, Handle):
            out = None if type(rows) is range else self._buffer(key, source, rows, axis)
            return self.store.rows(source, rows, out, axis)
        if isinstance(source, Composite):
            return source.rows(self.store, rows)
        if axis:
            return np.moveaxis(self.take(key, np.moveaxis(source, axis, 0), rows), 0, axis)
        is_copied = isinstance(source, np.ndarray) and type(rows) is not range
        return self.engine.take(source, rows, self._buffer(key, source, rows) if is_copied else None)

    def _buffer(self, key, source, rows, axis=0):
        """Return an array for a copy of rows, along its first axis."""
        shape = (len(rows), *source.shape[:axis], *source.shape[axis + 1 :])
        size = math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < size or buffer.dtype != source.dtype:
            buffer = self._buffers[key] = np.empty(size, source.dtype)
        return buffer[:size].reshape(shape)

    def forget(self, numbers: Iterable[int]) -> None:
        """Free what this rank keeps for functions and shared variables that were dropped."""
        numbers = set(numbers)
        for by_number in (self.rows, self.peers):
            for number in numbers & by_number.keys():
                del by_number[number]
        for by_key in (self.wires, self._buffers):  # each key starts with a number
            for key in [key for key in by_key if key[0] in numbers]:
                del by_key[key]
        self._kept.clear()  # a command may refer to the function that it has called
        self.comm.forget()

    def communicator(self, nccl: bool) -> Communicator:
        """Return the communicator to use: NCCL if it is available and allowed."""
        return self.comm if nccl else self.comm.over_cpu

    def send(self, array: Array) -> Handle:
        """Return a handle by which the master can get an array until the next command."""
        if not isinstance(array, np.ndarray):
            on_device, array = array, self.store.empty(array.shape, array.dtype)
            self.engine.read(on_device, array)
        handle = self.store.put(array)
        self.sent.append((array, handle))
        return handle

    def copy_out_of_store(self) -> None:
        """Move this rank's replicas out of the store, into private memory.

        The store is about to be freed, or new workers must inherit copies instead of shared arrays.
        """
        self.peers.clear()  # they have memory in the store
        for command in list(self.prepared):
            command.forget_arrays()
        for shared in self.shareds.values():
            storage = self.engine.storage(shared)
            if isinstance(storage, np.ndarray) and storage in self.store:
                self.engine.store(shared, storage.copy())

    def execute(self, payload: bytes) -> bytes:
        """Run the command in these bytes and return the bytes of the reply."""
        self._succeeded = False
        try:
            if payload != self._payload:  # the same call is often repeated
                self._command = self._payload = None
                self._command, self._payload = self.opened(payload), payload
            if self.sent:
                self.sent.clear()
                self.store.collect()
            reply = success(self._command.run(self))
            self._succeeded = True
            return reply
        except Exception as error:
            if not isinstance(error, CollectiveAbortedError):
                self.transport.abort()
            return self.failure(error)

    def rehearse(self) -> None:
        """Read the last command again, up to where it computes, while there is no other one.

        The next command is often like it, and its steps are in the processor's caches then. Nothing is
        done while this rank's steps are measured.
        """
        if self._succeeded and self._command.is_rehearsed and self.log is None:
            with suppress(Exception):  # the command itself will report what is wrong
                self.opened(self._payload).rehearse(self)

    def opened(self, payload: bytes) -> Command:
        """Return the command that was sent as these bytes."""
        sent = pickle.loads(payload)
        if type(sent) is not tuple:
            return sent
        base, rest = sent
        return self.kept(base).joined(rest, self)

    def kept(self, packed: bytes) -> Command:
        """Return the command in these bytes. Small ones are kept, as they are often repeated."""
        command = self._kept.get(packed)
        if command is None:
            command = self.opened(packed)
            if len(packed) <= _SMALL:
                if len(self._kept) >= _MOST_KEPT:
                    self._kept.clear()
                self._kept[packed] = command
        return command

    def failure(self, error: Exception) -> bytes:
        """Return the bytes of a reply that reports how this rank failed."""
        return failure(error)
