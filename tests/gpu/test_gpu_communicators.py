"""The checks of `checks`, with arrays of devices, on the communicator for devices of all kinds."""

from pathlib import Path

from checks.communicators import CHECKS

PROGRAMS = Path(__file__).with_name("programs")
NAMES = [*(check.__name__ for check in CHECKS), "check_join"]


def test_staging_through_shared_memory_conforms(run_python, devices):
    done = run_python(PROGRAMS / "run_conform.py", "staged", *devices, timeout=500)
    passed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("passed")]
    assert passed == NAMES, done.stdout + done.stderr
