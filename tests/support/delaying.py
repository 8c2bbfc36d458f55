"""Forwards Ethernet frames between interfaces, each after the same time, until it is killed.

Usage: ``delaying.py SECONDS INTERFACE...``, in the network namespace of the interfaces. It does what
netem does, for kernels without it. Frames of many TCP segments stay in one piece (``PACKET_VNET_HDR``),
as between the interfaces of one kernel, so a Gbit/s is a few thousand frames per second.
"""

import collections
import contextlib
import os
import select
import socket
import sys
import time

_ALL = 3  # ETH_P_ALL
_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23
_HEADER = 10  # bytes before each frame: a struct virtio_net_hdr
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_MEMORY = 64 << 20  # bytes of frames that wait in a socket
_LONGEST = (1 << 16) + 64  # bytes of a frame
_AT_ONCE = 64  # frames


def main(seconds, *interfaces):
    # As a network card, it does not wait for processes that compute.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with contextlib.suppress(OSError), open("/proc/self/timerslack_ns", "w") as slack:
        slack.write("1")
    ports = [_open(interface) for interface in interfaces]
    print("ready", flush=True)
    delay, behind = float(seconds), {}  # by Ethernet address, the port
    waiting = collections.deque()  # due, ports and frame
    while True:
        left = waiting[0][0] - time.monotonic() if waiting else None
        if left is not None and left <= 0:
            _, targets, frame = waiting.popleft()
            for port in targets:
                with contextlib.suppress(OSError):  # the interface is down
                    port.send(frame)
            continue
        for port in select.select(ports, [], [], left)[0]:
            with contextlib.suppress(OSError):  # no further frame, or the interface is down
                for _ in range(_AT_ONCE):
                    frame = port.recv(_LONGEST)
                    to, source = frame[_HEADER : _HEADER + 6], frame[_HEADER + 6 : _HEADER + 12]
                    behind[source] = port
                    targets = [behind[to]] if to in behind else [item for item in ports if item != port]
                    waiting.append((time.monotonic() + delay, targets, frame))


def _open(interface):
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    port.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    for option in (_SO_SNDBUFFORCE, _SO_RCVBUFFORCE):
        port.setsockopt(socket.SOL_SOCKET, option, _MEMORY)
    port.bind((interface, _ALL))
    port.setblocking(False)
    return port


if __name__ == "__main__":
    main(*sys.argv[1:])
