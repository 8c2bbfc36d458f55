"""Prints on how many cores this process and each rank may run."""

import os

import synkhronos as synk


def program(rank):
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    before = len(os.sched_getaffinity(0))
    print(before, synk.fork(use_gpu=False), synk.spmd(program))
