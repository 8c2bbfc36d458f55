"""Tests of ranks on several machines, joined by MPI: network namespaces, or else tasks on this one.

A job takes seconds to start, so one job does the work of many tests here.
"""

import json
import os
import pickle
import re
import threading

import numpy as np
import pytest
from checks import communicators, links, stores, transports, wires
from compilers import NAME
from namespaces import Machines, why_no_mpi, why_no_namespaces
from prelude import run_file
from processes import FOLDER, ROOT

from synkhronos.transports.machines.naive import NaiveNetwork

pytestmark = pytest.mark.skipif(bool(why_no_mpi()), reason=why_no_mpi())


#: PyTensor's functions are C code, or compiled by Numba.
SLOW_NUMBA = pytest.param("NUMBA", marks=pytest.mark.slow)


def flags_of(mode):
    """Return the environment in which functions are built in this mode if they have none."""
    if NAME == "theano":
        return {}
    return {"PYTENSOR_FLAGS": f"{os.environ['PYTENSOR_FLAGS']},mode={mode}"}


@pytest.fixture(scope="module")
def machines():
    if why_no_namespaces():
        print(f"tasks on one host stand for machines, as namespaces are {why_no_namespaces()}")
    with Machines(2) as made:
        yield made


# Conformance

CHECKS = [
    f"{one.__module__.split('.')[-1]}: {one.__name__[len('check_'):]}"
    for one in [*links.CHECKS, *transports.CHECKS, *stores.CHECKS, *communicators.CHECKS, *wires.CHECKS]
    if "read_as_it_is" not in one.__name__  # a rank gets another machine's array as it was
]


@pytest.fixture(scope="module")
def checked(machines, tmp_path_factory):
    """The traceback of each check between two machines with two ranks each, or None."""
    return run_checks(machines, tmp_path_factory.mktemp("checked"))


def run_checks(machines, folder, *only):
    script = FOLDER / "programs" / "checks_between_machines.py"
    machines.run(script, 1, folder, *only, plain=True, timeout=300).check()
    assert not machines.left()
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(check, checked):
    assert checked[check] is None, checked[check]


def test_links_and_communicators_of_three_machines(tmp_path):
    with Machines(3) as machines:
        failed = run_checks(machines, tmp_path, "links", "communicators", "wires")
    assert len(failed) == len([*links.CHECKS, *communicators.CHECKS, *wires.CHECKS])
    assert not any(failed.values()), failed


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", links.CHECKS, ids=lambda check: check.__name__[len("check_") :])
def test_naive_links(check, size):
    errors = []

    def run(one):
        try:
            check(one)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[one]) for one in NaiveNetwork(size).links()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


# Other tests, over machines

# What they cannot have: workers that start late, `Data` in memory that all ranks share, files of a
# process on another machine, reports that are seen at once, boxes that are full at once, and sums of
# small arrays by each rank. A sum over machines has another order. Deaths are those of leaders there,
# which end the job.
SUITE = {
    "test_function_oracle": "",
    "test_collectives_oracle": "",
    "test_data": "",
    "test_ops": "numpy_for_every or are_gathered or random_graphs or shapes_that_differ",
    "test_ops_calls": "without_rows or each_slice or rank_that_fails or call_together or name",
    "test_ops_gradients": "losses_of_all_ranks and 2 or training_step",
    "test_batch_norm": "theano_computes or of_one_process and 7 or stay_equal",
    "test_in_sync": "not without_replicas and not at_any_time and not before_the_start",
    "test_rules_train": "",
    "test_rules": "not full_box",
    "test_spmd": "not in_shared_memory and not latest_can_be_read and not profile and not dead_rank and "
    "not wait_inside and not fresh_ranks and not not_restarted and not cannot_be_replaced and not "
    "dies_again",
    "test_controller": "not never_woken and not fresh_rank",
}
if NAME == "pytensor":
    del SUITE["test_collectives_oracle"]  # all of it is slow there
    del SUITE["test_batch_norm"]  # it compares with a function of Theano


@pytest.fixture(scope="module")
def outcomes(machines, tmp_path_factory):
    """By file and test, the text of its failure."""
    chosen = " or ".join(
        f"({name}.py and ({words}))" if words else f"{name}.py" for name, words in SUITE.items()
    )
    folder = tmp_path_factory.mktemp("suite")
    by_file = {name: {} for name in SUITE}
    for test, text in run_tests(machines, folder, SUITE, "-k", chosen, patience=40).items():
        by_file[test.split("::")[0].split("/")[-1][: -len(".py")]][test] = text
    return by_file


def run_tests(machines, folder, files, *arguments, patience, timeout=600):
    """Run tests of some files over machines; return the text of each failure by test."""
    results = folder / "results.json"
    done = machines.run(
        "-m", "pytest", "-q", "-p", "over_machines", "-p", "no:cacheprovider", f"--results={results}",
        "-o", f"faulthandler_timeout={patience}", *arguments,
        *[ROOT / "tests" / f"{name}.py" for name in files],
        timeout=timeout, cwd=ROOT, tasks=2,
        environment={"EXAMPLES": "0.1", **COURIERS},
    )  # fmt: skip
    assert results.exists(), done.output
    return json.loads(results.read_text())


COURIERS = {"SYNKHRONOS_SPARE_TASKS": "1"}  # the second task of each machine is no rank


def test_fresh_ranks_take_the_place_of_dead_ones_on_any_machine(machines, tmp_path):
    done = machines.run(
        FOLDER / "programs" / "replaced_on_machines.py", cwd=tmp_path, tasks=2, environment=COURIERS
    )
    assert done.check().output.splitlines()[-1] == "replaced", done.output
    assert not machines.left()


def test_gradients_travel_while_the_ranks_compute(machines, tmp_path):
    done = machines.run(
        FOLDER / "programs" / "overlap_on_machines.py", cwd=tmp_path, tasks=2, environment=COURIERS,
        timeout=200,
    )  # fmt: skip
    assert done.check().output.splitlines()[-1] == "overlapped", done.output
    assert not machines.left()


def test_steps_in_wire_formats_are_resumed_bit_for_bit(machines, tmp_path):
    found = []
    for _ in range(2):
        done = machines.run(
            FOLDER / "programs" / "resumed_on_machines.py", tmp_path / "checkpoint.npz", cwd=tmp_path,
            tasks=2, environment=COURIERS, timeout=200,
        )  # fmt: skip
        found.append(done.check().output.splitlines()[-1].split())
    assert found[0] == found[1] and len({*found[0]}) == len(found[0]) == 6
    with np.load(tmp_path / "checkpoint.npz") as file:
        assert sum(name.startswith("kept_") and "machine" in name for name in file.files) == 12
    assert not machines.left()


@pytest.mark.parametrize("mode", ["CVM", "NUMBA"] if NAME == "pytensor" else ["CVM"])
@pytest.mark.parametrize("rank, moment", [(3, "use"), pytest.param(1, "meet", marks=pytest.mark.slow)])
def test_a_script_goes_on_after_a_restart(rank, moment, mode, machines, tmp_path):
    done = machines.run(
        FOLDER / "programs" / "restarted_on_machines.py", "rank", rank, moment, 4, cwd=tmp_path,
        tasks=2, environment={**COURIERS, **flags_of(mode), "SYNKHRONOS_RANKS": "2"},
    )  # fmt: skip
    assert done.check().output.splitlines()[-1] == "restarted with 4 of 4", done.output
    assert not machines.left()


@pytest.mark.parametrize(
    "demo", ["demo_1", "demo_3", *(pytest.param(f"demo_{n}", marks=pytest.mark.slow) for n in (2, 4, 5))]
)
def test_demos_equal_the_plain_compiler(demo, machines, tmp_path):
    script = ROOT / "demos" / f"{demo}.py"
    done = machines.run(script, cwd=tmp_path, tasks=2, environment={**COURIERS, "SYNKHRONOS_RANKS": "1"})
    assert done.check().output.splitlines()[-1].startswith("All results equal those of plain")


@pytest.mark.skipif(NAME != "theano", reason="Lasagne builds graphs of Theano")
@pytest.mark.parametrize("demo", ["rules", pytest.param("cpu_data", marks=pytest.mark.slow)])
def test_demos_train_on_machines(demo, machines, tmp_path):
    script = ROOT / "demos" / "lasagne_mnist" / f"train_mnist_{demo}.py"
    done = machines.run(
        script, "--data", "sklearn", "--epochs", "6", "--model", "mlp",
        cwd=tmp_path, tasks=2, environment={**COURIERS, "SYNKHRONOS_RANKS": "2"}, timeout=300,
    )  # fmt: skip
    [accuracy] = re.findall(r"^Test:.* accuracy ([\d.]+)%$", done.check().output, re.MULTILINE)
    assert float(accuracy) > 80, done.output


@pytest.mark.parametrize("name", SUITE)
def test_suite(name, outcomes):
    failed = {test: text for test, text in outcomes[name].items() if text}
    assert outcomes[name] and not failed, "\n".join(f"{test}\n{failed[test]}" for test in failed)


@pytest.mark.slow
@pytest.mark.skipif(NAME != "theano", reason="Lasagne builds graphs of Theano")
def test_20_synchronized_steps_of_resnet_equal_the_serial_ones(machines, tmp_path):
    chosen = "-m", "slow", "-k", "20_synchronized_steps"
    found = run_tests(machines, tmp_path, ["test_demo_resnet"], *chosen, patience=900, timeout=1800)
    assert any("full_network" in test for test in found)
    assert not any(found.values()), found


# The same as on one machine


@pytest.fixture(scope="module", params=["CVM", SLOW_NUMBA] if NAME == "pytensor" else ["CVM"])
def found(request, machines, tmp_path_factory):
    """What four ranks compute on one machine, and on two whose compile caches of Theano are cold."""
    folder = tmp_path_factory.mktemp("same")
    flags = environment = flags_of(request.param)
    if machines.apart and NAME == "theano":
        cold = f"base_compiledir={folder},compiledir_format=%(hostname)s"
        environment = {"THEANO_FLAGS": cold}
    script, both = FOLDER / "programs" / "same_on_machines.py", []
    runs = (
        lambda own: run_file(script, own, cwd=folder, environment=flags, timeout=300),
        lambda own: machines.run(script, own, cwd=folder, environment=environment, timeout=500).check(),
    )
    for number, run in enumerate(runs):
        own = folder / str(number)
        own.mkdir()
        run(own)
        both.append(pickle.loads((own / "found.pickle").read_bytes()))
        with np.load(next(own.glob("checkpoint*")), allow_pickle=False) as saved:
            both[-1]["checkpoint"] = sorted(saved)
    return both


def assert_equal(one, other, rtol=0.0):
    """Check arrays in nested lists and tuples."""
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other):
            assert_equal(*pair, rtol)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol, rtol)
    else:
        assert one == other


def test_the_ranks_are_on_both_machines(found, machines):
    assert len({host for host, _ in found[0]["hosts"]}) == 1
    assert [ranks for _, ranks in found[1]["hosts"]] == [[0, 1, 2, 3]] * 4
    if machines.apart:
        hosts = [host for host, _ in found[1]["hosts"]]
        assert hosts == [machines.hosts[rank // 2] for rank in range(4)]


@pytest.mark.parametrize("what", ["inputs", "variables", "draws", "graphs", "again"])
def test_outputs_variables_and_random_numbers_are_those_of_one_machine(found, what):
    # Averages are those of the machines' averages; C code is compiled with other options.
    assert_equal(found[0][what], found[1][what], 0 if what == "draws" else 1e-12)


@pytest.mark.parametrize("what", ["training", "checked training"])
def test_training_steps_are_the_serial_ones(found, what):
    parallel, serial = found[1][what]
    assert_equal(parallel, serial, 1e-10)


def test_training_in_wire_formats_is_almost_that_of_one_machine(found):
    """On one machine, formats have no effect."""
    exact = found[0]["wires"][None]
    assert all(losses == exact for losses in found[0]["wires"].values())
    for wire, losses in found[1]["wires"].items():
        assert losses[-1] < exact[0] / 4
        if wire in (None, "float16", "int8"):
            np.testing.assert_allclose(losses, exact, rtol=1e-5 if wire is None else 0.01)
        if wire is not None:
            assert losses != exact


def test_a_program_averages_gradients_in_wire_formats(found):
    exact, *others = found[0]["wires in a program"]
    for own in (found[0], found[1]):
        for mean in own["wires in a program"]:
            np.testing.assert_allclose(mean, exact, atol=0.02 * np.abs(exact).max())


def test_a_profile_has_all_ranks_and_a_next_world_another_number(found):
    assert found[1]["ranks that compute"] == [0, 1, 2, 3]
    assert {0, 2} <= {*found[1]["ranks that reduce"]}  # the leaders
    assert found[1]["size of the next world"] == 3


def test_a_checkpoint_of_one_machine_is_that_of_two(found):
    first, second = (one["checkpoint"] for one in found)
    assert first == second and len(first) > 2
