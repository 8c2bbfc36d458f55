"""What happens as processes fail, in a script of its own; each way to die at each place: `faults/`."""

import pstats
import signal

import pytest

# What the scripts share. Rank r gets row r of x: a number from ACTIONS that says what its share of the
# computation does. `act` runs inside a command, on every rank.
PRELUDE = """
import gc, multiprocessing, os, signal, sys, threading, time, warnings
from pathlib import Path
import numpy as np
import psutil
import synkhronos as synk
import theano
import theano.tensor as T

MASTER = os.getpid()
NOTHING, RAISE, SLEEP, DOZE, LONG, KILL, EXIT = range(7)


class WorkerTrouble(Exception):
    pass


def raise_trouble():
    raise WorkerTrouble("it went wrong in here")


ACTIONS = {
    NOTHING: lambda: None,
    RAISE: raise_trouble,
    SLEEP: lambda: time.sleep(1),
    DOZE: lambda: [time.sleep(0.1) for _ in range(10)],
    LONG: lambda: time.sleep(60),
    KILL: lambda: os.kill(os.getpid(), signal.SIGKILL) or time.sleep(60),
    EXIT: lambda: os._exit(7),
}


class Act(theano.Op):
    __props__ = ()

    def make_node(self, x):
        return theano.Apply(self, [x], [T.dvector()])

    def perform(self, node, inputs, outputs):
        for number in inputs[0]:
            ACTIONS[int(number)]()
        outputs[0][0] = np.full(len(inputs[0]), float(os.getpid()))


def open_world(n=2, **kwargs):
    global f, w, plain
    synk.fork(n, use_gpu=False, **kwargs)
    x = T.dvector("x")
    w = theano.shared(np.arange(3.0), name="w")
    f = synk.function([x], (Act()(x), "gather"), name="f", mode="FAST_COMPILE")
    plain = synk.function([x], [(x.sum() + w.sum(), "sum")], name="plain", mode="FAST_COMPILE")
    synk.distribute()


def pids():
    return [int(pid) for pid in f(np.zeros(synk.world.world.current_world().size))]


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


def check_usable(size=2):
    w.set_value(np.arange(3.0))
    synk.broadcast(w)
    assert plain(np.ones(size)) == [size + 3 * size]
    synk.all_reduce(w, op="sum")
    for rank in range(size):
        assert synk.get_value(rank, w).tolist() == [0, size, 2 * size]
    synk.broadcast(w, np.arange(3.0))


def error_of(call, seconds=2):
    began = time.monotonic()
    try:
        call()
    except BaseException as raised:
        took = time.monotonic() - began
        assert took < seconds, (took, raised)
        return raised
    raise AssertionError("nothing was raised")


def later(seconds, call, *args):
    timer = threading.Timer(seconds, call, args)
    timer.daemon = True
    timer.start()


def fused(*numbers):
    with synk.fuse():
        f(np.array(numbers, float))
        synk.all_reduce(w)


def check_broken_then_renew(error, *words):
    assert type(error) is synk.WorldBrokenError, repr(error)
    for word in words + ("close()",):
        assert word in str(error), (word, str(error))
    children = psutil.Process().children()
    assert all(gone(child.pid) for child in children), children
    for call in (
        lambda: plain(np.ones(2)), lambda: synk.all_reduce(w), lambda: synk.data(np.ones(2)),
        synk.distribute, lambda: synk.get_value(0, w), lambda: synk.function([], w.sum()),
        lambda: synk.set_shmems({}), lambda: synk.fuse().__enter__(),
    ):
        again = error_of(call, 0.5)
        assert type(again) is synk.WorldBrokenError, repr(again)
        assert str(again) == str(error)
    assert type(error_of(lambda: synk.fork(2))) is synk.AlreadyForkedError
    synk.close()
    assert w.get_value().tolist() == [0, 1, 2]
"""


@pytest.fixture
def run_script(run_python):
    """As `run_python`, with what the scripts share put first."""

    def run(code, *arguments, **kwargs):
        return run_python(PRELUDE + code, *arguments, **{"timeout": 45, **kwargs})

    return run


def test_an_exception_in_a_worker_becomes_a_worker_error_and_the_world_goes_on(run_script):
    run_script("""
open_world()
for _ in range(3):
    error = error_of(lambda: f(np.array([NOTHING, RAISE])))
    assert type(error) is synk.WorkerError, repr(error)
    assert error.rank == 1 and error.type_name == "WorkerTrouble"
    assert "it went wrong in here" in error.message
    assert "in raise_trouble" in error.traceback and "in raise_trouble" in str(error)
    assert "rank 1" in str(error) and "WorkerTrouble" in str(error)
    check_usable()
error = error_of(lambda: f(np.array([RAISE, NOTHING])))  # the master's own
assert type(error) is WorkerTrouble
check_usable()
error = error_of(lambda: f(np.array([RAISE, RAISE])))
assert type(error) is WorkerTrouble
check_usable()

# A Theano error: its own class is named.
x, y = T.dvector(), T.dvector()
unequal = synk.function([x], (x + y, "gather"), [y], mode="FAST_COMPILE")
error = error_of(lambda: unequal(np.ones(3), np.ones(2)))  # 2 and 1 rows: rank 1's differ
assert type(error) is synk.WorkerError and error.type_name == "ValueError", repr(error)
assert "mismatch" in str(error)
check_usable()
""")


def test_a_worker_error_can_be_pickled(run_script):
    run_script("""
import pickle
error = pickle.loads(pickle.dumps(synk.WorkerError(1, "ValueError", "why", "where")))
assert (error.rank, error.type_name, error.message, error.traceback) == (
    1, "ValueError", "why", "where")
""")


@pytest.mark.parametrize("master_rank", [0, 2])
def test_an_exception_before_a_collective_makes_the_others_leave_it(run_script, master_rank):
    run_script(
        """
master_rank = int(sys.argv[1])
open_world(3, master_rank=master_rank)
for rank in range(3):
    numbers = np.zeros(3)
    numbers[rank] = RAISE
    error = error_of(lambda: fused(*numbers))
    if rank == master_rank:
        assert type(error) is WorkerTrouble
    else:
        assert type(error) is synk.WorkerError and error.rank == rank, repr(error)
        assert error.type_name == "WorkerTrouble"
    check_usable(3)
error = error_of(lambda: fused(RAISE, RAISE, RAISE))
check_usable(3)
error = error_of(lambda: fused(SLEEP, RAISE, NOTHING))  # rank 0 comes to it when it is over
assert error.rank == 1
check_usable(3)
""",
        master_rank,
    )


@pytest.mark.parametrize("shapes", [(3, 5), (5, 3), (0, 3)])
def test_unequal_shapes_in_a_reduction_are_listed_and_no_rank_is_left_waiting(run_script, shapes):
    run_script(
        """
open_world()
shapes = [int(one) for one in sys.argv[1:]]
for reduction in (synk.reduce, synk.all_reduce, lambda v: synk.reduce(v, in_place=False)):
    for rank, length in enumerate(shapes):
        synk.set_value(rank, w, np.ones(length))
    error = error_of(lambda: reduction(w))
    assert type(error) is ValueError, repr(error)
    for rank, length in enumerate(shapes):
        assert f"rank {rank}: ({length},)" in str(error), error
    assert synk.get_lengths(w) == shapes
    check_usable()
""",
        *shapes,
    )


def test_a_worker_that_dies_while_the_master_computes_is_found(run_script):
    run_script("""
open_world()
check_broken_then_renew(error_of(lambda: f(np.array([SLEEP, KILL])), 3), "rank 1", "SIGKILL")
open_world(3)  # two at once: both are named
error = error_of(lambda: f(np.array([SLEEP, KILL, EXIT])), 3)
check_broken_then_renew(error, "rank 1", "SIGKILL", "rank 2", "exit code 7")
""")


def test_a_worker_that_dies_idle_does_not_disturb_close(run_script):
    run_script("""
open_world()
os.kill(pids()[1], signal.SIGKILL)
time.sleep(0.3)
began = time.monotonic()
synk.close()
assert time.monotonic() - began < 2
open_world()
check_usable()
""")


def test_an_idle_world_is_no_barrier_that_lasts_too_long(run_script):
    run_script("""
open_world(timeout=1)
time.sleep(1.5)
check_usable()
""")


def test_a_pause_of_the_whole_script_is_no_time_that_a_barrier_lasts(run_script):
    """As by Ctrl-Z in a terminal, and fg."""
    run_script("""
import subprocess
os.setsid()  # so that the signals go to this script's processes alone
open_world(3, timeout=3)
for numbers in ([NOTHING, NOTHING, DOZE], [DOZE, NOTHING, NOTHING]):
    began = time.monotonic()
    pause = f"sleep 0.3; kill -STOP -{MASTER}; sleep 4; kill -CONT -{MASTER}"
    with subprocess.Popen(["sh", "-c", pause], start_new_session=True):
        fused(*numbers)
    assert time.monotonic() - began > 4
    check_usable(3)
""")


def test_no_timeout_waits_for_a_slow_worker(run_script):
    run_script("""
open_world(timeout=2)
f(np.array([NOTHING, SLEEP]))
fused(NOTHING, SLEEP)
fused(SLEEP, NOTHING)
check_usable()
""")


INTERRUPTED = """
os.setsid()  # so that the signal goes to this script's processes alone


def interrupt():
    os.killpg(0, signal.SIGINT)


def check_after(error, workers):
    assert type(error) is KeyboardInterrupt, repr(error)
    if synk.world.world.current_world().broken is None:
        check_usable()
        assert pids()[1:] == workers
    else:
        assert all_gone_within(workers, 2)
        assert type(error_of(lambda: plain(np.ones(2)))) is synk.WorldBrokenError
        synk.close()
        open_world()
        check_usable()
"""


@pytest.mark.parametrize(
    "call",
    [
        "time.sleep(5)",  # idle
        "f(np.array([SLEEP, SLEEP]))",
        "f(np.array([NOTHING, SLEEP]))",  # at the finish barrier
        "fused(NOTHING, SLEEP)",  # the master in the collective
        "fused(SLEEP, NOTHING)",  # the worker in the collective
    ],
)
def test_ctrl_c_reaches_the_script_and_leaves_the_world_usable_or_broken(run_script, call):
    run_script(
        INTERRUPTED
        + f"""
open_world()
workers = pids()[1:]
later(0.4, interrupt)
check_after(error_of(lambda: {call}, 3), workers)
"""
    )


def test_ctrl_c_at_any_moment_of_short_calls_leaves_the_world_in_step(run_script):
    run_script(
        INTERRUPTED
        + """
open_world()
moments = np.random.RandomState(0)
for round in range(20):
    workers = pids()[1:]
    later(moments.uniform(0, 0.05), interrupt)

    def work():
        while True:
            assert plain(np.ones(4)) == [10]
            synk.broadcast(w, np.arange(3.0))

    check_after(error_of(work, 3), workers)
"""
    )


def test_a_second_ctrl_c_ends_a_call_that_does_not_end(run_script):
    run_script(
        INTERRUPTED
        + """
open_world()
workers = pids()[1:]
later(0.4, interrupt)
later(0.9, interrupt)
check_after(error_of(lambda: f(np.array([NOTHING, LONG])), 3), workers)
"""
    )


def test_an_uncaught_ctrl_c_ends_the_script_and_its_workers(run_script):
    done = run_script(INTERRUPTED + """
open_world()
print(*pids()[1:], flush=True)
later(0.4, interrupt)
fused(NOTHING, SLEEP)
""", check=False)  # fmt: skip
    assert done.returncode in (-signal.SIGINT, 130, 1)
    assert "KeyboardInterrupt" in done.stderr


def test_a_script_need_not_close(run_script):
    run_script("open_world(3)\ncheck_usable(3)\n")
    run_script("synk.fork(2, use_gpu=False)\n")  # no worker was started yet


def test_an_exception_at_top_level_ends_the_script_with_1(run_script):
    done = run_script("open_world()\ncheck_usable()\nraise LookupError('lost')\n", check=False)
    assert done.returncode == 1
    assert "LookupError: lost" in done.stderr
    done = run_script("open_world()\nsys.exit(3)\n", check=False)
    assert done.returncode == 3


def test_close_too_early_or_twice_warns(run_script):
    run_script("""
def warned():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        synk.close()
    return [one.category for one in caught]


assert warned() == [RuntimeWarning]
assert type(error_of(synk.distribute)) is synk.NotForkedError
open_world()
assert warned() == []
assert warned() == [RuntimeWarning]
assert type(error_of(synk.distribute)) is synk.ClosedError
assert type(error_of(lambda: plain(np.ones(2)))) is synk.ClosedError
""")


def test_fork_in_another_thread_works_also_after_that_thread_has_ended(run_script):
    run_script("""
thread = threading.Thread(target=open_world)
thread.start()
thread.join()
time.sleep(0.5)
check_usable()
workers = pids()[1:]
synk.close()
assert all_gone_within(workers, 0.1)
""")


def test_fork_in_a_daemonic_process_is_refused_in_words(run_script):
    run_script("""
def work(queue):
    try:
        open_world()
        plain(np.ones(2))
        queue.put(None)
    except Exception as error:
        queue.put((type(error).__name__, str(error)))


queue = multiprocessing.get_context("fork").SimpleQueue()
process = multiprocessing.get_context("fork").Process(target=work, args=(queue,), daemon=True)
process.start()
name, message = queue.get()
assert name == "SynkhronosError", (name, message)
assert "daemon" in message and "main process" in message
process.join()
""")


@pytest.mark.parametrize("end", ["sys.exit()", "os._exit(0)", "raise ValueError('of the child')"])
def test_the_end_of_a_forked_child_does_not_touch_the_parents_world(run_script, end):
    run_script(f"""
open_world()
workers = pids()[1:]
faulthandler.cancel_dump_traceback_later()  # its thread is not there after a fork
child = os.fork()
if child == 0:
    {end}
os.waitpid(child, 0)
time.sleep(0.2)
assert not any(map(gone, workers))
check_usable()
""")


def test_the_end_of_a_multiprocessing_child_does_not_touch_the_parents_world(run_script):
    run_script("""
open_world()
workers = pids()[1:]
process = multiprocessing.get_context("fork").Process(target=lambda: None)
process.start()
process.join()
assert process.exitcode == 0
time.sleep(0.2)
assert not any(map(gone, workers))
check_usable()
""")


def test_a_world_has_no_file_in_dev_shm(run_script):
    """Not even one that was removed at once: who is killed before that would leave it there."""
    run_script("""
open_world(3)
big = np.ones(1 << 18)
data = synk.data(big)
assert plain(data) == [len(big) + 9]
synk.broadcast(w, big)
synk.all_reduce(w)
assert len(synk.get_value(1, w)) == len(big)
for pid in pids():
    mapped = Path(f"/proc/{pid}/maps").read_text()
    assert "/dev/shm" not in mapped and "(deleted)" in mapped  # the anonymous mapping
    assert not [one for one in psutil.Process(pid).open_files() if "/dev/shm" in one.path]
""")


def test_one_process_works_throughout(run_script):
    run_script("""
assert synk.fork(1, use_gpu=False, timeout=1) == 1
x, b = T.dmatrix("x"), T.dscalar("b")
w, table = theano.shared(np.arange(3.0), name="w"), theano.shared(np.ones((4, 3)), name="table")
f = synk.function([x], [(x * w).mean(), (x, "gather"), (b * 2, None)], [b],
                  updates=[(w, w + x.mean(axis=0))], mode="FAST_COMPILE")
g = synk.function([], (table.sum(), "sum"), sliceable_shareds=[table], mode="FAST_COMPILE")
synk.distribute()
rows = np.arange(12.0).reshape(4, 3)
data = synk.data(rows)
for batch in (None, 2, slice(None, None, 2), [3, -4], np.array([True, False, True, True])):
    expected = rows[:batch] if isinstance(batch, int) else rows if batch is None else rows[batch]
    for num_slices in (1, 2, 9):
        w.set_value(np.arange(3.0))
        mean, same, two = f(data, 1, batch=batch, num_slices=num_slices)
        assert np.allclose(mean, (expected * np.arange(3)).mean()) and two == 2
        assert same.tolist() == expected.tolist()
        assert np.allclose(w.get_value(), np.arange(3) + expected.mean(axis=0))
assert g(batch_s=slice(2)) == 6 and g(batch_s=[[0, 1, 3]]) == 9 and g(num_slices=3) == 12
assert f.as_theano(data, 1)[2] == 2
synk.set_shmems({x: rows})
assert f(b=3, batch=2)[2] == 6
w.set_value(np.ones(3))
for op in ("avg", "sum", "prod", "min", "max"):
    synk.all_reduce(w, op=op)
    synk.reduce(w, op=op)
    assert synk.reduce(w, op=op, in_place=False).tolist() == [1, 1, 1]
synk.broadcast(w)
synk.broadcast(w, 2 * np.ones(3))
assert synk.gather(w).tolist() == [[2, 2, 2]] and synk.gather(w, nd_up=0).tolist() == [2, 2, 2]
synk.all_gather(w)
assert synk.get_value(0, w).tolist() == [2, 2, 2]
synk.scatter(table, rows, batch=[0, 2])
assert synk.get_lengths(table) == [2] and synk.get_shapes([table, w]) == [[(2, 3)], [(3,)]]
synk.set_value(0, w, np.zeros(3))
with synk.fuse():
    pending = f(data, 1)
    synk.all_reduce(w, weights=f)
assert pending.result()[0] == 0
assert type(error_of(lambda: synk.get_value(1, w))) is IndexError
assert psutil.Process().children() == []
# As on many ranks, an exception leaves the world usable.
bad = synk.function([x], (Act()(x[:, 0]), "gather"), mode="FAST_COMPILE")
assert type(error_of(lambda: bad(np.full((2, 1), RAISE)))) is WorkerTrouble
assert f(data, 4)[2] == 8
synk.close()
assert type(error_of(lambda: f(data, 1))) is synk.ClosedError
assert synk.fork(1, use_gpu=False) == 1
""")


def test_a_profile_of_each_worker_is_written(run_script, tmp_path):
    run_script("open_world(3, profile_workers=True)\ncheck_usable(3)\nsynk.close()\n")
    assert sorted(path.name for path in tmp_path.glob("*.prof")) == [
        "synk_worker_1.prof",
        "synk_worker_2.prof",
    ]
    profile = pstats.Stats(str(tmp_path / "synk_worker_1.prof"))
    assert any(function == "run" for _, _, function in profile.stats)


def test_ten_rounds_of_fork_and_close_leak_neither_files_nor_memory(run_script):
    run_script("""
def state():
    process = psutil.Process()
    return process.num_fds(), process.memory_info().rss, process.num_threads(), len(
        process.memory_maps(grouped=False))


def round():
    open_world()
    data = synk.data(np.ones(1 << 20))
    assert plain(data) == [(1 << 20) + 6]
    synk.broadcast(w, np.ones(1 << 19))
    synk.all_reduce(w)
    synk.close()
    gc.collect()


for _ in range(3):
    round()
files, memory, threads, maps = state()
for _ in range(10):
    round()
files_after, memory_after, threads_after, maps_after = state()
assert files_after <= files, (files, files_after)
assert threads_after <= threads
assert maps_after <= maps + 5, (maps, maps_after)
# An array kept each round would be 40 MB; malloc itself keeps some 6 MB now, and gives it back later.
assert memory_after - memory < 16 << 20, (memory_after - memory) >> 10
assert sum(type(one).__name__ == "World" for one in gc.get_objects()) == 1
assert psutil.Process().children() == []
""")


def test_idle_workers_use_no_processor_time(run_script):
    run_script("""
open_world(3)
check_usable(3)


def processor_seconds(pid):
    # Exactly, where psutil counts ticks of a clock.
    threads = Path("/proc", str(pid), "task").iterdir()
    return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1e9


workers = pids()[1:]
before = [processor_seconds(pid) for pid in workers]
time.sleep(2)
used = [processor_seconds(pid) - start for pid, start in zip(workers, before)]
assert max(used) < 0.02, used
""")


def test_a_value_larger_than_memory_is_refused_before_it_is_made(run_script):
    run_script("""
open_world()
error = error_of(lambda: synk.data(dtype="float64", shape=(1 << 50,)))
assert type(error) is MemoryError and str(8 << 50) in str(error), repr(error)
check_usable()
""")


def test_a_child_of_the_script_cannot_command_the_workers(run_python):
    done = run_python(
        """
        import os
        import synkhronos as synk, theano
        synk.fork(2, use_gpu=False)
        s = theano.shared(1.0)
        f = synk.function([], (s * 2, "sum"), mode="FAST_COMPILE")
        assert f() == 4
        faulthandler.cancel_dump_traceback_later()  # its thread is not there after a fork
        child = os.fork()
        if not child:
            for call in (f, synk.distribute, lambda: synk.all_reduce(s)):
                try:
                    call()
                except synk.WorldBrokenError as error:
                    assert "forked from the master" in str(error)
                else:
                    os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert f() == 4
        print("both well")
        """
    )
    assert "both well" in done.stdout


def test_closing_gives_all_memory_back_while_a_function_is_kept(run_python):
    run_python(
        """
        import re
        import numpy as np
        import synkhronos as synk, theano
        def shared_memory():
            rollup = open("/proc/self/smaps_rollup").read()
            return 1024 * int(re.search("Pss_Shmem: *([0-9]+) kB", rollup).group(1))
        before = shared_memory()
        synk.fork(2, use_gpu=False)
        s = theano.shared(np.zeros(4_000_000))
        f = synk.function([], updates=[(s, s + 1)])
        f()
        synk.all_reduce(s)
        data = synk.data(np.zeros(8_000_000))
        assert shared_memory() - before > 90e6, shared_memory() - before
        synk.close()
        assert s.get_value(borrow=True)[0] == 1
        assert shared_memory() - before < 1e6, shared_memory() - before
        """
    )
