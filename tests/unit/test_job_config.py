"""Tests of what ``launch`` understands: its options, config files and host files."""

import sys

import pytest

from synkhronos.machines.job.config import Job, JobError, make_job

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
