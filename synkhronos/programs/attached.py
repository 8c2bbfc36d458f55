"""Processes that were not forked from the script: they attach to a listener, by its name, at any time.

A listener answers questions, as a controller of `spmd` does, and owns the memory. The processes that
attach to it have a center, locks and collectives, as the ranks of a program have.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import weakref
from typing import Any, Callable

import numpy as np

from synkhronos._checks import check_in_range, check_int, check_number, check_string
from synkhronos._errors import SynkhronosError
from synkhronos._typing import SharedVariables
from synkhronos.comms.shm import SharedMemoryCommunicator
from synkhronos.engines.names import package
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.programs.center import Center
from synkhronos.programs.group_collectives import GroupCollectives
from synkhronos.programs.lock import ProgramLock
from synkhronos.services.listener import ASK, ATTACHED, DIED, LEFT, Client, Server, answer_to, failure_of
from synkhronos.services.mailbox import Mailbox
from synkhronos.services.messages import put, take
from synkhronos.services.register_group import RegisterGroup
from synkhronos.services.stripes import Stripes
from synkhronos.world.devices import make_engine

_MOST = 16  # attached processes at once, if their number is not given
_NAP = 2e-4  # seconds between two attempts
_CHECKED = 0.2  # seconds between two checks of `serve` whether to end
_BOX = "minibatches"  # of the mailbox from which attached processes take arrays


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
        self,
        name: str,
        size: int | None = None,
        rank_of: Callable[[int], int | None] = lambda pid: None,
    ) -> None:
        check_string(name, "Listener: name")
        if size is not None:
            size = check_int(size, "Listener: size", 1)
        self._name, self._size = name, size
        self._server = Server(name, size, size or _MOST, rank_of)
        self._came, self._died = 0, 0
        self._box: Mailbox | None = None
        self._is_closed = False

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
            ready = self._server.wait(_CHECKED)
            if is_over is None and limit is not None:
                latest = self._wait_for_more(latest, limit)
            for member, connection in ready:
                try:
                    message = connection.recv()
                except (EOFError, OSError) as error:
                    reraise_if_handlers(error)
                    self._died += 1
                    self._server.drop(connection, DIED)
                    continue
                if message[0] != ASK:
                    self._server.drop(connection, LEFT)
                    continue
                try:
                    value = answer(message[1], member.pid, message[2])
                except BaseException as error:
                    answer_to(connection, (None, failure_of(error)))
                    raise
                answer_to(connection, (value, None))
        return self._died

    @property
    def pids(self) -> list[int]:
        """The attached processes."""
        return [member.pid for member in self._server.members.values()]

    def _all_have_ended(self) -> bool:
        states = self._server.states
        return not (states == ATTACHED).any() and np.count_nonzero(states) >= (self._size or 1)

    def _wait_for_more(self, latest: float, limit: float) -> float:
        """Return when the latest process has attached; raise if the next one is late."""
        now, came, needed = time.monotonic(), np.count_nonzero(self._server.states), self._size or 1
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
            self._server.memory.use_span(self._server.places + 1)  # also in a forked process
            self._box = Mailbox(self._server.named_memory, _BOX)
        while not put(self._box, arrays, 0):
            pause()
            time.sleep(_NAP)

    def close(self) -> None:
        """Accept no process any more. The attached processes get errors."""
        if not self._is_closed:
            self._is_closed, self._box = True, None
            self._server.close()

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
        self._client = Client(name, timeout)
        assignment = self._client.assignment
        self.rank, self.size = assignment.rank, assignment.size
        self._named_memory = self._client.store.named_memory
        self._engine = make_engine([str(getattr(package.config, "device", "cpu"))])
        self._communicator: SharedMemoryCommunicator | None = None
        self._centers: dict[str, Center] = {}
        self._locks: dict[str, ProgramLock] = {}
        self._box: Mailbox | None = None
        self._leave_at_exit = _leave_at_exit(self)

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
        return self._client.ask(request, info, timeout)

    @property
    def attached(self) -> int:
        """The number of processes that are attached now."""
        return int(np.count_nonzero(self._client.states == ATTACHED))

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
            open_stripes = functools.partial(Stripes, self._named_memory)
            self._centers[name] = Center(
                open_stripes, self._engine, shared_vars, name, self._pause, self._check
            )
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
            open_stripes = functools.partial(Stripes, self._named_memory)
            self._locks[name] = ProgramLock(
                open_stripes, name, self._pause, self._check, contextlib.nullcontext()
            )
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
            self._communicator = SharedMemoryCommunicator(group, self._client.store)
        return self._communicator

    def _check_comes(self, rank: int) -> None:
        """Raise if a process will not come to a collective any more."""
        self._check()
        if self._client.states[rank] in (LEFT, DIED):
            raise SynkhronosError(
                f"the attached process {rank} has ended, and the others wait for it in a collective; "
                f"let every process call the same collectives"
            )

    # Internal

    def _check(self) -> None:
        self._client.check()

    def _pause(self) -> None:
        self._check()
        time.sleep(_NAP)

    def close(self) -> None:
        """Leave the listener. The methods raise errors afterwards."""
        atexit.unregister(self._leave_at_exit)
        self._communicator, self._box = None, None
        self._reductions.clear()
        self._client.leave()

    def __enter__(self) -> Attached:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _leave_at_exit(attached: Attached) -> Callable[[], None]:
    """Let a process that ends without `close` leave, unless it is killed."""
    reference = weakref.ref(attached)

    def leave() -> None:
        found = reference()
        if found is not None:
            found.close()

    atexit.register(leave)
    return leave
