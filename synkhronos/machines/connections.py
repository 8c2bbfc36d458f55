"""The TCP connections of this process, whoever has opened them, and whether the other side answers.

The kernel of the other machine answers, even if the process there computes, waits or is stopped. So
silence means that the machine, or the network, has failed.
"""

import contextlib
import math
import os
import socket
import struct
from typing import Any, Dict, Iterator, Tuple

from synkhronos.host.handler_errors import suppress

#: The addresses of a connection: of this side, and of the other one
Addresses = Tuple[Tuple[Any, ...], Tuple[Any, ...]]

_INTERVAL = 1  # seconds between two questions of the kernel to a silent other side
_MOST_QUESTIONS = 127  # the largest number, so that the kernel does not close the connection itself
_ESTABLISHED = 1
_INFO = struct.Struct("=8B24I")  # the beginning of the kernel's struct tcp_info
_STATE, _RETRANSMITS, _QUESTIONS, _LAST_SENT, _LAST_ANSWER = 0, 2, 3, 8 + 9, 8 + 12
_WAY = 500  # milliseconds, longer than the way there and back


def connections() -> Dict[Addresses, int]:
    """Return the file descriptors of the TCP connections of this process, by their addresses."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), _copy(int(name)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                found[_addresses(connection)] = int(name)
    return found


def enable_keepalive(descriptor: int) -> None:
    """Let the kernel ask the other side of a connection every second, if nothing comes from it."""
    with _copy(descriptor) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_KEEPIDLE, _INTERVAL),
            (socket.TCP_KEEPINTVL, _INTERVAL),
            (socket.TCP_KEEPCNT, _MOST_QUESTIONS),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def seconds_silent(descriptor: int, addresses: Addresses) -> float:
    """Return for how many seconds the other side has not answered, though something was sent to it.

    Return infinity if the connection has been closed by one of both sides.
    """
    try:
        with _copy(descriptor) as connection:
            if _addresses(connection) != addresses:  # another connection has this number now
                return math.inf
            data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:
        return math.inf
    info = _INFO.unpack(data)
    if info[_STATE] != _ESTABLISHED:
        return math.inf
    # While the process over there does not read, this kernel repeats its data more and more rarely. So
    # silence counts only if the last packet has no answer.
    is_waiting = info[_RETRANSMITS] and _WAY < info[_LAST_SENT] < info[_LAST_ANSWER]
    return info[_LAST_ANSWER] / 1000 if is_waiting or info[_QUESTIONS] > 1 else 0.0


@contextlib.contextmanager
def _copy(descriptor: int) -> Iterator[socket.socket]:
    """A socket with a descriptor of its own; raises `OSError` if it is not a socket."""
    if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
        raise OSError(f"{descriptor} is not a socket")
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        yield copy


def _addresses(connection: socket.socket) -> Addresses:
    return connection.getsockname()[:2], connection.getpeername()[:2]
