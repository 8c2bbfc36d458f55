"""Commands that the rows run on every rank, in addition to the library's own."""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run call.py.")

import ctypes
import re
import time
from pathlib import Path

import common
from synkhronos.arithmetic.partition import share
from synkhronos.world.rank_state import Command


class RepeatAllReduce(Command):
    """Repeat the all-reduce of a variable inside one command.

    Each rank returns the seconds and the processor time of one all-reduce.
    """

    def __init__(self, number, times, group=1, op="sum"):
        self.number, self.times, self.group, self.op = number, times, group, op

    def run(self, state):
        variable = state.shareds[self.number]
        arrays = [state.engine.storage(variable)]
        counted = 0
        reduce = state.comm.prepare_reduction(self.op)

        wait = getattr(arrays[0], "sync", lambda: None)  # a device may still be computing the array

        def all_reduce():
            nonlocal counted
            arrays[:] = reduce(arrays)
            wait()
            counted += 1

        start = time.process_time()
        seconds = common.seconds_of(all_reduce, self.times, self.group)
        used = (time.process_time() - start) / counted
        state.engine.store(variable, arrays[0])
        return seconds, used


class RepeatBarrier(Command):
    """Repeat a barrier inside one command. Each rank returns the processor time of one barrier."""

    def __init__(self, times):
        self.times = times

    def run(self, state):
        start = time.process_time()
        for _ in range(self.times):
            state.transport.barrier()
        return (time.process_time() - start) / self.times


class Excerpt(Command):
    """Copy each rank's share of rows, for several lists of rows, on all ranks at the same time.

    Each rank returns the seconds per list: the limit set by the memory, without any calls.
    """

    def __init__(self, handle, lists):
        self.handle, self.lists = handle, lists

    def run(self, state):
        left = iter(self.lists)

        def excerpt():
            rows = next(left)
            start, stop = share(len(rows), state.size, state.rank)
            state.take("excerpt", self.handle, rows[start:stop])

        state.transport.barrier()
        return common.seconds_of(excerpt, len(self.lists) - 1, warm_up=1)


class Nothing(Command):
    """A command that does nothing."""

    def run(self, state):
        return 0.0, 0.0


class ForgetPeak(Command):
    """Return freed memory to the system and reset the peak. Each rank returns its present memory."""

    def run(self, state):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")


class Peak(Command):
    """Return each rank's peak memory since `ForgetPeak`."""

    def run(self, state):
        return _status("VmHWM")


def _status(name):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s*(\d+) kB", text).group(1))
