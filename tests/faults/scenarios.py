"""The scenarios: which fault occurs, and what is expected of the library, as a pure function of a seed.

Consecutive seeds go through all pairs of a kind of fault and a place, because the numbers of kinds and
of places have no common factor. Everything else about a scenario is drawn at random from the seed.
"""

import random
from dataclasses import dataclass

BOUND = 2.0  # seconds within which the other ranks must detect a death
BOUND_OF_STOP = 5.0  # seconds within which they must detect a stopped rank
TIMEOUT = 1.5  # of fork(), if a rank stops: far longer than any step, far below BOUND_OF_STOP

# The steps of the script, in order.
STEPS = (
    "distribute",
    "distribute again",
    "function",
    "fused",
    "broadcast",
    "gather",
    "scatter",
    "all_gather",
    "reduce",
    "all_reduce",
    "set_value",
    "get_value",
    "close",
)
COMMANDS = STEPS[1:-1]  # steps that consist of one command, in a world whose workers are started

SIGNALS = {"SIGKILL": "SIGKILL", "SIGTERM": "SIGTERM", "SIGSEGV": "SIGSEGV", "stop": "SIGSTOP"}
EXCEPTIONS = ("exception", "memory")  # raise an exception; this alone does not end the process
HOWS = (*EXCEPTIONS, "SIGKILL", "SIGTERM", "SIGSEGV", "exit", "stop")
EXIT_CODE = 7

# A place is a step, and a seam of the library within it. The step "" stands for any of COMMANDS.
PLACES = (
    ("distribute", "fork"),  # worker: immediately after the fork; master: between two forks
    ("distribute", "command"),  # replication by inheritance ...
    ("distribute again", "command"),  # ... and by a pickle
    ("", "idle"),  # before the start barrier
    ("", "started"),  # after it, before the command
    ("function", "perform"),  # inside a Theano function
    ("", "reply"),  # while the worker writes its result, or the master collects them
    ("broadcast", "barrier"),  # inside a collective, which has two barriers
    ("gather", "barrier"),
    ("all_gather", "barrier"),
    ("reduce", "barrier"),
    ("all_reduce", "barrier"),
    ("fused", "barrier"),
    ("scatter", "command"),
    ("set_value", "command"),
    ("get_value", "command"),
    ("close", "close"),
    ("any", "moment"),  # at a random moment, triggered from outside
)
INSIDE = ("command", "perform", "barrier")  # seams where an exception is raised inside a command


@dataclass(frozen=True)
class Scenario:
    """One fault.

    Attributes
    ----------
    seed, size, master_rank : int
    rank : int
        The rank in which the fault occurs.
    how : str
        The kind of fault, one of ``HOWS``.
    step, seam : str
        The place of the fault.
    turn : int
        The moment within the seam: which barrier, before or after the call, or how much is written.
    others : {"", "busy", "stopped"}
        The state of the other workers: "busy" in a long C call that holds the interpreter lock, or
        "stopped" by a signal.
    in_thread : bool
        Whether the workers are forked by a thread that ends before the fault.
    caught : bool
        Whether the script catches an exception in the master and continues.
    delay : float
        Seconds until the fault, if it occurs at a random moment.
    restarts : bool
        Whether the script calls ``restart()`` before it closes the world and opens another one.
    """

    seed: int
    size: int
    master_rank: int
    rank: int
    how: str
    step: str
    seam: str
    turn: int
    others: str
    in_thread: bool
    caught: bool
    delay: float
    restarts: bool

    @property
    def of_master(self):
        return self.rank == self.master_rank

    @property
    def place(self):
        step, seam = PLACES[self.seed % len(PLACES)]
        return f"{step or 'any command'}: {seam}"

    @property
    def timeout(self):
        return TIMEOUT if self.how == "stop" else None

    @property
    def bound(self):
        stopped_as_it_closes = self.seam == "close" and self.others == "stopped"
        return BOUND_OF_STOP if self.how == "stop" or stopped_as_it_closes else BOUND

    @property
    def is_inside(self):
        return self.seam in INSIDE

    @property
    def kills(self):
        """Whether the fault ends the process immediately."""
        return self.how not in (*EXCEPTIONS, "stop")

    @property
    def causes(self):
        """Descriptions of which a `WorldBrokenError` about a worker must contain at least one."""
        if self.how in EXCEPTIONS:
            return ("exit code 1",)
        return (f"exit code {EXIT_CODE}",) if self.how == "exit" else (SIGNALS[self.how],)

    def __str__(self):
        who = "master" if self.of_master else "worker"
        others = f", others {self.others}" if self.others else ""
        thread = ", forked in a thread" if self.in_thread else ""
        caught = ", uncaught" if self.of_master and not self.caught else ""
        restarts = ", restart" if self.restarts else ""
        return (
            f"seed {self.seed}: {who} (rank {self.rank} of {self.size}), {self.how}, "
            f"{self.step}/{self.seam}{self.turn}{others}{thread}{caught}{restarts}"
        )


def scenario(seed):
    """Return the scenario for a seed."""
    how = HOWS[seed % len(HOWS)]
    step, seam = PLACES[seed % len(PLACES)]
    draw = random.Random(seed)
    size = draw.choice((2, 3, 3, 4))
    master_rank = draw.randrange(size)
    of_master = draw.random() < 0.4
    workers = [rank for rank in range(size) if rank != master_rank]
    rank = master_rank if of_master else draw.choice(workers)
    step = step or draw.choice(COMMANDS)
    others = ""
    if how not in EXCEPTIONS and size > 2 and seam != "moment" and draw.random() < 0.5:
        choices = ["stopped"] if (how != "stop" or of_master) and seam != "fork" else []
        if step == "function" and how != "stop":
            choices.append("busy")
        others = draw.choice(choices or [""])
    return Scenario(
        seed=seed,
        size=size,
        master_rank=master_rank,
        rank=rank,
        how=how,
        step=step,
        seam=seam,
        turn=draw.randrange(2),
        others=others,
        in_thread=draw.random() < 0.3,
        caught=not (of_master and how in EXCEPTIONS) or draw.random() < 0.7,
        delay=draw.uniform(0, 0.1),
        restarts=draw.random() < 0.5,
    )
