"""Four ranks on two machines; one on each machine is killed in a program and replaced."""

import os
import signal

import numpy as np
import synkhronos as synk
from compilers import RandomStreams, compiler, tt

KILLED, STEPS = (1, 3), 20


def program(rank, count, draw):
    center = rank.center(count)
    for step in range(rank.clock, STEPS):
        count.set_value(count.get_value() + 1)
        center.push()
        rank.clock = step + 1
        if rank.rank in KILLED and step == 5 and not rank.restarts:
            os.kill(os.getpid(), signal.SIGKILL)
    rank.send(0, np.array(rank.rank))
    rank.wait_for_clocks(STEPS)
    received = sorted(int(rank.receive(wait=True)[1]) for _ in range(4 if rank.is_master else 0))
    center.pull()
    return rank.restarts, received, int(count.get_value()[1]), float(rank.call(draw))


def main():
    synk.fork(4, use_gpu=False, timeout=20)
    count = compiler.shared(np.zeros(300_000, "int64"), "count")
    scale = tt.dscalar("scale")
    draw = synk.function([], (RandomStreams(1).uniform(), "gather"), bcast_inputs=[])
    synk.function([scale], (count.sum() * scale, "sum"))
    synk.distribute()
    for _ in range(2):
        synk.broadcast(count, np.zeros(300_000, "int64"))
        results = synk.spmd(program, count, draw, on_death="continue")
        assert [one[0] for one in results] == [0, 1, 0, 1], results
        assert results[0][1] == [0, 1, 2, 3], results
        assert [one[2] for one in results] == [4 * STEPS] * 4, results
        assert len({one[3] for one in results}) == 4, results
    assert sorted(synk.spmd(lambda rank: rank.exchange(rank.rank)[::-1])[3]) == [0, 1, 2, 3]
    print("replaced")


if __name__ == "__main__":
    main()
