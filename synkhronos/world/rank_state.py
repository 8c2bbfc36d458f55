"""Commands, the state of a rank on which they run, and its replies.

A command is an object with one method, ``run(state)``. The master creates it, the transport sends it to
every worker, and each rank runs it on its own state. The return value of ``run``, or the exception that
it raises, is sent to the master at the finish barrier. A public function and its command are in the
same module; there is no other list of the commands.

The sent form of a command is one of these. Tuples and lists, because they are pickled faster than
objects, by 20 microseconds when a gradient has emptied the processor's caches.

=============================  ==============================================================
Sent                           Command
=============================  ==============================================================
a `Command`                    itself
``(number,)``                  a schedule of the rank; only the number's eight bytes are sent
``(number, change)``           a schedule of the rank, with a change
``(number, change, command)``  a schedule that the rank may not have
a list of sent forms           a block of commands, in order
=============================  ==============================================================
"""

from __future__ import annotations

import math
import pickle
import struct
import traceback
from typing import Any, Callable, Iterable, MutableMapping, MutableSequence, NamedTuple, Sequence

import numpy as np

from synkhronos._errors import CollectiveAbortedError, WorkerError
from synkhronos._typing import Array, Rows, SharedVariable
from synkhronos.comms.base import Communicator
from synkhronos.comms.formats import make_wire
from synkhronos.comms.wires import Wire
from synkhronos.engines.base import NO_VALUE, Engine
from synkhronos.host.handler_errors import suppress
from synkhronos.host.status import LINE
from synkhronos.stores.handle import Composite, Handle, RequiredRows
from synkhronos.transports.base import Transport


class Command:
    """Something that every rank executes. It does not change once it has been run.

    Keep it small: it is pickled for each call.

    Attributes
    ----------
    is_like_serial : bool
        Whether it can be run on one rank alone, to compare the results.
    takes_master : bool
        Whether its changes depend on the master's values only.
    schedules : list of Schedule
        Those that all ranks have when they have run it.
    """

    is_like_serial = takes_master = False
    schedules: Sequence[Any] = ()

    def sent(self) -> Any:
        """Return the form in which it is sent."""
        return self

    def packed(self) -> bytes:
        """Return the bytes that are sent."""
        return pickle.dumps(self.sent(), pickle.HIGHEST_PROTOCOL)

    # A subclass defines `run`, or `bind` if it can be bound: each is defined by the other.

    def run(self, state: RankState) -> Any:
        """Execute the command on the state of this rank, and return a value for the master."""
        return self.bind(state)(None)

    def needs(self, ranks: range, size: int) -> Iterable[RequiredRows]:
        """Return which rows of the master's arrays some of the `size` ranks need: by default, none."""
        return ()

    def changed(self, change: Any) -> Command:
        """Return the command with a change of its own kind, or itself with None."""
        if change is None:
            return self
        raise TypeError(f"{type(self).__name__}: expected no change, got {change!r}")

    def prepare_changes(self, size: int) -> Callable[[Any], Any]:
        """Return a function of a batch, which returns the change to it for `size` ranks.

        The function returns None if the command has to be compiled again.
        """
        return lambda batch: None

    def bind(self, state: RankState) -> Callable[[Any], Any]:
        """Return a function that runs the command on this rank again and again, each time with a change.

        It does what precedes the computation without waiting for other ranks, and changes nothing.
        What it keeps is valid until `RankState.bound` is cleared: the store, a function or a variable is
        about to be freed then.
        """
        return lambda change: self.changed(change).run(state)

    @property
    def plain(self) -> Command:
        """The command without its observers."""
        return self

    def exact(self) -> Command:
        """Return the command without wire formats and state of former runs."""
        return self

    def title(self, state: RankState) -> str:
        """Return a few words about what it does, whatever it does it to."""
        return type(self).__name__

    def describe(self, state: RankState) -> str:
        """Return a few words about the command, for the log."""
        return self.title(state)


class Ask(Command):
    """Return what a function returns for the state of each rank.

    Parameters
    ----------
    function : callable
        A function of a module, which is called with the state and the arguments.
    *arguments
        They are pickled.
    handles : sequence of Handle
        Those of them that identify arrays of the master.
    """

    def __init__(
        self, function: Callable[..., Any], *arguments: Any, handles: Iterable[Handle] = ()
    ) -> None:
        self.function, self.arguments, self._handles = function, arguments, handles

    def __reduce__(self) -> tuple[Any, ...]:
        return Ask, (self.function, *self.arguments)

    def run(self, state: RankState) -> Any:
        return self.function(state, *self.arguments)

    def needs(self, ranks: range, size: int) -> list[RequiredRows]:
        return [RequiredRows(handle) for handle in self._handles]

    def title(self, state: RankState) -> str:
        return self.function.__name__.strip("_").replace("_", " ")


#: The bytes that are sent of a schedule without a change. A pickled command is longer.
SCHEDULE_NUMBER = struct.Struct("<q")


def sent_form(payload: bytes) -> Any:
    """Return the sent form of a command from the bytes that `Command.packed` has returned."""
    if len(payload) == SCHEDULE_NUMBER.size:
        return SCHEDULE_NUMBER.unpack(payload)
    return pickle.loads(payload)


class FusedCommand(Command):
    """Several commands, run in order. Its changes are those of the command in a place.

    Parameters
    ----------
    commands : list of Command
        The commands.
    place : int
        The place of the command that takes the rows of a batch.
    """

    def __init__(self, commands: Sequence[Command], place: int = 0) -> None:
        self.commands, self.place = commands, place

    def sent(self) -> list[Any]:
        return [command.sent() for command in self.commands]

    @property
    def schedules(self) -> list[Any]:  # type: ignore[override]  # a constant of most commands
        return [schedule for command in self.commands for schedule in command.schedules]

    def changed(self, change: Any) -> FusedCommand:
        if change is None:
            return self
        commands = list(self.commands)
        commands[self.place] = commands[self.place].changed(change)
        return FusedCommand(commands, self.place)

    def prepare_changes(self, size: int) -> Callable[[Any], Any]:
        return self.commands[self.place].prepare_changes(size)

    def bind(self, state: RankState) -> Callable[[Any], list[Any]]:
        bound = [command.bind(state) for command in self.commands]
        changing = bound[self.place]

        def run(change: Any) -> list[Any]:
            results = []
            for item in bound:
                results.append(item(change if item is changing else None))
            return results

        return run

    def run(self, state: RankState) -> list[Any]:
        return [command.run(state) for command in self.commands]

    def needs(self, ranks: range, size: int) -> list[RequiredRows]:
        return [need for command in self.commands for need in command.needs(ranks, size)]

    def title(self, state: RankState) -> str:
        return " + ".join(command.title(state) for command in self.commands)

    def describe(self, state: RankState) -> str:
        return " + ".join(command.describe(state) for command in self.commands)


class Failure(NamedTuple):
    """The reply of a rank whose command has raised an exception.

    Attributes
    ----------
    was_aborted : bool
        Whether it failed only because another rank has.
    kind, message, traceback : str
        Of the exception.
    """

    was_aborted: bool
    kind: str
    message: str
    traceback: str


class RankState:
    """The state of a rank, on which commands run.

    Attributes
    ----------
    transport, store, comm, engine : Transport, Store, Communicator, Engine
        The implementations that this rank uses.
    rank, size, master_rank : int
        This rank, the number of ranks, and the rank of the master.
    is_master : bool
        Whether this rank is the master.
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
        The state of reductions in wire formats, by the number of the variable and the format.
    schedules : dict of Command
        The command of each schedule that this rank has been sent, by number.
    bound : dict of callable
        The functions that this rank has bound to run schedules, by number.
    restarts : int
        How often this rank was replaced in the program that is running.
    progress : sequence of int
        What this rank has done so far, which other processes can read: ``progress[ROWS]`` are the rows
        that functions have computed on.
    """

    def __init__(self, transport: Transport, engine: Engine) -> None:
        self.transport = transport
        self.overlap = transport.overlap
        self.store = transport.store
        self.comm = transport.communicator()
        self.engine = engine
        self.size = transport.size
        self.master_rank = transport.master_rank
        self.find_rank()
        self.functions: dict[int, Any] = {}
        self.shareds: MutableMapping[int, SharedVariable] = {}
        self.rows: dict[int, int] = {}
        self.peers: dict[int, Any] = {}
        self.sent: list[Any] = []
        self.log: Any = None
        self.device = "cpu"
        self.restarts = 0
        self.schedules: dict[int, Command] = {}
        self.bound: dict[int, Callable[[Any], Any]] = {}
        self.wires: dict[tuple[int, Any], Any] = {}
        self.keep_progress()
        self._buffers: dict[tuple, np.ndarray] = {}
        self._adopted: list[SharedVariable] = []  # by the program that is running
        self._succeeded: bytes | None = None  # the last payload, if its command has succeeded
        self._last: Any = None  # the last command, in its sent form

    def find_rank(self) -> None:
        """Take the rank from the transport, which has another one in a forked process."""
        self.rank = self.transport.rank
        self.is_master = self.rank == self.master_rank

    @property
    def stream_index(self) -> int:
        """The index of this rank's random substreams; 0 for the master."""
        return self.transport.distance

    def wire(self, number: int, wire: Any, shape: Sequence[int]) -> Wire:
        """Return this rank's state of reductions of a shared variable in a wire format."""
        pieces = self.pieces(number, shape)
        kept = self.wires.get((number, wire))
        if kept is None or kept[0] != pieces:
            kept = self.wires[number, wire] = pieces, make_wire(wire, pieces)
        kept[1].check(math.prod(shape))
        return kept[1]

    def pieces(self, number: int, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays that a shared variable of some shape holds."""
        return self.engine.pieces_of(self.shareds[number]) or (tuple(shape),)

    def keep_progress(self, is_over: bool = False) -> None:
        """Write the progress where other processes can read it, or, when that is over, nowhere."""
        place = None if is_over else self.transport.progress
        self.progress: MutableSequence[int] | memoryview = [0] * LINE if place is None else place

    def show_name(self, number: int, name: str) -> None:
        """Write the name of a function or schedule where other processes can read it."""
        if self.transport.status is not None:
            self.transport.status.name(number, name)

    def keep_replicas(self) -> None:
        """Keep replicas alive until the master sends a command to drop them.

        Bound functions that a forked worker has inherited are the master's.
        """
        self.find_rank()
        self.keep_progress()
        self.bound.clear()
        self.functions, self.shareds = dict(self.functions), dict(self.shareds)

    def storages(self, numbers: Iterable[int]) -> list[Any]:
        """Return the arrays of this rank's replicas, or raise ``ValueError`` if an array is None."""
        found = []
        for number in numbers:
            found.append(self.engine.storage(self.shareds[number]))
            if found[-1] is None:
                raise ValueError(f"{self.shareds[number]} has no value on rank {self.rank}: {NO_VALUE}")
        return found

    def sliceable(self, number: int) -> Any:
        """Return the rows of a sliceable shared variable that this rank has."""
        return self.engine.storage(self.shareds[number])

    def take(self, key: tuple, source: Any, rows: Rows, axis: int = 0) -> Any:
        """Return rows of an array, or of the array or object of a handle.

        A ``range`` of rows is a view. Other rows are copied to a buffer, which is reused by the next
        call with the same `key`, a tuple that starts with the number of the function. `axis` is the axis
        of the rows.
        """
        if isinstance(source, Composite):
            return source.rows(self.store, rows)
        if isinstance(source, Handle):
            source, rows = self.store.find(source, rows)
        if axis:
            return np.moveaxis(self.take(key, np.moveaxis(source, axis, 0), rows), 0, axis)
        is_copied = isinstance(source, np.ndarray) and type(rows) is not range
        return self.engine.take(source, rows, self._buffer(key, source, rows) if is_copied else None)

    def _buffer(self, key: tuple, source: Any, rows: Rows) -> np.ndarray:
        """Return an array for a copy of rows."""
        shape = (len(rows), *source.shape[1:])
        size = math.prod(shape)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.size < size or buffer.dtype != source.dtype:
            buffer = self._buffers[key] = np.empty(size, source.dtype)
        return buffer[:size].reshape(shape)

    def adopt(self, shareds: Iterable[SharedVariable]) -> None:
        """Give numbers below 0 to shared variables of the program that is running."""
        for shared in shareds:
            self._adopted.append(shared)
            self.shareds[-len(self._adopted)] = shared

    def disown(self) -> None:
        """Forget the variables that a program has adopted, whose values move to private memory."""
        self._make_private(self._adopted)
        numbers = range(-len(self._adopted), 0)
        for number in numbers:
            self.shareds.pop(number, None)
        self._adopted.clear()
        if numbers:
            self.forget(numbers)

    def forget(self, numbers: Iterable[int]) -> None:
        """Free this rank's state of functions and shared variables that were dropped."""
        numbers = set(numbers)
        for by_number in (self.rows, self.peers):
            for number in numbers & by_number.keys():
                del by_number[number]
        for by_key in (self.wires, self._buffers):  # each key starts with a number
            for key in [key for key in by_key if key[0] in numbers]:
                del by_key[key]
        self.bound.clear()  # they may refer to these

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
        self.bound.clear()
        self._make_private(self.shareds.values())

    def _make_private(self, shareds: Iterable[SharedVariable]) -> None:
        for shared in shareds:
            storage = self.engine.storage(shared)
            if isinstance(storage, np.ndarray) and storage in self.store:
                self.engine.store(shared, storage.copy())

    def execute(self, payload: bytes) -> bytes:
        """Run the command in these bytes and return the bytes of the reply."""
        self._succeeded = self._last = None
        try:
            self._last = sent = sent_form(payload)
            if self.sent:
                self.sent.clear()
                self.store.collect()
            reply = pickle.dumps(self.run_sent(sent), pickle.HIGHEST_PROTOCOL)
            self._succeeded = payload
            return reply
        except Exception as error:
            if not isinstance(error, CollectiveAbortedError):
                self.transport.abort()
            return self.failure(error)

    def run_sent(self, sent: Any) -> Any:
        """Run a command in its sent form."""
        if type(sent) is tuple:
            number, change, command = (*sent, None, None)[:3]
            bound = self.bound.get(number)
            return (bound or self.bind(number, command))(change)
        if type(sent) is list:
            return [self.run_sent(item) for item in sent]
        return sent.run(self)

    def bind(self, number: int, command: Command | None = None) -> Callable[[Any], Any]:
        """Return the bound function of a schedule, whose command this rank may not have."""
        if command is not None:
            self.schedules[number] = command
        command = self.schedules[number]
        if self.is_master:
            self.show_name(number, command.title(self))
        bound = self.bound[number] = command.bind(self)
        return bound

    def _commands(self, sent: Any) -> list[tuple[Command, Any]]:
        """Return the commands of a block, or one command, in its sent form, each with its change."""
        if type(sent) is list:
            return [pair for item in sent for pair in self._commands(item)]
        if type(sent) is tuple:
            return [(self.schedules[sent[0]], (*sent, None)[1])]
        return [(sent, None)]

    def describe_last(self) -> str:
        """Return a few words about the last command, for the log."""
        return " + ".join(command.describe(self) for command, _ in self._commands(self._last))

    def warm_caches(self) -> None:
        """Read the last command again, up to where it computes, while there is no other command.

        The next command is often like it, and finds its steps in the processor's caches. Nothing is done
        while this rank's steps are measured.
        """
        if self._succeeded is not None and self.log is None:
            with suppress(Exception):  # running the command will report the error
                # The first command's work empties the caches again.
                command, change = self._commands(sent_form(self._succeeded))[0]
                command.changed(change).bind(self)

    def failure(self, error: Exception) -> bytes:
        """Return the bytes of a reply that reports an exception, in its ``except`` block."""
        try:
            message = str(error)
        except Exception as worse:  # raised by a user's class
            message = f"(str() of the exception raised {type(worse).__name__})"
        was_aborted = isinstance(error, CollectiveAbortedError)
        failure = Failure(was_aborted, type(error).__name__, message, traceback.format_exc())
        return pickle.dumps(failure, pickle.HIGHEST_PROTOCOL)


def results_of(replies: Sequence[bytes | None], own: Any, error: BaseException | None) -> list:
    """Return the results by rank.

    Parameters
    ----------
    replies : sequence of bytes
        The reply of each rank; None for the master's.
    own : object
        The result of the master.
    error : BaseException or None
        The exception that the command raised in the master. It is raised again, unless it is only the
        consequence of an error in a worker.

    Raises
    ------
    WorkerError
        If a worker raised an exception: the error of the first rank that failed by itself, not because
        another rank failed.
    """
    results, has_failed = [], error is not None
    for reply in replies:
        result = own if reply is None else pickle.loads(reply)
        if type(result) is Failure:
            has_failed = True
        results.append(result)
    if not has_failed:
        return results
    failures = [(rank, result) for rank, result in enumerate(results) if type(result) is Failure]
    if error is not None and not (failures and isinstance(error, CollectiveAbortedError)):
        raise error
    rank, first = min(failures, key=lambda pair: pair[1].was_aborted)
    raise WorkerError(rank, first.kind, first.message, first.traceback) from error
