"""ask: a question to the controller, against a round trip over pipes, alone and while all ranks compute.

Two ranks compute for 100 ms each, and then ask, again and again. The controller has to get a core from a
rank that computes, and neither finds much of its code in the caches. So does the process at the other
end of the pipes, which returns a byte for a byte.
"""

import json
import os
import time
from pathlib import Path

import common
from common import COLOURS, ONE_THREAD, Contestant, Line, line

import numpy as np

RANKS = 2
QUESTIONS = {"alone": 200, "computing": 20}  # of a rank, in a turn
STEP = 0.1  # seconds
GOAL = 1e-3
IDLE_SECONDS = 2.0


def main():
    common.main(__doc__, measure, draw)


def question_times(rank, load, ask):
    """Return the seconds of each question of a rank. Without a load, only the first one asks."""
    matrix = np.ones((256, 256), "float32")
    product = matrix.copy()
    seconds = []
    for _ in range(QUESTIONS[load]):
        if load == "computing":
            until = time.perf_counter() + STEP
            while time.perf_counter() < until:
                np.dot(matrix, matrix, product)
        elif rank:
            break
        began = time.perf_counter()
        ask()
        seconds.append(time.perf_counter() - began)
    return seconds


# Contestants


def pipes():
    """Processes that ask a further one over pipes."""
    asked, asking = os.pipe()
    answers = [os.pipe() for _ in range(RANKS)]
    other = os.fork()
    if not other:
        while True:  # until it is killed
            os.write(answers[os.read(asked, 1)[0]][1], b"0")

    def work(rank, load):
        def ask():
            os.write(asking, bytes([rank]))
            os.read(answers[rank][0], 1)

        return question_times(rank, load, ask)

    def turn(load):
        result, own_end = os.pipe()
        child = os.fork()
        if not child:
            os.write(own_end, json.dumps(work(1, load)).encode())
            os._exit(0)
        seconds = work(0, load) + json.loads(os.read(result, 1 << 16))
        os.waitpid(child, 0)
        os.close(result)
        os.close(own_end)
        return seconds

    yield turn
    os.kill(other, 9)
    os.waitpid(other, 0)


def program():
    """Ranks that ask their controller."""
    import synkhronos as synk

    common.fork(RANKS)
    synk.distribute()

    def turn(load):
        work = idle if load == "idle" else steps
        return sum(synk.spmd(work, load, controller=answer), [])

    yield turn
    synk.close()


def answer(request, rank, info):
    return os.getpid()


def steps(rank, load):
    return question_times(rank.rank, load, lambda: rank.ask(0))


def idle(rank, load):
    """Return the part of a core that the controller uses while nobody asks."""
    pid = rank.ask("pid")
    rank.barrier()
    if not rank.is_master:
        return []
    time.sleep(0.1)
    before = _cpu_seconds(pid)
    time.sleep(IDLE_SECONDS)
    return [(_cpu_seconds(pid) - before) / IDLE_SECONDS]


def _cpu_seconds(pid):
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


# The row


def measure(options):
    rounds = 3 if options.quick else 15
    with common.contestants(
        pipes=Contestant(pipes, environment=ONE_THREAD), ask=Contestant(program, environment=ONE_THREAD)
    ) as players:
        turns = {
            (name, load): lambda name=name, load=load: players[name](load)
            for load in QUESTIONS
            for name in ("pipes", "ask")
        }
        taken = common.take_turns(turns, rounds, "questions")
        idle_parts = [100 * players["ask"]("idle")[0] for _ in range(2 if options.quick else 5)]
    lines = []
    for load in QUESTIONS:
        for percent in (50, 90) if load == "computing" else (50,):
            which = "" if percent == 50 else f", {percent}% are faster"
            trip, asked = (
                np.array([np.percentile(one, percent) for one in taken[name, load]])
                for name in ("pipes", "ask")
            )
            lines.append(line(f"{load}: round trip over pipes{which}", "ms", trip))
            lines.append(line(f"{load}: rank.ask(){which}", "ms", asked, trip, "pipes"))
    question = next(one for one in lines if one.what == "computing: rank.ask()")
    question.goal, question.reached = f"< {1e3 * GOAL:g} ms", question.median < 1e3 * GOAL
    lines.append(
        Line("controller's CPU while idle", "%", idle_parts, goal="0", reached=max(idle_parts) == 0)
    )
    notes = [
        f"alone: one of {RANKS} ranks asks {QUESTIONS['alone']} times in a turn, and the others sleep; "
        f"computing: both compute products of matrices for {1e3 * STEP:g} ms before each of "
        f"{QUESTIONS['computing']} questions; {rounds} turns each, of which the median counts",
        f"idle: processor time over {IDLE_SECONDS:g} s by the kernel's account",
    ]
    title = f"a question to the controller, {RANKS} ranks on {len(os.sched_getaffinity(0))} cores"
    return common.Result(title, lines, notes)


def draw(figure, record):
    axes = figure.subplots()
    labels = {
        f"{load}: {what}": f"{load},\n{what}"
        for load in QUESTIONS
        for what in ("round trip over pipes", "rank.ask()")
    }
    lines = [common.find(record, name) for name in labels]
    colours = [COLOURS["other"], COLOURS["synk"]] * 2
    common.bars(axes, lines, list(labels.values()), colours, "ms")
    axes.set_xlim(0, 1.1 * max(1e3 * GOAL, axes.get_xlim()[1]))
    common.mark_goal(axes, 1e3 * GOAL, 0, f"goal {1e3 * GOAL:g} ms")
    axes.set_title("A question to the controller")


if __name__ == "__main__":
    main()
