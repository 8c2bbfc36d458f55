"""Tests of worlds with so many ranks that these start each other along a tree."""

import os
import signal

import numpy as np
from compilers import compiler, tt
from prelude import error_of
from processes import own_process

import synkhronos as synk

MANY = 16


@own_process
def test_many_ranks_compute_die_and_are_replaced():
    synk.fork(MANY, use_gpu=False, master_rank=5)
    x = tt.dmatrix("x")
    total = compiler.shared(np.zeros(3), "total")
    step = synk.function(
        [x], [(x.sum(axis=0), "sum"), (x[:, 0], "gather")],
        updates=[(total, total + x.sum(axis=0))], mode="FAST_COMPILE",
    )  # fmt: skip
    rows = np.arange(300.0).reshape(100, 3)
    data = synk.data(rows)

    def check(times=5):
        for _ in range(times):
            sums, firsts = step(data)
            assert sums.tolist() == rows.sum(axis=0).tolist()
            assert firsts.tolist() == rows[:, 0].tolist()

    check(10)
    synk.all_reduce(total, op="sum")
    assert total.get_value().tolist() == (10 * rows.sum(axis=0)).tolist()
    long = synk.function([x], (x + 1, "gather"), mode="FAST_COMPILE")  # replies that are not short
    assert long(data).tolist() == (rows + 1).tolist()
    error = error_of(lambda: step(np.ones((100, 2))))
    assert isinstance(error, Exception)
    check()

    def program(rank):
        if rank.rank in (0, 13) and not rank.restarts:  # 13 starts others
            os.kill(os.getpid(), signal.SIGKILL)
        return rank.restarts

    restarts = [int(rank in (0, 13)) for rank in range(MANY)]
    assert synk.spmd(program, on_death="continue") == restarts
    check()
    for n in (3, MANY):
        assert synk.restart(n) == n
        check()
    synk.close()
