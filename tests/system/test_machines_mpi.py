"""Tests of ranks on several machines, joined by MPI: network namespaces, or else tasks on this one.

A job takes seconds to start, so one job does the work of many tests here.
"""

import contextlib
import json
import os
import pickle
import re
import threading

import numpy as np
import pytest
from checks import communicators, links, stores, transports, wires
from compilers import NAME
from namespaces import Machines, why_no_mpi
from prelude import run_file
from processes import FOLDER, ROOT, find_test

from specifications.links import NaiveNetwork

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
    with Machines(2) as made:
        yield made


CHECKS = [
    f"{one.__module__.split('.')[-1]}: {one.__name__[len('check_') :]}"
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


@pytest.mark.slow
def test_transports_and_stores_of_four_machines(tmp_path):
    with Machines(4) as machines:
        failed = run_checks(machines, tmp_path, "transports", "stores")
    assert {name.partition(":")[0] for name in failed} == {"links", "transports", "stores"}
    assert not any(failed.values()), failed


@pytest.mark.slow
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


# What they cannot have: workers that start late, `Data` in memory that all ranks share, files of a
# process on another machine, reports that are seen at once, boxes that are full at once, and sums of
# small arrays by each rank. A sum over machines has another order. There, the processes that die are
# leaders, which ends the job.
# Those in `LONG` are slow tests.
SHORT = {"test_ops_calls": "without_rows or rank_that_fails or call_together or name"}
LONG = {
    "test_function_oracle": "",
    "test_collectives_oracle": "",
    "test_controller": "not never_woken and not fresh_rank",
    "test_data": "",
    "test_drawing": "not dead_one and not before_it",
    "test_ops": "numpy_for_every or are_gathered or shapes_that_differ",
    "test_ops_gradients": "losses_of_all_ranks and 2 or training_step",
    "test_batch_norm": "theano_computes or of_one_process and 7 or stay_equal",
    "test_in_sync": "not without_replicas and not at_any_time and not before_the_start",
    "test_rules_train": "",
    "test_rules": "not full_box",
    "test_spmd": "not in_shared_memory and not latest_can_be_read and not profile and not dead_rank and "
    "not wait_inside and not fresh_ranks and not not_restarted and not cannot_be_replaced and not "
    "dies_again",
}
if NAME == "pytensor":
    del LONG["test_collectives_oracle"]  # all of it is slow there
    del LONG["test_batch_norm"]  # it compares with a function of Theano
else:
    LONG["test_uneven"] = "slower_one and asleep and 2 or eight"


@pytest.fixture(scope="module")
def outcomes(machines, tmp_path_factory, request):
    """Of some test files, by file and test, the text of its failure."""
    files = request.param
    chosen = " or ".join(
        f"({name}.py and ({words}))" if words else f"{name}.py" for name, words in files.items()
    )
    folder = tmp_path_factory.mktemp("suite")
    by_file = {name: {} for name in files}
    for test, text in run_tests(machines, folder, files, "-k", chosen, patience=40).items():
        by_file[test.split("::")[0].split("/")[-1][: -len(".py")]][test] = text
    return by_file


def run_tests(machines, folder, files, *arguments, patience, timeout=600):
    """Run tests of some files over machines; return the text of each failure by test."""
    results = folder / "results.json"
    done = machines.run(
        "-m", "pytest", "-q", "-p", "over_machines", "-p", "no:cacheprovider", f"--results={results}",
        "-o", f"faulthandler_timeout={patience}", *arguments,
        *[find_test(f"{name}.py") for name in files],
        timeout=timeout, cwd=ROOT, tasks=2,
        environment={"EXAMPLES": "0.1", **PROGRESS_PROCESSES},
    )  # fmt: skip
    assert results.exists(), done.output
    return json.loads(results.read_text())


PROGRESS_PROCESSES = {"SYNKHRONOS_SPARE_TASKS": "1"}  # the second task of each machine is no rank


@pytest.fixture
def last_line(machines, tmp_path):
    """Function that runs a program, and returns its last line; afterwards nothing may be left."""

    def run(name, *arguments, **variables):
        done = machines.run(
            FOLDER / "programs" / name, *arguments, cwd=tmp_path, tasks=2, timeout=200,
            environment={**PROGRESS_PROCESSES, **variables},
        )  # fmt: skip
        return done.check().output.splitlines()[-1]

    yield run
    assert not machines.left()


@pytest.mark.slow
@pytest.mark.parametrize("name, line", [("replaced", "replaced"), ("overlap", "overlapped")])
def test_a_program_that_checks_itself_ends_as_it_should(last_line, name, line):
    assert last_line(f"{name}_on_machines.py") == line


@pytest.mark.slow
def test_steps_in_wire_formats_are_resumed_bit_for_bit(last_line, tmp_path):
    path = tmp_path / "checkpoint.npz"
    first, second = (last_line("resumed_on_machines.py", path).split() for _ in range(2))
    assert first == second and len({*first}) == len(first) == 6
    with np.load(path) as file:
        assert sum(name.startswith("kept_") and "machine" in name for name in file.files) == 12


@pytest.mark.slow
def test_a_session_trains_and_is_resumed(last_line, tmp_path):
    found = []
    for epochs in (["2"], ["1", "2"]):
        path = tmp_path / f"{len(epochs)}.npz"
        digest, error = last_line("session_on_machines.py", path, *epochs).split()
        found.append(digest)
        assert float(error) < 0.3
    assert found[0] == found[1]


def test_a_machine_with_other_source_files_is_refused(machines, tmp_path):
    if not machines.apart:
        pytest.skip("tasks on one host have the same files")
    script, changed = tmp_path / "script.py", tmp_path / "_html.py"
    script.write_text("import synkhronos\nif __name__ == '__main__': synkhronos.fork(2, use_gpu=False)")
    changed.write_text((ROOT / "synkhronos" / "_html.py").read_text() + "# changed\n")
    with machines.mounted(1, ROOT / "synkhronos" / "_html.py", "--bind", changed):
        done = machines.run(script, cwd=tmp_path)
    first, second = machines.hosts
    assert done.returncode != 0, done.output
    assert f"Synkhronos has other source files on {first} than on {second}" in done.output
    assert not machines.left()


@pytest.mark.slow
def test_files_that_a_machine_lacks_or_has_with_other_contents_are_sent(machines, tmp_path):
    if not machines.apart:
        pytest.skip("tasks on one host have the same files")
    rows = np.arange(40_000.0).reshape(1000, 40)
    others = {"same": None, "changed": rows + (rows == 39_999), "shorter": rows[:999], "absent": None}
    files = {name: tmp_path / name / "rows.npy" for name in others}
    with contextlib.ExitStack() as mounts:
        for name, other in others.items():
            files[name].parent.mkdir()
            np.save(files[name], rows)
            if other is not None:
                np.save(tmp_path / f"{name}.npy", other)
                mounts.enter_context(
                    machines.mounted(1, files[name], "--bind", tmp_path / f"{name}.npy")
                )
        mounts.enter_context(machines.mounted(1, files["absent"].parent, "-t", "tmpfs", "tmpfs"))
        script = FOLDER / "programs" / "files_on_machines.py"
        done = machines.run(script, *files.values(), cwd=tmp_path).check()
    sent = json.loads(done.output.splitlines()[-1])
    small = 4000  # bytes of messages without rows
    for name, path in files.items():
        wanted = [0, 0] if name == "same" else [rows.nbytes // 2, 495 * rows[0].nbytes]
        found = [count - least for count, least in zip(sent[str(path)], wanted)]
        assert all(0 <= one < small for one in found), (name, sent)
    assert not machines.left()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["CVM", "NUMBA"] if NAME == "pytensor" else ["CVM"])
@pytest.mark.parametrize("rank, moment", [(3, "use"), (1, "meet")])
def test_a_script_goes_on_after_a_restart(rank, moment, mode, last_line):
    line = last_line(
        "restarted_on_machines.py", "rank", rank, moment, 4, **flags_of(mode), SYNKHRONOS_RANKS="2"
    )
    assert line == "restarted with 4 of 4"


@pytest.mark.slow
@pytest.mark.parametrize("demo", [f"demo_{n}" for n in range(1, 6)])
def test_demos_equal_the_plain_compiler(demo, last_line):
    line = last_line(ROOT / "demos" / f"{demo}.py", SYNKHRONOS_RANKS="1")
    assert line.startswith("All results match plain")


@pytest.mark.skipif(NAME != "theano", reason="Lasagne builds graphs of Theano")
@pytest.mark.slow
@pytest.mark.parametrize("demo", ["rules", "cpu_data"])
def test_demos_train_on_machines(demo, machines, tmp_path):
    script = ROOT / "demos" / "lasagne_mnist" / f"train_mnist_{demo}.py"
    done = machines.run(
        script, "--data", "sklearn", "--epochs", "6", "--model", "mlp",
        cwd=tmp_path, tasks=2, environment={**PROGRESS_PROCESSES, "SYNKHRONOS_RANKS": "2"}, timeout=300,
    )  # fmt: skip
    [accuracy] = re.findall(r"^Test:.* accuracy ([\d.]+)%$", done.check().output, re.MULTILINE)
    assert float(accuracy) > 80, done.output


@pytest.mark.parametrize(
    "outcomes, name",
    [pytest.param(SHORT, name, id=name) for name in SHORT]
    + [pytest.param(LONG, name, id=name, marks=pytest.mark.slow) for name in LONG],
    indirect=["outcomes"],
)
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


@pytest.fixture(scope="module", params=["CVM", SLOW_NUMBA] if NAME == "pytensor" else ["CVM"])
def found(request, machines, tmp_path_factory):
    """What four ranks compute on one machine, and on two whose compile caches of Theano are cold.

    The third item is what one machine computes from the checkpoint of two.
    """
    folder = tmp_path_factory.mktemp("same")
    flags = environment = flags_of(request.param)
    if machines.apart and NAME == "theano":
        cold = f"base_compiledir={folder},compiledir_format=%(hostname)s"
        environment = {"THEANO_FLAGS": cold}
    script, found = FOLDER / "programs" / "same_on_machines.py", []

    def on_one(*given):
        run_file(script, *given, cwd=folder, environment=flags, timeout=300)

    def on_two(*given):
        machines.run(script, *given, cwd=folder, environment=environment, timeout=500).check()

    checkpoints = [folder / str(number) / "resumed" for number in range(2)]
    runs = [(on_one,), (on_two, checkpoints[0]), (on_one, checkpoints[1], "only")]
    for number, (run, *given) in enumerate(runs):
        own = folder / str(number)
        own.mkdir()
        run(own, *given)
        found.append(pickle.loads((own / "found.pickle").read_bytes()))
        with np.load(own / "resumed", allow_pickle=False) as saved:
            found[-1]["checkpoint"] = {name: saved[name] for name in saved.files}
    return found


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


@pytest.mark.parametrize("what", ["inputs", "variables", "graphs", "again"])
def test_outputs_and_variables_are_the_same_as_on_one_machine(found, what):
    # Averages are averages of the machines' averages; C code is compiled with other options.
    assert_equal(found[0][what], found[1][what], 1e-12)


def test_random_numbers_are_the_same_as_on_one_machine(found):
    drawn = [one["resumed"][0] for one in found]
    assert_equal(drawn[0], drawn[1])


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
    first, second, _ = (one["checkpoint"] for one in found)
    arrays = [name for name in first if name.startswith("shared_")]
    # One value of w, and those of each rank of two variables; and random streams.
    assert sorted(first) == sorted(second) and len(arrays) > 1 + 2 * 4, sorted(first)
    for name, array in first.items():
        assert_equal(array, second[name])


def test_a_checkpoint_is_loaded_on_another_number_of_machines(found):
    [own], of_two, of_one = [one["resumed"][1] for one in found]
    assert_equal(of_two[0], own)
    assert_equal(of_two[1], own)  # the checkpoint of one machine, on two
    assert_equal(of_one[1], own)  # and that of two machines, on one
    values = own[3][1]
    assert len({float(value) for value in values}) == 4, values
