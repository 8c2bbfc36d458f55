"""Eight machines with a rank each: they train, fail, work at their own pace, and lose a machine.

The argument is a file, which is written when a machine may be killed.
"""

import sys
import time
from pathlib import Path

import numpy as np
import synkhronos as synk
from compilers import compiler, default_mode, tt

SIZE, ROWS, STEPS, RATE = 8, 160, 20, 0.1


def train():
    """Take steps whose gradients are averages over all machines; compare with NumPy."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(ROWS, 600))
    targets = inputs @ rng.normal(size=600)
    x, y = tt.dmatrix("x"), tt.dvector("y")
    w = compiler.shared(np.zeros(600), "w")
    error = x.dot(w) - y
    gradient = 2 * x.T.dot(error) / x.shape[0]
    step = synk.function([x, y], (tt.sqr(error).mean(), "avg"), updates=[(w, w - RATE * gradient)])
    synk.distribute()
    own, losses = np.zeros(600), []
    for _ in range(STEPS):
        losses.append(step(inputs, targets))
        synk.all_reduce(w, "avg")
        errors = inputs @ own - targets
        np.testing.assert_allclose(losses[-1], (errors**2).mean())
        own -= RATE * 2 * inputs.T @ errors / ROWS
    for rank in range(SIZE):
        np.testing.assert_allclose(synk.get_value(rank, w), own)
    assert losses[-1] < losses[0]
    return step, losses[0], inputs, targets


def fail_on(rank, failing, meets):
    if rank.rank == failing:
        raise ZeroDivisionError(f"rank {failing} divides")
    if meets:
        rank.barrier()


def fail():
    """Let one rank after the other fail, while the others end or wait for it."""
    for failing in range(1, SIZE):
        for meets in (False, True):
            try:
                synk.spmd(fail_on, failing, meets)
            except synk.WorkerError as error:
                assert error.rank == failing and "divides" in str(error), error
            else:
                raise AssertionError("no rank failed")
            assert synk.spmd(lambda rank: rank.rank) == list(range(SIZE))


def end_early(rank, missing):
    if rank.rank != missing:
        rank.barrier()


def end_without_others():
    """Let a leader end whose replies depend on others, which wait for it in a meeting."""
    for missing in (2, 4, 6, 7):
        try:
            synk.spmd(end_early, missing)
        except synk.SynkhronosError as error:  # the master may be the first to notice
            assert f"for rank {missing}, which ended the program without it" in str(error), error
        else:
            raise AssertionError("no rank noticed")


def work(rank, count):
    """End at another time than the other ranks; pass a message on, and push to the center."""
    center = rank.center(count)
    time.sleep(0.05 * ((5 * rank.rank + 3) % SIZE))
    for _ in range(rank.rank):
        count.set_value(count.get_value() + 1)
        center.push()
    rank.send((rank.rank + 3) % SIZE, np.full(3000, rank.rank))
    received = rank.receive(wait=True)[1]
    assert set(received.tolist()) == {(rank.rank - 3) % SIZE}
    time.sleep(0.05 * ((3 * rank.rank + 1) % SIZE))
    return np.full(3000, rank.rank)


def run_programs():
    count = compiler.shared(np.zeros(4), "count")
    synk.function([], count.sum())
    synk.distribute()
    for _ in range(3):
        values = synk.spmd(work, count)
        assert [set(one.tolist()) for one in values] == [{rank} for rank in range(SIZE)]


def meet_for_ever(rank):
    while True:
        rank.barrier()
        time.sleep(0.01)


def main(file):
    synk.fork(SIZE, use_gpu=False, timeout=120)
    step, loss, *batch = train()
    fail()
    end_without_others()
    run_programs()
    assert synk.restart(SIZE) == SIZE  # the same machines, in another world
    assert 0 < step(*batch) < loss
    print("trained, failed and worked", flush=True)
    file.write_text("now")
    synk.spmd(meet_for_ever)


if __name__ == "__main__":
    with default_mode("FAST_COMPILE"):
        main(Path(sys.argv[1]))
