"""Helpers for test programs: a world with two functions, ways to fail in it, and checks."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback

import numpy as np
import psutil
from processes import FOLDER, PYTHONPATH, restore_signals

import synkhronos as synk
from compilers import Apply, Op, compiler, tt
from synkhronos.world.world import current_world

# The actions that an element of the input of `Act` can stand for.
NOTHING, RAISE, SLEEP, DOZE, LONG, KILL, EXIT = range(7)


class WorkerTrouble(Exception):
    pass


def raise_trouble():
    raise WorkerTrouble("it went wrong in here")


ACTIONS = {
    NOTHING: lambda: None, RAISE: raise_trouble, SLEEP: lambda: time.sleep(1),
    DOZE: lambda: [time.sleep(0.1) for _ in range(10)], LONG: lambda: time.sleep(60),
    KILL: lambda: os.kill(os.getpid(), signal.SIGKILL) or time.sleep(60), EXIT: lambda: os._exit(7),
}  # fmt: skip


class Act(Op):
    """Performs the actions that the elements of a vector stand for, on the rank that has them."""

    __props__ = ()

    def make_node(self, x):
        return Apply(self, [x], [tt.dvector()])

    def perform(self, node, inputs, outputs):
        for number in inputs[0]:
            ACTIONS[int(number)]()
        outputs[0][0] = np.full(len(inputs[0]), float(os.getpid()))


class Locked(Op):
    """The identity; it has an attribute that cannot be pickled."""

    __props__ = ()

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        with self.lock:
            outputs[0][0] = inputs[0].copy()


class Opened:
    """A world of `n` ranks with two functions and a shared variable `w`, which is 0, 1, 2 first.

    `f` takes a vector with an element for each rank, which selects the rank's action from `ACTIONS`; it
    returns the process ids. `plain` returns the sum of a vector, plus the sum of `w` on each rank. The
    workers are started, unless ``start=False`` is given.
    """

    def __init__(self, n, start=True, **kwargs):
        self.n = n
        synk.fork(n, use_gpu=False, **kwargs)
        x = tt.dvector("x")
        self.w = compiler.shared(np.arange(3.0), name="w")
        self.f = synk.function([x], (Act()(x), "gather"), name="f", mode="FAST_COMPILE")
        total = (x.sum() + self.w.sum(), "sum")
        self.plain = synk.function([x], [total], name="plain", mode="FAST_COMPILE")
        if start:
            synk.distribute()

    def act(self, *numbers):
        """Perform one action on each rank."""
        return self.f(np.array(numbers, float))

    def fused(self, *numbers):
        """Perform one action on each rank and then a collective, in one command."""
        with synk.fuse():
            self.act(*numbers)
            synk.all_reduce(self.w)

    def pids(self):
        return [int(pid) for pid in self.f(np.zeros(current_world().size))]

    def workers(self):
        """Return the process ids of the workers. The master must be rank 0."""
        return self.pids()[1:]

    def check_usable(self):
        """Check that functions, collectives and single values work on every rank."""
        size, w = current_world().size, self.w
        w.set_value(np.arange(3.0))
        synk.broadcast(w)
        assert self.plain(np.ones(size)) == [size + 3 * size]
        synk.all_reduce(w, op="sum")
        for rank in range(size):
            assert synk.get_value(rank, w).tolist() == [0, size, 2 * size]
        synk.broadcast(w, np.arange(3.0))

    def check_broken(self, error, *words):
        """Check that the world is broken, and that it can be closed.

        The error must be a `WorldBrokenError` with these words. All further calls must raise it again.
        """
        assert type(error) is synk.WorldBrokenError, repr(error)
        for word in words + ("close()",):
            assert word in str(error), (word, str(error))
        children = psutil.Process().children()
        assert all(gone(child.pid) for child in children), children
        for call in (
            lambda: self.plain(np.ones(2)), lambda: synk.all_reduce(self.w),
            lambda: synk.data(np.ones(2)), synk.distribute, lambda: synk.get_value(0, self.w),
            lambda: synk.function([], self.w.sum()), lambda: synk.set_shmems({}),
            lambda: synk.fuse().__enter__(),
        ):  # fmt: skip
            again = error_of(call, 0.5)
            assert type(again) is synk.WorldBrokenError, repr(again)
            assert str(again) == str(error)
        assert type(error_of(lambda: synk.fork(2))) is synk.AlreadyForkedError
        synk.close()
        assert self.w.get_value().tolist() == [0, 1, 2]


def open_world(n=2, **kwargs):
    """Return an `Opened`. Keyword arguments other than `start` are passed to ``fork()``."""
    return Opened(n, **kwargs)


def error_of(call, seconds=2):
    """Return the exception that a call raises. It must be raised within a number of seconds."""
    began = time.monotonic()
    try:
        call()
    except BaseException as raised:
        took = time.monotonic() - began
        assert took < seconds, (took, raised)
        return raised
    raise AssertionError("nothing was raised")


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def all_gone_within(pids, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(map(gone, pids)):
        time.sleep(0.01)
    return all(map(gone, pids))


def later(seconds, call, *args):
    """Call a function in another thread, after a number of seconds."""
    timer = threading.Timer(seconds, call, args)
    timer.daemon = True
    timer.start()


def interrupt():
    """Send SIGINT to all processes of the program, as a terminal does for Ctrl-C."""
    os.killpg(0, signal.SIGINT)


def check_in_fork(call):
    """Make a call in a forked child process. Fail if it raises an exception."""
    child = os.fork()
    if not child:
        try:
            call()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


# Theano's message that another process is compiling; which test gets it is a matter of chance.
_WAITING = re.compile(r"^INFO \(theano\.gof\.compilelock\): .*\n", re.MULTILINE)


def run_file(file, *arguments, cwd, timeout=120, check=True, environment=None, command=()):
    """Run a file of ``programs/`` as a script in a new Python process; return the completed process.

    This is for tests that need a script with a path, or a process that has not imported anything.
    Signals have their default actions in it. After the timeout, its processes write their tracebacks.
    It fails if the exit status is not 0, if `check` is true, or if a process is left in the folder
    `cwd`. `environment` adds variables, and removes those with None; `command` begins the command line.
    """
    variables = {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "PYTHONFAULTHANDLER": "1",
        **(environment or {}),
    }
    process = subprocess.Popen(
        [*command, sys.executable, FOLDER / "programs" / file, *map(str, arguments)],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=restore_signals,
        env={name: value for name, value in variables.items() if value is not None},
    )  # fmt: skip
    late = False
    try:
        outputs = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGABRT)
        outputs = process.communicate(timeout=10)
    outputs = [_WAITING.sub("", output) for output in outputs]
    done = subprocess.CompletedProcess(process.args, process.returncode, *outputs)
    assert not late, f"{file} takes more than {timeout} seconds\n{done.stdout}{done.stderr}"
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SynkhronosWarning" not in done.stderr, done.stderr
    left = [one.pid for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(cwd)]
    assert all_gone_within(left, 1), left
    return done
