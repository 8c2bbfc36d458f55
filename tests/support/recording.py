"""Records which lines of the library each test runs, and how long it takes: a plugin of pytest.

`tests/record.py` starts pytest with this plugin, and has every Python process of the tests import it.
Each process appends to its own file in the folder ``TESTS_RECORD`` lines of JSON: the test, its seconds
of processor time, and the lines by module. What a process that is killed has run is lost.
"""

import atexit
import collections
import contextlib
import json
import os
from pathlib import Path

import coverage

PACKAGE = Path(__file__).resolve().parent.parent.parent / "synkhronos"
_TICKS = os.sysconf("SC_CLK_TCK")
_exit = os._exit


class Recorder:
    """Records lines in this process, and in those that are forked from it."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._coverage = coverage.Coverage(
            data_file=None, include=[f"{PACKAGE}/*"], config_file=False, messages=False
        )
        self._coverage.start()
        os.register_at_fork(after_in_child=self._take)
        atexit.register(self.write)
        os._exit = self._write_and_exit

    def _take(self):
        """Return the lines since the last time, by module, and forget them."""
        found = {}
        for name, lines in list(self._coverage._collector.data.items()):
            if lines:
                found[Path(name).relative_to(PACKAGE.parent).as_posix()] = sorted(lines)
                lines.clear()  # in place, as the frames that are running have a reference to it
        return found

    def write(self, test=None, seconds=None):
        lines = self._take()
        if lines or seconds is not None:
            name = test or os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
            with (self._folder / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps([name, seconds, lines]) + "\n")

    def _write_and_exit(self, status):
        with contextlib.suppress(OSError):
            self.write()
        _exit(status)


RECORDER = Recorder(os.environ["TESTS_RECORD"])


def processor_time():
    """Return the seconds of this process and of those below it, with those that have ended."""
    below, seconds = collections.defaultdict(list), {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            below[int(fields[1])].append(int(name))
            seconds[int(name)] = sum(map(int, fields[11:15])) / _TICKS
    total, waiting = 0.0, [os.getpid()]
    while waiting:
        process = waiting.pop()
        total += seconds.get(process, 0.0)
        waiting += below[process]
    return total


try:
    import pytest
except ImportError:  # a program of a test
    pass
else:

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_protocol(item):
        """Attribute to each test what has run since the one before."""
        began = processor_time()
        yield
        RECORDER.write(item.nodeid, round(processor_time() - began, 3))
