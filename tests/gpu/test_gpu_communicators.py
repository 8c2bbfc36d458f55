"""The checks of `checks`, with arrays of devices, on the communicator for devices of all kinds."""

from checks.communicators import CHECKS
from conftest import ROOT

NAMES = [*(check.__name__ for check in CHECKS), "check_join"]


def test_staging_through_shared_memory_conforms(run_python, devices):
    code = f"from gpu.conform import conform\nconform('staged', {devices!r})"
    done = run_python(code, timeout=500, environment={"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"})
    passed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("passed")]
    assert passed == NAMES, done.stdout + done.stderr
