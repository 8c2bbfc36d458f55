"""Tests of every kind of fault at every place, each in a separate script. See README.rst."""

import harness
import pytest
from scenarios import HOWS, PLACES, PROGRAM_PLACES, PROGRAMS

SAMPLE = range(len(HOWS))
PAIRS = len(HOWS) * len(PLACES)
TURNS = 4
SOAK = range(40, 40 + TURNS * PAIRS)  # 504 faults
SAMPLE_OF_PROGRAMS = range(PROGRAMS + 5, PROGRAMS + 12)
PAIRS_OF_PROGRAMS = len(HOWS) * len(PROGRAM_PLACES)
START_OF_PROGRAMS = PROGRAMS + PAIRS_OF_PROGRAMS
TURNS_OF_PROGRAMS = 2  # 224 faults


@pytest.fixture(scope="module")
def results():
    seeds = [*SAMPLE, *SAMPLE_OF_PROGRAMS]
    return {result["seed"]: result for result in harness.run(seeds)}


@pytest.mark.parametrize("seed", [*SAMPLE, *SAMPLE_OF_PROGRAMS], ids=lambda seed: f"seed{seed}")
def test_a_fault_is_reported_in_time_and_by_name_and_leaves_nothing_behind(results, seed):
    result = results[seed]
    assert not result["problem"], f"{result['scenario']}: {result['problem']}"


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(TURNS))
def test_many_faults_are_reported_in_time_and_by_name_and_leave_nothing_behind(turn):
    results = harness.run(SOAK[turn * PAIRS : (turn + 1) * PAIRS])
    failures = [f"{r['scenario']}: {r['problem']}" for r in results if r["problem"]]
    assert not failures, "\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(TURNS_OF_PROGRAMS))
def test_many_faults_in_programs_are_reported_or_survived_and_leave_nothing_behind(turn):
    start = START_OF_PROGRAMS + turn * PAIRS_OF_PROGRAMS
    results = harness.run(range(start, start + PAIRS_OF_PROGRAMS))
    failures = [f"{r['scenario']}: {r['problem']}" for r in results if r["problem"]]
    assert not failures, "\n".join(failures)


# Locks as words in shared memory: the kernel releases none of them. To test and set one takes a moment.
