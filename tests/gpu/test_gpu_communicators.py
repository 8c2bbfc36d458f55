"""The checks of `checks`, with arrays of devices, on each communicator that takes such."""

import pytest
from checks import CHECKS
from conftest import ROOT

NAMES = [*(check.__name__ for check in CHECKS), "check_join"]


@pytest.fixture
def conform(run_python, devices):
    def run(kind, devices=devices, **environment):
        code = f"from gpu.conform import conform\nconform({kind!r}, {devices!r})"
        environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
        done = run_python(code, timeout=500, environment=environment)
        passed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("passed")]
        names = NAMES if kind == "staged" else [*NAMES, "check_unequal_dtypes"]
        assert passed == names, done.stdout + done.stderr

    return run


def test_staging_through_shared_memory_conforms(conform):
    conform("staged")


def test_what_is_around_nccl_conforms_with_a_stand_in_for_it(conform):
    conform("stand-in")
