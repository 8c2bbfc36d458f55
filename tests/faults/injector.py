"""Fault injection from outside the library, whose methods are wrapped before the process forks."""

import contextlib
import ctypes
import mmap
import multiprocessing.context
import os
import resource
import signal
import sys
import time
from unittest import mock

import numpy as np
import program
import psutil
from compilers import Apply, Op, tt
from scenarios import EXIT_CODE, PROGRAM, SIGNALS, STEPS

from synkhronos.functions import call as _call
from synkhronos.programs.center import Center
from synkhronos.services.messages import Mailbox
from synkhronos.services.registers import Channel, Register
from synkhronos.services.stripes import Stripes
from synkhronos.stores.named_memory import NamedMemory
from synkhronos.transports import children, local
from synkhronos.transports.waiting import BarrierProgress
from synkhronos.variables import replicas as _replicas
from synkhronos.world import world
from synkhronos.world.rank_state import Ask, RankState

HEADROOM = 16 << 20  # bytes that a rank may still allocate after its memory limit is set
AGAIN = 1e-3  # seconds until an exception that Python has dropped is raised again


class Fault(Exception):
    """An exception that neither the library nor the script expects."""


class Board:
    """Numbers in shared memory, for communication between the script, its workers and the harness."""

    NAMES = ("armed", "step", "died_at", "pid", "asked_at", "over", "back_at", "controller")

    def __init__(self):
        self._numbers = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), float)

    def __getattr__(self, name):
        return self._numbers[Board.NAMES.index(name)]

    def __setattr__(self, name, value):
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            self._numbers[Board.NAMES.index(name)] = value


class Point(Op):
    """The identity operation. It calls ``Point.reach()`` when it is computed."""

    __props__ = ()
    reach = staticmethod(lambda: None)

    def make_node(self, x):
        return Apply(self, [x], [tt.dvector()])

    def perform(self, node, inputs, outputs):
        Point.reach()
        outputs[0][0] = inputs[0].copy()


class Injector:
    """Injects one fault into one rank, once."""

    def __init__(self, scenario, board):
        self.scenario, self.board = scenario, board
        self.rank = scenario.master_rank
        self.barriers = self.forks = 0
        self.step = None  # the step of the last command that this worker has run
        self.doing = None  # what this rank does with a center
        self.limit = resource.getrlimit(resource.RLIMIT_AS)

    # Triggering the fault

    def at(self, seam, turn=None):
        """Trigger the fault if the rank, the step, the seam and the turn are the scenario's."""
        fault = self.scenario
        if self.board.armed and self.rank == fault.rank and seam == fault.seam:
            step = (*STEPS, PROGRAM)[int(self.board.step)]
            if turn not in (None, fault.turn) or step == PROGRAM and program.current_round < fault.round:
                return
            if step == fault.step or fault.step == "any":
                self.have_it()

    def have_it(self):
        self.board.armed -= 1
        if self.scenario.others in ("stopped", "killed"):
            self.send_others(signal.SIGSTOP if self.scenario.others == "stopped" else signal.SIGKILL)
        self.board.died_at = time.monotonic()
        how = self.scenario.how
        if how == "exception":
            sys.unraisablehook = self.have_it_later
            raise Fault("nobody expects this")
        if how == "memory":
            self.exhaust_memory()
        elif how == "exit":
            os._exit(EXIT_CODE)
        elif how == "SIGSEGV":
            ctypes.string_at(0)
        else:
            number = getattr(signal, SIGNALS[how])
            waits = number in signal.pthread_sigmask(signal.SIG_BLOCK, [])  # during a fork
            os.kill(os.getpid(), number)
            if how != "stop" and not waits:
                time.sleep(60)

    def have_it_later(self, unraisable):
        """Raise the exception again if Python has dropped it, as it does in ``__del__``."""
        if unraisable.exc_type is not Fault:
            sys.__unraisablehook__(unraisable)
            return
        self.board.armed += 1
        signal.setitimer(signal.ITIMER_REAL, AGAIN)

    def send_others(self, number):
        """Send a signal to every other worker that has not ended."""
        master = psutil.Process(None if self.scenario.of_master else os.getppid())
        for child in master.children():
            if child.pid not in (os.getpid(), self.board.controller):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(number)

    def exhaust_memory(self):
        size = psutil.Process().memory_info().vms + HEADROOM
        resource.setrlimit(resource.RLIMIT_AS, (size, self.limit[1]))
        kept = []
        try:
            while True:
                kept.append(np.ones(1 << 17))
        finally:
            if self.scenario.of_master:  # under the limit, OpenBLAS crashes when it restarts threads
                self.lift_limit()

    def lift_limit(self):
        """Restore the memory limit, as workers do before each command."""
        resource.setrlimit(resource.RLIMIT_AS, self.limit)

    # Seams: the places where methods of the library are wrapped

    @contextlib.contextmanager
    def installed(self):
        """Wrap the library's methods inside a ``with`` block."""
        transport = local.LocalTransport
        with contextlib.ExitStack() as stack:
            for owner, name, wrapper in [
                (multiprocessing.context.ForkProcess, "run", self.first_moment),
                (multiprocessing.context.ForkProcess, "start", self.between_forks),
                (transport, "receive", self.receive),
                (transport, "reply", self.reply),
                (transport, "post", self.post),
                (transport, "collect", self.collect),
                (transport, "barrier", self.barrier),
                (transport, "close", self.close),
                (children, "ignore_signals_for_the_master", self.keep_alarm),
                (world, "_run_commands", self.serve),
                (_replicas.Assign, "run", self.command),
                (Ask, "run", self.command),
                (_call.CallFunction, "run", self.command),
                (BarrierProgress, "finish", self.finish),
                (RankState, "copy_out_of_store", self.prepare),
                (Center, "pull", lambda *args: self.exchange("pull", *args)),
                (Center, "push", lambda *args: self.exchange("push", *args)),
                (Center, "elastic", lambda *args: self.exchange("elastic", *args)),
                (Stripes, "read", self.visit),
                (Stripes, "change", self.visit),
                (NamedMemory, "_create", self.create),
                (Mailbox, "write", lambda *args: self.copy("send", *args)),
                (Mailbox, "read", lambda *args: self.copy("receive", *args)),
                (Mailbox, "_places", self.pieces),
                (Mailbox, "_recover", self.recover),
                (Register, "write", self.write_question),
                (Channel, "put", self.ask),
                (program, "reach", self.reach),
            ]:
                stack.enter_context(mock.patch.object(owner, name, _wrap(wrapper, getattr(owner, name))))
            stack.enter_context(mock.patch.object(Point, "reach", self.perform))
            signal.signal(signal.SIGALRM, lambda *_: self.have_it())
            if self.scenario.of_master:
                self.board.pid = os.getpid()
            yield self
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def first_moment(self, original, process):
        name = process.name.rpartition("-")[2]
        self.rank = int(name) if name.isdigit() else self.scenario.size
        if self.rank == self.scenario.rank:
            self.board.pid = os.getpid()
        if self.rank == self.scenario.size:
            self.board.controller = os.getpid()
            program.current_round = 0
        self.at("fork", 0 if self.scenario.of_program else None)
        original(process)

    def keep_alarm(self, original):
        """Reinstall the alarm handler in a worker, which ignores signals that the script handles."""
        original()
        signal.signal(signal.SIGALRM, lambda *_: self.have_it())

    def between_forks(self, original, process):
        self.forks += 1
        original(process)
        if self.scenario.of_master and self.forks == 1:
            self.at("fork")

    def receive(self, original, transport, *args):
        """Wait for a command; at the seam "idle", the fault occurs after that of the preceding step."""
        self.barriers = 0
        self.lift_limit()
        fault = self.scenario
        if fault.seam == "idle" and self.rank == fault.rank and self.board.armed:
            if self.step is not None and STEPS[self.step + 1] == fault.step:
                self.have_it()
        payload = original(transport, *args)
        self.step = int(self.board.step)
        if payload == b"":
            self.at("close", 0)
        else:
            self.at("started")
        return payload

    def serve(self, original, *args):
        original(*args)
        self.at("close", 1)

    def reply(self, original, transport, payload):
        fault = self.scenario
        if not fault.of_program:
            self.at("reply", 0)
        half = 0 if fault.of_program else 1
        if fault.seam == "reply" and fault.turn == half and self.rank == fault.rank:
            transport._replies[self.rank].put(payload[: len(payload) // 2])
            self.at("reply")
        original(transport, payload)

    def post(self, original, transport, payload, needs=None):
        """Wrap the method with which the master sends a command."""
        self.barriers = 0
        self.at("idle")
        original(transport, payload, needs)
        self.at("started")
        self.at("close", 0)

    def collect(self, original, transport):
        self.at("reply", 0)
        replies = original(transport)
        self.at("reply", 1)
        return replies

    def barrier(self, original, transport):
        self.at("barrier", self.barriers % 2 if self.scenario.of_program else self.barriers)
        self.barriers += 1
        original(transport)

    def close(self, original, transport, grace):
        original(transport, grace)
        if self.scenario.of_master:
            self.at("close", 1)

    def command(self, original, command, state):
        self.at("command", 0)
        result = original(command, state)
        self.at("command", 1)
        return result

    # In a program

    def reach(self, original, seam):
        if seam == "controller":
            program.current_round += 1
        fault = self.scenario
        if seam == "code" and fault.seam == "fork" and self.rank == fault.rank and self.board.armed == 2:
            self.board.armed = 1
            os.kill(os.getpid(), signal.SIGKILL)
        self.at(seam)

    def finish(self, original, *args):
        original(*args)
        if self.rank != self.scenario.master_rank and self.scenario.of_program:
            self.at("reply", 1)

    def prepare(self, original, state):
        original(state)
        if not state.is_master:
            self.at("fork", 1)

    def exchange(self, name, original, *args):
        self.doing = name
        original(*args)
        self.doing = None

    def visit(self, original, stripes, work):
        def do(number, *memory):
            where = self.doing if number == 1 else None
            self.at(where, 0)
            work(number, *memory)
            self.at(where, 1)

        original(stripes, do)

    def create(self, original, named_memory, name, *args):
        where = "directory" if f"of rank {self.rank}," in name else None
        self.at(where, 0)
        original(named_memory, name, *args)
        self.at(where, 1)

    def copy(self, name, original, box, slot, parts):
        self.doing = name
        original(box, slot, parts)
        if len(parts) > 1:
            self.at(name, 1)
        self.doing = None

    def pieces(self, original, box, slot, parts):
        for number, piece in enumerate(original(box, slot, parts)):
            yield piece
            if number == 1:
                self.at(self.doing, 0)

    def recover(self, original, box):
        self.at("box", 0)
        original(box)
        self.at("box", 1)

    def write_question(self, original, register, number, data):
        if self.rank != self.scenario.size:
            register._room(len(data))[: len(data) // 2] = data[: len(data) // 2]
            self.at("ask", 0)
        original(register, number, data)

    def ask(self, original, channel, number, question):
        original(channel, number, question)
        self.at("ask", 1)

    def perform(self):
        fault = self.scenario
        busy = fault.others == "busy" and self.rank not in (fault.rank, fault.master_rank)
        if busy and not self.board.over:
            ctypes.PyDLL(None).sleep(60)  # holds the interpreter lock
        self.at("perform")


def _wrap(wrapper, original):
    return lambda *args: wrapper(original, *args)
