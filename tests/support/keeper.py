"""The first process of a machine made of namespaces, which runs commands there as sshd does; its client.

``keeper.py serve FOLDER HOST`` is the first process. It listens at the socket ``FOLDER/HOST``.
``keeper.py FOLDER HOST COMMAND`` runs a shell command there, with the files 0, 1 and 2 of this process
and a fresh environment. MPI starts the other machines with it, in place of ssh.
"""

import array
import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time

_STATUS = struct.Struct("!i")
_ENVIRONMENT = ("PATH", "HOME", "LANG")  # what sshd would set


def serve(folder, host):
    """Run commands until this process is killed; reap all children, as ``init`` does."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.join(folder, host))
    listener.listen(64)
    waiting = {}  # by process id: the client's connection

    def reap(*_):
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                connection = waiting.pop(ended[0], None)
                if connection is not None:
                    with contextlib.suppress(OSError):
                        connection.sendall(_STATUS.pack(ended[1]))
                    connection.close()

    signal.signal(signal.SIGCHLD, reap)
    print("ready", flush=True)
    while True:
        connection = listener.accept()[0]
        request, files = _receive(connection)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if not pid:
            _execute(request, files)
        for file in files:
            os.close(file)
        waiting[pid] = connection
        connection.sendall(_STATUS.pack(pid))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def _receive(connection):
    files = array.array("i")
    data, ancillary, *_ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(3 * files.itemsize))
    for _, _, content in ancillary:
        files.frombytes(content)
    return json.loads(data), files


def _execute(request, files):
    try:
        os.setsid()
        for number, file in enumerate(files):
            os.dup2(file, number)
        for number in (
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGTERM,
            signal.SIGQUIT,
            signal.SIGCHLD,
            signal.SIGPIPE,
        ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir(request["folder"])
        os.execvpe(request["command"][0], request["command"], request["environment"])
    finally:
        os._exit(127)


class Remote:
    """A command on a machine, with the files 0, 1 and 2 as given; `pid` is as the machine sees it."""

    def __init__(self, folder, host, command, environment, files, cwd="/"):
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(os.path.join(folder, host))
        request = {"command": command, "environment": environment, "folder": cwd}
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        self._connection.sendmsg([json.dumps(request).encode()], [rights])
        self.pid = self._number()

    def wait(self, timeout=None):
        """Return the status as of ``os.waitpid``; None if the machine was ended."""
        self._connection.settimeout(timeout)
        return self._number()

    def close(self):
        """Close the connection. The command goes on."""
        self._connection.close()

    def _number(self):
        data = self._connection.recv(_STATUS.size, socket.MSG_WAITALL)
        return _STATUS.unpack(data)[0] if data else None


def main(arguments):
    """Be what the arguments say."""
    if arguments[0] == "serve":
        return serve(*arguments[1:])
    folder, host, *command = arguments
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    remote = Remote(folder, host, ["/bin/sh", "-c", " ".join(command)], environment, [0, 1, 2])
    status = remote.wait()
    if status is not None:
        return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    parent = os.getppid()
    while os.getppid() == parent:  # ssh would not learn that the machine has no power any more
        time.sleep(0.1)
    return 255


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
