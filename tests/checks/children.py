"""Ranks as forked processes that a test stops and kills."""

import contextlib
import os
import signal
import time
import traceback


@contextlib.contextmanager
def child(work, *args):
    """Fork a process that calls a function and then sleeps; continue when it has returned.

    It is killed at the end.
    """
    readable, writable = os.pipe()
    pid = begin(_work_and_report, writable, work, args)
    try:
        os.close(writable)
        assert os.read(readable, 4) == b"done"
        yield pid
    finally:
        os.close(readable)
        kill(pid)


def _work_and_report(writable, work, args):
    work(*args)
    os.write(writable, b"done")
    time.sleep(60)


def begin(work, *args):
    """Fork a process that calls a function and ends; return its id."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            work(*args)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def end(pid):
    """Wait for the end of a process; return the signal that ended it, or its exit code if negative."""
    status = os.waitpid(pid, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status)


def kill(pid):
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def wait_until(condition, seconds=30):
    """Wait until another process has made this true."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "another process has failed, see above"
        time.sleep(1e-3)


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def as_rank(store, number, work, *args):
    """Be the rank with this number, and call a function."""
    store.memory.use_span(number)
    work(*args)
