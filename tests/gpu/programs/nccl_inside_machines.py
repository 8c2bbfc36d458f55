"""Reduce and broadcast arrays of devices by NCCL inside each machine, and by MPI between the leaders.

The arguments are the devices. There are two machines with two ranks each. Nothing in the library joins
these two yet: NCCL connects the ranks of all machines. The communicators have the same interface, so
this program joins them.
"""

import sys

import numpy as np
import synkhronos as synk
from nccl_calls import calls_of

n = synk.fork(devices=sys.argv[1:])
import theano

from synkhronos.comms.linked import LinkedCommunicator
from synkhronos.comms.nccl import join
from synkhronos.comms.staged import StagedCommunicator
from synkhronos.machines.communicator import MachinesCommunicator

LENGTH = 50_000


class Hierarchical:
    """A command."""

    def run(self, here):
        transport, engine = here.transport, here.engine
        staging = here.store, engine.read, engine.to_device, engine.overwrite
        group = transport._meetings.group
        near = StagedCommunicator(transport.near_communicator(group), *staging)
        local = join(near, engine.context, engine.arithmetic)
        between = StagedCommunicator(LinkedCommunicator(transport.leaders), *staging)
        comm = MachinesCommunicator(
            transport, local, between, transport.local.master_rank, transport._machines
        )
        own = engine.to_device(np.arange(LENGTH, dtype="float32") + comm.rank)
        is_own = type(own)
        found = []
        for op, weight in (("sum", 1), ("avg", comm.rank + 1), ("max", 1)):
            [reduced] = comm.all_reduce([own.copy()], op, weight)
            assert type(reduced) is is_own
            found.append(np.asarray(reduced))
        [received] = comm.broadcast([own.copy()], comm.size - 1)
        assert type(received) is is_own
        return [*found, np.asarray(received)]
