"""Helpers for programs that send signals to themselves at a chosen moment."""

import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import signal
from typing import NamedTuple

import psutil
from processes import exit_code

_PR_SET_CHILD_SUBREAPER = 36


class Moment(NamedTuple):
    """A moment in a phase of a program, such as "fork": "before" or "after" a call at a place.

    The place is where callers look up the function: ``"module:attribute.attribute"``.
    """

    phase: str
    place: str
    when: str

    def find(self):
        """Return the object that has the function as an attribute, and the attribute's name."""
        module, path = self.place.split(":")
        *owners, name = path.split(".")
        return functools.reduce(getattr, owners, importlib.import_module(module)), name


def send(to="group", number=signal.SIGINT):
    """Send a signal to all processes of the program, as a terminal does, or only to this process."""
    if to == "group":
        os.killpg(0, number)
    else:
        os.kill(os.getpid(), number)


def strike(moment, to, number=signal.SIGINT):
    """Make this process, the master, send one signal the next time that it reaches a moment."""
    master = os.getpid()
    owner, name = moment.find()
    original = getattr(owner, name)
    left = [moment.when]

    @functools.wraps(original)
    def struck(*args, **kwargs):
        when = left.pop() if left and os.getpid() == master else None
        if when == "before":
            send(to, number)
        try:
            return original(*args, **kwargs)
        finally:
            if when and os.getpid() == master:
                setattr(owner, name, original)
                if when == "after":
                    send(to, number)

    setattr(owner, name, struck)


def interrupted(call):
    """Fail unless KeyboardInterrupt is raised during a call or immediately after it."""
    try:
        call()
        for _ in range(100):  # let the handler run if the signal came at the very end
            pass
    except KeyboardInterrupt:
        return
    raise AssertionError("no KeyboardInterrupt")


def end_of(program, *args):
    """Run a function in a child process with its own process group; return the exit code.

    As in ``subprocess``, it is negative if a signal ended the child; it is 0 after the function has
    returned. Fail if a process that the child has started runs 2 seconds after the child has ended.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    faulthandler.cancel_dump_traceback_later()  # or the child waits for a thread that it does not have
    gc.freeze()  # or the garbage collection at the child's end copies all objects
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        faulthandler.dump_traceback_later(30, exit=True)
        program(*args)
        os._exit(0)
    code = exit_code(os.waitpid(child, 0)[1])
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), 2)
    for one in left:
        one.kill()
    assert not left, left
    return code
