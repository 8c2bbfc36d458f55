"""Processes of the script that are no ranks, such as those that load data.

They belong to the script and not to a world, so they can be started before `fork`, and outlive `close`.
They are copies of the script at the moment when they are started, so what they need is not sent. They
share ``MappedMemory`` with the ranks, and semaphores in it.

The extensions use this module. A process of this kind

- ends with the script, also if the script is killed;
- ignores Ctrl-C and the other signals that the script handles;
- has none of the script's pipes, sockets and locked files;
- must not use the world, of which it may have a copy.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from multiprocessing import connection as connections
from multiprocessing import get_context
from typing import Any, Callable

from synkhronos._errors import SynkhronosError
from synkhronos.host.descriptors import descriptors, give_up, open_unnamed
from synkhronos.host.handler_errors import reraise_if_handlers
from synkhronos.transports import limits
from synkhronos.transports.children import Children, find_dead, status
from synkhronos.transports.fork_locks import threads_of_libraries, warn_of_threads

_CHECK_INTERVAL = 0.1  # seconds between two checks that a process is alive
_LONGEST_ANSWER = 2.0  # seconds for a process to write its stack
_MOST_LINES = 6  # of a stack
_SIGNAL = signal.SIGRTMAX - 2  # at which a process writes its stack


def describe(pid: int, stack: str) -> str:
    """Return where a process is: its Python stack, or that it cannot run.

    Parameters
    ----------
    pid : int
    stack : str
        Of `BackgroundProcesses.stacks`, to which the process writes its stack.
    """
    state = status(pid)
    if state in ("stopped", "disk-sleep"):
        return (
            "is stopped by a signal" if state == "stopped" else "waits for a disk that does not answer"
        )
    try:
        with open(stack) as file:
            file.seek(0, os.SEEK_END)
            os.kill(pid, _SIGNAL)
            text, deadline = "", time.monotonic() + _LONGEST_ANSWER
            while time.monotonic() < deadline and not text.endswith("\n"):
                time.sleep(_CHECK_INTERVAL)
                text += file.read()
    except OSError as error:
        return f"cannot be asked: {error}"
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    return "\n".join(["is here, the latest call first:", *lines[:_MOST_LINES]]) if lines else "is silent"


class BackgroundProcesses:
    """Processes that are no ranks.

    Parameters
    ----------
    name : str
        The processes are named ``synkhronos-<name>-<number>``.
    count : int
        How many there are.
    serve : callable
        Each process calls ``serve(number, connection)``, and ends when that returns. The connection has
        what `send` sends, and takes what `receive` returns.

    Attributes
    ----------
    pids : list of int
        Their process ids.

    Raises
    ------
    SynkhronosError
        If the system refuses a process. None is left then.
    """

    def __init__(
        self, name: str, count: int, serve: Callable[[int, connections.Connection], None]
    ) -> None:
        limits.check_may_have_children()
        warn_of_threads(f"processes for {name}", "their code", "these processes", threads_of_libraries())
        self._name, self._serve, self._owner = name, serve, os.getpid()
        self._children, self._processes = Children(), {}  # type: ignore[var-annotated]
        self._stacks: list[Any] = []
        self._connections: list[connections.Connection] = []
        try:
            self._children.relay_log()
            inherited = descriptors()
            for number in range(count):
                self._children.run(self._fork, number, inherited)
        except OSError as error:
            refused = limits.too_many_background_processes(error, name, len(self._processes), count)
            self.end()
            raise refused from error
        except BaseException:
            self.end()
            raise
        self.pids: list[int] = [process.pid for process in self._processes.values()]
        #: For `describe`
        self.stacks = [f"/proc/{self._owner}/fd/{stack.fileno()}" for stack in self._stacks]

    def _fork(self, number: int, inherited: Any) -> None:
        theirs, ours = get_context("fork").Pipe()
        self._connections.append(ours)
        stack = open_unnamed(f"synkhronos-{self._name}-stack")
        self._stacks.append(stack)

        def become() -> None:
            give_up(inherited, only_reads=True)
            if os.getppid() != self._owner:
                return  # it ended before this process could be told to end with it
            for connection in self._connections:
                connection.close()
            faulthandler.register(_SIGNAL, stack)
            self._serve(number, theirs)

        with theirs:  # of this process; the other has its own
            process = self._children.fork_further(f"{self._name}-{number}", become)
        self._processes[number] = process

    def send(self, message: Any) -> None:
        """Send an object to every process.

        Raises
        ------
        SynkhronosError
            If one of them has ended.
        """
        for connection in self._connections:
            try:
                connection.send(message)
            except OSError as error:
                reraise_if_handlers(error)
                self.check()
                raise SynkhronosError(f"{self._name}: a process has closed its pipe: {error}") from error

    def ask(self, number: int, message: Any, while_waiting: Callable[[float], None]) -> Any:
        """Send an object to a process, and return what it sends back.

        Parameters
        ----------
        number : int
        message : object
        while_waiting : callable
            Called from time to time with the seconds of the wait.

        Raises
        ------
        SynkhronosError
            If it has ended.
        """
        connection, began = self._connections[number], time.monotonic()
        connection.send(message)
        while not connection.poll(_CHECK_INTERVAL):
            self.check()
            while_waiting(time.monotonic() - began)
        try:
            return connection.recv()
        except EOFError as error:
            self._processes[number].join(1)  # which it does now
            self.check()
            raise SynkhronosError(f"{self._name}: a process has closed its pipe") from error

    def find_dead(self) -> dict[int, str]:
        """Return ``{number: cause}`` for the processes that have ended. Only the script knows."""
        self._children.emit_log()
        return find_dead(self._processes)

    def check(self) -> None:
        """Raise ``SynkhronosError`` if one of the processes has ended."""
        for number, cause in self.find_dead().items():
            raise SynkhronosError(
                f"{self._name}: process {number} of {len(self._processes)} has ended ({cause}); close "
                f"what it belongs to, and create it again"
            )

    def end(self) -> None:
        """End the processes. In a copy of the script nothing is done."""
        if os.getpid() != self._owner:
            return
        self._processes = {}
        self._children.kill()
        for connection in [*self._connections, *self._stacks]:
            connection.close()
        self._connections, self._stacks = [], []
