"""Runs the conformance checks between the leaders of an MPI job: each task is or leads a machine.

The arguments are the master's rank, a folder, and which checks to run, by default all. A JSON file in
the folder then has the traceback of each check, or null.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import synkhronos  # noqa: F401  # sets up MPI
from checks import communicators, links, stores, transports, wires
from checks.ranks import Ranks

from synkhronos._errors import WorldBrokenError
from synkhronos.arithmetic.machines import ranks_of_machines
from synkhronos.transports.local import LocalTransport
from synkhronos.machines import mpi
from synkhronos.machines.leaders import Leaders
from synkhronos.machines.mpi import Tasks, abort
from synkhronos.machines.transport import MachinesTransport

mpi._CHUNK = 1 << 20  # the checks have longer messages
SIZES = [2, 2, 1, 1, 2, 1, 1, 1]  # of the first machines, as many as there are


def communicator_of(transport):
    return transport.communicator()


def itself(transport):
    return transport


def transport_of(leaders, master):
    """Return the transport of this machine's leader, not started yet."""
    machines = ranks_of_machines(SIZES[: leaders.size], master)
    own = machines[leaders.rank]
    first = own.index(master) if leaders.rank == 0 else 0
    leaders.begin(leaders.number + 1)
    local = LocalTransport(len(own), first, 60, labels=own)
    return MachinesTransport(local, leaders, machines, master, 60)


def run(leaders, master, checks, make, folder, results):
    """Run checks in a world of their own."""
    ranks = Ranks(transport_of(leaders, master), make)
    if leaders.rank:
        try:
            ranks.serve(ranks.transport)
        except WorldBrokenError:
            pass
        return ranks.transport.close(5)
    for check in checks:
        wants_path = "path" in check.__code__.co_varnames[: check.__code__.co_argcount]
        results[name_of(check)] = attempt(check, ranks, *[folder / "array"] * wants_path)
    ranks.close()


def attempt(check, *args):
    """Return None if a check passes, else the traceback."""
    try:
        check(*args)
    except Exception:
        return traceback.format_exc()


def name_of(check):
    return f"{check.__module__.split('.')[-1]}: {check.__name__[len('check_') :]}"


def main(master, folder, only):
    tasks = Tasks(int(os.environ.get("SYNKHRONOS_TASKS_ARE_MACHINES", 0)))
    results, began = {}, time.monotonic()
    for check in links.CHECKS:
        results[name_of(check)] = failed = attempt(check, tasks.links)
        if failed:
            print(f"leader {tasks.links.rank}: {failed}", flush=True)
            abort()  # the other leaders wait for this one
    leaders = Leaders(tasks.links)
    kinds = (transports, itself), (stores, itself), (communicators, communicator_of)
    for module, make in (*kinds, (wires, communicator_of)):
        if not only or module.__name__.split(".")[-1] in only:
            checks = [one for one in module.CHECKS if "read_as_it_is" not in one.__name__]
            run(leaders, master, checks, make, folder, results)
    if leaders.rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    print(f"leader {leaders.rank}: {time.monotonic() - began:.1f} s", flush=True)
    tasks.finish()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
