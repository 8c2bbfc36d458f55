"""Restart: the same objects go on with other workers."""

import pytest

PRELUDE = """
import gc, multiprocessing, os, signal, sys, threading, time
import numpy as np
import psutil
import synkhronos as synk
import theano
import theano.tensor as T
from theano.sandbox.rng_mrg import MRG_RandomStreams
from theano.tensor.shared_randomstreams import RandomStreams


def worker(rank):
    return next(one for one in multiprocessing.active_children() if one.name == f"synkhronos-{rank}")


def kill(rank, number=signal.SIGKILL):
    os.kill(worker(rank).pid, number)


def error_of(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except BaseException as raised:
        return raised
    raise AssertionError("nothing was raised")


def lose(rank, call):
    kill(rank)
    error = error_of(call)
    assert type(error) is synk.WorldBrokenError, repr(error)
    assert f"rank {rank} (killed by SIGKILL)" in str(error) and "restart()" in str(error)


def open_world(n=2, **kwargs):
    global x, w, step, where
    synk.fork(n, use_gpu=False, **kwargs)
    x = T.dmatrix("x")
    w = theano.shared(np.zeros(2), "w")
    step = synk.function([x], [(x.sum(axis=0), "sum"), (x[:, 0], "gather")],
                         updates=[(w, w + x.sum(axis=0))], name="step", mode="FAST_COMPILE")
    synk.distribute()


def check(n, data):
    \"\"\"Every rank takes its own rows, and has a replica of its own.\"\"\"
    before = w.get_value()
    total, firsts = step(data)
    assert total.tolist() == data.data.sum(axis=0).tolist()
    assert firsts.tolist() == data.data[:, 0].tolist()
    shares = np.array_split(data.data, n)
    assert synk.gather(w).tolist() == [(before + one.sum(axis=0)).tolist() for one in shares]
    synk.all_reduce(w)  # they lie in shared memory from now on
"""


@pytest.fixture
def run_script(run_python):
    def run(code, *arguments, **kwargs):
        return run_python(PRELUDE + code, *arguments, **{"timeout": 50, **kwargs})

    return run


@pytest.mark.parametrize("n, master_rank, lost", [(2, 0, 1), (2, 1, 0), (3, 1, 2)])
def test_the_same_objects_go_on_after_a_death(run_script, tmp_path, n, master_rank, lost):
    run_script(
        """
n, master_rank, lost = map(int, sys.argv[1:])
open_world(n, master_rank=master_rank)
rows = np.arange(14.0).reshape(7, 2)
np.save("rows.npy", rows)
data, mapped = synk.data(rows), synk.data(np.load("rows.npy", mmap_mode="r"))
bound, = step.set_input_shmems(rows)
view = data.data
check(n, data)
for _ in range(3):
    lose(lost, lambda: step(data))
    assert synk.restart() == n
    kept = w.get_value()
    assert synk.gather(w).tolist() == [kept.tolist()] * n
    view[2] += 1  # the very memory of before
    assert synk.get_shmems(x) is bound and bound.data.tolist() == rows.tolist()
    for one in (data, mapped):
        check(n, one)
    assert step()[1].tolist() == rows[:, 0].tolist()
    assert step(data, batch=[0, 6, 2, 2])[1].tolist() == [0, 12, view[2, 0], view[2, 0]]
    data.set_length(9)
    data.set_length(7)
    view = data.data
    extra = synk.function([x], ((x * w).sum(), "sum"), mode="FAST_COMPILE")
    synk.broadcast(w)
    assert np.allclose(extra(data), (view * w.get_value()).sum())
synk.close()
assert w.get_value().shape == (2,)
""",
        n,
        master_rank,
        lost,
    )


def test_the_number_of_processes_may_change_up_to_that_of_fork(run_script):
    run_script("""
open_world(3, master_rank=2)
data = synk.data(np.arange(14.0).reshape(7, 2))
check(3, data)
step(data)  # a call that will be repeated
for n in (1, 2, 3, 1, 3):
    assert synk.restart(n) == n
    assert len(multiprocessing.active_children()) == 0  # until they are needed
    step(data)
    assert len(multiprocessing.active_children()) == n - 1
    synk.broadcast(w)
    check(n, data)
    assert synk.get_lengths(w) == [2] * n
lose(1, lambda: step(data))
assert synk.restart(1) == 1
check(1, data)
for wrong in (0, 4, -1):
    error = error_of(synk.restart, wrong)
    assert type(error) is ValueError and "expected 1 to 3" in str(error)
for wrong in (True, 2.0, "2"):
    assert type(error_of(synk.restart, wrong)) is TypeError
check(1, data)
""")


def test_every_rank_has_a_replica_of_its_own_again(run_script):
    # A collective leaves the variable in the memory that all share.
    run_script("""
def shared_memory():
    return psutil.Process().memory_full_info().shared

open_world(2)
big = theano.shared(np.zeros(1 << 22), "big")
touch = synk.function([], updates=[(big, big + 1)], mode="FAST_COMPILE")
data = synk.data(np.ones((4, 2)))
check(2, data)
lose(1, lambda: synk.broadcast(w))
synk.restart()
before = w.get_value().tolist()
synk.set_value(1, w, [7.0, 7.0])
assert w.get_value().tolist() == before
assert synk.gather(w).tolist() == [before, [7, 7]]
# And what the former workers had there is given back.
for _ in range(2):
    touch()
    synk.all_reduce(big)
seen = shared_memory()  # of 32 MB each that are the master's and the worker's, the half of the latter
synk.restart()
assert shared_memory() < seen - (14 << 20), (seen - shared_memory()) >> 20
touch()
assert big.get_value().tolist()[:2] == [3, 3]
""")


def test_a_rank_without_rows_of_its_own_is_noticed_after_a_restart(run_script):
    run_script("""
open_world(2, master_rank=0)
own = synk.function([x], (x[0, 0], None), mode="FAST_COMPILE")
one = synk.data(np.ones((1, 2)))
assert own(one) == 1
synk.restart(1)
synk.restart(2)
assert own(one) == 1
# The rows that weigh a reduction are those of calls since the restart.
step(one)
synk.all_reduce(w, weights=step)
synk.restart()
error = error_of(synk.all_reduce, w, weights=step)
assert type(error) is synk.WorkerError or type(error) is ValueError
assert "weights of all ranks are zero" in str(error), error
step(synk.data(np.ones((3, 2))))
synk.all_reduce(w, weights=step)
""")


def test_what_is_not_possible_is_refused_and_changes_nothing(run_script):
    run_script("""
assert type(error_of(synk.restart)) is synk.NotForkedError
open_world(2)
data = synk.data(np.ones((4, 2)))
with synk.fuse():
    error = error_of(synk.restart)
    assert type(error) is RuntimeError and "fuse()" in str(error)
with synk.profile():
    error = error_of(synk.restart)
    assert type(error) is RuntimeError and "profile()" in str(error)
check(2, data)
faulthandler.cancel_dump_traceback_later()
child = os.fork()
if not child:
    error = error_of(synk.restart)
    os._exit(0 if type(error) is RuntimeError and "forked from the master" in str(error) else 1)
assert os.waitpid(child, 0)[1] == 0
check(2, data)
synk.close()
assert type(error_of(synk.restart)) is synk.ClosedError
""")


def test_a_death_inside_fuse_or_profile_can_be_followed_by_a_restart(run_script):
    run_script("""
open_world(2)
data = synk.data(np.ones((4, 2)))
def fused():
    with synk.fuse():
        step(data)
        synk.all_reduce(w)
def profiled():
    with synk.profile():
        step(data)
for call in (fused, profiled):
    lose(1, call)
    synk.restart()
    synk.broadcast(w)
    check(2, data)
    call()
    synk.broadcast(w)
""")


def test_a_restart_needs_neither_functions_nor_started_workers(run_script):
    run_script("""
synk.fork(2, use_gpu=False)
assert synk.restart() == 2 and synk.restart(1) == 1 and synk.restart(2) == 2
data = synk.data(np.ones((4, 2)))
s = theano.shared(2.0)
x = T.dmatrix()
f = synk.function([x], (x.sum() * s, "sum"), mode="FAST_COMPILE")
synk.restart()
assert f(data) == 16
synk.restart()
s.set_value(3.0)  # by the master alone, before the workers are there: they inherit it
assert f(data) == 24
""")


def test_a_stopped_worker_and_an_interrupted_command_can_be_got_rid_of(run_script):
    run_script("""
open_world(2, timeout=0.7)
data = synk.data(np.ones((4, 2)))
kill(1, signal.SIGSTOP)
error = error_of(step, data)
assert type(error) is synk.WorldBrokenError and "timeout" in str(error)
synk.restart()
check(2, data)
synk.restart()
# Ctrl-C, while the master waits for a rank that does not answer.
step(data)
kill(1, signal.SIGSTOP)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
assert type(error_of(step, data)) is KeyboardInterrupt
assert type(error_of(step, data)) is synk.WorldBrokenError
synk.restart()
synk.broadcast(w)
check(2, data)
""")


def test_workers_that_cannot_be_forked_are_an_error_and_tried_again_by_the_next_call(run_script):
    run_script("""
open_world(3)
data = synk.data(np.ones((6, 2)))
lose(1, lambda: step(data))
synk.restart()
fork, calls = os.fork, []
def failing():
    calls.append(1)
    if len(calls) == 2:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = failing
error = error_of(step, data)
assert type(error) is synk.SynkhronosError and "could be started" in str(error), repr(error)
assert len(multiprocessing.active_children()) == 0
check(3, data)
""")


def test_a_step_that_broke_was_taken_as_a_whole_or_not_at_all(run_script):
    # Rank 1 is killed at 16 moments of a step: gradient, all-reduce in shared memory, update.
    done = run_script(
        """
synk.fork(2, use_gpu=False)
x = T.dmatrix("x")
w, count = theano.shared(np.zeros(1_000_000), "w"), theano.shared(np.int64(0), "count")
flat = theano.shared(np.zeros(1_000_000), "flat")
gradient = synk.function([x], updates=[(flat, T.ones_like(w) * x.sum() / x.shape[0])])
update = synk.function([], updates=[(w, w + flat), (count, count + 1)])
data = synk.data(np.ones((5, 1)))
def take_a_step():
    with synk.fuse():
        gradient(data)
        synk.all_reduce(flat, weights=gradient)
        update()
take_a_step()
began = time.monotonic()
take_a_step()
seconds = time.monotonic() - began
taken, halves = 2, 0
for moment in range(16):
    threading.Timer(moment / 13 * seconds, kill, (1,)).start()
    try:
        for _ in range(10_000):
            take_a_step()
            taken += 1
    except synk.WorldBrokenError:
        pass
    synk.restart()
    values = np.unique(w.get_value(borrow=True))
    assert values.tolist() == [float(count.get_value())], values  # whole
    assert count.get_value() - taken in (0, 1)
    halves += len(np.unique(flat.get_value(borrow=True))) > 1
    taken = int(count.get_value())
    take_a_step()
    taken += 1
    assert synk.get_value(1, count) == taken
print("steps", taken)
""",
        timeout=120,
    )
    assert int(done.stdout.split()[-1]) > 18


STREAMS = """
n, make, interrupted = int(sys.argv[1]), globals()[sys.argv[2]], sys.argv[3] == "yes"
synk.fork(n, use_gpu=False)
x = T.dmatrix("x")
draw = synk.function([x], (make(5).uniform((x.shape[0], 3)), "gather"), mode="FAST_COMPILE")
draw(np.ones((3 * n, 1)))
if interrupted:
    draw(np.ones((3 * n, 1)))
    lose(1, lambda: draw(np.ones((n, 1))))  # where the master has drawn its share
    synk.restart()
else:
    draw(np.ones((3 * n, 1)))
    draw(np.ones((n, 1)))
rows = draw(np.ones((3 * n, 1)))
assert len(np.unique(rows)) == rows.size
print(rows.tolist())
"""


def test_with_equal_shares_mrg_streams_go_on_as_if_nothing_had_happened(run_script):
    arguments = 3, "MRG_RandomStreams"
    whole, restarted = (run_script(STREAMS, *arguments, one).stdout for one in ("no", "yes"))
    assert whole == restarted


def test_streams_of_numpy_are_independent_after_a_restart(run_script):
    run_script(STREAMS, 3, "RandomStreams", "yes")


def test_thirty_restarts_leak_neither_files_nor_memory(run_script):
    run_script("""
open_world(2)
big = theano.shared(np.zeros(1 << 20), "big")
touch = synk.function([], updates=[(big, big + 1)], mode="FAST_COMPILE")
data = synk.data(np.ones((1 << 17, 2)))


def state():
    gc.collect()
    process = psutil.Process()
    used = process.memory_full_info()
    return process.num_fds(), used.rss, process.num_threads(), len(process.memory_maps(grouped=False))


def round(number):
    touch()
    synk.all_reduce(big)
    step(data)
    if number % 2:
        lose(1, lambda: step(data))
    synk.restart()


for number in range(4):
    round(number)
files, memory, threads, maps = state()
for number in range(30):
    round(number)
files_after, memory_after, threads_after, maps_after = state()
assert files_after <= files, (files, files_after)
assert threads_after <= threads
assert maps_after <= maps + 5, (maps, maps_after)
# The variable kept each round would be 250 MB.
assert memory_after - memory < 24 << 20, (memory_after - memory) >> 10
assert big.get_value()[0] == 34
kinds = [type(one).__name__ for one in gc.get_objects()]
assert kinds.count("World") == kinds.count("LocalTransport") == kinds.count("SharedMemory") == 1
""")
