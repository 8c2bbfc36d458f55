"""The processes of a task: that of the script and its parent, and that which passes on the output.

mpirun sends signals to all processes of a task, and does not return the exit code of a script that ends
without MPI. So the task that mpirun has started is the parent of the script: it passes the signals of
``launch`` to the script alone, as on one machine, and tells ``launch`` how the script has ended.

A task that leads another machine prints into a pipe, and so do the ranks that it forks. A small process,
which outlives them, reads the pipe, and writes whole lines to stderr, with the name of the machine
before each. mpirun passes on its input at once, so a line could be cut where two machines print at the
same time. In a pipe with ``O_DIRECT``, one write is one read.
"""

import contextlib
import fcntl
import os
import signal
import socket
import stat
import sys
from typing import Any, Dict, Iterator, Set, Tuple

from synkhronos.host import job
from synkhronos.host.handler_errors import suppress
from synkhronos.host.signals import die_with_parent, do_nothing
from synkhronos.machines.job.config import Job
from synkhronos.machines.job.ending import start_reader
from synkhronos.machines.job.reports import ENDED, EXITED, STARTED, TERMINATED, report

#: The signals that mpirun passes on, or sends when it ends the job, and what the script gets
_SIGNALS = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.Signals[job.INTERRUPT]: signal.SIGINT,
    signal.Signals[job.TERMINATE]: signal.SIGTERM,
}

_PACKET = 4096  # bytes, the most that Linux keeps together, and that mpirun reads at once
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", job.TERMINATE)


def go_on_in_child(is_launched: bool) -> None:
    """Return in a child process. This process waits for it, and exits as a shell would.

    Parameters
    ----------
    is_launched : bool
        Whether ``launch`` has started the job. Otherwise signals reach the script without this process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        die_with_parent()
        if is_launched:
            os.setsid()
        return
    received: Set[int] = set()
    passed: Set[int] = set()

    def pass_on(number: int, frame: Any) -> None:
        received.add(number)
        wanted = _SIGNALS[signal.Signals(number)]
        if wanted == signal.SIGTERM and wanted in passed:
            return  # mpirun sends it, too, when ``launch`` ends the job for good
        passed.add(wanted)
        with suppress(ProcessLookupError):
            os.kill(child, wanted)
        if number == signal.Signals[job.TERMINATE]:
            report(TERMINATED)

    for number in _SIGNALS:
        signal.signal(number, pass_on if is_launched else do_nothing)
    if is_launched:
        report(STARTED)
    status = os.waitpid(child, 0)[1]
    is_signal = os.WIFSIGNALED(status)
    code = os.WTERMSIG(status) if is_signal else os.WEXITSTATUS(status)
    if signal.SIGTERM not in received:  # otherwise mpirun has ended the job
        if is_signal:
            report(ENDED, signal.Signals(code).name)
        elif is_launched:
            report(EXITED, code)
    os._exit(128 * is_signal + code)


def open_input(given: str) -> None:
    """Open the standard input of ``launch``, which it has described, as that of this process.

    It is empty if it cannot be opened, because ``launch`` runs on another machine, for instance.
    """
    path, *expected = given.rsplit(":", 2)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOCTTY)
        facts = os.fstat(descriptor)
    except OSError:
        facts = None
    if facts is None or [str(facts.st_dev), str(facts.st_ino)] != expected:
        descriptor = os.open(os.devnull, os.O_RDONLY)
    if descriptor != 0:  # as it is where there was no standard input
        os.dup2(descriptor, 0)
        os.close(descriptor)


def own_input(what: Job) -> Dict[str, str]:
    """Return the variable that tells the script where its standard input is.

    A script on this machine opens that of this process. On another machine, it is empty if this is a
    terminal or ``/dev/null``. Otherwise there is no variable, and mpirun passes on what it reads; that
    of OpenMPI 5.0 never tells the script that the input has ended.
    """
    try:
        if not what.hosts or _is_here(what.hosts[0]):
            path = f"/proc/{os.getpid()}/fd/0"
            os.close(os.open(path, os.O_RDONLY | os.O_NOCTTY))  # not possible with a socket
            facts = os.stat(path)
            return {job.INPUT: f"{path}:{facts.st_dev}:{facts.st_ino}"}
        is_nothing = os.isatty(0) or os.path.samestat(os.fstat(0), os.stat(os.devnull))
    except OSError:
        is_nothing = False
    return {job.INPUT: os.devnull} if is_nothing else {}


def _is_here(host: str) -> bool:
    """Whether a host is this machine: its address is one of this machine's."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as one:
            one.bind(address)
    except OSError:
        return False
    return True


# What other tasks print


def prefix_output(name: str) -> None:
    """Let each line that this process and its children print begin with ``[name]``, on stderr."""
    writing = start_reader(_relay, f"[{name}] ".encode())
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.close(writing)


def _relay(reading: int, prefix: bytes) -> None:
    """Write the output, line by line, until every process has closed its end."""
    for name in _IGNORED:
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    if stat.S_ISFIFO(os.fstat(2).st_mode):
        with contextlib.suppress(OSError):  # then a line may be cut
            fcntl.fcntl(2, fcntl.F_SETFL, fcntl.fcntl(2, fcntl.F_GETFL) | os.O_DIRECT)
    for line in prefixed(iter(lambda: os.read(reading, 1 << 16), b""), prefix):
        os.write(2, line)


def prefixed(chunks: Iterator[bytes], prefix: bytes, longest: int = _PACKET) -> Iterator[bytes]:
    r"""Yield whole lines with a prefix, each of which fits into a packet.

    A line is not held back for others. Longer lines are cut. Of a line that was overwritten with ``\r``,
    as progress bars do, the last state is left.

    Parameters
    ----------
    chunks : iterator of bytes
        The output, in pieces of any length.
    prefix : bytes
        The beginning of each line.
    longest : int
        The size of a packet.
    """
    room = longest - len(prefix) - 1
    left = b""
    for chunk in chunks:
        *lines, left = (left + chunk).split(b"\n")
        left = left[left.rfind(b"\r", 0, -1) + 1 :]
        while len(left) > room:
            part, left = _cut(left, room)
            lines.append(part)
        for line in lines:
            line = line.rstrip(b"\r")
            line = line[line.rfind(b"\r") + 1 :]
            while len(line) > room:
                part, line = _cut(line, room)
                yield prefix + part + b"\n"
            yield prefix + line + b"\n"
    if left:
        yield prefix + left + b"\n"


def _cut(line: bytes, room: int) -> Tuple[bytes, bytes]:
    """Cut a line, but not within a character of UTF-8."""
    end = room
    while end > room - 3 and line[end] & 0xC0 == 0x80:
        end -= 1
    return line[:end], line[end:]
