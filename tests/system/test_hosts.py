"""Tests of where scripts run: in threads, in forked processes, under pytest-xdist, and in Jupyter."""

import concurrent.futures
import functools
import gc
import multiprocessing
import os
import queue
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
from compilers import Apply, Op, as_op, compiler, tt
from prelude import (
    LONG, NOTHING, SLEEP, all_gone_within, check_in_fork, error_of, gone, interrupt, later, open_world,
    run_file,
)  # fmt: skip
from processes import FOLDER, PYTHONPATH, own_process, run_interpreter

import synkhronos as synk
from synkhronos._errors import BUSY
from synkhronos.extensions import train
from synkhronos.world.world import world_exists


def slow(*values):
    return [pytest.param(one, marks=pytest.mark.slow) for one in values]


@own_process
def test_close_while_another_thread_calls_ends_the_call_with_an_error():
    world = open_world(3)
    workers = world.workers()
    raised = []

    def call():
        raised.append(error_of(lambda: world.act(NOTHING, LONG, NOTHING), 5))

    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.5)
    synk.close()
    thread.join(5)
    assert [type(one) for one in raised] == [synk.WorldBrokenError], raised
    assert "another thread" in str(raised[0])
    assert all_gone_within(workers, 1)
    open_world().check_usable()


def end_while_a_daemonic_thread_calls():
    world = open_world(3)
    threading.Thread(target=lambda: world.act(NOTHING, LONG, NOTHING), daemon=True).start()
    time.sleep(0.5)


def test_a_script_that_ends_while_a_daemonic_thread_calls_ends_quietly(programs):
    done = programs.run(end_while_a_daemonic_thread_calls).check()
    assert done.stderr.count("Traceback") <= 1, done.stderr  # at most the thread's
    assert "BusyError" not in done.stderr


@own_process
@pytest.mark.parametrize("moment", ["computing", "collective"])
def test_ctrl_c_while_a_thread_calls_reaches_the_main_thread(moment):
    worlds = []
    thread = threading.Thread(target=lambda: worlds.append(open_world(3)))
    thread.start()
    thread.join()
    (world,) = worlds  # forked in a thread that has ended by now
    done = threading.Event()

    def call():
        if moment == "computing":
            world.act(SLEEP, NOTHING, SLEEP)
        else:
            world.fused(NOTHING, SLEEP, NOTHING)
        done.set()

    thread = threading.Thread(target=call)
    later(0.3, interrupt)
    thread.start()
    error = error_of(done.wait)
    assert type(error) is KeyboardInterrupt, repr(error)
    # Do not use join(): after an interrupted join(), Python believes that the thread has ended.
    assert done.wait(10)
    world.check_usable()


@own_process
def test_a_forked_child_can_close_the_world_that_it_inherits_and_make_its_own():
    """The parent's world, its workers and its data must not be affected."""
    world = open_world(3)
    values = np.arange(1 << 20) * 1.0
    data = synk.data(values)
    dropped = [synk.data(np.ones(50 << 17))]  # 50 MB that the child releases
    synk.broadcast(world.w, np.ones(1 << 19))
    workers = world.workers()

    def make_its_own():
        assert "forked from the master" in str(error_of(lambda: data.set_length(1 << 22)))
        dropped.clear()
        gc.collect()
        synk.close()
        own = open_world()
        assert not set(own.pids()) & set(workers)
        own.check_usable()
        synk.close()

    check_in_fork(make_its_own)
    assert not any(map(gone, workers)) and world.workers() == workers
    assert (data.data == values).all() and (dropped[0].data == 1).all()
    assert all((one == 1).all() for one in synk.gather(world.w))
    assert world.plain(data) == [values.sum() + 3 * (1 << 19)]
    world.check_usable()


@own_process
def test_a_daemonic_process_is_refused_by_fork_itself():
    def work(results):
        error = error_of(lambda: synk.fork(2, use_gpu=False))
        exists = world_exists()
        results.put((type(error).__name__, str(error), exists, synk.fork(1, use_gpu=False)))

    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=work, args=(results,), daemon=True)
    process.start()
    name, message, exists, alone = results.get()
    assert name == "SynkhronosError" and "daemon=False" in message and not exists and alone == 1
    process.join()


@pytest.mark.parametrize("method", ["fork", *slow("spawn", "forkserver")])
@pytest.mark.parametrize("closes", [False, *slow(True)])
def test_a_process_of_multiprocessing_has_a_world_of_its_own(tmp_path, method, closes):
    """Such a process ends without calling `atexit` functions. Here it also has a SIGTERM handler."""
    run_file("world_in_a_process.py", method, closes, cwd=tmp_path)


def square(number):
    return number**2


def end_at_once():
    """Let SIGTERM end a child of the master, which has the script's handler.

    Python drops the handler's exception if the signal comes while the child's first callbacks run.
    """
    if multiprocessing.parent_process().name == "MainProcess":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def by_pool(numbers):
    with multiprocessing.get_context("fork").Pool(2, end_at_once) as pool:
        return pool.map(square, numbers)


def by_executor(numbers):
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        return list(pool.map(square, numbers))


@functools.lru_cache(None)
def kept_pool():
    return multiprocessing.get_context("fork").Pool(2, end_at_once)


def by_pool_that_is_kept(numbers):
    return kept_pool().map(square, numbers)


def by_processes_that_are_ended(numbers):
    squares = [number**2 for number in numbers]
    if multiprocessing.parent_process() is None:
        return squares  # the children of the master have the script's handler
    context = multiprocessing.get_context("fork")
    sleeping = context.Process(target=time.sleep, args=(60,))
    sleeping.start()
    sleeping.terminate()  # possibly before it has begun to run
    sleeping.join()
    program = subprocess.Popen(["sleep", "60"])
    program.terminate()
    ended = [sleeping.exitcode, program.wait()]
    return squares if ended == [-signal.SIGTERM] * 2 else ended


@own_process
@pytest.mark.parametrize(
    "way", [by_pool, by_executor, by_pool_that_is_kept, by_processes_that_are_ended]
)
def test_an_operation_may_use_multiprocessing_on_every_rank(way):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))  # workers ignore what the script handles
    squares = as_op([tt.dvector], [tt.dvector])(lambda numbers: np.array(way(list(numbers))))
    synk.fork(2, use_gpu=False)
    x = tt.dvector("x")
    f = synk.function([x], (squares(x), "gather"), mode="FAST_COMPILE")
    for _ in range(2):
        assert f(np.arange(5.0)).tolist() == [0, 1, 4, 9, 16]
    synk.close()


class Calling(Op):
    """The identity; it calls functions on a vector whose first element is not zero."""

    __props__ = ()

    def __init__(self, *calls):
        super().__init__()
        self.calls = calls

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        if inputs[0][0]:
            for call in self.calls:
                call(inputs[0])
        outputs[0][0] = inputs[0].copy()


@own_process
@pytest.mark.parametrize("is_late", [False, True])
def test_a_call_inside_an_operation_is_refused_in_the_same_words_on_every_rank(is_late):
    synk.fork(2, use_gpu=False)
    x, w = tt.dvector("x"), compiler.shared(np.ones(2), "w")
    inner = synk.function([x], (x.sum() + w.sum(), "sum"), mode="FAST_COMPILE")
    step = train.parallel_function(
        [x], x.mean(), updates=[(w, w - tt.grad((x.mean() * w).sum(), w))], loss=(x.mean() * w).sum(),
        params=[w], mode="FAST_COMPILE",
    )  # fmt: skip
    calls = [inner, step, inner.as_theano, lambda _: synk.all_reduce(w)][: 3 if is_late else 4]
    if is_late:
        synk.distribute()  # the functions below are sent to the workers
    built = [synk.function([x], (Calling(one)(x), "gather"), mode="FAST_COMPILE") for one in calls]
    for call, f in zip(calls, built):
        of_worker = error_of(functools.partial(f, [0.0, 1.0]), 10)
        assert type(of_worker) is synk.WorkerError and of_worker.type_name == "SynkhronosError"
        assert of_worker.message.splitlines()[0] == BUSY
        if call != inner.as_theano:
            of_master = error_of(functools.partial(f, [1.0, 0.0]), 10)
            assert type(of_master) is synk.SynkhronosError and str(of_master).splitlines()[0] == BUSY
        assert f([0.0, 0.0]).tolist() == [0, 0]
    assert inner([1.0, 2.0]) == 7
    synk.close()


@pytest.mark.slow
def test_under_pytest_xdist_each_process_has_a_world(tmp_path):
    shutil.copy(FOLDER / "programs" / "worlds_in_tests.py", tmp_path / "test_inside.py")
    words = "-m", "pytest", "-n", "2", "-q", "-p", "no:cacheprovider", tmp_path
    assert "7 passed" in run_interpreter(*words, cwd=tmp_path).stdout


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Function that runs a cell in a Jupyter kernel, the kernel's manager, and its client."""
    from jupyter_client.manager import KernelManager

    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
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
        """Run a cell; return what it printed, and the name of its exception or None."""
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


START = """
import synkhronos
from prelude import *
world = open_world(3); print(*world.workers())
"""


def test_in_jupyter_an_interrupted_cell_leaves_a_world_for_the_next(kernel):
    run_cell, manager, client = kernel
    printed, error = run_cell(START)
    assert error is None, printed
    workers = [int(one) for one in printed.split()]
    assert len(workers) == 2
    for cell in (
        "world.act(SLEEP, NOTHING, NOTHING)",
        "world.act(NOTHING, SLEEP, SLEEP)",
        "world.fused(NOTHING, NOTHING, SLEEP)",
        "time.sleep(20)",
        "while True: world.plain(np.ones(5))",
        "with synk.fuse():\n    world.plain(np.ones(5))\n    time.sleep(20)",
    ):
        printed, error = run_cell(cell, interrupt_after=0.4)
        assert error == "KeyboardInterrupt", (cell, printed, error)
        assert run_cell("world.check_usable(); print('well')") == ("well\n", None), cell
    printed, error = run_cell("print(*world.workers())")
    assert [int(one) for one in printed.split()] == workers
    # Shutting down the kernel during a call, as the restart button does, leaves no worker behind.
    printed, error = run_cell("synk.close(); world = open_world(3); print(*world.workers())")
    assert error is None
    workers = [int(one) for one in printed.split()]
    assert len(workers) == 2
    client.execute("world.act(NOTHING, LONG, NOTHING)")
    manager.shutdown_kernel(now=True)
    assert all_gone_within(workers, 3)


def test_in_jupyter_a_cell_that_does_not_end_is_ended_by_a_second_interrupt(kernel):
    run_cell, _, _ = kernel
    run_cell(START)
    run_cell("later(1.5, os.kill, os.getpid(), signal.SIGINT)")
    printed, error = run_cell("world.act(NOTHING, LONG, NOTHING)", interrupt_after=0.4)
    assert error == "KeyboardInterrupt"
    assert "a second one ends them" in printed, printed
    _, error = run_cell("world.plain(np.ones(2))")
    assert error == "WorldBrokenError"
    cell = "synk.close(); open_world().check_usable(); print('well')"
    assert run_cell(cell) == ("well\n", None)
