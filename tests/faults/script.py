"""The program under test. It forks one process per seed, in which the fault occurs.

``python script.py LIMIT SEED...`` prints one line of JSON per seed. Each scenario may take LIMIT
seconds. The forked process plays a user's script: it opens a world, works until the fault, and, if it
survives, closes the world and opens another one. The parent process watches it, and adopts the
processes that it leaves behind.
"""

import ctypes
import faulthandler
import gc
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import synkhronos as synk
import numpy as np
import psutil
import theano
import theano.tensor as T
from injector import Board, Fault, Injector, Point
from scenarios import (
    BOUND,
    COMMANDS,
    EXCEPTIONS,
    EXIT_CODE,
    SIGNALS,
    STEPS,
    TIMEOUT,
    scenario,
)

FADES = 3.0  # seconds until an exception at a random moment counts as swallowed, e.g. in a destructor
_PR_SET_CHILD_SUBREAPER = 36


class Ranks:
    """A world, and the steps of the script. Each step checks its result."""

    def __init__(self, fault):
        self.size, self.in_thread = fault.size, fault.in_thread
        synk.fork(fault.size, use_gpu=False, master_rank=fault.master_rank, timeout=fault.timeout)
        self.values = np.arange(6.0)
        self.x = T.dvector("x")
        self.w = theano.shared(self.values, name="w")
        self.rows = theano.shared(np.zeros(1), name="rows")
        self.inputs = np.arange(2.0 * self.size)
        total = self.w.sum() + 0 * self.rows.sum()
        self.f = self.compiled(Point()(self.x) * 2, "gather", (total, "sum"))

    def compiled(self, output, op, *others):
        return synk.function([self.x], [(output, op), *others], mode="FAST_COMPILE")

    def do(self, step):
        getattr(self, step.replace(" ", "_"))()

    def distribute(self):
        if not self.in_thread:
            return synk.distribute()
        errors = []

        def attempt():
            try:
                synk.distribute()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def distribute_again(self):
        late = theano.shared(1.0, name="late")
        function = self.compiled(self.x + late, "gather")
        synk.distribute()
        self.late = function

    def function(self):
        doubled, total = self.f(self.inputs)
        check(doubled, 2 * self.inputs)
        check(total, self.size * self.values.sum())

    def fused(self):
        with synk.fuse():
            pending = self.f(self.inputs)
            synk.all_reduce(self.w)
        check(pending.result()[0], 2 * self.inputs)
        check(self.w.get_value(), self.values)

    def broadcast(self):
        synk.broadcast(self.w)

    def gather(self):
        check(synk.gather(self.w), [self.values] * self.size)

    def scatter(self):
        synk.scatter(self.rows, self.inputs)
        check(self.rows.get_value().size, 2)

    def all_gather(self):
        synk.all_gather(self.rows)
        check(self.rows.get_value(), self.inputs)

    def reduce(self):
        check(synk.reduce(self.w, "sum", in_place=False), self.size * self.values)

    def all_reduce(self):
        synk.all_reduce(self.w, "max")
        check(self.w.get_value(), self.values)

    def set_value(self):
        synk.set_value(self.size - 1, self.w, self.values)

    def get_value(self):
        for rank in range(self.size):
            check(synk.get_value(rank, self.w), self.values)

    def close(self):
        synk.close()


def check(got, expected):
    np.testing.assert_array_equal(got, expected)


class Play:
    """One scenario, as seen in the process of the script."""

    def __init__(self, fault, board):
        self.fault, self.board = fault, board
        self.detection = 0.0
        self.step = STEPS[0]

    def run(self):
        with Injector(self.fault, self.board).installed() as injector:
            self.board.armed = 1
            ranks = Ranks(self.fault)
            error = self.meet_fault(ranks)
            self.board.armed, self.board.over = 0, 1
            injector.lift_limit()
            if not self.fault.caught and error is not None:
                raise error
            self.judge(ranks, error)
            if synk.world.world.world_exists() and self.fault.restarts:
                synk.restart()
                for step in COMMANDS:
                    ranks.do(step)
            if synk.world.world.world_exists():
                took = seconds_of(synk.close)
                assert took < self.fault.bound, f"close() took {took:.1f} s"
            assert not psutil.Process().children(), "close() left processes"
            ranks = Ranks(self.fault)
            for step in STEPS:
                ranks.do(step)
            assert not psutil.Process().children(), "the second close() left processes"

    def meet_fault(self, ranks):
        """Run the steps; return the exception that was raised, or None."""
        began = time.monotonic()
        try:  # around the loop, as an alarm may arrive between two steps
            for step in self.steps():
                self.step, self.board.step = step, STEPS.index(step)
                began = time.monotonic()
                ranks.do(step)
                if self.fault.seam == "close":
                    self.detection = time.monotonic() - began
        except BaseException as error:
            self.detection = time.monotonic() - max(began, self.board.died_at)
            return error

    def steps(self):
        if self.fault.step != "any":
            yield from STEPS
            return
        yield from STEPS[:2]
        self.board.asked_at = time.monotonic()
        while not self.board.died_at or time.monotonic() < self.board.died_at + FADES:
            yield from COMMANDS[1:]

    def judge(self, ranks, error):
        """Check the outcome against the failure model."""
        fault = self.fault
        assert self.board.died_at, "there was no fault"
        assert self.detection < fault.bound, f"noticed after {self.detection:.2f} s: {error!r}"
        if fault.seam == "close" and not fault.of_master or fault.of_master and fault.how == "stop":
            assert error is None, repr(error)
        elif fault.how in EXCEPTIONS and (fault.is_inside or fault.of_master or fault.seam == "moment"):
            self.judge_exception(ranks, error)
        elif fault.how == "memory" and fault.seam == "reply":
            # The reply did not fit in memory, so the worker reports that to the master instead.
            self.judge_exception(ranks, error)
        else:
            self.judge_broken(ranks, error)

    def judge_exception(self, ranks, error):
        fault = self.fault
        usable = synk.world.world.world_exists() and synk.world.world.current_world().broken is None
        if fault.seam == "moment" and (error is None or isinstance(error, synk.WorldBrokenError)):
            pass
        elif fault.of_master:
            assert isinstance(error, (Fault, MemoryError)), repr(error)
        else:
            assert type(error) is synk.WorkerError and error.rank == fault.rank, repr(error)
            assert error.type_name == "Fault" or "MemoryError" in error.type_name, repr(error)
        if fault.is_inside:
            assert usable, "an exception in a command broke the world"
        if usable and self.step != "close":
            for step in STEPS[1 if self.step in STEPS[:2] else 2 : -1]:
                ranks.do(step)
        elif not usable and self.step != "close":
            self.judge_refusal(ranks)

    def judge_broken(self, ranks, error):
        fault = self.fault
        assert type(error) is synk.WorldBrokenError, repr(error)
        assert f"rank {fault.rank} " in str(error), str(error)
        assert any(cause in str(error) for cause in fault.causes), str(error)
        named = [rank for rank in range(fault.size) if f"rank {rank} " in str(error)]
        assert named == [fault.rank], f"blames the wrong rank: {error}"
        if fault.step != "any":
            late = STEPS.index(self.step) - STEPS.index(fault.step)
            assert late == 0 or late == -1 and fault.seam == "idle", f"came in {self.step}"
        assert not psutil.Process().children(), "workers are left"
        self.judge_refusal(ranks)

    def judge_refusal(self, ranks):
        for step in ("function", "all_reduce", "distribute"):
            try:
                ranks.do(step)
            except synk.WorldBrokenError as again:
                assert "close()" in str(again), str(again)
            else:
                raise AssertionError(f"{step} works in a broken world")


def exit_code(status):
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def seconds_of(call):
    began = time.monotonic()
    call()
    return time.monotonic() - began


class Watch:
    """One scenario, as seen from the parent process."""

    def __init__(self, fault, limit):
        self.fault, self.limit, self.board = fault, limit, Board()
        self.folder = Path(tempfile.mkdtemp())  # a TemporaryDirectory would be removed by a child
        self.report, self.errors = self.folder / "report", self.folder / "stderr"
        self.errors.touch()
        self.before = semaphores()

    def start(self):
        """Fork the script; return True in the child process."""
        self.began = time.monotonic()
        self.pid = os.fork()
        return not self.pid

    def play(self):
        """Run the script, in the child process."""
        os.setsid()
        os.dup2(os.open(self.errors, os.O_WRONLY), 2)
        os.dup2(2, 1)
        warnings.simplefilter("error")
        play = Play(self.fault, self.board)
        try:
            play.run()
            problem = ""
        except AssertionError as error:
            problem = f"{type(error).__name__}: {error}"
        self.report.write_text(json.dumps({"problem": problem, "detection": play.detection}))

    def result(self):
        """Wait until the script has ended; return the result to print."""
        status = self.wait()
        exited = time.monotonic()
        problems, detection = [], 0.0
        left = self.wait_for_orphans()
        if status is None:
            problems.append("it hangs")
        elif left:
            problems.append(f"{len(left)} processes are left")
        if self.report.exists():
            told = json.loads(self.report.read_text())
            problems.append(told["problem"])
            detection = told["detection"]
        elif self.fault.of_master:
            detection = time.monotonic() - (self.board.died_at if self.fault.kills else exited)
        text = self.errors.read_text()
        problems += [self.judge_status(status, text), self.judge_errors(text)]
        shutil.rmtree(self.folder)
        names = semaphores() - self.before
        time.sleep(0.3 if names else 0)  # another world may be in the middle of being created
        if names & semaphores():
            problems.append(f"semaphores are left: {names}")
        return {
            "seed": self.fault.seed,
            "scenario": str(self.fault),
            "who": "master" if self.fault.of_master else "worker",
            "how": self.fault.how,
            "place": self.fault.place,
            "detection": detection,
            "seconds": time.monotonic() - self.began,
            "problem": "; ".join(filter(None, problems)),
        }

    def wait(self):
        """Return the script's wait status, or None if it hangs.

        Meanwhile, continue the script if it has stopped, and trigger a fault at a random moment.
        """
        stopped_at = None
        while time.monotonic() < self.began + self.limit:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                stopped_at = time.monotonic()
            elif pid:
                return status
            if stopped_at and time.monotonic() > stopped_at + TIMEOUT + 1:
                stopped_at = None
                os.killpg(self.pid, signal.SIGCONT)
            if self.board.asked_at and time.monotonic() > self.board.asked_at + self.fault.delay:
                self.board.asked_at = 0
                self.strike()
            time.sleep(0.005)
        for one in psutil.Process().children(recursive=True):
            one.send_signal(signal.SIGCONT)
            one.send_signal(signal.SIGUSR1)  # makes it write its traceback
        time.sleep(1)

    def strike(self):
        how, pid = self.fault.how, int(self.board.pid)
        if how in ("SIGKILL", "SIGTERM", "stop"):
            self.board.armed = 0
            self.board.died_at = time.monotonic()
            os.kill(pid, getattr(signal, SIGNALS[how]))
        else:
            os.kill(pid, signal.SIGALRM)  # the injector does the rest

    def wait_for_orphans(self):
        """Kill and return the processes of the script that are left after the allowed time."""
        me, deadline = psutil.Process(), time.monotonic() + BOUND
        while me.children() and time.monotonic() < deadline:
            self.reap()
            time.sleep(0.005)
        left = me.children(recursive=True)
        for one in left:
            one.kill()
        for one in left:
            one.wait()
        return left

    def reap(self):
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass

    def judge_status(self, status, text):
        fault, code = self.fault, None if status is None else exit_code(status)
        expected = 0
        if fault.of_master and fault.kills:
            expected = EXIT_CODE if fault.how == "exit" else -getattr(signal, fault.how)
        elif not fault.caught:
            expected = 1
        if code != expected and not (fault.seam == "moment" and not fault.caught and code == 0):
            return f"the script ended with {code}, not {expected}: {text}"

    def judge_errors(self, text):
        """Check what was written to stderr: nothing, or the traceback of an uncaught exception."""
        if not self.fault.caught and self.fault.seam != "moment":
            if f"{Fault.__name__}: " not in text and "MemoryError: " not in text:
                return f"the script did not end with its exception: {text}"
        if text and (self.fault.how not in EXCEPTIONS or "Exception ignored" in text):
            return f"stderr: {text}"


def semaphores():
    return {name for name in os.listdir("/dev/shm") if name.startswith("sem.synkhronos")}


def main():
    # Orphans become children of this process, so that none is overlooked.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    limit, *seeds = map(int, sys.argv[1:])
    gc.freeze()  # or the garbage collection at the end of each script would copy all objects
    for seed in seeds:
        watch = Watch(scenario(seed), limit)
        if watch.start():
            return watch.play()
        print(json.dumps(watch.result()), flush=True)


if __name__ == "__main__":
    main()
