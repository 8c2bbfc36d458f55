"""Tests of every kind of fault at every place, each in a separate script. See README.rst."""

import os
from math import gcd
from pathlib import Path

import harness
import pytest
from scenarios import HOWS, PLACES, scenario

SAMPLE = range(40)
PAIRS = len(HOWS) * len(PLACES)
TURNS = 4
SOAK = range(len(SAMPLE), len(SAMPLE) + TURNS * PAIRS)  # 504 faults


@pytest.fixture(scope="module")
def results():
    return {result["seed"]: result for result in harness.run(SAMPLE)}


@pytest.mark.parametrize("seed", SAMPLE, ids=lambda seed: f"seed{seed}")
def test_a_fault_is_reported_in_time_and_by_name_and_leaves_nothing_behind(results, seed):
    result = results[seed]
    assert not result["problem"], f"{result['scenario']}: {result['problem']}"


@pytest.fixture(scope="module")
def soaked():
    """List that collects the results of the long series; the table is created at the end."""
    results = []
    yield results
    if results:
        table = harness.table(results)
        print(table)
        if "FAULTS_TABLE" in os.environ:
            Path(os.environ["FAULTS_TABLE"]).write_text(table)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(TURNS))
def test_many_faults_are_reported_in_time_and_by_name_and_leave_nothing_behind(soaked, turn):
    results = harness.run(SOAK[turn * PAIRS : (turn + 1) * PAIRS])
    soaked += results
    failures = [f"{r['scenario']}: {r['problem']}" for r in results if r["problem"]]
    assert not failures, "\n".join(failures)


def test_the_seeds_cover_every_kind_of_fault_at_every_place():
    assert gcd(len(HOWS), len(PLACES)) == 1
    sample = [scenario(seed) for seed in SAMPLE]
    assert {fault.how for fault in sample} == set(HOWS)
    assert {fault.place for fault in sample} == {scenario(n).place for n in range(len(PLACES))}
    soak = [scenario(seed) for seed in SOAK]
    assert len({(fault.how, fault.place, fault.of_master) for fault in soak}) > 1.8 * PAIRS
    assert scenario(17) == scenario(17)


LIBRARY = """import os
from synkhronos.transports import liveness, local
from synkhronos.world import world
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation, fault, problem",
    [
        ("liveness.find_dead = lambda processes: {}", {"rank": 1, "how": "exit"}, "it hangs"),
        ("liveness._describe_exit = str", {"rank": 1, "how": "SIGKILL"}, "a worker died"),
        ("local.CHECK_INTERVAL = 2.5", {"rank": 1, "how": "SIGKILL"}, "noticed after"),
        ("liveness.end = lambda processes: None", {"rank": 1, "how": "SIGKILL", "size": 3}, "are left"),
        ("liveness.die_with_parent = int", {"rank": 0, "how": "exit", "others": "stopped"}, "are left"),
        ("os._exit = int", {"rank": 1, "how": "exit"}, "AssertionError: None"),
        ("world.World.renew = print", {"rank": 1, "how": "exit", "restarts": True}, "ended with 1"),
    ],
)
def test_the_harness_sees_what_is_wrong(mutation, fault, problem):
    """Break something in the library, and run the first scenario that shows it."""
    fault = {"step": "function", "master_rank": 0, **fault}
    seed = next(
        seed
        for seed in range(10_000)
        if all(getattr(scenario(seed), name) == value for name, value in fault.items())
    )
    (result,) = harness.run([seed], 1, limit=10, prelude=f"{LIBRARY}\n{mutation}")
    assert problem in result["problem"], result
