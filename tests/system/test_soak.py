"""Short soak tests with the benchmark's code: nothing grows, and the benchmark detects a leak."""

import importlib
import json
import sys

import numpy as np
import pytest
import theano
from processes import ROOT

from synkhronos.world.here import Here

KINDS = ["calls", "collectives", "Data", "functions", "fork() and close()"]
# The most that may be added, in MB; a leak of 8 kB for each of 900 commands adds 14 MB to two workers.
ROOM = {"master": 7, "workers": 7}


class InThisProcess:
    """A contestant of a benchmark that runs in this process."""

    def __init__(self, prepare):
        self._steps = prepare()

    def start(self):
        self._turn = next(self._steps)

    def __call__(self, *arguments):
        return self._turn(*arguments)

    def blas(self):
        return "none"

    def close(self):
        assert next(self._steps, None) is None
        return 0


def leak():
    """Make the ranks leak eight kilobytes per command."""
    kept = []
    execute = Here.execute

    def execute_and_leak(self, payload):
        kept.append(np.ones(1000))
        return execute(self, payload)

    Here.execute = execute_and_leak


def print_trends(kinds, leaks=False):
    """Run the soak for some kinds of work; print each quantity at the start and at the end as JSON."""
    if leaks:
        leak()
    theano.config.mode = "FAST_COMPILE"
    sys.path.insert(0, str(ROOT / "benchmarks"))
    soak = importlib.import_module("soak")
    soak.Contestant, soak.SAMPLES = InThisProcess, 10
    soak.WORK = {kind: soak.WORK[kind] for kind in kinds}
    found = {
        kind: {name: soak.trend([one[name] for one in samples])[:2] for name in soak.QUANTITIES}
        for kind, samples in soak.run(scale=0.001).items()
    }
    print(json.dumps(found))


@pytest.mark.slow
def test_calls_collectives_data_and_worlds_leave_nothing_behind(programs, tmp_path):
    done = programs.run(print_trends, KINDS, timeout=120, cwd=tmp_path).check()
    found = json.loads(done.stdout)
    assert set(found) == set(KINDS)
    for kind, by_name in found.items():
        for name, (start, end) in by_name.items():
            room = 0.02 * start if name == "mappings" else ROOM.get(name, 0)
            assert end <= start + room, (kind, name)
        assert by_name["files"][0] > 0 and by_name["threads"][0] >= 3


def test_a_worker_that_leaks_eight_kilobytes_per_command_is_detected(programs, tmp_path):
    done = programs.run(print_trends, KINDS[:1], True, timeout=120, cwd=tmp_path).check()
    start, end = json.loads(done.stdout)["calls"]["workers"]
    assert end > start + ROOM["workers"]
