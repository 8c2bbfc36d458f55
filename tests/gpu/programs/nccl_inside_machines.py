"""Reduce and broadcast arrays of devices by NCCL inside each machine, and by messages between leaders.

The arguments are the devices of two machines with two ranks each. The library itself lets NCCL connect
the ranks of all machines. Its communicators have one interface, so this program can join them otherwise.
"""

import sys

import numpy as np
import synkhronos as synk
from nccl_calls import calls_of

n = synk.fork(devices=sys.argv[1:])
import theano

LENGTH = 50_000  # numbers, which are more than the leaders' meeting has
w = theano.shared(np.zeros(LENGTH, "float32"), "w")
synk.function([], w.sum())
synk.distribute()


def reduce(rank):
    from synkhronos.comms.linked import LinkedCommunicator
    from synkhronos.comms.nccl import NcclCommunicator, join
    from synkhronos.comms.staged import StagedCommunicator
    from synkhronos.machines.communicator import MachinesCommunicator

    state = synk.world.world.current_world().rank_state
    transport, engine = state.transport, state.engine
    staging = state.store, engine.read, engine.to_device, engine.overwrite
    group = transport._here
    near = StagedCommunicator(transport.near_communicator(group), *staging)
    local = join(near, engine.context, engine.arithmetic)
    assert type(local) is NcclCommunicator and local.size == 2
    between = StagedCommunicator(LinkedCommunicator(transport.leaders), *staging)
    comm = MachinesCommunicator(
        transport, local, between, transport.local.master_rank, transport._machines
    )

    def own():
        return engine.to_device(np.arange(LENGTH, dtype="float32") + 10 * rank.rank)

    found = []
    for op, weight in (("sum", 1), ("avg", rank.rank + 1), ("max", 1)):
        [reduced] = comm.all_reduce([own()], op, weight)
        assert type(reduced) is type(own())
        found.append(np.array(reduced))
    [received] = comm.broadcast([own()], rank.size - 1)
    assert type(received) is type(own())
    return [*found, np.array(received)]


outcomes = []
made = calls_of(lambda: outcomes.extend(synk.spmd(reduce)))
reduced = [int(items) for name, items in made if name == "reduce"]
# By NCCL, on the first rank of each machine, and no all-reduce by NCCL
assert reduced == [LENGTH] * 3 * 2, made
assert "all_reduce" not in [name for name, items in made if int(items) >= LENGTH], made
numbers = np.arange(LENGTH)
offsets = 10 * np.arange(n)
wanted = [
    n * numbers + offsets.sum(),
    numbers + np.average(offsets, weights=np.arange(n) + 1),
    numbers + offsets[-1],
    numbers + offsets[-1],
]
for values in outcomes:
    for value, expected in zip(values, wanted):
        np.testing.assert_allclose(value, expected, rtol=1e-5)
print("reduced on two levels")
