"""Tests of what the processes of a job tell ``launch``, and of telling losses from other ends."""

import os

import pytest

from synkhronos.machines.job import reports
from synkhronos.machines.job.reports import Reports, report

OWN = "python -m synkhronos: "
STARTED = f"{OWN}the script has started\n"
SECOND = "machine node-2 (ranks 2, 3) was lost: its second process has died"


def told(*lines):
    found = Reports()
    found.read("".join(lines).encode())
    return found


def exited(code):
    return f"{OWN}the script has exited with {code}\n"


def ended(name):
    return f"{OWN}the script was ended by {name}\n"


def cause(code, *lines, ulfm=False):
    return told(STARTED, *lines).cause_of_loss(code, ulfm)


def test_what_is_not_for_users_is_left_out_wherever_the_output_is_cut():
    given = f"{STARTED}begin\r50% {exited(7)}{ended('SIGKILL')}[b] {OWN}a task has failed\nend".encode()
    assert Reports().read(given) == f"begin\r50% {ended('SIGKILL')}end".encode()
    found = Reports()
    for number in range(len(given)):
        found.read(given[number : number + 1])
    assert found.is_started and found.code == 137


def test_a_report_is_one_line_on_stderr_that_can_be_read(capfd):
    report(reports.EXITED, 3)
    said = capfd.readouterr().err
    assert told(said).code == 3 and said.count("\n") == 1
    null = os.dup(2)
    os.close(2)
    try:
        report(reports.STARTED)  # nobody reads it
    finally:
        os.dup2(null, 2)
        os.close(null)


def test_a_machine_that_a_progress_process_has_named_is_the_cause():
    assert cause(205, f"[node-3] {SECOND}\n") == SECOND
    assert cause(143, f"{SECOND}\n") == SECOND  # mpirun has ended the tasks by SIGTERM
    assert cause(1, f"{SECOND}\n", exited(1)) == SECOND


def test_a_job_that_has_ended_before_its_script_has_lost_something():
    assert cause(205) == cause(1, ulfm=True) == "a machine or a task was lost"
    assert cause(137) == "a task was ended by SIGKILL"
    assert cause(128 + 40) == "a task was ended by signal 40"
    assert Reports().cause_of_loss(137, False) == "a task was ended by SIGKILL"


@pytest.mark.parametrize("code", [1, 3, 137])
def test_a_script_that_has_exited_by_itself_is_no_loss(code):
    assert cause(code, exited(code)) is None


def test_a_script_that_a_signal_of_no_user_has_ended_is_a_loss():
    assert cause(135, ended("SIGBUS")) == "the script was ended by SIGBUS"
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"):
        assert cause(143, ended(name)) is None and cause(143, ended(name), f"{SECOND}\n") is None
    assert cause(143) is None  # by a user, also where nothing more was told


def test_an_error_about_a_loss_that_has_ended_the_script_is_the_cause():
    lost = "on node-2: a worker died: rank 3 (killed by SIGKILL)"
    assert cause(1, f"{OWN}the script has lost {lost}\n", exited(1)) == lost


def test_a_task_that_has_failed_is_no_loss_and_neither_is_a_job_that_has_not_started():
    assert cause(1, f"[node-2] {OWN}a task has failed\n") is None
    assert Reports().cause_of_loss(1, False) is None


def test_a_task_that_has_died_before_the_start_of_mpi_is_a_loss():
    line = "before MPI was initialized, a task has died on node-2"
    died = f"[node-2] {OWN}{line}\n"
    assert told(died).cause_of_loss(1, True) == cause(143, died, ended("SIGTERM"), ulfm=True) == line
    assert cause(143, ended("SIGTERM"), died, ulfm=True) is None  # it was ended with the job


def test_a_loss_that_ulfm_has_survived_is_not_why_the_script_has_exited():
    assert cause(1, f"{SECOND}\n", exited(1), ulfm=True) is None
    assert cause(1, f"{SECOND}\n", ulfm=True) == SECOND


def test_losses_and_failures_are_told_only_if_the_job_may_be_started_again(capfd, monkeypatch):
    for name, expected in (("", ""), ("SYNKHRONOS_JOB", f"{OWN}a task has failed\n")):
        if name:
            monkeypatch.setenv(name, "1")
        report(reports.FAILED)
        assert capfd.readouterr().err == expected
