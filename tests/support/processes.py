"""Programs of tests in processes of their own.

A test that needs its own process is an ordinary function with the decorator `own_process`: its body runs
in a new process, which then ends like a script. `Programs.run` does the same with any function of a
module of the tests, and `Programs.run_script` with a file; both return the outcome.

The new processes are forked from a server process that has imported what they need, which is several
times as fast as starting Python. For tests of the start itself, the fixture ``run_python`` starts it.
"""

import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import os
import pickle
import runpy
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from multiprocessing.reduction import recvfds, sendfds
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

FOLDER = Path(__file__).resolve().parent.parent  # of the tests
ROOT = FOLDER.parent
#: Where tests and their programs import modules from. pytest gets the same from ``pyproject.toml``.
PATHS = [ROOT, FOLDER, *(FOLDER / name for name in ("support", "unit", "contract", "system"))]
PYTHONPATH = os.pathsep.join(map(str, PATHS))
_LENGTH = struct.Struct("!Q")
MODULES = ("numpy", "psutil", "synkhronos", "theano", "pytensor", "pytest")
_FEW_MODULES = 20
_IN_CHILD = "_tests_in_child"  # an attribute of this module's, in processes that run programs


def find_test(name):
    """Return the path of a file of tests, in whichever folder it is."""
    (path,) = FOLDER.rglob(name)
    return path


class Done(NamedTuple):
    """The outcome of a process, with the attributes of ``subprocess.CompletedProcess``."""

    pid: int
    returncode: int
    stdout: str
    stderr: str

    def check(self):
        """Fail unless the process ended with 0, without a warning about its results."""
        if self.returncode or "SynkhronosWarning" in self.stderr:
            pytest.fail(f"the process ended with {self.returncode}\n{self.stdout}{self.stderr}", False)
        return self


def run_interpreter(*words, code=0, environment=None, **options):
    """Run Python with arguments; return the completed process, whose exit status has to be `code`.

    With None any status will do. `environment` adds variables, and removes those with None.
    """
    variables = {**os.environ, **(environment or {})}
    variables = {name: value for name, value in variables.items() if value is not None}
    options = {"capture_output": True, "text": True, "timeout": 120, **options}
    done = subprocess.run([sys.executable, *map(str, words)], env=variables, **options)
    assert code in (None, done.returncode), (done.returncode, done.stdout, done.stderr)
    return done


def own_process(test=None, *, timeout=60):
    """Have the body of a test run in a process of its own, with this limit in seconds.

    The test may be parametrized; of fixtures it can only have those whose values can be pickled. Its
    working folder is ``tmp_path``.
    """
    if test is None:
        return functools.partial(own_process, timeout=timeout)
    if _IN_CHILD in globals():
        return test

    def run(programs, tmp_path, **arguments):
        if "tmp_path" in names:
            arguments["tmp_path"] = tmp_path
        programs.run(run, timeout=timeout, cwd=tmp_path, **arguments).check()

    names = list(inspect.signature(test).parameters)
    functools.update_wrapper(run, test)
    wanted = dict.fromkeys(["programs", "tmp_path", *names])
    kind = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in wanted])
    return run


class Programs:
    """Runs functions in new processes, which are forked from one that has imported `modules`.

    Variables that are read at the start of a process, or when Theano is imported, are in `environment`.
    """

    def __init__(self, modules=MODULES, environment=None):
        ours, theirs = socket.socketpair()
        code = f"import sys; sys.path[:0] = {[*map(str, PATHS)]!r}\nimport processes\nprocesses.serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=_without_active_gpu({**os.environ, **(environment or {})}),
        )
        theirs.close()
        self._connection = ours

    def close(self):
        self._connection.close()
        self._process.wait(10)

    def run(self, program, *args, timeout=60, cwd=None, environment=None, **kwargs):
        """Run a function in a new process; return a `Done`.

        The function is sent by its name, and the arguments are pickled. After `timeout` seconds, the
        process writes its traceback and ends.
        """
        return self._run(
            (program.__module__, program.__qualname__), (args, kwargs), timeout, cwd, environment
        )

    def run_script(self, file, *arguments, timeout=120, cwd=None, environment=None, check=True):
        """Run a file in ``programs/`` as a script in a new process, as by `run`; return a `Done`.

        It fails unless the process ends with 0, if `check` is true.
        """
        call = (str(FOLDER / "programs" / file), *map(str, arguments)), {}
        done = self._run((__name__, "be_script"), call, timeout, cwd, environment)
        return done.check() if check else done

    def _run(self, program, call, timeout, cwd, environment):
        request = {
            "program": program, "arguments": pickle.dumps(call), "cwd": str(cwd or os.getcwd()),
            "environment": {**os.environ, **(environment or {})}, "timeout": timeout,
        }  # fmt: skip
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            descriptors = [stdout.fileno(), stderr.fileno()]
            _send(self._connection, request, descriptors)
            pid, _ = _receive(self._connection)
            self._connection.settimeout(timeout + 10)
            try:
                status, _ = _receive(self._connection)
            except socket.timeout:  # TimeoutError is another class before Python 3.10
                os.kill(pid, signal.SIGKILL)
                self._connection.settimeout(10)
                status, _ = _receive(self._connection)
            finally:
                self._connection.settimeout(None)
            texts = []
            for file in (stdout, stderr):
                file.seek(0)
                texts.append(file.read().decode())
        left = [one for one in psutil.process_iter() if _is_of_session(one, pid)]
        for one in left:
            one.kill()
        if "Timeout (" not in texts[1]:  # written by faulthandler
            assert not left, f"left behind: {left}\n{''.join(texts)}"
        return Done(pid, exit_code(status), *texts)


def exit_code(status):
    """Return the exit code of a process from its wait status, negative if a signal ended it."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _without_active_gpu(environment):
    """Drop the variable with which Theano forbids devices to the children of a process that uses one."""
    return {name: environment[name] for name in environment if name != "THEANO_GPU_IS_ALREADY_ACTIVE"}


def _is_of_session(process, session):
    try:
        return os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.Error):
        return False


def _send(connection, item, descriptors=()):
    if descriptors:
        sendfds(connection, descriptors)
    payload = pickle.dumps(item)
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def _receive(connection, descriptors=0):
    received = recvfds(connection, descriptors) if descriptors else []
    start = connection.recv(_LENGTH.size, socket.MSG_WAITALL)
    if not start:
        raise EOFError
    (length,) = _LENGTH.unpack(start)
    payload = b""
    while len(payload) < length:
        payload += connection.recv(length - len(payload))
    return pickle.loads(payload), received


def be_script(file, *arguments):
    """Run a file like ``python file arguments``, in this process."""
    sys.argv = [file, *arguments]
    sys.path.insert(0, os.path.dirname(file))
    runpy.run_path(file, run_name="__main__")


def serve():
    """Run the server process; in each forked child, run the program."""
    globals()[_IN_CHILD] = True
    descriptor, *modules = sys.argv[1:]
    for name in modules:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    wait_briefly_for_the_compile_lock()
    n_modules = read_compile_cache()
    connection = socket.socket(fileno=int(descriptor))
    while True:
        try:
            request, (stdout, stderr) = _receive(connection, 2)
        except EOFError:
            return
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            connection.close()
            return _be_program(request, stdout, stderr)
        os.close(stdout), os.close(stderr)
        _send(connection, pid)
        _send(connection, os.waitpid(pid, 0)[1])
        n_modules = read_compile_cache(n_modules)


def _be_program(request, stdout, stderr):
    os.dup2(stdout, 1), os.dup2(stderr, 2)
    os.close(stdout), os.close(stderr)
    os.setsid()  # signals to the group are for this program's processes alone
    restore_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python does
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    faulthandler.dump_traceback_later(request["timeout"], exit=True)
    module, name = request["program"]
    sys.argv = [name]
    program = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    args, kwargs = pickle.loads(request["arguments"])
    program(*args, **kwargs)
    faulthandler.cancel_dump_traceback_later()


def restore_signals():
    """Restore the actions of signals that end a script, as if a terminal had started this process.

    A shell starts a command in the background, and nohup any command, with some of them ignored.
    """
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def shared_files():
    """Return the names in ``/dev/shm``, except those of MPI: other tests run beside this one."""
    of_mpi = ("vader_segment", "mpich", "psm", "ucx", "ompi")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(of_mpi)}


def wait_briefly_for_the_compile_lock():
    """Have Theano look every 0.1 s whether it may compile: several processes share the cache."""
    if importlib.util.find_spec("theano") is None:
        return  # PyTensor waits no longer
    from theano.gof import compilelock

    compilelock.lock = functools.partial(compilelock.lock, min_wait=0.05, max_wait=0.1, verbosity=0)


def read_compile_cache(n_known=None):
    """Have the compiler read what is new in its cache now, and not in each program again.

    Returns the number of modules in the cache. With few more than `n_known`, nothing is read.
    """
    if importlib.util.find_spec("theano") is None:
        from pytensor.link.c.basic import get_module_cache
    else:
        from theano.gof.cc import get_module_cache

    cache = get_module_cache()
    n_modules = len(os.listdir(cache.dirname))
    if n_known is not None:
        if n_modules < n_known + _FEW_MODULES:
            return n_known
        cache.refresh(cleanup=False)
    gc.freeze()  # or each program would look at all objects, and so copy them, when it ends
    return n_modules


@pytest.fixture(scope="session")
def programs():
    """`Programs` whose processes have imported the library."""
    made = Programs()
    yield made
    made.close()


@pytest.fixture(scope="session")
def demo_programs():
    """`Programs` whose processes have imported what the demos need, too."""
    made = Programs([*MODULES, "matplotlib", "PIL.Image", "scipy.ndimage", "sklearn.datasets", "tqdm"])
    yield made
    made.close()


@pytest.fixture
def run_demo(demo_programs, tmp_path):
    """`Programs.run_script` in ``tmp_path``, for demos."""
    return functools.partial(demo_programs.run_script, cwd=tmp_path)
