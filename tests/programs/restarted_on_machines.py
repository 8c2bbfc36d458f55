"""Two ranks on each machine, of which a process is killed; the script goes on after ``restart()``.

The arguments say what is killed, "rank" or "progress_process", its number, while all "use" a center,
"meet" or are "idle", and the number of ranks that are left.
"""

import os
import re
import signal
import sys
import threading
import time

import numpy as np
import psutil
import synkhronos as synk
from compilers import RandomStreams, compiler, tt

PROMISED = 2.0  # seconds to the error
SOON = 0.5  # seconds
TASK = "OMPI_COMM_WORLD_RANK"
ROWS = np.arange(24.0).reshape(8, 3)


def main(what, number, moment, left):
    size = synk.fork(use_gpu=False)
    x, w = tt.dmatrix("x"), compiler.shared(np.zeros(3), "w")
    step = synk.function(
        [x], [(x.sum(axis=0), "sum"), (x[:, 0], "gather")], updates=[(w, w + x.sum(axis=0))]
    )
    draw = synk.function([], (RandomStreams(3).uniform(size=(4,)), "gather"), bcast_inputs=[])
    data, constant = synk.data(ROWS), synk.data(ROWS, constant=True)
    (bound,) = step.set_input_shmems(ROWS)
    synk.distribute()

    def check(ranks):
        for given in ((data,), (constant,), (ROWS,), ()):
            before = w.get_value()
            total, firsts = step(*given)
            assert total.tolist() == ROWS.sum(axis=0).tolist() and firsts.tolist() == ROWS[:, 0].tolist()
            shares = np.array_split(ROWS, ranks)
            assert synk.gather(w).tolist() == [(before + one.sum(axis=0)).tolist() for one in shares]
            synk.all_reduce(w)
        assert len(np.unique(draw())) == 4 * ranks
        assert synk.get_shmems(x) is bound

    check(size)
    seconds = lose(what, number, moment, w)
    assert seconds < PROMISED, seconds
    assert synk.restart() == left == synk.size()
    check(left)
    if what == "rank":
        assert synk.spmd(pull, w) == list(range(left))
    assert synk.restart(left - 1) == left - 1
    check(left - 1)
    synk.close()
    assert synk.fork(use_gpu=False) == left
    print(f"restarted with {left} of {size}")


def lose(what, number, moment, w):
    """Kill a process; return the seconds until an error names it."""
    name = rf"ranks? [\d, ]*\b{number}\b" if what == "rank" else "task"
    synk.spmd(kill_soon, number if what == "rank" else 2 * number, what == "progress_process")
    began = time.monotonic() + SOON
    try:
        if moment == "idle":
            time.sleep(2 * SOON)
            synk.all_reduce(w)
        else:
            synk.spmd(exchange if moment == "use" else meet, w)
    except synk.WorldBrokenError as error:
        assert re.search(name, str(error)) and "restart()" in str(error), error
        return time.monotonic() - began
    raise AssertionError("nothing was noticed")


def kill_soon(rank, number, progress_process):
    """On one rank: kill its process soon, or the progress process of the machine that it leads."""
    if rank.rank == number:
        pid = os.getpid()
        if progress_process:  # the task after the leader's
            task = str(int(os.environ[TASK]) + 1)
            # The parent of a task is mpirun's process, but the script is a child of its task.
            tasks = [one for parent in psutil.Process().parents()[:2] for one in parent.children()]
            [pid] = [one.pid for one in tasks if one.environ().get(TASK) == task]
        threading.Timer(SOON, os.kill, [pid, signal.SIGKILL]).start()


def meet(rank, w):
    while True:
        rank.barrier()
        time.sleep(0.001)


def exchange(rank, w):
    center = rank.center(w)
    while True:
        center.elastic(0.5)


def pull(rank, w):
    rank.center(w).pull()
    return rank.rank


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
