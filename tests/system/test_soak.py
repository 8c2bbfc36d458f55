"""Short soak tests with the benchmark's code: nothing grows."""

import importlib
import json
import sys

import pytest
import theano
from processes import ROOT


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


def print_trends(kinds):
    """Run the soak for some kinds of work; print each quantity at the start and at the end as JSON."""
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
