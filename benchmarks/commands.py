"""What the rows let every rank do, besides the library's own commands."""

import ctypes
import re
import time
from pathlib import Path

import common
from synkhronos.arithmetic.partition import share
from synkhronos.world.here import Command


class RepeatAllReduce(Command):
    """Repeat the all-reduce of a variable inside one command.

    Each rank returns the seconds that one takes, and the processor time.
    """

    def __init__(self, number, times, group=1, op="sum"):
        self.number, self.times, self.group, self.op = number, times, group, op

    def run(self, here):
        variable = here.shareds[self.number]
        arrays = [here.engine.storage(variable)]
        counted = 0

        wait = getattr(arrays[0], "sync", lambda: None)  # a device's array may be in the making

        def all_reduce():
            nonlocal counted
            arrays[:] = here.comm.all_reduce(arrays, self.op)
            wait()
            counted += 1

        start = time.process_time()
        seconds = common.seconds_of(all_reduce, self.times, self.group)
        used = (time.process_time() - start) / counted
        here.engine.store(variable, arrays[0])
        return seconds, used


class RepeatBarrier(Command):
    """Repeat a barrier inside one command; each rank returns the processor time of one."""

    def __init__(self, times):
        self.times = times

    def run(self, here):
        start = time.process_time()
        for _ in range(self.times):
            here.transport.barrier()
        return (time.process_time() - start) / self.times


class Excerpt(Command):
    """Each rank copies its share of rows, one list of rows after another, all ranks at once.

    Each returns the seconds that one list takes: what the memory allows, without any calls.
    """

    def __init__(self, handle, lists):
        self.handle, self.lists = handle, lists

    def run(self, here):
        left = iter(self.lists)

        def excerpt():
            rows = next(left)
            start, stop = share(len(rows), here.size, here.rank)
            here.take("excerpt", self.handle, rows[start:stop])

        here.transport.barrier()
        return common.seconds_of(excerpt, len(self.lists) - 1, warm_up=1)


class Nothing(Command):
    """What any command takes by itself."""

    def run(self, here):
        return 0.0, 0.0


class ForgetPeak(Command):
    """Give freed memory back and let the peak begin anew; each rank returns what it has."""

    def run(self, here):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")


class Peak(Command):
    """Each rank returns the most memory that it had since `ForgetPeak`."""

    def run(self, here):
        return _status("VmHWM")


def _status(name):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s*(\d+) kB", text).group(1))
