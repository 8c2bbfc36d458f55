"""machines: all-reduces and calls on two machines joined by TCP, against OpenMPI between the same two.

The machines are network namespaces (``tests/support/namespaces.py``), which need root's rights. The
leaders' communicator and OpenMPI take turns in one job with a process per machine; two more jobs have
two ranks per machine, ours and OpenMPI's four processes, and each row is repeated with a limit of
1 Gbit/s. Another job, with two ranks and a progress process on each machine, waits.
"""

import ast
import functools
import os
import sys
import time
from multiprocessing.connection import Client, Listener
from pathlib import Path

import common
import waiting

sys.path.insert(0, str(common.ROOT / "tests" / "support"))

import numpy as np

BYTES = {"64 kB": 1 << 16, "5 MB": 5_000_000, "102 MB": 102_000_000}
TIMES = {"64 kB": (200, 10), "5 MB": (10, 2), "102 MB": (2, 1)}
GOALS = {"64 kB": 1.5, "5 MB": 1.0, "102 MB": 1.0}
LIMITED = "1gbit"
MESSAGES = 50  # sent one after the other


def main():
    if sys.argv[1:2] == ["--be"]:
        be(*sys.argv[2:])
    else:
        common.main(__doc__, measure, draw)


# Jobs: each is a contestant that sleeps until its turn


class MpiJob:
    """An MPI job on machines, whose first task does what it is asked."""

    def __init__(self, machines, kind, tasks=1, mpi=()):
        address = str(machines.folder / kind)
        with Listener(address, "AF_UNIX") as listener:
            plain, variables = kind in ("leaders", "flat"), common.ONE_THREAD
            if kind == "waiting":
                variables = {**variables, "SYNKHRONOS_SPARE_TASKS": "1"}
            paths = os.pathsep.join([str(common.ROOT), str(common.ROOT / "benchmarks")])
            self._job = machines.start(
                Path(__file__).resolve(), "--be", kind, address, tasks=tasks, plain=plain,
                environment={**variables, "PYTHONPATH": paths},
                # Shared memory between the processes of a machine.
                btl="vader,tcp,self" if kind == "flat" else "tcp,self", mpi=mpi,
            )  # fmt: skip
            self._connection = listener.accept()

    def __call__(self, *asked):
        self.ask(*asked)
        return self.answer()

    def ask(self, *asked):
        self._connection.send(asked)

    def answer(self):
        try:
            return self._connection.recv()
        except EOFError:
            raise RuntimeError(f"a job has ended: {self._job.wait(10).output}") from None

    def close(self):
        self._connection.send(None)
        self._job.wait(30).check()
        self._connection.close()


def be(kind, address):
    """Be a task of a job."""
    if kind in ("leaders", "flat"):
        import synkhronos  # noqa: F401  # keeps MPI from being initialized by an import

        return be_peers(address)
    connection = Client(address, "AF_UNIX")
    work = be_world(2 if kind == "call" else 4)
    while (asked := connection.recv()) is not None:
        connection.send(work(*asked))


def be_world(ranks):
    """Return what measures in a world."""
    import synkhronos as synk
    import theano
    import theano.tensor as tt
    from commands import RepeatAllReduce

    synk.fork(ranks, use_gpu=False)
    single = {size: theano.shared(np.ones(nbytes // 4, "float32")) for size, nbytes in BYTES.items()}
    x = tt.dvector("x")
    function = synk.function([x], (x.sum(), "sum"))
    synk.function([], sum(one[0] for one in single.values()))
    synk.distribute()
    rows = synk.data(np.ones(ranks))
    world = synk.world.world.current_world()

    def turn(what, size=None):
        if what == "call":
            return common.seconds_of(lambda: function(rows), 300, 10)
        if what == "idle":
            synk.spmd(sleep, 0.0)  # so that the progress processes have worked
            return time.sleep(size)
        if what == "program":
            return synk.spmd(sleep, size)
        synk.broadcast(single[size], np.zeros(BYTES[size] // 4, "float32"))
        command = RepeatAllReduce(world.registry.numbers[single[size]], *TIMES[size])
        return world.run(command)[world.master_rank][0]

    return turn


def sleep(rank, seconds):
    time.sleep(seconds)


def be_peers(address):
    """Be a task of plain MPI, or a leader: all do what the first one is asked."""
    from mpi4py import MPI

    from synkhronos.comms.linked import LinkedCommunicator
    from synkhronos.machines.leaders import REPLY, ControlMessage, Leaders
    from synkhronos.machines.mpi import MpiLinks, initialize

    initialize()
    comm = MPI.COMM_WORLD
    leaders = Leaders(MpiLinks(comm.Dup()))
    if comm.size > (os.cpu_count() or 1):  # the machines share the cores of this one
        leaders.begin_world(may_poll=False)
    ours = LinkedCommunicator(leaders)
    connection = Client(address, "AF_UNIX") if comm.rank == 0 else None
    arrays = {size: np.zeros(nbytes // 4, "float32") for size, nbytes in BYTES.items()}

    data = bytearray(8)

    def round_trip():
        for turn in range(2):
            if comm.rank == turn:
                comm.Send(data, 1 - turn)
            elif comm.rank == 1 - turn:
                comm.Recv(data, turn)

    def messages():
        letter = ControlMessage(leaders.number, leaders.first_number, b"a reply")
        if comm.rank < 2:
            for turn in range(2):
                for _ in range(MESSAGES):
                    if comm.rank == turn:
                        leaders.send(1 - turn, REPLY, letter)
                    else:
                        leaders.receive(turn, REPLY)

    @functools.lru_cache(maxsize=None)
    def array(nbytes):
        return np.zeros(nbytes // 4, "float32")

    def nonblocking(nbytes):
        request = comm.Iallreduce(MPI.IN_PLACE, array(nbytes), MPI.SUM)
        while not request.Test():
            pass

    calls = {
        # Of an array of so many bytes
        "reduce": lambda asked: ours.all_reduce([array(asked[0])], "sum"),
        "blocking": lambda asked: comm.Allreduce(MPI.IN_PLACE, array(asked[0]), MPI.SUM),
        "nonblocking": lambda asked: nonblocking(asked[0]),
        "message": lambda size: messages(),
        "ours": lambda size: ours.all_reduce([arrays[size]], "sum"),
        "mpi": lambda size: comm.Allreduce(MPI.IN_PLACE, arrays[size], MPI.SUM),
        "round trip": lambda size: round_trip(),
    }
    while True:
        asked = together(comm, connection.recv() if connection is not None else None)
        if asked is None:
            break
        what, size = asked
        leaders.begin(leaders.number + 1)
        call = functools.partial(calls[what], size)
        times = (10, 2) if what == "message" else TIMES.get(size, (300, 10))
        times = size[1] if isinstance(size, tuple) else times
        seconds = common.seconds_of(call, *times) / (MESSAGES if what == "message" else 1)
        if connection is not None:
            connection.send(seconds)
    MPI.Finalize()


def together(comm, asked):
    """Return what the first task has, on all of them, which sleep meanwhile."""
    length = np.array([len(repr(asked))])
    for array in (length, None):
        if array is None:
            array = np.zeros(length[0], "uint8")
            if comm.rank == 0:
                array[:] = np.frombuffer(repr(asked).encode(), "uint8")
        request = comm.Ibcast(array, 0)
        while not request.Test():
            time.sleep(2e-3)
    return ast.literal_eval(bytes(array).decode())


# The row


def measure(options):
    from namespaces import Machines, why_no_mpi, why_no_namespaces

    why_not = why_no_mpi() or why_no_namespaces()
    if why_not:
        raise SystemExit(f"machines: this row needs machines made of namespaces: {why_not}")
    rounds = 3 if options.quick else 11
    times, jobs = {}, {}
    with Machines(2) as machines:
        try:
            for kind in ("leaders", "call"):
                jobs[kind] = MpiJob(machines, kind)
            # While there are no other jobs, which do not use much of the cores between their turns, but
            # some.
            times.update(_take_turns_of_calls(jobs, rounds))
            jobs.pop("call").close()
            jobs["waiting"] = MpiJob(machines, "waiting", tasks=2)
            jobs["waiting"]("program", 0.0)  # the progress processes join the ranks
            waits = _take_turns_of_waits(machines, jobs["waiting"], rounds)
            jobs.pop("waiting").close()
            for kind, tasks in (("world", 1), ("flat", 2)):
                jobs[kind] = MpiJob(machines, kind, tasks)
            times.update(_take_turns(jobs, rounds, ""))
            sent = machines.sent_bytes(1)
            jobs["world"]("all-reduce", "102 MB")
            traffic = machines.sent_bytes(1) - sent
            machines.limit(LIMITED)
            times.update(_take_turns(jobs, max(rounds // 3, 2), ", 1 Gbit/s"))
        finally:
            for job in jobs.values():
                job.close()
    lines = [*_lines(times), *_lines_of_waits(waits)]
    return common.Result("two machines over TCP, float32", lines, _notes(rounds, traffic))


def _take_turns_of_calls(jobs, rounds):
    turns = {
        "round trip": lambda: jobs["leaders"]("round trip", None),
        "call": lambda: jobs["call"]("call"),
    }
    return common.take_turns(turns, rounds, "calls between machines")


def _take_turns_of_waits(machines, job, rounds):
    turns = {state: lambda state=state: waiting.shares(machines, job, state) for state in waiting.STATES}
    return common.take_turns(turns, max(rounds // 3, 2), "processes that wait")


def _take_turns(jobs, rounds, limit):
    turns = {}
    for size in BYTES:
        for what in ("ours", "mpi"):
            turns[what, size + limit] = lambda what=what, size=size: jobs["leaders"](what, size)
        turns["world", size + limit] = lambda size=size: jobs["world"]("all-reduce", size)
        turns["flat", size + limit] = lambda size=size: jobs["flat"]("mpi", size)
    return common.take_turns(turns, rounds, "machines")


def _lines(times):
    lines = []
    for limit in ("", ", 1 Gbit/s"):
        for size in BYTES:
            name = size + limit
            lines += [
                common.line(f"{name}: 2 leaders", "ms", times["ours", name], times["mpi", name],
                            "OpenMPI", at_most=GOALS[size]),
                common.line(f"{name}: OpenMPI, 2 processes", "ms", times["mpi", name]),
                common.line(f"{name}: 2 × 2 ranks", "ms", times["world", name], times["flat", name],
                            "flat", at_most=1),
                common.line(f"{name}: OpenMPI, 4 processes (flat)", "ms", times["flat", name]),
            ]  # fmt: skip
    lines.append(common.line("a round trip between two leaders", "µs", times["round trip"]))
    lines.append(common.line("a trivial call, 1 rank per machine", "µs", times["call"],
                             times["round trip"], "round trip", at_most=4))  # fmt: skip
    return lines


def _lines_of_waits(waits):
    lines = []
    for state, name in waiting.STATES.items():
        for role in waiting.ROLES:
            percent = [100 * one[role] for one in waits[state]]
            line = common.Line(f"{role}, {name}, of a core", "%", percent)
            line.goal, line.reached = "≤ 2", line.median <= 2
            lines.append(line)
    return lines


def _notes(rounds, traffic):
    times, _ = TIMES["102 MB"]
    return [
        f"{rounds} rounds, a third of them with the limit; the limit is tbf's, on what a machine sends.",
        "The two leaders and OpenMPI's two processes are the same processes.",
        f"2 × 2 ranks sent {traffic / 1e6:.0f} MB from one machine to the other for {times + 1} "
        f"all-reduces of 102 MB and a broadcast.",
    ]


def draw(figure, result):
    lines = [one for one in result["lines"] if one["ratio"] is not None and one["goal"]]
    axes = figure.add_subplot()
    common.bars_and_goals(axes, lines)
    axes.set_xlabel("time of Synkhronos, relative to what the table compares it with; at most the goal")


if __name__ == "__main__":
    main()
