"""Tests of scripts written for Platoon, run as its users run them: by its launcher, or by hand."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest
from processes import ROOT, restore_signals, shared_files

from synkhronos.compat.platoon import configparser, launcher
from synkhronos.compat.platoon.param_sync import ASGD, EASGD

PROGRAMS = ROOT / "tests" / "programs" / "platoon"
LAUNCHER = ["-m", "synkhronos.compat.platoon.launcher"]
LIMIT = 300
#: Ports are names on this machine, which no other test may use at the same time.
PORTS = itertools.count(os.getpid() * 1000)

ENDLESS = """
    import time
    from platoon.channel import Worker
    worker = Worker(**Worker.default_arguments(Worker.default_parser().parse_args()))
    print("ready", worker.global_rank, flush=True)
    while True:
        time.sleep(0.1)
"""


@pytest.fixture
def start(tmp_path):
    """Function that starts Python in ``tmp_path``. In the end nothing may be left of it."""
    started = []

    def start_python(*arguments, **variables):
        environment = {**os.environ, "THEANO_FLAGS": "mode=FAST_COMPILE", **variables}
        environment["PYTHONPATH"] = str(ROOT)
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=tmp_path, env=environment, text=True, start_new_session=True,
            preexec_fn=restore_signals,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    before = shared_files()
    try:
        yield start_python
        assert not [pid for one in started for pid in wait_for_end_of_session(one.pid)]
        wait_until(lambda: shared_files() <= before)
    finally:
        for one in started:
            for pid in session(one.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            one.communicate()


def session(leader):
    """Return the processes of a session."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def wait_for_end_of_session(leader, seconds=20):
    until = time.monotonic() + seconds
    while session(leader) and time.monotonic() < until:
        time.sleep(0.05)
    return session(leader)


@pytest.fixture
def launch(start):
    """Function that starts the launcher with a port of its own."""

    def launch_experiment(name, *arguments, controller="", worker="", devices=2):
        port = f"--control-port={next(PORTS)}"
        return start(
            *LAUNCHER, name, "-D", *["cpu"] * devices, f"-c={port} {controller}", f"-w={port} {worker}"
        )  # fmt: skip

    return launch_experiment


@pytest.fixture
def example(tmp_path):
    """Function that copies the scripts of an example."""

    def copy(*names):
        for name in names:
            shutil.copy(PROGRAMS / name, tmp_path)

    return copy


@pytest.fixture
def write(tmp_path):
    """Function that writes a script."""

    def write_script(name, text):
        (tmp_path / name).write_text(textwrap.dedent(text))

    return write_script


@pytest.fixture
def logs(tmp_path):
    """Function that returns what is in the logs of an experiment, by the names of the files."""

    def read():
        folders = list(tmp_path.glob("PLATOON_LOGS/*/*"))
        assert len(folders) <= 1
        return {path.name: path.read_text() for folder in folders for path in folder.iterdir()}

    return read


def ended(process, code, logs=dict):
    """Wait for the end of a process, and check its exit code."""
    out, err = process.communicate(timeout=LIMIT)
    if process.returncode != code:
        pytest.fail(f"exit code {process.returncode}, not {code}\n{out}{err}{logs()}", False)
    return out + err


def wait_until(condition, *shown):
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, [one() for one in shown]
        time.sleep(0.05)


def test_pixel_sum_is_exact(launch, example, logs):
    example("pixels.py", "pixel_sum_controller.py", "pixel_sum_worker.py")
    said = ended(launch("pixel_sum"), 0, logs)
    assert "PLATOON_LOGS/pixel_sum/" in said
    found = logs()
    kinds = ["controllercpu", "workercpu-0", "workercpu-1"]
    assert sorted(found) == [f"{kind}.{end}" for kind in kinds for end in ("err", "out")]
    assert found["controllercpu.out"].endswith("20 minibatches are done\n")
    for rank in range(2):
        assert found[f"workercpu-{rank}.out"].endswith("stop\nThe sum is exact.\n"), found


@pytest.mark.parametrize(
    "options",
    ["--param-sync-api --valid_sync", pytest.param("", marks=pytest.mark.slow)],
    ids=["shared", "all_reduce"],
)
def test_an_lstm_learns_with_elastic_averaging(launch, example, logs, options):
    example("sequences.py", "lstm_controller.py", "lstm_worker.py")
    # The last round has no validation, which one worker would make while the other waits for it.
    ended(launch("lstm", controller="--max-mb=180", worker=options), 0, logs)
    found = logs()
    best, steps = found["controllercpu.out"].split("\n")[-2].split(" after ")
    assert int(steps) > 180
    assert float(best.split()[1]) < 0.2, found  # half of them are wrong at first
    assert all("Train cost" in found[f"workercpu-{rank}.out"] for rank in range(2))


def test_rules_reductions_and_operations_of_two_workers(launch, write, logs):
    write(
        "rules_worker.py",
        """
        import numpy as np
        import theano
        from platoon import Worker, ops
        from platoon.channel.worker import Worker as Same
        from platoon.training import global_dynamics as gd

        assert Worker is Same
        worker = Worker(**Worker.default_arguments(Worker.default_parser().parse_args()))
        rank, n = worker.global_rank, worker.global_size
        assert (n, worker.local_size, worker.local_rank) == (2, 2, rank)
        one = theano.shared(np.arange(6.0).reshape(2, 3) + rank)
        other = theano.shared(np.full(2, 3.0 * rank, "float32"))

        # Interfaces of all_reduce
        total = np.arange(6.0).reshape(2, 3) * 2 + 1
        to = theano.shared(np.zeros((2, 3)))
        assert worker.all_reduce(one, "+", to) is None
        np.testing.assert_array_equal(to.get_value(), total)
        np.testing.assert_array_equal(worker.all_reduce(one, "+").get_value(), total)
        np.testing.assert_array_equal(worker.all_reduce(np.array([rank + 1]), "*"), [2])
        np.testing.assert_array_equal(worker.all_reduce(np.array([rank]), "max"), [1])
        try:
            worker.all_reduce(one, "-")
        except ValueError as error:
            assert "expected one of" in str(error)

        # Operations in graphs
        f = theano.function([], [], updates=[(to, ops.AllReduceSum(2 * one) / 2)])
        to.set_value(np.zeros((2, 3)))
        f()
        np.testing.assert_array_equal(to.get_value(), total)
        for op, expected in ((ops.AllReduceProd, 0), (ops.AllReduceMax, 3), (ops.AllReduceMin, 0)):
            np.testing.assert_array_equal(theano.function([], op(other, other))(), [expected] * 2)
        try:
            ops.AllReduceSum(one, other)
            raise AssertionError("no error")
        except TypeError as error:
            assert "dest" in str(error)

        # Rules
        gd.SumSGD(worker).make_rule(one)
        average = gd.AverageSGD()  # of the worker that there is
        average.make_rule([one, other])
        average()
        np.testing.assert_array_equal(one.get_value(), total / 2)
        np.testing.assert_array_equal(other.get_value(), [1.5, 1.5])
        summed = gd.SumSGD(worker)
        summed.make_rule(other)
        summed()
        np.testing.assert_array_equal(other.get_value(), [3, 3])

        x, center = theano.shared(np.array([4.0, 8.0]) * (1 + rank)), theano.shared(np.array([2.0, 0.0]))
        easgd = gd.EASGD(worker)
        easgd.make_rule(x, center, 0.25)
        easgd()
        # x - (x - c) / 4, and c + the sum of (x - c) / 4
        np.testing.assert_array_equal(x.get_value(), [[3.5, 6], [6.5, 12]][rank])
        np.testing.assert_array_equal(center.get_value(), [4, 6])

        local, updates = theano.shared(np.zeros(2)), theano.shared(np.full(2, 1.0 + rank))
        parameters = theano.shared(np.array([0.0, 1.0]))
        downpour = gd.Downpour(worker)
        downpour.make_rule([local], [updates], [parameters])
        downpour()
        np.testing.assert_array_equal(updates.get_value(), [0, 0])
        np.testing.assert_array_equal(parameters.get_value(), [3, 4])
        np.testing.assert_array_equal(local.get_value(), [3, 4])
        worker.close()
        print("all is right")
        """,
    )
    ended(launch("rules"), 0, logs)  # with the controller that there is without a script
    assert all(logs()[f"workercpu-{rank}.out"] == "all is right\n" for rank in range(2)), logs()


def test_param_sync_easgd_moves_both_by_a_part_of_the_difference():
    local, master = [np.array([4.0, 0.0])], [np.array([0.0, 2.0])]
    EASGD(0.25).update_params(local, master)
    assert local[0].tolist() == [3, 0.5] and master[0].tolist() == [1, 1.5]


def test_param_sync_asgd_adds_each_change_once():
    master = [np.array([1.0])]
    rules, own = [ASGD(), ASGD()], [[np.array([1.0])], [np.array([1.0])]]
    for rule, local in zip(rules, own):
        rule.begin(local)
    own[0][0] += 2
    own[1][0] += 5
    rules[0].update_params(own[0], master)
    rules[1].update_params(own[1], master)
    assert master[0] == own[1][0] == 8 and own[0][0] == 3
    rules[0].update_params(own[0], master)
    assert master[0] == own[0][0] == 8


def test_wrong_arguments_are_exit_code_2(start, write):
    assert "no script missing_worker.py" in ended(start(*LAUNCHER, "missing", "-D", "cpu"), 2)
    write("some_worker.py", ENDLESS)
    assert "expected devices" in ended(start(*LAUNCHER, "some", PLATOON_DEVICES=""), 2)
    for arguments, variables in ((["-H", "one"], {}), ([], {"PLATOON_HOSTS": "localhost,one"})):
        said = ended(start(*LAUNCHER, "some", *arguments, **variables), 2)
        assert "expected this machine as the only host" in said and "got one; " in said


def test_a_worker_that_fails_ends_the_others_and_is_exit_code_1(launch, write, logs):
    write(
        "some_worker.py",
        ENDLESS.replace("    while True", "    assert worker.global_rank\n    while True"),
    )
    said = ended(launch("some"), 1, logs)
    assert "exit code 1" in said
    assert "AssertionError" in logs()["workercpu-0.err"]
    assert logs()["workercpu-1.out"] in ("", "ready 1\n")


def test_a_controller_that_fails_ends_the_workers_and_is_exit_code_1(launch, write, logs):
    write("some_worker.py", ENDLESS.replace("while True", "worker.send_req('next')\n    while True"))
    ended(launch("some"), 1, logs)
    assert "the request 'next' of worker" in logs()["controllercpu.err"]


@pytest.mark.parametrize(
    "who, code",
    [
        ("worker", 1), ("launcher", -9), ("all, by an interrupt", -signal.SIGINT),
        pytest.param("controller", 3, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_after_a_kill_nothing_is_left(launch, write, logs, who, code):
    write("some_worker.py", ENDLESS)
    process = launch("some")
    names = [f"workercpu-{rank}.out" for rank in range(2)]
    wait_until(lambda: all("ready" in logs().get(name, "") for name in names), logs)
    controller = psutil.Process(process.pid).children()[0]
    victims = {"worker": controller.children()[0], "controller": controller, "launcher": process}
    if who in victims:
        victims[who].kill()
    else:
        os.killpg(process.pid, signal.SIGINT)
    ended(process, code, logs)  # and the fixture looks for processes


def test_what_a_controller_closes_is_no_failure(launch, write, logs):
    write(
        "some_controller.py",
        """
        import sys
        from platoon.channel import Controller

        class Closing(Controller):
            def handle_control(self, req, worker_id, req_info):
                assert worker_id in self._workers and len(self._devices) == 2
                self._close()
                return "stop"

        args = Controller.default_parser().parse_args()
        sys.exit(Closing(**Controller.default_arguments(args)).serve())
        """,
    )
    write(
        "some_worker.py",
        """
        import numpy as np
        from platoon.channel import Worker
        worker = Worker(**Worker.default_arguments(Worker.default_parser().parse_args()))
        if worker.global_rank:
            worker.all_reduce(np.zeros(2))  # to which the other worker does not come
        print(worker.send_req("next"))
        """,
    )
    ended(launch("some"), 0, logs)
    assert logs()["workercpu-0.out"] == "stop\n"


def test_hosts_and_devices_are_in_configuration_files_the_last_one_first(tmp_path, monkeypatch):
    for variable in ("PLATOON_DEVICES", "PLATOON_HOSTS", "PLATOONRC"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert launcher.find_hosts(None) == []
    for fetch in (configparser.fetch_hosts, lambda: configparser.fetch_devices_for_host("lisa0")):
        with pytest.raises(KeyError):
            fetch()
    # As in Platoon's template: several lines, with and without commas.
    text = "[platoon]\nhosts : lisa0\n        lisa1, lisa3\n[devices]\nlisa0 : cuda0\n        cuda1\n"
    (tmp_path / "home" / ".platoonrc").write_text(text + "localhost: cuda5")
    assert launcher.find_hosts(None) == ["lisa0", "lisa1", "lisa3"]
    assert configparser.fetch_devices_for_host("lisa0") == ["cuda0", "cuda1"]
    assert launcher.find_devices(None, None) == ["cuda5"]
    (tmp_path / ".platoonrc").write_text("[devices]\nlocalhost=cuda6,cuda7\n")
    assert launcher.find_devices(None, None) == ["cuda6", "cuda7"]
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"[platoon]\nhosts={name}\n")
    monkeypatch.setenv("PLATOONRC", f"{tmp_path}/one:{tmp_path}/two")
    assert configparser.fetch_hosts() == ["two"] and launcher.find_hosts(["three"]) == ["three"]
    monkeypatch.setenv("PLATOON_HOSTS", "four")
    assert configparser.fetch_hosts() == ["four"]
    (tmp_path / "two").write_text("hosts: nowhere\n")
    with pytest.raises(ValueError, match="configuration file cannot be read"):
        launcher.find_devices(None, None)


LIEUTENANT = """
    import sys
    from platoon import channel

    class Counting(channel.Lieutenant):
        def handle_control(self, req):
            print(req, flush=True)
            return 2 * req["done"]

    lieutenant = Counting()
    lieutenant.init_control(port=int(sys.argv[1]))
    print("Lieutenant is ready", flush=True)
    sys.exit(lieutenant.serve())
"""
SOLDIER = """
    import sys
    import numpy as np
    import theano
    from platoon.channel import Soldier
    from platoon.param_sync import EASGD

    port, number, to_do = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    soldier = Soldier(port=port)
    param = theano.shared(np.full(3, float(number)))
    soldier.init_shared_params([param], EASGD(0.5), cleanup=number == 0)
    assert param.get_value().tolist() == [number] * 3
    assert soldier.send_req(dict(done=number)) == 2 * number
    soldier.lock()
    soldier.unlock()
    soldier.sync_params(synchronous=number % 2 == 0)
    print("center", soldier.shared_params[0][0], "own", param.get_value()[0], flush=True)
    if to_do == "wait":
        sys.stdin.readline()
    soldier.copy_to_local()
    print("copied", param.get_value()[0], flush=True)
    soldier.close()
"""


@pytest.fixture
def by_hand(start, write):
    """Functions that start a lieutenant and a soldier by hand, at one port."""
    write("lieutenant.py", LIEUTENANT)
    write("soldier.py", SOLDIER)
    run, port = ["-m", "synkhronos", "run"], next(PORTS)
    return (
        lambda: start(*run, "lieutenant.py", port),
        lambda number, to_do="": start(*run, "soldier.py", port, number, to_do),
    )


@pytest.mark.slow
def test_soldiers_attach_to_a_lieutenant_when_they_come(by_hand):
    start_lieutenant, start_soldier = by_hand
    early = start_soldier(0, "wait")  # it waits for the lieutenant, and stays until all are gone
    lieutenant = start_lieutenant()
    assert early.stdout.readline() == "center 0.0 own 0.0\n"
    later = start_soldier(4)
    assert ended(later, 0) == "center 2.0 own 2.0\ncopied 2.0\n"
    killed = start_soldier(6, "wait")
    assert killed.stdout.readline() == "center 4.0 own 4.0\n"
    killed.kill()
    ended(killed, -9)
    last = start_soldier(1)
    assert ended(last, 0) == "center 2.5 own 2.5\ncopied 2.5\n"
    assert lieutenant.poll() is None
    early.stdin.write("go on\n")
    early.stdin.flush()
    assert ended(early, 0) == "copied 2.5\n"
    said = ended(lieutenant, 1)  # as a soldier was killed
    assert said.splitlines() == ["Lieutenant is ready", *(f"{{'done': {n}}}" for n in (0, 4, 6, 1))]


@pytest.mark.slow
def test_a_port_is_free_again_after_a_kill_and_taken_before(by_hand):
    start_lieutenant, start_soldier = by_hand
    lieutenant = start_lieutenant()
    assert lieutenant.stdout.readline() == "Lieutenant is ready\n"
    assert "another process listens" in ended(start_lieutenant(), 1)
    soldier = start_soldier(0, "wait")
    assert soldier.stdout.readline()
    lieutenant.kill()
    ended(lieutenant, -9)
    soldier.kill()
    ended(soldier, -9)
    again = start_lieutenant()
    assert again.stdout.readline() == "Lieutenant is ready\n"
    assert ended(start_soldier(3), 0) == "center 3.0 own 3.0\ncopied 3.0\n"
    assert ended(again, 0) == "{'done': 3}\n"


def test_an_installed_platoon_comes_first(start, write, tmp_path):
    write("platoon.py", "NAME = 'installed'")
    write("script.py", "import platoon\nprint(platoon.NAME)")
    assert ended(start("-m", "synkhronos", "run", "script.py"), 0) == "installed\n"


def test_install_makes_platoon_importable(start):
    code = (
        "from synkhronos.compat import platoon as ours\n"
        "ours.install()\nours.install()\n"
        "import sys, platoon\n"
        "from platoon import Controller, Worker\n"
        "assert platoon is ours and isinstance(Controller, type) and isinstance(Worker, type)\n"
        "assert sum(getattr(one, '__name__', '') == 'AliasFinder' for one in sys.meta_path) == 1\n"
        "try:\n    platoon.missing\nexcept AttributeError as error:\n    print(error)\n"
    )
    said = ended(start("-c", code), 0)
    assert said == "module 'synkhronos.compat.platoon' has no attribute 'missing'\n"
