"""Time the same work in turns: of Theano untouched, of one process at its best, and of all processes.

The first two run in processes of their own, which this file starts: ``python comparison.py SCRIPT KIND
DEVICE ...``. The script's function ``alone(kind, *arguments)`` prepares the work there. A process sleeps
until its turn.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ENVIRONMENT = dict(os.environ)  # before fork() limits the threads of processes that are started later

import script
from synkhronos.host.machine import affinity
from synkhronos.host.machine import OtherPrograms
from synkhronos.world.devices import choose_devices
from threadpoolctl import threadpool_info, threadpool_limits

THEANO, ONE, ALL = "theano", "one", "all"
NAMES = {THEANO: "Theano untouched", ONE: "one process"}
GUIDE = "docs/performance.rst"
CLEAR = 1.3  # a speedup below this is explained
DISTURBED = 0.1  # the share of the cores from which on other programs make a difference


class Times(NamedTuple):
    """The least seconds of each contestant, the BLAS threads of each process, and the circumstances."""

    seconds: dict
    threads: dict
    turns: int
    cores: int
    others: float  # cores that other programs used meanwhile

    def speedup(self, kind):
        """Return how many times as fast as this contestant all processes were."""
        return self.seconds[kind] / self.seconds[ALL]

    @property
    def is_disturbed(self):
        """Whether other programs used cores, which slows down some contestants more than others."""
        return self.others >= DISTURBED * self.cores


class SerialRank:
    """A process that does the work without workers.

    Parameters
    ----------
    file : path
        The script whose function ``alone`` prepares the work.
    kind : {"theano", "one"}
    device : str
    *arguments : str
        For the function.
    """

    def __init__(self, file, kind, device, *arguments):
        command = [sys.executable, __file__, str(file), kind, device, *map(str, arguments)]
        variables = {**ENVIRONMENT, "SYNKHRONOS_PROGRESS": "0"}  # this process shows it
        if kind == THEANO:
            flags = filter(None, [ENVIRONMENT.get("THEANO_FLAGS"), f"device={device}"])
            # Without what `import synkhronos` changes besides making Theano importable
            variables.update(SYNKHRONOS_KEEP_MEMORY="0", THEANO_FLAGS=",".join(flags))
        self._kind = kind
        self._process = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the script, which ends it
        )

    def answer(self):
        """Wait for the next answer: the number of threads, and then the seconds of each turn."""
        line = self._process.stdout.readline()
        if not line:
            raise script.UserError(f"the process to compare with ({self._kind}) ended, see above")
        return json.loads(line)

    def turn(self):
        """Do the work once; return its seconds."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.answer()

    def end(self):
        """End the process."""
        self._process.kill()
        self._process.communicate()


def compare(file, arguments, work, turns, compiling, devices=None):
    """Return the `Times` of some turns, after one to warm up.

    Parameters
    ----------
    file : path
        The script whose function ``alone`` prepares the work in a process of its own.
    arguments : list of str
        For the function.
    work : callable
        Does the work on all processes.
    turns : int
    compiling : script.Compiling
    devices : list of str, optional
        As for `synk.fork`.
    """
    device = choose_devices(1, None, devices and devices[:1])[0]
    alone, threads = {}, {}
    try:
        for kind in (THEANO, ONE) if device == "cpu" else (THEANO,):
            with compiling(NAMES[kind]):
                alone[kind] = SerialRank(file, kind, device, *arguments)
                threads[kind] = alone[kind].answer()
        contestants = {kind: one.turn for kind, one in alone.items()}
        contestants[ALL], threads[ALL] = lambda: seconds_of(work), blas_threads()
        others, taken = OtherPrograms(), {kind: [] for kind in contestants}
        for number in range(1 + turns):
            start = time.perf_counter()
            for kind, turn in contestants.items():
                taken[kind].append(turn())
            if number == 0:
                script.tell(f"timing {turns} turns, {turns * (time.perf_counter() - start):.0f} s")
        used = others.cores()
    finally:
        for one in alone.values():
            one.end()
    # The first turn of each is a warm-up.
    least = {kind: min(seconds[1:]) for kind, seconds in taken.items()}
    return Times(least, threads, turns, affinity(), used)


def describe(times, processes, work):
    """Return lines with the speedups, and with the reason if they are small."""
    lines = [
        f"{processes} processes are {times.speedup(THEANO):.2f} times as fast as Theano untouched "
        f"({threads(times, THEANO)})"
    ]
    if times.is_disturbed:
        lines = ["not measured, as other programs used the cores, too; run it again when they do not"]
    elif ONE in times.seconds:
        lines[0] += ","
        lines.append(
            f"and {times.speedup(ONE):.2f} times as fast as the best setting of one process "
            f"({threads(times, ONE)})"
        )
    seconds = ", ".join(f"{one:.3f}" for one in (times.seconds[ALL], *list(times.seconds.values())[:-1]))
    lines.append(f"Seconds for {work}: {seconds}; the least of {times.turns} in turns")
    lines.append(f"Other programs used {times.others:.1f} of {times.cores} cores meanwhile")
    if not times.is_disturbed and min(map(times.speedup, list(times.seconds)[:-1])) < CLEAR:
        lines.append(f"Why not faster: {reason(times, processes)}; see {GUIDE}")
    return lines


def threads(times, kind):
    number = times.threads[kind]
    return f"{number} BLAS thread{'s' * (number > 1)}"


def reason(times, processes):
    """Return why the processes are hardly faster, as far as this can be measured."""
    if processes > times.cores:
        return f"{processes} processes share {times.cores} core(s)"
    return "the steps are short, or limited by the memory; larger batches or networks gain more"


def blas_threads():
    """Return the number of BLAS threads of this process."""
    pools = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    return max(pools, default=1)


def seconds_of(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def choose_threads(work):
    """Set the number of BLAS threads, one or all, with which the work takes less time; return it."""
    choices = {}
    work()  # to warm up
    for number in sorted({1, blas_threads()}, reverse=True):
        with threadpool_limits(number, "blas"):
            choices[min(seconds_of(work) for _ in range(2))] = number
    fastest = choices[min(choices)]
    threadpool_limits(fastest, "blas")
    return fastest


def main():
    file, kind, device, *arguments = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # what the script prints is no answer
    sys.path.insert(0, str(Path(file).parent))
    module = importlib.import_module(Path(file).stem)
    if kind == ONE:
        script.fork(devices=[device])
    work = module.alone(kind, *arguments)
    print(choose_threads(work) if kind == ONE else blas_threads(), file=answers, flush=True)
    for _ in sys.stdin:
        print(seconds_of(work), file=answers, flush=True)


if __name__ == "__main__":
    script.run(main)
