"""Processes that were not forked from the script: they attach to a listener, by its name, at any time.

A listener answers questions, as a controller of `spmd` does, and owns the memory. The processes that
attach to it have a center, locks and collectives, as the ranks of a program have.

The name is the address of a Unix socket in Linux's abstract namespace, which is no file and ends with
its process. Through it, a process that attaches gets the descriptors of two files without names: the
shared memory and the locks. So nothing has a name in a file system, and nothing remains, even if all
processes are killed. Each connection lasts as long as the process is attached. It carries the questions
and the answers, and its end tells either side that the other has ended. Only processes of the same user
are accepted; the kernel says whose they are.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import struct
import time
import traceback
import weakref
from multiprocessing import reduction
from multiprocessing.connection import Connection, wait
from typing import Any, Callable

import numpy as np

from synkhronos._checks import check_in_range, check_int, check_number, check_string
from synkhronos._errors import SynkhronosError
from synkhronos._typing import SharedVariables
from synkhronos.comms.shm import SharedMemoryCommunicator
from synkhronos.engines.names import package
from synkhronos.host.handler_errors import reraise_if_handlers, suppress
from synkhronos.programs.center import Center, ProgramLock
from synkhronos.programs.collectives import GroupCollectives
from synkhronos.services.messages import Mailbox, put, take
from synkhronos.services.registers import RegisterGroup
from synkhronos.services.stripes import Stripes
from synkhronos.stores.base import SharedMemoryStore
from synkhronos.stores.named_memory import JointNamedMemory
from synkhronos.world.devices import make_engine

_MOST = 16  # attached processes at once, if their number is not given
_NAP = 2e-4  # seconds between two attempts
_CHECKED = 0.2  # seconds between two checks of `serve` whether to end
_BOX = "minibatches"  # of the mailbox from which attached processes take arrays
_ATTACHED, _LEFT, _DIED = 1, 2, 3  # what an attached process is, in the named memory
_PEER = struct.Struct("3i")  # struct ucred of Linux: process, user, group
_SEARCH_NAP = 0.02  # seconds between two attempts to find a listener
_BACKLOG = 128


class Listener:
    r"""A process to which others attach, with `attach`. It answers their questions and owns the memory.

    Its socket and its memory have no names in a file system, so nothing remains after it has ended, even
    if it was killed.

    Parameters
    ----------
    name : str
        Processes of the same user on this machine find it by this name.
    size : int, optional
        The number of processes that will attach in all; collectives need it. By default any number can
        come and go, at most 16 at once.
    rank_of : callable, optional
        ``rank_of(pid)`` returns the number that a process gets, or None for the next one.

    Examples
    --------
    >>> import subprocess, sys
    >>> import synkhronos as synk
    >>> script = '''
    ... import synkhronos as synk
    ... with synk.attach("example") as attached:
    ...     print(attached.ask("double", 21), flush=True)
    ... '''
    >>> with synk.Listener("example") as listener:
    ...     process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    ...     listener.serve(lambda request, pid, info: 2 * info)
    ...     process.communicate()[0]
    0
    b'42\n'
    """

    def __init__(
        self, name: str, size: int | None = None, rank_of: Callable[[int], int | None] = lambda pid: None
    ) -> None:
        check_string(name, "Listener: name")
        if size is not None:
            size = check_int(size, "Listener: size", 1)
        self._name, self._size, self._rank_of = name, size, rank_of
        self._places = size or _MOST
        self._socket = _listen(name)
        self._named_memory = JointNamedMemory(self._places)
        self._named_memory.memory.use_span(self._places + 1)  # which belongs to no attached process
        self._states = _states_of(self._named_memory, self._places)
        self._members: dict[Connection, tuple[int, int]] = {}  # the rank and the process of each
        self._came, self._died = 0, 0
        self._box: Mailbox | None = None
        self._is_closed = False
        # A forked process would keep the connections open.
        os.register_at_fork(after_in_child=_weakly(self._disconnect))

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{self._came} came, {self._died} died"
        return f"<synkhronos.Listener {self._name}, {state}>"

    def serve(
        self,
        answer: Callable[[Any, int, Any], Any],
        is_over: Callable[[], bool] | None = None,
        timeout: float | None = 60,
    ) -> int:
        """Answer questions until all attached processes have ended.

        Parameters
        ----------
        answer : callable
            ``answer(request, pid, info)`` returns the answer to the question of the process `pid`.
        is_over : callable, optional
            Called several times a second; it ends this call by returning True. By default the call ends
            when all attached processes have ended, and `size` processes, or at least one, have attached.
        timeout : float or None, default: 60
            Without `is_over`: how many seconds to wait for the next process to attach, until `size`
            processes, or one, have done so. None waits without limit.

        Returns
        -------
        int
            How many of the attached processes have ended without `Attached.close`.

        Raises
        ------
        SynkhronosError
            If too few processes attach.
        Exception
            What `answer` raises, after the process that has asked was told.
        """
        limit = None if timeout is None else check_in_range(timeout, "Listener.serve: timeout", 0)
        latest = time.monotonic()
        while not (self._all_have_ended() if is_over is None else is_over()):
            ready = wait([self._socket, *self._members], _CHECKED)
            if self._socket in ready:
                self._accept()
            if is_over is None and limit is not None:
                latest = self._wait_for_more(latest, limit)
            for connection in ready:
                if connection in self._members:
                    self._hear(connection, answer)
        return self._died

    def _accept(self) -> None:
        with suppress(OSError):  # it has gone away
            accepted, _ = self._socket.accept()
            connection = Connection(accepted.detach())
            pid, user = _peer(connection)
            rank = self._find_rank(pid) if user == os.geteuid() else None
            try:
                connection.send(None if rank is None else (rank, self._size, self._places))
                for file in self._named_memory.files if rank is not None else ():
                    reduction.send_handle(connection, file.fileno(), pid)
            except BaseException:
                connection.close()
                raise
            if rank is None:
                connection.close()
            else:
                self._states[rank] = _ATTACHED
                self._members[connection] = rank, pid

    def _find_rank(self, pid: int) -> int | None:
        """Return the number of a process that attaches; None if there is no place."""
        rank = self._rank_of(pid)
        if rank is not None:
            return rank if not self._states[rank] else None
        free = [rank for rank in range(self._places) if not self._states[rank]]
        if not free and self._size is None:
            free = [rank for rank in range(self._places) if self._states[rank] != _ATTACHED]
        return free[0] if free else None

    def _hear(self, connection: Connection, answer: Callable[[Any, int, Any], Any]) -> None:
        """Answer the question of an attached process, or forget it if it has left or died."""
        (rank, pid), left = self._members[connection], _LEFT
        try:
            message = connection.recv()
        except (EOFError, OSError) as error:
            reraise_if_handlers(error)
            self._died += 1
            message, left = None, _DIED
        if message is None:
            self._states[rank] = left
            del self._members[connection]
            connection.close()
            return
        number, request, info = message
        try:
            reply = number, answer(request, pid, info), None
        except BaseException:
            _reply(connection, (number, None, traceback.format_exc()))
            raise
        _reply(connection, reply)

    @property
    def pids(self) -> list[int]:
        """The attached processes."""
        return [pid for _, pid in self._members.values()]

    def _all_have_ended(self) -> bool:
        states = self._states
        return not (states == _ATTACHED).any() and np.count_nonzero(states) >= (self._size or 1)

    def _wait_for_more(self, latest: float, limit: float) -> float:
        """Return when the latest process has attached; raise if the next one is late."""
        now, came, needed = time.monotonic(), np.count_nonzero(self._states), self._size or 1
        if came != self._came:
            self._came = came
            return now
        if came < needed and now - latest > limit:
            raise SynkhronosError(
                f"Listener.serve: expected {needed} process{'es' if needed > 1 else ''} to attach, but "
                f"{came or 'none'} came, and no other within {limit:g} seconds; see their output, start "
                f"those that are missing, with attach({self._name!r}), or wait longer: "
                f"serve(..., timeout=None)"
            )
        return latest

    def send(self, arrays: Any, pause: Callable[[], None] = lambda: None) -> None:
        """Send arrays to the attached process that is the first to receive them.

        It waits while the box is full, which has room for 8 messages. A process that this process has
        forked may call it, too.

        Parameters
        ----------
        arrays : array-like, or list of these
            The contents of the message.
        pause : callable, optional
            Called from time to time while it waits.
        """
        if self._box is None:
            self._named_memory.memory.use_span(self._places + 1)  # also in a forked process
            self._box = Mailbox(self._named_memory, _BOX)
        while not put(self._box, arrays, 0):
            pause()
            time.sleep(_NAP)

    def close(self) -> None:
        """Accept no process any more. The attached processes get errors."""
        if not self._is_closed:
            self._is_closed, self._box = True, None
            self._disconnect()
            self._named_memory.close()

    def _disconnect(self) -> None:
        """Close the socket and the connections, which the attached processes notice."""
        self._socket.close()
        for connection in self._members:
            connection.close()
        self._members.clear()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def attach(name: str, timeout: float = 60) -> Attached:
    """Attach this process to a `Listener` on this machine.

    Parameters
    ----------
    name : str
        The name of the listener.
    timeout : float, default: 60
        How many seconds to wait for a listener that has not started yet.

    Returns
    -------
    Attached
        The methods that this process can use now.

    Raises
    ------
    SynkhronosError
        If there is no such listener, or it has no place for another process.
    """
    check_string(name, "attach: name")
    return Attached(name, check_number(timeout, "attach: timeout"))


class Attached(GroupCollectives):
    """A process that is attached to a listener. `attach` returns it.

    Its methods are those of `Rank`; its collectives need a listener with a `size`.

    Attributes
    ----------
    rank : int
        The number of this process.
    size : int or None
        The number of processes in all, if the listener knows it.
    """

    def __init__(self, name: str, timeout: float) -> None:
        super().__init__()
        self._name = name
        self._connection, (self.rank, self.size, places), files = _connect(name, timeout)
        self._named_memory = JointNamedMemory(places, files)
        self._named_memory.memory.use_span(self.rank)
        self._open_stripes = functools.partial(Stripes, self._named_memory)
        self._states = _states_of(self._named_memory, places)
        self._engine = make_engine([str(getattr(package.config, "device", "cpu"))])
        self._communicator: SharedMemoryCommunicator | None = None
        self._centers: dict[str, Center] = {}
        self._locks: dict[str, ProgramLock] = {}
        self._box: Mailbox | None = None
        self._asked = 0  # questions
        # A process that ends without `close` leaves, unless it is killed.
        self._leave_at_exit = atexit.register(_weakly(self.close))

    def __repr__(self) -> str:
        return f"<synkhronos.Attached {self.rank}{f' of {self.size}' if self.size else ''}>"

    def ask(self, request: Any, info: Any = None, timeout: float | None = None) -> Any:
        """Ask the listener, and return its answer.

        Parameters
        ----------
        request, info : object
            Arguments for its function, in addition to the number of this process. They are pickled.
        timeout : float, optional
            The longest time to wait, in seconds. By default there is no limit while the listener lives.

        Raises
        ------
        SynkhronosError
            If the listener has ended, its function raised an exception, or the time is over.
        """
        self._check()
        number = self._asked = self._asked + 1
        until = None if timeout is None else time.monotonic() + timeout
        answered = 0  # the answer to an earlier question may come too late
        try:
            self._connection.send((number, request, info))
            while answered != number:
                left = None if until is None else max(until - time.monotonic(), 0)
                if not self._connection.poll(left):
                    raise SynkhronosError(
                        f"ask: no answer within {timeout} seconds; see what the controller does, or "
                        f"wait longer"
                    )
                answered, value, failure = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise SynkhronosError(self._ended()) from error
        if failure is not None:
            raise SynkhronosError(f"ask: the controller raised an exception:\n{failure}")
        return value

    @property
    def attached(self) -> int:
        """The number of processes that are attached now."""
        return int(np.count_nonzero(self._states == _ATTACHED))

    def center(self, shared_vars: SharedVariables, name: str = "center") -> Center:
        """Return the center of shared variables; see `Rank.center`.

        Parameters
        ----------
        shared_vars : shared variable, or list of these
            The variables, with the same shapes and dtypes in every process.
        name : str, default: "center"
            Each name denotes a separate center.
        """
        self._check()
        check_string(name, "center: name")
        if name not in self._centers:
            given = self._open_stripes, self._engine, shared_vars, name, self._pause, self._check
            self._centers[name] = Center(*given)
        return self._centers[name]

    def lock(self, name: str = "lock") -> ProgramLock:
        """Return a lock that one process can hold at a time; see `Rank.lock`.

        Parameters
        ----------
        name : str, default: "lock"
            Each name denotes a separate lock.
        """
        self._check()
        check_string(name, "lock: name")
        if name not in self._locks:
            given = self._open_stripes, name, self._pause, self._check, contextlib.nullcontext()
            self._locks[name] = ProgramLock(*given)
        return self._locks[name]

    def receive(self, timeout: float | None = None) -> Any:
        """Return the oldest arrays that `Listener.send` has sent, and that no process has received.

        Parameters
        ----------
        timeout : float, optional
            The longest time to wait, in seconds. By default there is no limit while the listener lives.

        Returns
        -------
        numpy.ndarray, list of numpy.ndarray, or None
            As they were sent; None after the time limit.
        """
        self._check()
        if self._box is None:
            self._box = Mailbox(self._named_memory, _BOX)
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            found = take(self._box)
            if found is not None:
                return found[1]
            if until is not None and time.monotonic() >= until:
                return None
            self._pause()

    # Collectives

    def _find_communicator(self) -> SharedMemoryCommunicator:
        self._check()
        if self.size is None:
            raise SynkhronosError(
                "collectives of attached processes need their number: give it to the listener, as in "
                "Listener(name, size=2)"
            )
        if self._communicator is None:
            group = RegisterGroup(self._named_memory, self.rank, self.size, self._check_comes)
            store = SharedMemoryStore(self._named_memory.memory, self._named_memory)
            self._communicator = SharedMemoryCommunicator(group, store)
        return self._communicator

    def _check_comes(self, rank: int) -> None:
        """Raise if a process will not come to a collective any more."""
        self._check()
        if self._states[rank] in (_LEFT, _DIED):
            raise SynkhronosError(
                f"the attached process {rank} has ended, and the others wait for it in a collective; "
                f"let every process call the same collectives"
            )

    # Internal

    def _check(self) -> None:
        """Raise if the listener has ended."""
        if self._connection.closed:
            raise SynkhronosError("this process is no longer attached; use it before close() only")
        try:
            while self._connection.poll(0):  # an answer that comes too late, or the end
                self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise SynkhronosError(self._ended()) from error

    def _ended(self) -> str:
        return (
            f"the controller {self._name!r} has ended, or has ended this process's part; see its output"
        )

    def _pause(self) -> None:
        self._check()
        time.sleep(_NAP)

    def close(self) -> None:
        """Leave the listener. The methods raise errors afterwards."""
        atexit.unregister(self._leave_at_exit)
        self._communicator, self._box = None, None
        self._prepare.cache_clear()
        if not self._connection.closed:
            with suppress(OSError):  # it has ended before
                self._connection.send(None)
            self._connection.close()
            self._named_memory.close()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


# The socket


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a method, if its object still exists."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


def _states_of(named_memory: JointNamedMemory, places: int) -> Any:
    """Return what the process with each number is: 0, `_ATTACHED`, `_LEFT` or `_DIED`."""
    return named_memory.array("attached", (places,), "int64")


def _address_of(name: str) -> str:
    """Return the address of the socket of a name, which each user has for himself."""
    return f"\0synkhronos-{os.geteuid()}-{name}"


def _reply(connection: Connection, reply: Any) -> None:
    """Send ``(number, value, failure)`` to an attached process, if it still lives."""
    with suppress(ConnectionError):  # it has died meanwhile; its end comes next
        connection.send(reply)


def _peer(connected: Any) -> tuple[int, int]:
    """Return the process and the user at the other end."""
    with socket.fromfd(connected.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as copy:
        data = copy.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return _PEER.unpack(data)[:2]


def _listen(name: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(_address_of(name))
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise SynkhronosError(
            f"listener: the name {name!r} cannot be used: {error.strerror}; if another process listens "
            f"there, end it or take another name"
        ) from error
    return listening


def _connect(name: str, timeout: float) -> tuple[Connection, tuple[int, int | None, int], list[Any]]:
    """Return the connection to a listener, what it says first, and the files of the named memory."""
    until = time.monotonic() + timeout
    with _find(name, until) as connected:
        if _peer(connected)[1] != os.geteuid():
            raise SynkhronosError(f"attach: the controller {name!r} belongs to another user")
        connected.settimeout(None)
        connection = Connection(connected.detach())
    try:
        if not connection.poll(max(until - time.monotonic(), _SEARCH_NAP)):
            raise SynkhronosError(
                f"attach: the controller {name!r} does not answer; it has to serve, or wait longer"
            )
        given = connection.recv()
        if given is None:
            raise SynkhronosError(
                f"attach: the controller {name!r} has no place for another process; start it for more"
            )
        numbers = [reduction.recv_handle(connection) for _ in range(2)]
        return connection, given, [os.fdopen(number, "r+b", buffering=0) for number in numbers]
    except BaseException as error:
        connection.close()
        if isinstance(error, (EOFError, ConnectionError)):
            raise SynkhronosError(f"attach: the controller {name!r} has ended") from error
        raise


def _find(name: str, until: float) -> socket.socket:
    """Return a socket that is connected to the listener of a name, when there is one."""
    while True:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connected.settimeout(max(until - time.monotonic(), _SEARCH_NAP))
            connected.connect(_address_of(name))
            return connected
        except (ConnectionRefusedError, BlockingIOError) as error:  # not there yet, or too many come
            reraise_if_handlers(error)
            connected.close()
            if time.monotonic() >= until:
                raise SynkhronosError(
                    f"attach: there is no controller {name!r}; start it before, or wait longer"
                ) from error
            time.sleep(_SEARCH_NAP)
        except BaseException:
            connected.close()
            raise
