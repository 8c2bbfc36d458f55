"""Tests of the demos on this run's device, with two ranks."""

import pytest
from processes import ROOT


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_demo_runs_on_the_device(run_demo, devices, number):
    script = ROOT / "demos" / f"demo_{number}.py"
    done = run_demo(script, "--devices", *devices[:1] * 2, timeout=300)
    assert done.stdout.splitlines()[-1].startswith("All results match plain Theano")
