"""Conformance checks on the communicator that works for devices of all kinds."""

from pathlib import Path

from checks.communicators import CHECKS

PROGRAMS = Path(__file__).with_name("programs")
NAMES = [*(check.__name__ for check in CHECKS), "check_join"]


def test_staging_through_shared_memory_conforms(programs, tmp_path, devices):
    words = PROGRAMS / "run_module.py", "conform", "staged", *devices
    done = programs.run_script(*words, timeout=500, cwd=tmp_path)
    passed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("passed")]
    assert passed == NAMES, done.stdout + done.stderr
