"""Tests of what ``launch`` understands, what the job tells it, and which files it removes."""

import mmap
import os
import socket
import sys
import time

import pytest

from synkhronos.machines.job.config import Job, JobError, make_job
from synkhronos.machines.job import ending, reports
from synkhronos.machines.job.reports import Reports, report

OPTIONS = ("machines", "ranks", "hosts", "hostfile", "config", "mpi")


def job_of(**given):
    return make_job(*(given.get(name) for name in OPTIONS))


@pytest.fixture
def file(tmp_path):
    """A function that writes a file, and returns its path."""

    def write(text):
        path = tmp_path / "job.toml"
        path.write_text(text)
        return str(path)

    return write


def test_without_options_a_job_is_this_machine():
    assert job_of() == Job([], 1, {}, {}, [])
    assert job_of(machines=3, ranks=2) == Job([], 3, {"SYNKHRONOS_RANKS": "2"}, {}, [])


def test_hosts_come_from_the_option_or_from_a_file(file):
    assert job_of(hosts="b,a") == Job(["b", "a"], 2, {}, {}, [])
    path = file("# two machines\na slots=4\n\nme@b.local   # the other\n")
    assert job_of(hostfile=path) == Job(["a", "me@b.local"], 2, {}, {}, [])
    assert job_of(hosts="b,a,c", machines=2).hosts == ["b", "a"]


CONFIG = """
hosts = ["a", "b", "c"]
mpi = "--mca btl 'tcp,self'"
environment = {OMP_NUM_THREADS = 1, NAME = "a b"}
ranks = {a = 2, c = 4}
"""


def test_a_config_file_says_the_same_and_more(file):
    assert job_of(config=file(CONFIG)) == Job(
        ["a", "b", "c"], 3, {"OMP_NUM_THREADS": "1", "NAME": "a b"},
        {"a": {"SYNKHRONOS_RANKS": "2"}, "c": {"SYNKHRONOS_RANKS": "4"}}, ["--mca", "btl", "tcp,self"],
    )  # fmt: skip


def test_options_have_priority_over_the_config_file(file):
    job = job_of(config=file(CONFIG), hosts="c,d", ranks=3, mpi="-q")
    environment = {"OMP_NUM_THREADS": "1", "NAME": "a b", "SYNKHRONOS_RANKS": "3"}
    assert job == Job(["c", "d"], 2, environment, {}, ["-q"])
    assert job_of(config=file(CONFIG), machines=1).by_host == {"a": {"SYNKHRONOS_RANKS": "2"}}


def test_devices_are_those_of_the_ranks_of_a_host(file):
    hosts = 'hosts = ["a", "b"]\nranks = 2\n'
    path = file(hosts + '[devices]\na = ["cuda0", "cuda1"]\nb = ["cuda2", "cuda2"]')
    assert job_of(config=path).by_host == {
        "a": {"SYNKHRONOS_DEVICES": "cuda0,cuda1"}, "b": {"SYNKHRONOS_DEVICES": "cuda2,cuda2"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"machines": 0}, "-n: expected a number from 1 on, got 0"),
        ({"ranks": -1}, "--ranks: expected a number from 1 on, got -1"),
        ({"hosts": "a,b,a"}, "--hosts: a is named twice"),
        ({"hosts": "a,,b"}, "--hosts: expected the name or the address of a machine, got ''"),
        ({"hosts": "a:4"}, "expected the name or the address of a machine, got 'a:4'"),
        ({"hosts": "--mca"}, "expected the name or the address of a machine, got '--mca'"),
        ({"hosts": "a,b", "machines": 3}, "-n: expected at most 2, the number of hosts, got 3"),
        ({"hostfile": "none"}, "none cannot be read: No such file or directory"),
        ({"config": "none"}, "none cannot be read: No such file or directory"),
        ({"mpi": "--mca 'x"}, "--mpi: No closing quotation"),
    ],
)
def test_wrong_options_are_one_sentence(given, message):
    with pytest.raises(JobError) as raised:
        job_of(**given)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts = [", "is not a TOML file: "),
        ("host = ['a']", "expected the keys devices, environment, hosts, mpi, ranks, got host"),
        ("hosts = 'a'", "hosts: expected a list of names of machines, got 'a'"),
        ("hosts = []", "hosts: expected a list of names of machines, got []"),
        ("hosts = ['a', 1]", "hosts: expected the name or the address of a machine, got 1"),
        ("hosts = ['a', 'a']", "hosts: a is named twice"),
        ("ranks = 0", "ranks: expected a number from 1 on, got 0"),
        ("ranks = true", "ranks: expected a number from 1 on, got True"),
        ("hosts = ['a']\nranks = {b = 2}", "ranks: b is none of the hosts: a"),
        ("hosts = ['a']\nranks = {a = 'x'}", "ranks: a: expected a number from 1 on, got 'x'"),
        ("environment = ['A=1']", "environment: expected a table, got ['A=1']"),
        ("environment = {'A B' = 1}", "expected the name of an environment variable, got 'A B'"),
        ("environment = {A = 1.5}", "environment: A: expected a string or a number, got 1.5"),
        ("mpi = 3", "mpi: expected a list of strings, got 3"),
        ("hosts = ['a', 'b']\ndevices = {a = ['cuda0']}", "a list for each host, got none for b"),
        ("hosts = ['a']\ndevices = {a = 'cuda0'}", "a: expected a list of strings, got 'cuda0'"),
        ("hosts = ['a']\ndevices = {a = []}", "expected the name of at least one device"),
        ("hosts = ['a']\nranks = 2\ndevices = {a = ['cuda0']}", "a has 1 devices, cuda0, for 2 ranks"),
    ],
)
def test_a_wrong_config_file_is_one_sentence(file, text, message):
    with pytest.raises(JobError) as raised:
        job_of(config=file(text))
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_config_file_on_an_older_python_asks_for_tomli(file, monkeypatch):
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(JobError, match="python -m pip install tomli"):
        job_of(config=file(CONFIG))


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


@pytest.fixture
def make(tmp_path):
    """A function that makes a file in the folder, a minute old, and returns its name."""

    def make(host=None, user=None, form="vader_segment.{host}.{user}.59b10001.{task}", task=0, age=60):
        user = os.geteuid() if user is None else user
        path = tmp_path / form.format(host=host or socket.gethostname(), user=user, task=task)
        path.write_bytes(b"\0" * mmap.PAGESIZE)
        os.utime(path, (time.time() - age,) * 2)
        return path.name

    return make


def test_files_that_no_process_uses_are_removed(make, tmp_path):
    names = [make(), make(task=1), make(form="sm_segment.{host}.{user}.1.{task}")]
    assert sorted(ending.sweep(tmp_path)) == sorted(names)
    assert not list(tmp_path.iterdir()) and ending.sweep(tmp_path) == []


def test_a_file_that_a_process_has_mapped_is_kept(make, tmp_path):
    used, unused = make(), make(task=1)
    with open(tmp_path / used, "r+b") as file, mmap.mmap(file.fileno(), 0):
        file.close()
        assert ending.sweep(tmp_path) == [unused]
    assert ending.sweep(tmp_path) == [used]


@pytest.mark.parametrize(
    "facts",
    [
        {"age": 0},  # a job that starts
        {"host": "another"},
        {"user": os.geteuid() + 1},
        {"form": "my_segment.{host}.{user}.1.{task}"},
        {"form": "vader_segment.{host}.{user}.1.{task}.txt"},
    ],
)
def test_other_files_are_kept(make, tmp_path, facts):
    name = make(**facts)
    assert ending.sweep(tmp_path) == [] and os.listdir(tmp_path) == [name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to a second user")
def test_a_file_of_another_user_is_kept(make, tmp_path):
    os.chown(tmp_path / make(), 65534, 65534)
    assert ending.sweep(tmp_path) == []


def test_a_missing_folder_has_nothing_to_remove(tmp_path):
    assert ending.sweep(tmp_path / "none") == []
