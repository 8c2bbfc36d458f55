"""Starts as many ranks as its argument says, and kills the last one in a program."""

import os
import signal
import sys

import synkhronos as synk


def program(rank):
    if rank.rank == rank.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    rank.barrier()


if __name__ == "__main__":
    synk.fork(int(sys.argv[1]), use_gpu=False)
    synk.spmd(program)
