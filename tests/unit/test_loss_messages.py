"""Tests of telling losses from other ends of a job, with what mpirun and the tasks have really written.

The recorded outputs are those of OpenMPI 4.1.4 and 5.0.11, on two machines made of namespaces.
"""

import json
from pathlib import Path

import pytest

from synkhronos.machines.job.loss_messages import cause_of_loss

RECORDED = json.loads((Path(__file__).with_name("recorded") / "endings_of_mpirun.json").read_text())
OUTPUTS = {(one["openmpi"], one["what"]): "\n".join(one["said"]) for one in RECORDED}
NODE_2 = "machine node-2 (ranks 2, 3) was lost: "
SECOND = (
    "the second task of another machine left the job: its first process has died, or cannot be reached"
)
SILENT = "it has not answered for 3 seconds, so it has no power, or the network to it is interrupted"
CAUSES = {
    ("4", "all processes of a machine are killed"):
        f"{NODE_2}all its connections were closed, so its processes have died",
    ("5", "all processes of a machine are killed"): "mpirun has lost the machine node-2",
    ("4", "the network to a machine is interrupted"): f"{NODE_2}{SILENT}",
    ("5", "the network to a machine is interrupted"): f"{NODE_2}{SILENT}",
    ("4", "mpirun's daemon on a machine is killed"): "mpirun has lost the machine node-2",
    ("4", "the leader of another machine is killed"): f"{NODE_2}its first process has died",
    ("5", "the leader of another machine is killed"):
        "machine node-2 (ranks 2, 3) left the job: its first process has died, or cannot be reached",
    ("4", "a progress process is killed"): f"{NODE_2}its second process has died",
    ("5", "a progress process is killed"): SECOND,
    ("4", "the script is killed"): "machine node-1 (ranks 0, 1) was lost: its first process has died",
    ("5", "the script is killed"): "machine node-1 (ranks 0, 1) was lost: its first process has died",
    ("4", "a rank is killed"): "on node-2: a worker died: rank 3 (killed by SIGKILL)",
    ("5", "a rank gets SIGSEGV"): "on node-2: a worker died: rank 3 (killed by SIGSEGV)",
    ("4", "the leader of another machine gets SIGTERM"): f"{NODE_2}its first process has died",
    ("4", "the script raises an exception"): None,
    ("4", "the script exits with 3"): None,
    ("5", "the script exits with 3"): None,
}  # fmt: skip
SIGNAL = "mpirun noticed that process rank {} with PID 0 on node node-1 exited on signal {} (Name).\n"


def test_each_recorded_output_has_a_cause():
    assert {*OUTPUTS} == {*CAUSES}


@pytest.mark.parametrize("case", CAUSES, ids=" ".join)
def test_a_loss_is_told_from_other_ends(case):
    assert cause_of_loss(OUTPUTS[case], survives_deaths=case[0] == "5") == CAUSES[case]


@pytest.mark.parametrize("number", [1, 2, 3, 15])
def test_a_user_ends_the_script_but_not_a_task_of_another_machine(number):
    own = "machine node-1 (ranks 0, 1) was lost: its first process has died\n"
    assert cause_of_loss(own + SIGNAL.format(0, number)) is None
    assert cause_of_loss(SIGNAL.format(2, number)).startswith("task 2, on node-1, was ended by SIG")


def test_a_script_that_a_signal_of_no_user_ends_is_a_loss():
    assert cause_of_loss(SIGNAL.format(0, 11)) == "task 0, on node-1, was ended by SIGSEGV"
    assert cause_of_loss(SIGNAL.format(0, 40)) == "task 0, on node-1, was ended by signal 40"
    said = "python -m synkhronos: the script was ended by {}\n"
    assert cause_of_loss(said.format("SIGBUS"), True) == "the script was ended by SIGBUS"
    assert cause_of_loss(said.format("SIGTERM"), True) is None


def test_a_task_that_has_died_before_the_start_of_mpi_is_a_loss():
    said = (
        "[node-2] python -m synkhronos: a task on node-2 has died before all tasks had initialized MPI\n"
    )
    died = "a task on node-2 has died before all tasks had initialized MPI"
    assert cause_of_loss(said, True) == died
    assert cause_of_loss(f"{said}PRTE has lost communication with a remote daemon.", True) == died
    by_user = "python -m synkhronos: the script was ended by SIGTERM\n"
    assert cause_of_loss(said + by_user, True) == died and cause_of_loss(by_user + said, True) is None


def test_a_script_that_is_killed_with_its_parent_is_a_loss_and_one_that_a_user_ends_is_not():
    said = "MPI_ABORT was invoked on rank {} in communicator MPI_COMM_WORLD\n"
    assert cause_of_loss(said.format(4), True).startswith("task 4 has ended the job, as the task with")
    assert cause_of_loss(said.format(0), True) is None  # the script itself
    by_user = "python -m synkhronos: the script was ended by SIGTERM\n"
    assert cause_of_loss(by_user + said.format(4), True) is None


def test_the_exit_code_counts_if_mpirun_does_not_say_which_task_has_ended():
    said = OUTPUTS["4", "the script exits with 3"]
    short = said.partition("mpirun detected")[0]
    assert short != said
    assert cause_of_loss(short, code=137) == "a task was ended by SIGKILL"
    assert cause_of_loss(short, code=128 + 15) is None  # by a user
    assert cause_of_loss(short, code=3) is None and cause_of_loss("", code=137) is None
    assert cause_of_loss(said, code=137) is None


@pytest.mark.parametrize(
    "said",
    [
        "ORTE was unable to reliably start one or more daemons.",
        "An ORTE daemon has unexpectedly failed after launch and before",
        "PRTE has lost communication with a remote daemon.",
    ],
)
def test_a_lost_daemon_is_a_lost_machine(said):
    assert cause_of_loss(said) == "mpirun has lost a machine"


def test_a_daemon_that_has_not_started_is_a_lost_machine_by_the_output_of_openmpi_5():
    printed = (
        f"{60 * '-'}\nA daemon failed to report back after being spawned. This could\n...\n"
        "  Local host:    node-1\n  Remote host:   node-2\n  Daemon exit status: 213\n"
    )
    assert cause_of_loss("", True, 213, printed) == "mpirun has lost node-2 at the start"
    by_user = "python -m synkhronos: the script was ended by SIGTERM\n"
    assert cause_of_loss(by_user, True, 213, printed) is None
    assert cause_of_loss("", True, 213, "was a daemon\n") is None


def test_after_a_loss_that_ulfm_has_survived_an_exception_of_the_script_is_its_own():
    lost = f"[node-2] {NODE_2}its first process has died\n"
    traceback = "Traceback (most recent call last):\n  File ...\n"
    error = "synkhronos.machines.links.LostError: machine node-2 (ranks 2, 3) left the job: ...; only\n"
    own = "KeyError: 'lost'\n"
    assert cause_of_loss(lost, True) is None  # it has exited with a code
    assert cause_of_loss(lost + traceback + error, True).startswith("machine node-2")
    for end in (traceback + own, traceback + error + "\nDuring handling ...\n\n" + traceback + own):
        assert cause_of_loss(lost + end, True) is None
    assert cause_of_loss(lost + traceback + own) is not None  # mpirun 4.1 ends the job


def test_an_error_of_the_processes_that_names_no_signal_is_no_loss():
    error = "synkhronos._errors.WorldBrokenError: {}; only restart() and close() can be called\n"
    assert cause_of_loss(error.format("a worker died: rank 1 (killed by SIGKILL)")) is not None
    assert cause_of_loss(error.format("a worker died: rank 1 (exit code 3)")) is None
    assert cause_of_loss("[node-2] " + error.format("a worker died: rank 1 (killed by SIGKILL)")) is None
    assert cause_of_loss(error.format("a command was interrupted")) is None
