"""Tests of every kind of fault at every place, each in a separate script. See README.rst."""

import os
from math import gcd
from pathlib import Path

import harness
import pytest
from scenarios import HOWS, PLACES, PROGRAM_PLACES, PROGRAMS, first, scenario

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


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(TURNS_OF_PROGRAMS))
def test_many_faults_in_programs_are_reported_or_survived_and_leave_nothing_behind(soaked, turn):
    start = START_OF_PROGRAMS + turn * PAIRS_OF_PROGRAMS
    results = harness.run(range(start, start + PAIRS_OF_PROGRAMS))
    soaked += results
    failures = [f"{r['scenario']}: {r['problem']}" for r in results if r["problem"]]
    assert not failures, "\n".join(failures)


def test_the_seeds_cover_every_kind_of_fault_at_every_place():
    assert gcd(len(HOWS), len(PLACES)) == 1
    sample = [scenario(seed) for seed in SAMPLE]
    assert {fault.how for fault in sample} == set(HOWS)
    soak = [scenario(seed) for seed in SOAK]
    assert {fault.place for fault in soak} == {scenario(n).place for n in range(len(PLACES))}
    assert len({(fault.how, fault.place, fault.of_master) for fault in soak}) > 1.8 * PAIRS
    assert scenario(17) == scenario(17)

    assert gcd(len(HOWS), len(PROGRAM_PLACES)) == 1
    places = {f"{step}: {seam}" for step, seam in PROGRAM_PLACES}
    assert {scenario(seed).how for seed in SAMPLE_OF_PROGRAMS} == set(HOWS)
    pairs = range(START_OF_PROGRAMS, START_OF_PROGRAMS + PAIRS_OF_PROGRAMS)
    in_programs = [scenario(seed) for seed in pairs]
    assert {(one.how, one.place) for one in in_programs} == {(h, p) for h in HOWS for p in places}
    assert {one.on_death for one in in_programs} == {"raise", "continue"}
    assert {one.who for one in in_programs} == {"worker", "master", "controller"}
    for name in ("again", "meets", "restarts"):
        assert {getattr(one, name) for one in in_programs} == {False, True}


LIBRARY = """import os
from synkhronos.programs import spmd
from synkhronos.services import mailbox
from synkhronos.stores import commons
from synkhronos.transports import children, local
from synkhronos.world import world
"""
# Locks as words in shared memory: the kernel releases none of them. To test and set one takes a moment.
NOBODY_RELEASES = """import mmap, multiprocessing
words, moment = mmap.mmap(-1, 1 << 20), multiprocessing.Lock()
def try_acquire(self, byte):
    with moment:
        was_held, words[hash((byte,)) % len(words)] = words[hash((byte,)) % len(words)], 1
    return not was_held
def release(self, byte):
    words[hash((byte,)) % len(words)] = 0
commons.LockFile.try_acquire, commons.LockFile.release = try_acquire, release
commons.LockFile.is_free = lambda self, byte: not words[hash((byte,)) % len(words)]
"""
NOBODY_IS_REPLACED = "spmd.replacing_dead = lambda *of: spmd.contextlib.nullcontext()"
NOBODY_IS_STOPPED = "children.Children.find_stopped = lambda self: []"
DEATH = {"step": "program", "rank": 1, "how": "SIGKILL", "on_death": "continue"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation, fault, problem",
    [
        ("children.find_dead = lambda processes: {}", {"rank": 1, "how": "exit"}, "it hangs"),
        ("children._describe_exit = str", {"rank": 1, "how": "SIGKILL"}, "a worker died"),
        ("local.CHECK_INTERVAL = 2.5", {"rank": 1, "how": "SIGKILL"}, "noticed after"),
        (
            "children.kill_and_join = lambda processes: None",
            {"rank": 1, "how": "SIGKILL", "size": 3},
            "are left",
        ),
        ("children.die_with_parent = int", {"rank": 0, "how": "exit", "others": "stopped"}, "are left"),
        ("os._exit = int", {"rank": 1, "how": "exit"}, "AssertionError: None"),
        ("world.World.renew = print", {"rank": 1, "how": "exit", "restarts": True}, "ended with 1"),
        (NOBODY_RELEASES, {**DEATH, "seam": "push", "others": ""}, "it hangs"),
        ("mailbox.Mailbox._recover = bool", {**DEATH, "seam": "receive", "others": ""}, "are lost"),
        (NOBODY_IS_REPLACED, {**DEATH, "seam": "code"}, "a worker died: rank 1"),
        ("spmd.Controller.end = bool", {**DEATH, "seam": "code"}, "controller is left"),
        (NOBODY_IS_STOPPED, {**DEATH, "seam": "code", "how": "stop"}, "it hangs"),
    ],
)
def test_the_harness_sees_what_is_wrong(mutation, fault, problem):
    """Break something in the library, and run the first scenario that shows it."""
    fault = {"step": "function", "master_rank": 0, **fault}
    seeds = range(PROGRAMS, PROGRAMS + 10_000) if "seam" in fault else range(10_000)
    (result,) = harness.run([first(seeds, fault)], 1, limit=10, prelude=f"{LIBRARY}\n{mutation}")
    assert problem in result["problem"], result


STRIKES_IN_A_FINALIZER = """import injector
have_it = injector.Injector.have_it
class Finalized:
    def __init__(self, injector):
        self.injector = injector
    def __del__(self):
        have_it(self.injector)
def strike_in_a_finalizer(self):
    injector.Injector.have_it = have_it
    Finalized(self)
injector.Injector.have_it = strike_in_a_finalizer
"""


@pytest.mark.slow
def test_an_exception_in_a_finalizer_which_python_drops_occurs_a_moment_later():
    fault = {"how": "exception", "seam": "moment", "who": "worker", "others": "", "caught": True}
    seed = first(range(10_000), fault)
    (result,) = harness.run([seed], 1, prelude=STRIKES_IN_A_FINALIZER)
    assert not result["problem"], result
