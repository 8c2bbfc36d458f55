"""The name of a machine before each line that its ranks print.

The task that leads another machine prints into a pipe, and so do the ranks that it forks. A small
process, which outlives them, reads the pipe, and writes whole lines to stderr, which mpirun passes on.
mpirun passes on its input at once, so a line could be cut where two machines print at the same
time. In a pipe with ``O_DIRECT``, one write is one read.
"""

import contextlib
import fcntl
import os
import signal
import stat
import sys
from typing import Iterable, Iterator, List, Tuple

from synkhronos.host import job

_PACKET = 4096  # bytes, the most that Linux keeps together, and that mpirun reads at once
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", job.TERMINATE)


def prefix_output(name: str) -> None:
    """Let each line that this process and its children print begin with ``[name]``, on stderr."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(writing)
            if not os.fork():  # a grandchild: this process does not know of it when it ends
                _relay(reading, f"[{name}] ".encode())
        finally:
            os._exit(0)
    os.close(reading)
    os.waitpid(child, 0)
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
    for packet in packets(_chunks(reading), prefix):
        os.write(2, packet)


def _chunks(reading: int) -> Iterator[bytes]:
    while True:
        chunk = os.read(reading, 1 << 16)
        if not chunk:
            return
        yield chunk


def packets(chunks: Iterator[bytes], prefix: bytes, longest: int = _PACKET) -> Iterator[bytes]:
    r"""Yield whole lines with a prefix, as many as fit into a packet.

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
        parts = [part for line in lines for part in _parts(line, room)]
        while len(left) > room:
            part, left = _cut(left, room)
            parts.append(part)
        yield from _packed([prefix + part + b"\n" for part in parts], longest)
    if left:
        yield prefix + left + b"\n"


def _parts(line: bytes, room: int) -> List[bytes]:
    line = line.rstrip(b"\r")
    line = line[line.rfind(b"\r") + 1 :]
    parts = []
    while len(line) > room:
        part, line = _cut(line, room)
        parts.append(part)
    return [*parts, line]


def _cut(line: bytes, room: int) -> Tuple[bytes, bytes]:
    """Cut a line, but not within a character of UTF-8."""
    end = room
    while end > room - 3 and line[end] & 0xC0 == 0x80:
        end -= 1
    return line[:end], line[end:]


def _packed(lines: Iterable[bytes], longest: int) -> Iterator[bytes]:
    packet = b""
    for line in lines:
        if len(packet) + len(line) > longest:
            yield packet
            packet = b""
        packet += line
    if packet:
        yield packet
