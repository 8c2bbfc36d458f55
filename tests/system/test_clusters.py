"""Tests of the files in ``demos/clusters``, which start jobs from Slurm, Kubernetes, Dask and Ray."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from namespaces import LINK, Job, Machines, job_environment, why_no_mpi, why_no_namespaces
from processes import FOLDER, ROOT, restore_signals
from slurm import Slurm, why_no_slurm

CLUSTERS = ROOT / "demos" / "clusters"
needs_mpi = pytest.mark.skipif(bool(why_no_mpi()), reason=why_no_mpi())
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no Ray: pip install ray")
LONG = 100_000  # epochs


def ranks_by_machine(output):
    total, counts = re.search(r"^(\d+) ranks \((.*)\)$", output, re.MULTILINE).groups()
    found = {name: int(count) for name, count in re.findall(r"([\w-]+): (\d+)", counts)}
    assert sum(found.values()) == int(total)
    return found


def losses(output):
    return [float(loss) for loss in re.findall(r"^epoch \d+: loss ([\d.]+)$", output, re.MULTILINE)]


@pytest.fixture(scope="module")
def slurm():
    if why_no_slurm():
        pytest.skip(why_no_slurm())
    with Machines(2, apart=True) as machines, Slurm(machines) as slurm:
        yield slurm


@pytest.fixture
def submit(slurm, tmp_path):
    """A function that submits ``train.sbatch``; it returns the job's number and its output's path."""

    def submit(*arguments):
        output = tmp_path / "output.txt"
        options = ["--cpus-per-task=1", f"--output={output}"]
        return slurm.submit(*options, "train.sbatch", *arguments, cwd=CLUSTERS), output

    return submit


@pytest.mark.slow
def test_slurm_runs_a_job_on_two_nodes(slurm, submit):
    number, output = submit("--epochs", 2)
    state = slurm.wait(number, 300)
    assert state == ("COMPLETED", "0:0"), output.read_text()
    assert sorted(ranks_by_machine(output.read_text())) == slurm.hosts
    assert losses(output.read_text())[-1] < 0.1


@pytest.mark.slow
def test_slurm_sees_the_exit_status_of_the_script(slurm, submit):
    number, output = submit("--epochs", "many")
    assert slurm.wait(number, 300) == ("FAILED", "2:0"), output.read_text()
    assert "invalid int value: 'many'" in output.read_text()


@pytest.mark.slow
def test_a_job_that_slurm_cancels_ends_on_all_nodes(slurm, submit):
    number, output = submit("--epochs", LONG)
    until = time.monotonic() + 300
    while not (output.exists() and losses(output.read_text())):
        assert time.monotonic() < until and slurm.state(number)[0] in ("PENDING", "RUNNING")
        time.sleep(0.5)
    assert all(any("train.py" in one for one in found) for found in slurm.processes())
    slurm.run("scancel", number).check()
    assert slurm.wait(number, 60)[0] == "CANCELLED"
    until = time.monotonic() + 30
    while any(re.search("train.py|orted", one) for found in slurm.processes() for one in found):
        assert time.monotonic() < until, slurm.processes()
        time.sleep(0.5)


@pytest.fixture(scope="module")
def manifest():
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((CLUSTERS / "mpijob.yaml").read_text())


def dockerfile():
    text = re.sub(r"^#.*\n", "", (CLUSTERS / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n", " ", text).splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line.strip()]


def container(manifest, role):
    (one,) = manifest["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]["containers"]
    return one


def test_the_manifest_starts_what_the_image_has(manifest):
    spec, made = manifest["spec"], dict(dockerfile())
    launcher, worker = container(manifest, "Launcher"), container(manifest, "Worker")
    assert launcher["image"] == worker["image"]
    assert f"--tag {worker['image']} ." in (CLUSTERS / "Dockerfile").read_text()
    assert launcher["securityContext"] == worker["securityContext"] == {"runAsUser": 1000}
    command, home = launcher["command"], made["WORKDIR"]
    assert command[command.index("-n") + 1] == str(spec["mpiReplicaSpecs"]["Worker"]["replicas"])
    assert spec["slotsPerWorker"] == 2
    (source,) = [line for word, line in dockerfile() if word == "COPY" and line != ". /tmp/synkhronos"]
    assert source == f"demos/clusters/{command[-1]} ." and (ROOT / source.split()[0]).exists()
    setup = next(line for word, line in dockerfile() if word == "RUN" and "useradd" in line)
    assert f"'HostKey {spec['sshAuthMountPath']}/id_rsa'" in setup
    assert spec["sshAuthMountPath"] == f"{home}/.ssh"
    assert f"> {worker['command'][-1]}" in setup and "--uid 1000" in setup
    assert f"'Port {worker['readinessProbe']['tcpSocket']['port']}'" in setup


@pytest.mark.slow
@needs_mpi
@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
def test_the_launcher_of_the_manifest_runs_the_script_on_the_pods(manifest, tmp_path):
    """The launcher and the pods are machines, with the variables and the file that the operator sets."""
    launcher = container(manifest, "Launcher")
    command = [*launcher["command"][:-1], str(CLUSTERS / launcher["command"][-1]), "--epochs", "2"]
    with Machines(3, apart=True) as machines:
        slots = manifest["spec"]["slotsPerWorker"]
        hosts = tmp_path / "hostfile"
        hosts.write_text("".join(f"{host} slots={slots}\n" for host in machines.hosts[1:]))
        environment = job_environment({
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOME": os.environ["HOME"],
            "OMPI_MCA_orte_default_hostfile": str(hosts),
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "OMPI_MCA_orte_set_default_slots": str(slots),
            "OMPI_MCA_plm_rsh_agent": machines.agent,  # in place of ssh
            "OMPI_MCA_btl_tcp_if_include": LINK, "OMPI_MCA_oob_tcp_if_include": LINK,
        })  # fmt: skip
        done = Job(machines, command, environment, str(machines.folder)).wait(300).check()
        assert sorted(ranks_by_machine(done.output)) == machines.hosts[1:]
        assert losses(done.output)[-1] < 0.1
        assert not machines.left()


@pytest.fixture(scope="module")
def dask():
    pytest.importorskip("distributed")
    program = FOLDER / "programs" / "dask_cluster.py"
    process = subprocess.Popen(
        [sys.executable, program], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, preexec_fn=restore_signals,
    )  # fmt: skip
    with process:
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(60)


def environment():
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "SYNKHRONOS_PROGRESS": "0",
        "OMPI_MCA_btl_tcp_if_include": "lo",  # others may not reach themselves
        # Ray writes no token into the home folder, tells nobody, and waits while the machine is busy
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "300",
        "RAY_gcs_server_request_timeout_seconds": "300",
    }


def start(script, *arguments):
    return subprocess.Popen(
        [sys.executable, CLUSTERS / script, *map(str, arguments)],
        cwd=CLUSTERS, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, preexec_fn=restore_signals,
    )  # fmt: skip


def run(script, *arguments, timeout=300):
    with start(script, *arguments) as process:
        printed, said = process.communicate(timeout=timeout)
    return process.returncode, printed, said


@needs_mpi
def test_dask_starts_the_job_on_the_hosts_of_its_workers(dask):
    code, printed, said = run("from_dask.py", dask, "--ranks", 3, "--dry-run", "train.py")
    assert code == 0, said
    assert " -H 127.0.0.1,127.0.0.1 -n 2 " in printed  # a leader and a progress process on one host
    assert "SYNKHRONOS_RANKS=3" in printed and "THREADS" not in printed
    assert printed.strip().endswith("-m synkhronos run train.py")


@pytest.fixture(params=["dask", pytest.param("ray", marks=needs_ray)])
def scheduler(request):
    """The script of a scheduler, and the address of its cluster."""
    if request.param == "dask":
        return "from_dask.py", request.getfixturevalue("dask")
    return "from_ray.py", "local"


@pytest.mark.slow
@needs_mpi
def test_a_scheduler_runs_a_job(scheduler):
    code, printed, said = run(*scheduler, "--ranks", 2, "train.py", "--epochs", 2)
    assert code == 0, printed + said
    assert ranks_by_machine(printed) == {os.uname().nodename: 2}
    assert losses(printed)[-1] < 0.1
    code, printed, said = run(*scheduler, "-c", "import sys; print('end'); sys.exit(3)")
    assert code == 3 and printed.startswith("end\n"), said


def processes_with(word):
    return [one for one in psutil.process_iter(["cmdline"]) if word in (one.info["cmdline"] or [])]


@pytest.mark.slow
@needs_mpi
def test_ctrl_c_ends_the_job_of_a_scheduler(scheduler):
    mark = str(LONG + os.getpid())
    with start(*scheduler, "--ranks", 2, "train.py", "--epochs", mark) as process:
        for line in process.stdout:
            if losses(line):
                break
        assert losses(line), process.communicate()
        assert len(processes_with(mark)) > 3
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode
    until = time.monotonic() + 60
    while left := processes_with(mark):
        assert time.monotonic() < until, left
        time.sleep(0.2)
