"""Runs a program whose ranks print lines; prints the environment of each rank."""

import os
import sys

import synkhronos as synk


def program(rank):
    # What the first machine prints is passed on as it comes, so it would cut lines of the other.
    for line in range(300 if rank.rank > 1 else 0):
        print(rank.rank, line, "." * (line % 90), file=sys.stderr)
    sys.stdout.write(f"printed by {rank.rank}\n")
    return os.environ["OMPI_COMM_WORLD_RANK"], os.environ.get("OWN")


if __name__ == "__main__":
    n = synk.fork(use_gpu=False)
    sys.stderr.write("first\rsecond\n")
    sys.stderr.flush()
    print(n, synk.spmd(program), sys.argv[1:])
