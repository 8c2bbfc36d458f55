"""A process that lets other processes attach to it, which it has not forked: by a name, at any time.

The name is the address of a Unix socket in Linux's abstract namespace, which is no file and ends with
its process. Through it, a process that attaches gets the descriptors of two files without names: the
shared memory and the locks. So nothing has a name in a file system, and nothing remains, even if all
processes are killed. `Server` is the side of the listener, and `Client` that of an attached process.

Each connection lasts as long as the process is attached. It carries the questions and the answers, and
its end tells either side that the other has ended. Only processes of the same user are accepted; the
kernel says whose they are.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import time
import traceback
import weakref
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any, Callable, NamedTuple

from synkhronos._errors import SynkhronosError
from synkhronos.host.handler_errors import reraise_if_handlers, suppress
from synkhronos.stores.memory import SharedMemory
from synkhronos.stores.named_memory import LockFile, SharedNamedMemory, open_unnamed
from synkhronos.stores.shared import SharedMemoryStore

#: The messages of an attached process
ASK, LEAVE = "ask", "leave"
#: What an attached process is, in the named memory
ATTACHED, LEFT, DIED = 1, 2, 3

_PEER = struct.Struct("3i")  # struct ucred of Linux: process, user, group
_NAP = 0.02  # seconds between two attempts to find a listener
_BACKLOG = 128
_HELLO_TIME = 10.0  # seconds in which a process that is accepted must take the descriptors


class Assignment(NamedTuple):
    """What an attached process is told first.

    Attributes
    ----------
    rank : int
        Its number.
    size : int or None
        The number of processes that attach in all, if it is known.
    places : int
        The number of spans of the shared memory that processes have.
    """

    rank: int
    size: int | None
    places: int


class Member(NamedTuple):
    """An attached process.

    Attributes
    ----------
    rank, pid : int
        Its number, and its process.
    """

    rank: int
    pid: int


def address_of(name: str) -> str:
    """Return the address of the socket of a name, which each user has for himself."""
    return f"\0synkhronos-{os.geteuid()}-{name}"


def states_of(named_memory: SharedNamedMemory, places: int) -> Any:
    """Return what the process with each number is: 0, `ATTACHED`, `LEFT` or `DIED`."""
    return named_memory.array("attached", (places,), "int64")


class Server:
    """The side of the process to which others attach.

    Parameters
    ----------
    name : str
        The name by which others find it.
    size : int or None
        The number of processes that attach in all, if it is known. Then no number is given twice.
    places : int
        The largest number of processes at once.
    rank_of : callable
        ``rank_of(pid)`` returns the number of a process that attaches, or None for any number.

    Attributes
    ----------
    members : dict
        The attached processes by their connections.
    named memory : SharedCommons
        The memory that they share.
    """

    def __init__(
        self, name: str, size: int | None, places: int, rank_of: Callable[[int], int | None]
    ) -> None:
        self.size, self.places, self._rank_of = size, places, rank_of
        self.members: dict[Connection, Member] = {}
        self._socket = _listen(name)
        self._files = open_unnamed("synkhronos-memory"), open_unnamed("synkhronos-locks")
        self.memory = SharedMemory(places, self._files[0].fileno())
        self.memory.use_span(places + 1)  # which belongs to no attached process
        self.named_memory = SharedNamedMemory(self.memory, LockFile(self._files[1]))
        self.states = states_of(self.named_memory, places)
        _forget_in_children(self)

    def wait(self, seconds: float) -> list[tuple[Member, Connection]]:
        """Accept who comes, and return the members that have sent something, after `seconds` at most."""
        ready = wait([self._socket, *self.members], seconds)
        found = []
        for item in ready:
            if item is self._socket:
                self._accept()
            elif item in self.members:
                found.append((self.members[item], item))
        return found

    def _accept(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except OSError as error:  # it has gone away
            reraise_if_handlers(error)
            return
        with accepted:
            pid, user = _peer(accepted)
            accepted.settimeout(_HELLO_TIME)
            try:
                if user != os.geteuid():
                    return
                rank = self._find_rank(pid)
                assignment = None if rank is None else Assignment(rank, self.size, self.places)
                _send_assignment(accepted, assignment, [file.fileno() for file in self._files])
            except OSError as error:  # it has ended meanwhile
                reraise_if_handlers(error)
                return
            if rank is not None:
                accepted.settimeout(None)
                self.states[rank] = ATTACHED
                self.members[Connection(accepted.detach())] = Member(rank, pid)

    def _find_rank(self, pid: int) -> int | None:
        """Return the number of a process that attaches; None if there is no place."""
        rank = self._rank_of(pid)
        if rank is not None:
            return rank if not self.states[rank] else None
        free = [rank for rank in range(self.places) if not self.states[rank]]
        if not free and self.size is None:
            free = [rank for rank in range(self.places) if self.states[rank] != ATTACHED]
        return free[0] if free else None

    def drop(self, connection: Connection, state: int) -> None:
        """Forget a member, which has left or died."""
        self.states[self.members.pop(connection).rank] = state
        connection.close()

    def close(self) -> None:
        """Accept no more processes, and close the connections, which the attached processes notice."""
        self._socket.close()
        for connection in self.members:
            connection.close()
        self.members.clear()
        self.named_memory.close()
        self._files[0].close()

    def forget(self) -> None:
        """Close the socket and the connections in a forked process, which would keep them open."""
        self._socket.close()
        for connection in self.members:
            connection.close()
        self.members.clear()


def _forget_in_children(server: Server) -> None:
    reference = weakref.ref(server)

    def forget() -> None:
        found = reference()
        if found is not None:
            found.forget()

    os.register_at_fork(after_in_child=forget)


class Client:
    """The side of a process that attaches.

    Parameters
    ----------
    name : str
        The name of the listener.
    timeout : float
        The time in seconds to wait for a listener that has not started yet, and for its first answer.

    Attributes
    ----------
    assignment : Assignment
        What the listener has said.
    store : SharedMemoryStore
        The memory that all attached processes share.
    """

    def __init__(self, name: str, timeout: float) -> None:
        until = time.monotonic() + timeout
        with _connect(name, until) as connected:
            self.assignment, files = _receive_assignment(connected, name)
            connected.settimeout(None)
            self._connection = Connection(connected.detach())
        memory = SharedMemory(self.assignment.places, files[0])
        os.close(files[0])
        memory.use_span(self.assignment.rank)
        locks = LockFile(os.fdopen(files[1], "r+b", buffering=0))
        self.store = SharedMemoryStore(memory, locks)
        self.states = states_of(self.store.named_memory, self.assignment.places)  # type: ignore[arg-type]
        self._name = name

    def ask(self, request: Any, info: Any, timeout: float | None) -> Any:
        """Return the answer of the listener.

        Raises
        ------
        SynkhronosError
            If the listener has ended, its answer raised an exception, or the time is over.
        """
        try:
            self._connection.send((ASK, request, info))
            if not self._connection.poll(timeout):
                raise SynkhronosError(
                    f"ask: no answer within {timeout} seconds; see what the controller does, or wait "
                    f"longer"
                )
            value, failure = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise SynkhronosError(self._ended()) from error
        if failure is not None:
            raise SynkhronosError(f"ask: the controller raised an exception:\n{failure}")
        return value

    def check(self) -> None:
        """Raise if the listener has ended."""
        if self._connection.closed:
            raise SynkhronosError("this process is no longer attached; use it before close() only")
        if self._connection.poll(0):  # nothing comes unasked but the end
            raise SynkhronosError(self._ended())

    def _ended(self) -> str:
        return (
            f"the controller {self._name!r} has ended, or has ended this process's part; see its output"
        )

    def leave(self) -> None:
        """Say that this process needs the others no more. Nothing can be used afterwards."""
        if self._connection.closed:
            return
        with suppress(OSError):  # it has ended before
            self._connection.send((LEAVE,))
        self._connection.close()
        self.store.named_memory.close()


def answer_to(connection: Connection, reply: Any) -> None:
    """Send ``(value, failure)`` to a member, if it still lives."""
    with suppress(ConnectionError):  # it has died meanwhile; its end comes next
        connection.send(reply)


def failure_of(error: BaseException) -> str:
    """Return the traceback of an exception, for the process that has asked."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _listen(name: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(address_of(name))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise SynkhronosError(
            f"listener: the name {name!r} cannot be used: {error.strerror}; if another process listens "
            f"there, end it or take another name"
        ) from error
    return listening


def _connect(name: str, until: float) -> socket.socket:
    while True:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(max(until - time.monotonic(), _NAP))
            connected.connect(address_of(name))
            _, user = _peer(connected)
            if user != os.geteuid():
                raise SynkhronosError(f"attach: the controller {name!r} belongs to another user")
            return connected
        except (ConnectionRefusedError, BlockingIOError) as error:  # not there yet, or too many come
            reraise_if_handlers(error)
            connected.close()
            if time.monotonic() >= until:
                raise SynkhronosError(
                    f"attach: there is no controller {name!r}; start it before, or wait longer"
                ) from error
            time.sleep(_NAP)
        except BaseException:
            connected.close()
            raise


def _peer(connected: socket.socket) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return _PEER.unpack(data)[:2]


def _send_assignment(connected: socket.socket, assignment: Assignment | None, files: list[int]) -> None:
    text = pickle.dumps(None if assignment is None else tuple(assignment))
    connected.sendall(struct.pack("=I", len(text)) + text)
    if assignment is not None:
        reduction.sendfds(connected, files)


def _receive_assignment(connected: socket.socket, name: str) -> tuple[Assignment, list[int]]:
    try:
        (length,) = struct.unpack("=I", _receive(connected, 4))
        given = pickle.loads(_receive(connected, length))
        if given is None:
            raise SynkhronosError(
                f"attach: the controller {name!r} has no place for another process; start it for more"
            )
        return Assignment(*given), reduction.recvfds(connected, 2)
    except socket.timeout as error:
        raise SynkhronosError(
            f"attach: the controller {name!r} does not answer; it has to serve, or wait longer"
        ) from error
    except (EOFError, ConnectionError) as error:
        raise SynkhronosError(f"attach: the controller {name!r} has ended") from error


def _receive(connected: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connected.recv(length - len(data))
        if not more:
            raise EOFError
        data += more
    return data
