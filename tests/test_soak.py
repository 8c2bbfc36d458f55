"""A short soak, by the code of the benchmark: nothing grows, and the benchmark would see it."""

import json

from conftest import ROOT

SOAK = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import soak

if __name__ == "__main__":  # the one who soaks is spawned, and imports this
    soak.SAMPLES = 10
    for kind in sys.argv[1:]:
        del soak.WORK[kind]
    samples = soak.run(0.004)
    print(json.dumps({{kind: [{{name: soak.trend([one[name] for one in of_kind])[:2]
                               for name in soak.QUANTITIES}}] for kind, of_kind in samples.items()}}))
"""

LEAK = """
import os, sys
import numpy as np
sys.modules["mpi4py"] = None
from synkhronos.world import here as _here

kept = []
execute = _here.Here.execute

def leak(self, payload):
    kept.append(np.ones(1000))
    return execute(self, payload)

_here.Here.execute = leak
"""


def trends(run_python, *left_out, **options):
    """Return start and end by the kind of work and by quantity."""
    done = run_python(SOAK, *left_out, timeout=300, **options)
    return {kind: one for kind, (one,) in json.loads(done.stdout.splitlines()[-1]).items()}


def test_calls_collectives_data_and_worlds_leave_nothing_behind(run_python):
    found = trends(run_python)
    assert set(found) == {"calls", "collectives", "Data", "fork() and close()"}
    for kind, by_name in found.items():
        for name, (start, end) in by_name.items():
            room = 0.02 * start if name in ("master", "workers", "mappings") else 0
            assert end <= start + room, (kind, name)
        assert by_name["files"][0] > 0 and by_name["threads"][0] >= 3


def test_a_worker_that_keeps_eight_kilobytes_a_command_is_seen(run_python, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(LEAK)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    others = "collectives", "Data", "fork() and close()"
    start, end = trends(run_python, *others, environment=environment)["calls"]["workers"]
    assert end > 1.02 * start
