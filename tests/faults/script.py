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
import program
import psutil
from compilers import compiler, tt
from injector import Board, Fault, Injector, Point
from processes import exit_code
from program import FADES
from scenarios import BOUND, COMMANDS, EXCEPTIONS, EXIT_CODE, PROGRAM, SIGNALS, STEPS, TIMEOUT, scenario

from synkhronos.services import messages

_PR_SET_CHILD_SUBREAPER = 36


class Ranks:
    """A world, and the steps of the script. Each step checks its result."""

    def __init__(self, fault):
        self.size, self.in_thread = fault.size, fault.in_thread
        synk.fork(fault.size, use_gpu=False, master_rank=fault.master_rank, timeout=fault.timeout)
        self.values = np.arange(6.0)
        self.x = tt.dvector("x")
        self.w = compiler.shared(self.values, name="w")
        self.rows = compiler.shared(np.zeros(1), name="rows")
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
        late = compiler.shared(1.0, name="late")
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

    def write_again(self):
        """Set the variable that a collective may have been writing at the moment of the fault.

        The failure model says that it may be partly written, also on other ranks.
        """
        self.w.set_value(self.values)
        if synk.world.world.current_world().broken is None:
            synk.broadcast(self.w)


class ProgramRanks(Ranks):
    """A world in which a program runs."""

    def __init__(self, fault):
        super().__init__(fault)
        self.fault = fault
        self.count = compiler.shared(np.zeros(program.ITEMS, "int64"), "count")
        self.weights = compiler.shared(np.zeros(program.ITEMS), "weights")
        self.go = compiler.shared(np.zeros(1), "go")
        self.used = self.compiled(self.x * self.go, "gather", *((one.sum(), "sum") for one in (
            self.count, self.weights)))  # fmt: skip

    def program_with_fault(self):
        fault = self.fault
        lasts = "until the fault" if fault.is_survived or fault.how == "stop" else "until the end"
        if fault.seam == "reply":
            lasts = "briefly"
        results = self.spmd(lasts, fault.on_death)
        restarts = list(fault.deaths)
        if fault.seam == "reply" and fault.turn == 1:
            restarts[fault.rank] = 0  # its result was there
        if fault.others == "killed":
            # These may have had their results, too.
            known = (fault.rank, fault.master_rank)
            for rank in range(fault.size):
                if rank not in known and results[rank]:
                    assert results[rank][0] <= restarts[rank], results[rank][0]
                    restarts[rank] = results[rank][0]
        deaths = sum(fault.deaths)
        lost = deaths if fault.seam == "moment" or fault.others == "killed" else 0
        if fault.how == "stop" and fault.seam in ("box", "moment"):
            lost = messages.SLOTS  # the box may still be locked when its rank looks for the last time
        program.judge(results, restarts, lost, deaths)

    def program(self):
        program.judge(self.spmd("briefly", "raise"), [0] * self.size, 0, 0)

    def spmd(self, lasts, on_death):
        program.tally.clear()
        request = "slowly" if self.fault.seam == "ask" else "quickly"
        return synk.spmd(
            program.program, self.f, self.inputs, self.count, self.weights, self.go, request,
            self.fault.meets, lasts, controller=program.Answers(), on_death=on_death,
        )  # fmt: skip


def check(got, expected):
    np.testing.assert_array_equal(got, expected)


class Play:
    """One scenario, as seen in the process of the script."""

    ranks, all_steps, again = Ranks, STEPS, COMMANDS
    refused = ("function", "all_reduce", "distribute")

    def __init__(self, fault, board):
        self.fault, self.board = fault, board
        program.board = board
        self.detection = 0.0
        self.step = STEPS[0]

    def run(self):
        with Injector(self.fault, self.board).installed() as injector:
            self.board.armed = self.fault.times
            ranks = self.ranks(self.fault)
            error = self.meet_fault(ranks)
            self.board.armed, self.board.over = 0, 1
            injector.lift_limit()
            if not self.fault.caught and error is not None:
                raise error
            self.judge(ranks, error)
            if synk.world.world.world_exists() and self.fault.restarts:
                if self.fault.seam == "moment":
                    ranks.write_again()
                synk.restart()
                for step in self.again:
                    ranks.do(step)
            if synk.world.world.world_exists():
                took = seconds_of(synk.close)
                assert took < self.fault.bound, f"close() took {took:.1f} s"
            assert not psutil.Process().children(), "close() left processes"
            ranks = self.ranks(self.fault)
            for step in self.all_steps:
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
        if self.step != "close":
            (self.judge_usable if usable else self.judge_refusal)(ranks)

    def judge_usable(self, ranks):
        if self.fault.seam == "moment":
            ranks.write_again()
        for step in STEPS[1 if self.step in STEPS[:2] else 2 : -1]:
            ranks.do(step)

    def judge_broken(self, ranks, error):
        fault = self.fault
        assert type(error) is synk.WorldBrokenError, repr(error)
        assert f"rank {fault.rank} " in str(error), str(error)
        assert any(cause in str(error) for cause in fault.causes), str(error)
        self.judge_place(error)
        assert not psutil.Process().children(), "workers are left"
        self.judge_refusal(ranks)

    def judge_place(self, error):
        fault = self.fault
        named = [rank for rank in range(fault.size) if f"rank {rank} " in str(error)]
        assert named == [fault.rank], f"blames the wrong rank: {error}"
        if fault.step != "any":
            late = STEPS.index(self.step) - STEPS.index(fault.step)
            assert late == 0 or late == -1 and fault.seam == "idle", f"came in {self.step}"

    def judge_refusal(self, ranks):
        for step in self.refused:
            try:
                ranks.do(step)
            except synk.WorldBrokenError as again:
                assert "close()" in str(again), str(again)
            else:
                raise AssertionError(f"{step} works in a broken world")


class ProgramPlay(Play):
    """One fault in a program."""

    ranks, all_steps, again = ProgramRanks, ("distribute", PROGRAM, "close"), ("function", PROGRAM)
    refused = ("function", PROGRAM)

    def meet_fault(self, ranks):
        ranks.do("distribute")
        self.step, self.board.step = PROGRAM, len(STEPS)
        began = time.monotonic()
        try:
            ranks.program_with_fault()
        except BaseException as error:
            self.detection = time.monotonic() - max(began, self.board.died_at)
            return error
        if self.board.back_at:
            self.detection = max(0, self.board.back_at - self.board.died_at)

    def judge(self, ranks, error):
        fault = self.fault
        assert self.board.died_at, f"there was no fault: {error!r}"
        assert self.detection < fault.bound, f"noticed after {self.detection:.2f} s: {error!r}"
        program.judge_messages()
        if fault.is_survived and not (fault.how in EXCEPTIONS and fault.seam == "moment"):
            if error is not None:
                raise error
            self.judge_whole(ranks)
        elif fault.of_controller:
            self.judge_controller(error)
            self.judge_whole(ranks)
        elif fault.how in EXCEPTIONS and (fault.is_inside or fault.of_master or fault.seam == "moment"):
            self.judge_exception(ranks, error)
        elif (fault.how, fault.seam, fault.turn) == ("memory", "reply", 0):
            self.judge_exception(ranks, error)
        else:
            self.judge_broken(ranks, error)

    def judge_controller(self, error):
        how = self.fault.how
        assert isinstance(error, synk.SynkhronosError), repr(error)
        assert not isinstance(error, synk.WorldBrokenError), repr(error)
        words = "the controller has died"
        if how in EXCEPTIONS:
            words = "the controller raised an exception"
        elif how == "stop":
            words = "waited longer than fork(timeout="
        assert words in str(error), str(error)

    def judge_place(self, error):
        """The program has no steps, and ranks that died with this one may be named as well."""

    def judge_usable(self, ranks):
        self.judge_whole(ranks)

    def judge_whole(self, ranks):
        """Check that the world can be used, and that only its workers are left."""
        assert len(psutil.Process().children()) == self.fault.size - 1, "the controller is left"
        ranks.do("function")
        ranks.do(PROGRAM)


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
        self.struck = False
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
        warnings.filterwarnings("ignore", "Numba will use object mode")  # for the operation Point
        play = (ProgramPlay if self.fault.of_program else Play)(self.fault, self.board)
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
            "detection": detection,
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
            if self.is_time():
                self.struck = True
                self.strike()
            time.sleep(0.005)
        for one in psutil.Process().children(recursive=True):
            one.send_signal(signal.SIGCONT)
            one.send_signal(signal.SIGUSR1)  # makes it write its traceback
        time.sleep(1)

    def is_time(self):
        if self.struck or self.fault.seam != "moment" or not self.board.asked_at:
            return False
        return time.monotonic() > self.board.asked_at + self.fault.delay

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
        if self.fault.of_program:  # deaths that the ranks survive are logged
            lines = [line for line in text.splitlines() if not line.endswith("the other ranks continue")]
            text = "\n".join(lines)
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
