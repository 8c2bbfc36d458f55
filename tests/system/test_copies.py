"""Processes that the script's code forks from a rank, in an operation or a program."""

import os
import sys
import time

import numpy as np
import pytest
from compilers import Apply, Op, compiler, tt
from processes import exit_code, own_process

import synkhronos as synk

W = compiler.shared(0.0, "w")


def fork(rank, chosen, in_child):
    if rank.rank != chosen:
        return None
    pid = os.fork()
    if not pid:
        return in_child(rank)
    return exit_code(os.waitpid(pid, 0)[1])


def fail(rank):
    raise RuntimeError("the child fails")


def give_back(rank):
    return "as if it was the rank"


def leave(rank):
    sys.exit(7)


def leave_without_a_code(rank):
    sys.exit()


def meet(rank):
    rank.barrier()


def meet_and_catch(rank):
    try:
        rank.all_reduce(W)
    except synk.SynkhronosError as error:
        os._exit(3 if "forked from rank" in str(error) else 4)
    os._exit(5)


def read(rank):
    os._exit(9 if W.get_value() == 5 and rank.size == 2 else 8)


@pytest.mark.parametrize("chosen", [0, 1])
@pytest.mark.parametrize(
    "in_child, code, said",
    [
        (fail, 1, "RuntimeError: the child fails"), (give_back, 1, "it went on as that rank"),
        (leave, 7, ""), (leave_without_a_code, 0, ""), (meet, 1, "this process was forked from rank"),
        (meet_and_catch, 3, ""), (read, 9, ""),
    ],
)  # fmt: skip
def test_a_process_that_a_program_forks_is_no_rank(programs, chosen, in_child, code, said):
    done = programs.run(run_program, chosen, in_child)
    assert done.returncode == 0 and done.stdout.split() == ["None", str(code)], done
    assert said in done.stderr and (said or not done.stderr), done.stderr
    if code == 1:
        assert f"forked it on rank {chosen}" in done.stderr


def run_program(chosen, in_child):
    synk.fork(2, use_gpu=False)
    count = synk.function([], updates=[(W, W + 1)])
    synk.distribute()
    synk.broadcast(W, 5.0)
    found = synk.spmd(fork, chosen, in_child)
    assert synk.get_value(0, W) == synk.get_value(1, W) == 5
    for _ in range(20):
        count()
    assert synk.get_value(0, W) == synk.get_value(1, W) == 25
    synk.close()
    print(found[1 - chosen], found[chosen])


class ForkIn(Op):
    """The identity. On some ranks it forks a process, which fails."""

    __props__ = ("value",)

    def __init__(self, value):
        self.value = value

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        (x,) = inputs
        if x[0] == self.value:
            pid = os.fork()
            if not pid:
                raise RuntimeError("the child fails")
            assert exit_code(os.waitpid(pid, 0)[1]) == 1
        outputs[0][0] = x.copy()


@pytest.mark.parametrize("first", [0.0, 2.0])  # rows of the master, or of the worker
def test_a_process_that_an_operation_forks_is_no_rank(programs, first):
    done = programs.run(run_operation, first)
    assert done.returncode == 0 and done.stdout.split() == ["6.0", "6.0"], done
    assert "RuntimeError: the child fails" in done.stderr and "went on as that rank" in done.stderr


def run_operation(first):
    synk.fork(2, use_gpu=False, verify="off")
    x = tt.dvector("x")
    f = synk.function([x], (ForkIn(first)(x).sum(), "sum"))
    for _ in range(2):
        print(f(np.arange(4.0)))
    synk.close()


@own_process
def test_a_process_that_the_script_forks_leaves_the_workers_alone():
    synk.fork(2, use_gpu=False)
    x = tt.dvector("x")
    f = synk.function([x], (x.sum(), "sum"))
    synk.distribute()
    pid = os.fork()
    if not pid:
        with pytest.raises(synk.WorldBrokenError, match="was forked from the master"):
            f(np.ones(4))
        synk.close()
        time.sleep(0.1)
        os._exit(0)
    assert exit_code(os.waitpid(pid, 0)[1]) == 0
    assert f(np.ones(4)) == 4
    synk.close()
