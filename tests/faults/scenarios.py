"""The scenarios: which fault occurs, and what is expected of the library, as a pure function of a seed.

Consecutive seeds go through all pairs of a kind of fault and a place, because the numbers of kinds and
of places have no common factor. Everything else about a scenario is drawn at random from the seed.

Seeds from ``PROGRAMS`` on are faults in a program of `spmd`.
"""

import random
from dataclasses import dataclass

BOUND = 2.0  # seconds within which the other ranks must detect a death
BOUND_OF_STOP = 5.0  # seconds within which they must detect a stopped rank
TIMEOUT = 1.5  # of fork(), if a rank stops: far longer than any step, far below BOUND_OF_STOP

# The steps of the script, in order.
STEPS = (
    "distribute", "distribute again", "function", "fused", "broadcast", "gather", "scatter",
    "all_gather", "reduce", "all_reduce", "set_value", "get_value", "close",
)  # fmt: skip
COMMANDS = STEPS[1:-1]  # steps that consist of one command, in a world whose workers are started
PROGRAM = "program"  # the step that is a program

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
PROGRAMS = 100_000  # the first seed of a fault in a program
PROGRAM_PLACES = (
    (PROGRAM, "started"),  # before the program
    (PROGRAM, "code"),  # in its own code
    (PROGRAM, "perform"),  # inside a Theano function, in `rank.call`
    (PROGRAM, "barrier"),  # inside a collective
    (PROGRAM, "directory"),  # while an array of the named memory is made, with the lock of the directory
    (PROGRAM, "pull"),  # with the lock of a stripe
    (PROGRAM, "push"),
    (PROGRAM, "elastic"),
    (PROGRAM, "send"),  # with the lock of a slot, while a message is copied, and after that
    (PROGRAM, "receive"),
    (PROGRAM, "box"),  # with the lock of a mailbox
    (PROGRAM, "ask"),  # while the question is written, or while the rank waits for the answer
    (PROGRAM, "controller"),  # in the controller itself
    (PROGRAM, "reply"),  # before the result is written, or after that but before the master knows
    (PROGRAM, "fork"),  # of the rank that takes the place of a dead one
    (PROGRAM, "moment"),
)
# Seams where an exception is raised inside a command
INSIDE = ("command", "perform", "barrier", "code", "directory", "pull", "push", "elastic", "send",
          "receive", "box", "ask")  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """One fault."""

    seed: int
    size: int
    master_rank: int
    rank: int  # in which the fault occurs; `size` is the controller of a program
    how: str  # one of HOWS
    step: str
    seam: str
    turn: int  # within the seam: which barrier, before or after the call, or how much is written
    others: (
        str  # "", "busy" in a C call that holds the interpreter lock, "stopped" or "killed" by a signal
    )
    in_thread: bool  # whether the workers are forked by a thread that ends before the fault
    caught: bool  # whether the script catches an exception in the master and continues
    delay: float  # seconds until the fault, if it occurs at a random moment
    restarts: bool  # whether the script calls restart() before it closes the world and opens another one
    on_death: str = "raise"  # of the program
    meets: bool = False  # whether the program has collectives
    again: bool = False  # whether the rank that takes the place of a dead one dies at the same place
    round: int = 0  # of the program, in which the fault occurs

    @property
    def of_program(self):
        return self.seed >= PROGRAMS

    @property
    def of_controller(self):
        return self.rank == self.size

    @property
    def of_master(self):
        return self.rank == self.master_rank

    @property
    def timeout(self):
        if self.of_program and self.of_master:
            return None  # or the others would end their waits while it is stopped
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
        """Descriptions; a `WorldBrokenError` about a worker must contain at least one."""
        if self.how in EXCEPTIONS:
            return ("exit code 1",)
        return (f"exit code {EXIT_CODE}",) if self.how == "exit" else (SIGNALS[self.how],)

    @property
    def is_survived(self):
        """Whether the ranks of a program go on, with a fresh one, or as the stopped one continues."""
        if self.how == "stop":
            return self.of_master
        dies = self.kills or self.seam in ("started", "reply", "fork")
        # A reply for which there is too little memory is replaced by an error.
        dies = dies and (self.how, self.seam, self.turn) != ("memory", "reply", 0)
        return dies and self.on_death == "continue" and not self.of_master and not self.of_controller

    @property
    def times(self):
        """How often the fault occurs; before the one in a fork in a program, the rank is killed."""
        return 1 + self.again + (self.of_program and self.seam == "fork")

    @property
    def deaths(self):
        """How often ranks of a program die that are replaced, by rank."""
        deaths = [0] * self.size
        if self.is_survived and not self.of_master:
            deaths[self.rank] = self.times
            if self.others == "killed":
                for rank in range(self.size):
                    deaths[rank] += rank not in (self.rank, self.master_rank)
        return deaths

    @property
    def who(self):
        return "master" if self.of_master else "controller" if self.of_controller else "worker"

    def __str__(self):
        who = self.who
        others = f", others {self.others}" if self.others else ""
        thread = ", forked in a thread" if self.in_thread else ""
        caught = ", uncaught" if self.of_master and not self.caught else ""
        restarts = ", restart" if self.restarts else ""
        if self.of_program:
            caught += f", {self.on_death}" + ", meets" * self.meets + ", again" * self.again
            caught += f", round {self.round}"
        return (
            f"seed {self.seed}: {who} (rank {self.rank} of {self.size}), {self.how}, "
            f"{self.step}/{self.seam}{self.turn}{others}{thread}{caught}{restarts}"
        )


def place_of(seed):
    """Return the step and the seam for a seed."""
    places = PROGRAM_PLACES if seed >= PROGRAMS else PLACES
    return places[seed % len(places)]


def scenario(seed):
    """Return the scenario for a seed."""
    draw = random.Random(seed)
    if seed >= PROGRAMS:
        return _in_program(seed, draw)
    how = HOWS[seed % len(HOWS)]
    step, seam = place_of(seed)
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
        seed, size, master_rank, rank, how, step, seam, draw.randrange(2), others,
        in_thread=draw.random() < 0.3,
        caught=not (of_master and how in EXCEPTIONS) or draw.random() < 0.7,
        delay=draw.uniform(0, 0.1), restarts=draw.random() < 0.5,
    )  # fmt: skip


def _in_program(seed, draw):
    how = HOWS[seed % len(HOWS)]
    step, seam = place_of(seed)
    size = draw.choice((2, 2, 3))
    master_rank = draw.randrange(size)
    worker = draw.choice([rank for rank in range(size) if rank != master_rank])
    of_master = draw.random() < 0.35 and seam not in ("fork", "controller")
    on_death = "raise" if seam == "barrier" or draw.random() < 0.4 else "continue"
    if seam == "fork":
        on_death = "continue"
    again = others = ""
    if on_death == "continue" and not of_master and how not in (*EXCEPTIONS, "stop"):
        if seam not in ("moment", "fork", "controller"):
            again = draw.random() < 0.25
            others = "killed" if size > 2 and not again and draw.random() < 0.5 else ""
    rank = size if seam == "controller" else master_rank if of_master else worker
    return Scenario(
        seed, size, master_rank, rank, how, step, seam, draw.randrange(2), others, in_thread=False,
        caught=not (of_master and how in EXCEPTIONS) or draw.random() < 0.7,
        delay=draw.uniform(0, 0.1), restarts=draw.random() < 0.5, on_death=on_death,
        meets=on_death == "raise" and (seam == "barrier" or draw.random() < 0.4),
        again=bool(again),
        round=0 if seam in ("directory", "started", "reply", "fork") else draw.randrange(3),
    )  # fmt: skip


def first(seeds, fault):
    """Return the first seed whose scenario has the given attributes."""
    wanted = fault.items()
    return next(one for one in seeds if all(getattr(scenario(one), k) == v for k, v in wanted))
