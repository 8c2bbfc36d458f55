"""Attack a process, given by its id and the address of data in it.

The result of each attack is printed as JSON: bytes, "done", or the name of an error. The program needs
only the standard library.
"""

import ctypes
import errno
import json
import os
import resource
import signal
import sys

GETFD, OPEN = 438, 434  # the numbers of the system calls pidfd_getfd and pidfd_open
ATTACH, DETACH = 16, 17  # requests of ptrace
ANY_KIND = 0x40000000  # the option __WALL of waitpid

pid, address = int(sys.argv[1]), int(sys.argv[2])
libc = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def memory(flags):
    file = os.open(f"/proc/{pid}/mem", flags)
    if flags == os.O_RDONLY:
        return os.pread(file, 8, address).hex()


def vector(name):
    state = ctypes.create_string_buffer(8)
    local = (ctypes.c_size_t * 2)(ctypes.addressof(state), 8)
    remote = (ctypes.c_size_t * 2)(address, 8)
    if name == "process_vm_writev":
        call("process_vm_readv", pid, local, 1, remote, 1, 0)
    call(name, pid, local, 1, remote, 1, 0)
    return state.raw.hex()


def take_descriptor():
    handle = libc.syscall(OPEN, pid, 0)
    if libc.syscall(GETFD, handle, 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")


def attach():
    call("ptrace", ATTACH, pid, None, None)
    os.waitpid(pid, ANY_KIND)
    call("ptrace", DETACH, pid, None, None)


attacks = {
    "read memory": lambda: memory(os.O_RDONLY),
    "open memory to write": lambda: memory(os.O_RDWR),
    "list maps": lambda: open(f"/proc/{pid}/maps").read() and None,
    "list map_files": lambda: os.listdir(f"/proc/{pid}/map_files") and None,
    "list files": lambda: os.listdir(f"/proc/{pid}/fd") and None,
    "read environment": lambda: open(f"/proc/{pid}/environ").read() and None,
    "process_vm_readv": lambda: vector("process_vm_readv"),
    "process_vm_writev": lambda: vector("process_vm_writev"),
    "ptrace": attach,
    "take a file": take_descriptor,
    "limit": lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (10**6, 10**6)) and None,
    "move to a core": lambda: os.sched_setaffinity(pid, os.sched_getaffinity(0)),
    "continue": lambda: os.kill(pid, signal.SIGCONT),
}
if os.geteuid():  # not as root, where these attacks would succeed and end the victim
    for name in ("SIGSTOP", "SIGINT", "SIGTERM", "SIGKILL"):
        attacks[name] = lambda name=name: os.kill(pid, getattr(signal, name))
results = {}
for name, attack in attacks.items():
    try:
        results[name] = attack() or "done"
    except OSError as error:
        results[name] = errno.errorcode.get(error.errno, "?")
print(json.dumps(results))
