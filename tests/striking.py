"""Signals that a program sends to itself at a chosen moment, and how it ends of them."""

import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import signal
from typing import NamedTuple

import psutil

_PR_SET_CHILD_SUBREAPER = 36


class Moment(NamedTuple):
    """A moment in a phase of a program.

    Attributes
    ----------
    phase : str
    place : str
        Where a function is looked up as it is called: ``"module:attribute.attribute"``.
    when : str
        Before or after its call.
    """

    phase: str
    place: str
    when: str

    def find(self):
        """Return the object whose attribute the function is, and the name of the attribute."""
        module, path = self.place.split(":")
        *owners, name = path.split(".")
        return functools.reduce(getattr, owners, importlib.import_module(module)), name


def send(to="group", number=signal.SIGINT):
    """Send a signal to all processes of the program, as a terminal does, or to this process."""
    if to == "group":
        os.killpg(0, number)
    else:
        os.kill(os.getpid(), number)


def strike(moment, to, number=signal.SIGINT):
    """Have this process, the master, send one signal at the next such moment of its own."""
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
    """Fail unless a call, or the moment after it, is ended by KeyboardInterrupt."""
    try:
        call()
        for _ in range(100):  # a signal that came last of all
            pass
    except KeyboardInterrupt:
        return
    raise AssertionError("no KeyboardInterrupt")


def end_of(program, *args):
    """Run a function in a child with a process group of its own; return the exit code.

    Fail if a process that the child has started is there 2 seconds after its end. A child whose function
    returns ends with 0, at once.

    Parameters
    ----------
    program : callable

    Returns
    -------
    int
        As of ``subprocess``: negative for a signal.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    faulthandler.cancel_dump_traceback_later()  # a child would wait for its thread, and not have it
    gc.freeze()  # or a child would look at, and so copy, each object when it ends
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        faulthandler.dump_traceback_later(30, exit=True)
        program(*args)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), 2)
    for one in left:
        one.kill()
    assert not left, left
    return code
