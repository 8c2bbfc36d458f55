"""Where scripts run: in threads, in processes that others forked, under pytest-xdist, in Jupyter."""

import queue
import signal
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
from conftest import ROOT
from test_failures import PRELUDE


@pytest.fixture
def run_script(run_python):
    def run(code, *arguments, **kwargs):
        return run_python(PRELUDE + code, *arguments, **{"timeout": 60, **kwargs})

    return run


def slow(*values):
    return [pytest.param(one, marks=pytest.mark.slow) for one in values]


# Threads


def test_two_calls_at_once_are_refused_in_words_and_harm_nothing(run_script):
    run_script("""
open_world(3)
errors = []


def call():
    try:
        f(np.array([NOTHING, SLEEP, NOTHING]))
    except synk.SynkhronosError as error:
        errors.append(str(error))


threads = [threading.Thread(target=call) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(errors) == 2 and all("one thread at a time" in error for error in errors), errors
check_usable(3)
""")


def test_close_while_another_thread_calls_ends_the_call_with_an_error(run_script):
    run_script("""
open_world(3)
workers = pids()[1:]
raised = []
thread = threading.Thread(
    target=lambda: raised.append(error_of(lambda: f(np.array([NOTHING, LONG, NOTHING])), 5)))
thread.start()
time.sleep(0.5)
synk.close()
thread.join(5)
assert [type(one) for one in raised] == [synk.WorldBrokenError], raised
assert "another thread" in str(raised[0])
assert all_gone_within(workers, 1)
open_world()
check_usable()
""")


def test_a_script_that_ends_while_a_daemonic_thread_calls_ends_quietly(run_script):
    done = run_script("""
open_world(3)
threading.Thread(target=lambda: f(np.array([NOTHING, LONG, NOTHING])), daemon=True).start()
time.sleep(0.5)
""")
    assert done.stderr.count("Traceback") <= 1, done.stderr  # that of the thread
    assert "BusyError" not in done.stderr


@pytest.mark.parametrize("moment", ["computing", "collective"])
def test_ctrl_c_while_a_thread_calls_reaches_the_main_thread(run_script, moment):
    run_script(
        """
os.setsid()
thread = threading.Thread(target=open_world, args=(3,))  # forked in a thread that has ended
thread.start()
thread.join()
call = {"computing": lambda: f(np.array([SLEEP, NOTHING, SLEEP])),
        "collective": lambda: fused(NOTHING, SLEEP, NOTHING)}[sys.argv[1]]
done = threading.Event()
thread = threading.Thread(target=lambda: (call(), done.set()))
later(0.3, os.killpg, 0, signal.SIGINT)
thread.start()
try:
    done.wait()
    raise AssertionError("not interrupted")
except KeyboardInterrupt:  # a join() that was interrupted believes that the thread has ended
    assert done.wait(10)
check_usable(3)
""",
        moment,
    )


# Processes that were forked


def test_a_forked_child_can_close_the_world_that_it_inherits_and_make_its_own(run_script):
    """The parent's world, its workers and its data stay as they were."""
    run_script("""
open_world(3)
values = np.arange(1 << 20) * 1.0
data = synk.data(values)
dropped = synk.data(np.ones(50 << 17))  # 50 MB that the child lets go of
synk.broadcast(w, np.ones(1 << 19))
workers = pids()[1:]
faulthandler.cancel_dump_traceback_later()  # its thread is not there after a fork
child = os.fork()
if not child:
    status = 1
    try:
        assert "forked from the master" in str(error_of(lambda: data.set_length(1 << 22)))
        del dropped
        gc.collect()
        synk.close()
        open_world(2)
        assert not set(pids()) & set(workers)
        check_usable()
        synk.close()
        status = 0
    finally:
        os._exit(status)
assert os.waitpid(child, 0)[1] == 0
assert not any(map(gone, workers)) and pids()[1:] == workers
assert (data.data == values).all() and (dropped.data == 1).all()
assert all((one == 1).all() for one in synk.gather(w))
assert plain(data) == [values.sum() + 3 * (1 << 19)]
check_usable(3)
""")


def test_a_daemonic_process_is_refused_by_fork_itself(run_script):
    run_script("""
def work(results):
    error = error_of(lambda: synk.fork(2, use_gpu=False))
    exists = synk.world.world.world_exists()
    results.put((type(error).__name__, str(error), exists, synk.fork(1, use_gpu=False)))


context = multiprocessing.get_context("fork")
results = context.SimpleQueue()
process = context.Process(target=work, args=(results,), daemon=True)
process.start()
name, message, exists, alone = results.get()
assert name == "SynkhronosError" and "daemon=False" in message and not exists and alone == 1
process.join()
""")


@pytest.mark.parametrize("method", ["fork", *slow("spawn", "forkserver")])
@pytest.mark.parametrize("closes", [False, *slow(True)])
def test_a_process_of_multiprocessing_has_a_world_of_its_own(run_script, method, closes):
    """It ends without the functions of `atexit`, and here with a handler that outlives a SIGTERM."""
    run_script(
        """
def work(results, closes):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    open_world(3)
    check_usable(3)
    results.put(pids()[1:])
    if closes:
        synk.close()


if __name__ == "__main__":
    method, closes = sys.argv[1:]
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    process = context.Process(target=work, args=(results, closes == "True"))
    process.start()
    workers = results.get()
    process.join(20)
    assert process.exitcode == 0, process.exitcode
    assert len(workers) == 2 and all_gone_within(workers, 2)
    open_world()
    check_usable()
""",
        method,
        closes,
    )


def test_a_pool_of_concurrent_futures_has_a_world_in_each_process(run_script):
    run_script("""
import concurrent.futures


def work(number):
    if not synk.world.world.world_exists():
        open_world(2)
    check_usable()
    return os.getpid(), pids()[1]


context = multiprocessing.get_context("fork")
with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
    pairs = set(pool.map(work, range(6)))
masters, workers = {one for one, _ in pairs}, {one for _, one in pairs}
assert len(masters) == len(workers) == len(pairs)
assert all_gone_within(masters | workers, 2)
""")


# Hosts


def test_under_pytest_xdist_each_process_has_a_world(tmp_path):
    (tmp_path / "test_inside.py").write_text(
        textwrap.dedent("""
        import os
        import numpy as np
        import pytest
        import synkhronos as synk
        import theano.tensor as T

        @pytest.mark.parametrize("number", range(6))
        def test_world(number):
            synk.fork(2, use_gpu=False)
            x = T.dvector()
            f = synk.function([x], (x.sum(), "sum"), mode="FAST_COMPILE")
            assert f(np.full(4, number)) == 4 * number
            if number % 2:
                synk.close()
            else:
                synk.close()
                with pytest.warns(RuntimeWarning):
                    synk.close()

        def test_that_leaves_its_world_open():
            synk.fork(3, use_gpu=False)
            synk.distribute()
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0 and "7 passed" in done.stdout, done.stdout + done.stderr


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A function that runs a cell in a Jupyter kernel, and the kernel's manager."""
    from jupyter_client.manager import KernelManager

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    manager = KernelManager(kernel_name="python3")
    manager.kernel_spec.argv[:] = [
        sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"
    ]  # fmt: skip
    manager.start_kernel(cwd=str(tmp_path), stderr=subprocess.DEVNULL)
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)

    def run_cell(code, interrupt_after=None):
        """Return what the cell printed, and the name of its exception, or None."""
        request = client.execute(textwrap.dedent(code))
        printed, error, end = "", None, time.monotonic() + 60
        due = None if interrupt_after is None else time.monotonic() + interrupt_after
        while time.monotonic() < end:
            if due is not None and time.monotonic() > due:
                manager.interrupt_kernel()
                due = None
            try:
                message = client.get_iopub_msg(timeout=0.05)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "error":
                error = content["ename"]
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, error
        raise AssertionError(f"the cell did not end: {code}; printed: {printed}")

    yield run_cell, manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def test_in_jupyter_an_interrupted_cell_leaves_a_world_for_the_next(kernel, tmp_path):
    run_cell, manager, client = kernel
    (tmp_path / "prelude.py").write_text(PRELUDE)
    printed, error = run_cell("from prelude import *\nimport prelude\nopen_world(3)\nprint(*pids()[1:])")
    assert error is None, printed
    workers = [int(one) for one in printed.split()]
    assert len(workers) == 2
    for cell in (
        "prelude.f(np.array([SLEEP, NOTHING, NOTHING]))",
        "prelude.f(np.array([NOTHING, SLEEP, SLEEP]))",
        "fused(NOTHING, NOTHING, SLEEP)",
        "time.sleep(20)",
        "while True: prelude.plain(np.ones(5))",
        "with synk.fuse():\n    prelude.plain(np.ones(5))\n    time.sleep(20)",
    ):
        printed, error = run_cell(cell, interrupt_after=0.4)
        assert error == "KeyboardInterrupt", (cell, printed, error)
        assert run_cell("check_usable(3); print('well')") == ("well\n", None), cell
    printed, error = run_cell("print(*pids()[1:])")
    assert [int(one) for one in printed.split()] == workers
    # Restarted in the middle of a call, as the button does: no worker stays.
    assert run_cell("synk.close()\nopen_world(3)\nprint(*pids()[1:])")[1] is None
    printed, _ = run_cell("print(*pids()[1:])")
    client.execute("prelude.f(np.array([NOTHING, LONG, NOTHING]))")
    manager.shutdown_kernel(now=True)
    end = time.monotonic() + 3
    while time.monotonic() < end and any(psutil.pid_exists(int(one)) for one in printed.split()):
        time.sleep(0.05)
    assert not any(psutil.pid_exists(int(one)) for one in printed.split())


def test_in_jupyter_a_cell_that_does_not_end_is_ended_by_a_second_interrupt(kernel, tmp_path):
    run_cell, _, _ = kernel
    (tmp_path / "prelude.py").write_text(PRELUDE)
    run_cell("from prelude import *\nimport prelude\nopen_world(2)")
    run_cell(f"later(1.5, os.kill, MASTER, {int(signal.SIGINT)})")
    printed, error = run_cell("prelude.f(np.array([NOTHING, LONG]))", interrupt_after=0.4)
    assert error == "KeyboardInterrupt"
    assert "a second one ends them" in printed, printed
    _, error = run_cell("prelude.plain(np.ones(2))")
    assert error == "WorldBrokenError"
    assert run_cell("synk.close(); open_world(2); check_usable(); print('well')") == ("well\n", None)
