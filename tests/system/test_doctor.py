"""Tests of the doctor's checks, each with and without a problem."""

import importlib.util
import os
import re
import shutil
import sys

import pytest

from synkhronos.host.doctor import blas_kernels, check, checks, gpus
from synkhronos.host.doctor.check import OK, PROBLEM, WARNING, Check
from made_up_libraries import fixture_bare_machine, fixture_binaries, fixture_put  # noqa: F401
from made_up_libraries import all_are_visible, path_of
import synkhronos as synk
from synkhronos.host import environment
from namespaces import KEEPER, Job, Machines, why_no_mpi, why_no_namespaces
from processes import PYTHONPATH, ROOT
from synkhronos.host.compiler import TITLE
from synkhronos.machines.job import doctor as doctor_mpi

CHECKS = {one.name: one for one in (*checks.OF_PYTENSOR, *checks.OF_THEANO, *checks.CHECKS)}


def result_of(examine, *arguments):
    return Check("this", lambda: examine(*arguments), is_required=True).run()


FOUND = {
    "version": "1.0.5",
    "compiler": "/usr/bin/g++",
    "ldflags": "-lopenblas",
    "theano": 0.010,
    "numpy": 0.010,
    "libraries": [
        {
            "user_api": "blas", "internal_api": "openblas",
            "filepath": "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.29.so",
            "version": "0.3.29", "threading_layer": "pthreads", "architecture": "Haswell",
        }
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "change, state",
    [({}, OK), ({"pytensor": 0.030}, WARNING), ({"ldflags": ""}, WARNING), ({"compiler": ""}, WARNING)],
)
def test_pytensors_product_is_judged(change, state):
    found = {**FOUND, "version": "3.0.7", "pytensor": 0.010}
    assert result_of(checks.judge_product, {**found, **change}, "PyTensor").state == state


def test_pytensor_without_numpy_2_is_a_problem(monkeypatch):
    monkeypatch.setattr("numpy.__version__", "1.23.5")
    for one in checks.OF_PYTENSOR[1], checks.OF_PYTENSOR[-1]:
        assert one.run().state == PROBLEM and "NumPy 2" in one.run().remedy


@pytest.mark.parametrize(
    "name, patched, state, found",
    [
        ("Python", (sys, "version_info", (3, 15, 0, "final", 0)), PROBLEM, ""),
        ("cores", (checks, "cores", lambda: 1), WARNING, ""),
        ("memory", (checks, "memory_room", lambda: 2**20), WARNING, ""),
        (
            "Theano",
            (checks, "PRODUCT_PROBE", "raise OSError('disk full')"),
            PROBLEM,
            "OSError: disk full",
        ),
    ],
    ids=["another Python", "one core", "little memory", "a Theano that fails"],
)
def test_what_is_wrong_with_this_machine_has_its_state(monkeypatch, name, patched, state, found):
    monkeypatch.setattr(*patched)
    result = CHECKS[name].run()
    assert result.state == state and result.found == (found or result.found)


def test_missing_modules_are_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    result = CHECKS["packages"].run()
    assert result.state == PROBLEM
    assert result.remedy == "python -m pip install psutil"


def test_no_compiler_is_a_problem(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "g++" in CHECKS["compiler"].run().remedy


def test_a_compiler_that_fails_is_a_problem_with_its_own_message(monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'In file x:' >&2; echo 'error: no cc1plus' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    result = CHECKS["compiler"].run()
    assert result.state == PROBLEM
    assert result.found == f"{compiler} does not compile: error: no cc1plus"


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, OK), ({"theano": 0.019}, OK), ({"theano": 0.030}, WARNING), ({"ldflags": ""}, WARNING),
        ({"compiler": ""}, PROBLEM), ({"version": "0.9.0"}, PROBLEM),
    ],
)  # fmt: skip
def test_theano_is_judged_by_its_product_and_its_settings(change, state):
    result = result_of(checks.judge_product, {**FOUND, **change}, "Theano")
    assert result.state == state
    assert bool(result.remedy) == (state != OK)


def test_a_probe_that_fails_reports_the_last_line():
    with pytest.raises(check.ProbeError, match="^ValueError: lost$"):
        check.probe("raise ValueError('lost')")


def test_a_probe_that_crashes_is_a_finding():
    with pytest.raises(check.ProbeError, match="exit status -9"):
        check.probe("import os; os.kill(os.getpid(), 9)")


def test_a_probe_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(check, "TIME_LIMIT", 0.5)
    with pytest.raises(check.ProbeError, match="no answer"):
        check.probe("import time; time.sleep(60)")


ZEN_5 = "fma sse4_2 avx f16c avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16"
PROCESSORS = {
    ZEN_5: "AVX-512",
    "sse4_2 fma avx avx2 avx512f avx512cd avx512er avx512pf": "AVX2",  # Knights Landing
    "sse4_2 avx f16c fma avx2": "AVX2",
    "sse4_2 avx f16c fma": "AVX",  # Piledriver
    "sse4_2 avx": "AVX",
    "sse sse2 ssse3": "SSE",
}


@pytest.mark.parametrize(("flags", "instructions"), PROCESSORS.items())
def test_the_instructions_of_a_processor_are_the_newest_of_its_flags(tmp_path, flags, instructions):
    path = tmp_path / "cpuinfo"
    path.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} popcnt\nbugs\t\t: none\n\n")
    assert blas_kernels.instructions_of_processor(path) == instructions


def library(filepath, version="0.3.21", architecture="Haswell", api="openblas", layer="pthreads"):
    """Return the description of a library, as threadpoolctl would."""
    return {
        "user_api": "blas",
        "internal_api": api,
        "num_threads": 2,
        "filepath": filepath,
        "version": version,
        "threading_layer": layer,
        "architecture": architecture,
    }


PACKAGES = "/home/me/env/lib/python3.11/site-packages"
SYSTEM = library("/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.21.so")
OF_NUMPY = library(f"{PACKAGES}/numpy.libs/libopenblas64_p-r0-742d56dc.3.20.so", "0.3.20")
OF_SCIPY = library(f"{PACKAGES}/scipy.libs/libopenblasp-r0-41284840.3.18.so", "0.3.18")
BY_PATH = f"-Wl,--no-as-needed,{OF_SCIPY['filepath']},-rpath,{PACKAGES}/scipy.libs"
MKL = library("/opt/libmkl_rt.so.2", "2023.1", None, "mkl", "intel")


@pytest.mark.parametrize(
    ("ldflags", "expected"),
    [
        ("-lopenblas", SYSTEM),
        ("-L/usr/lib -lopenblas", SYSTEM),
        (BY_PATH, OF_SCIPY),
        (f"-L{PACKAGES}/scipy.libs -lopenblasp-r0-41284840.3.18", OF_SCIPY),
        ("-lmkl_rt", MKL),
        ("-lblas", MKL),  # it may be any library outside of the wheels
        ("-Wl,--no-as-needed,/elsewhere/libopenblas.so,-rpath,/elsewhere", None),
        ("", None),
    ],
)
def test_the_linked_library_is_found_by_the_flags(ldflags, expected):
    assert blas_kernels.linked(ldflags, [OF_NUMPY, OF_SCIPY, MKL, SYSTEM]) == expected


def with_kernels(one, kernels):
    return {**one, "architecture": kernels}


OLD = "the kernels do not use AVX-512, which the processor has: "
SYSTEMS = (
    "install the system's OpenBLAS, on Debian with: apt-get install libopenblas-dev; or a newer SciPy"
)


@pytest.mark.parametrize(
    ("ldflags", "linked", "coretype", "remedy"),
    [
        ("-lopenblas", SYSTEM, "Haswell",
         OLD + "unset OPENBLAS_CORETYPE, which is 'Haswell', or set it to SkylakeX"),
        (BY_PATH, OF_SCIPY, "Nonsense",
         OLD + "unset OPENBLAS_CORETYPE, which is 'Nonsense', or set it to SkylakeX"),
        ("-lopenblas", SYSTEM, None,
         OLD + "install a newer version of OpenBLAS; or set OPENBLAS_CORETYPE=SkylakeX"),
        ("-lopenblas", SYSTEM, "Cooperlake", OLD + "install a newer version of OpenBLAS"),
        (BY_PATH, OF_SCIPY, None, OLD + SYSTEMS + "; or set OPENBLAS_CORETYPE=SkylakeX"),
        (BY_PATH, OF_SCIPY, "SkylakeX", OLD + SYSTEMS),
    ],
    ids=["variable", "unknown-name", "system", "system-despite", "wheel", "wheel-despite"],
)  # fmt: skip
@pytest.mark.parametrize("is_slow", [False, True])
def test_the_remedy_for_old_kernels_fits_their_cause(ldflags, linked, coretype, remedy, is_slow):
    for kernels in ("Haswell", "Zen", "Barcelona", "Prescott"):
        libraries = [OF_NUMPY, with_kernels(linked, kernels)]
        found = blas_kernels.remedy(ldflags, libraries, is_slow, coretype, "AVX-512")
        assert found == remedy


@pytest.mark.parametrize(
    ("ldflags", "libraries", "remedy"),
    [
        ("", [OF_NUMPY], "install OpenBLAS, "),
        ("-lblas", [OF_NUMPY], "this BLAS is slow: install OpenBLAS"),
        ("-lmkl_rt", [MKL, OF_NUMPY], "this BLAS is slow: install OpenBLAS"),
        (BY_PATH, [OF_NUMPY, OF_SCIPY], "SciPy's copy is slow: install the system's"),
        ("-lopenblas", [SYSTEM, OF_NUMPY], "this OpenBLAS is slower than NumPy's"),
        ("-lopenblas", [OF_NUMPY], "this OpenBLAS is slower than NumPy's"),
        ("-lopenblas", [{**SYSTEM, "threading_layer": "disabled"}], "this OpenBLAS has no threads"),
    ],
)
def test_the_remedy_for_a_slow_product_fits_what_is_linked(ldflags, libraries, remedy):
    assert blas_kernels.remedy(ldflags, libraries, True, None, "AVX2").startswith(remedy)


NAMES = ("libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libcublas.so.13", "libcublasLt.so.13")
BARE = ("libcuda.so", "libnvrtc.so", "libcublas.so", "libnccl.so")


@pytest.fixture
def devices(tmp_path, monkeypatch, bare_machine):
    folder = tmp_path / "dev"
    folder.mkdir()
    monkeypatch.setattr(gpus, "DEVICES", folder)
    return folder


@pytest.fixture
def gpu(devices):
    (devices / "nvidia0").touch()
    return devices


@pytest.fixture
def libraries(put, tmp_path, monkeypatch, bare_machine):
    """Function that creates libraries in a folder, and puts it into this process's search path."""

    def put_them(*names):
        folder = put("libraries", *names)
        monkeypatch.setenv("LD_LIBRARY_PATH", path_of(folder)["LD_LIBRARY_PATH"])
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        return folder

    return put_them


def test_without_a_gpu_neither_pygpu_nor_nccl_is_missed(monkeypatch, devices):
    monkeypatch.setattr(gpus, "PYGPU_PROBE", "import a_module_that_is_not_there")
    monkeypatch.setattr(gpus, "NCCL_PROBE", "raise OSError('no libnccl.so')")
    assert CHECKS["GPUs"].run().state == OK
    assert CHECKS["NCCL"].run().state == OK


def test_gpus_that_cannot_be_used_are_a_warning(monkeypatch, devices):
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (devices / name).touch()
    monkeypatch.setattr(gpus, "PYGPU_PROBE", "import a_module_that_is_not_there")
    monkeypatch.setattr(gpus, "NCCL_PROBE", "raise OSError('no libnccl.so')")
    assert "nvidia0, nvidia1 cannot be used" in CHECKS["GPUs"].run().found
    assert CHECKS["NCCL"].run().state == WARNING


def test_a_pygpu_that_a_virtual_environment_does_not_see_is_named(monkeypatch, tmp_path, devices):
    folder = tmp_path / "lib" / "python3" / "dist-packages"
    (folder / "pygpu").mkdir(parents=True)
    (folder / "pygpu" / "__init__.py").touch()
    (devices / "nvidia0").touch()
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    monkeypatch.setattr("synkhronos.world.devices.get_n_gpu", lambda: 0)
    assert environment.hidden_folder("pygpu") == folder
    found, remedy = gpus.judge_missing_pygpu("no pygpu", ["nvidia0"])
    assert remedy == (
        f"python3 -m venv --system-site-packages {sys.prefix}, which then sees pygpu in {folder}"
    )
    with pytest.raises(ValueError, match=f"does not see pygpu, which is in {folder}; make it with"):
        synk.fork(2, use_gpu=True)
    monkeypatch.setattr(sys, "base_prefix", sys.prefix)
    assert environment.hidden_folder("pygpu") is None


def test_a_gpu_without_the_drivers_library_is_a_warning(gpu):
    result = CHECKS["CUDA"].run()
    assert result.state == WARNING
    assert "nvidia0" in result.found
    assert "libcuda1" in result.remedy


def test_libraries_with_their_bare_names_are_well(libraries, gpu):
    folder = libraries(*BARE, *NAMES, "libnccl.so.2")
    result = CHECKS["CUDA"].run()
    assert (result.state, result.remedy) == (OK, "")
    assert result.found.splitlines()[:4] == [
        f"libcuda.so: {folder}/libcuda.so (13.0)",
        f"libnvrtc.so: {folder}/libnvrtc.so.13 (13.0)",
        f"libcublas.so: {folder}/libcublas.so.13 (13)",
        f"libnccl.so: {folder}/libnccl.so.2 (2)",
    ]


@pytest.mark.skipif(all_are_visible(), reason="no library is hidden on this machine")
def test_libraries_that_only_the_run_command_makes_visible_are_a_warning(libraries, gpu):
    folder = libraries("libcuda.so.1", *NAMES, "libcublas.so")
    result = CHECKS["CUDA"].run()
    assert result.state == WARNING
    lines = result.found.splitlines()
    assert lines[0] == f"libcuda.so: {folder}/libcuda.so.1 (13.0), not found under this name"
    assert lines[2] == f"libcublas.so: {folder}/libcublas.so.13 (13)"
    assert lines[3] == "libnccl.so: no suitable file"
    assert result.remedy == "start scripts with: python -m synkhronos run SCRIPT"


def test_a_missing_library_is_a_warning_with_the_remedy(libraries, gpu):
    libraries("libcuda.so.1", *NAMES[:2])
    result = CHECKS["CUDA"].run()
    assert result.state == WARNING
    assert "libcublas.so: no suitable file" in result.found
    assert '"nvidia-cublas<14"' in result.remedy


def test_nccl_is_loaded_as_the_run_command_would_make_it_visible(libraries, gpu):
    libraries("libcuda.so.1", *NAMES, "libnccl.so.2")
    assert CHECKS["NCCL"].run().found == "2.28.9"


def test_pygpu_is_probed_in_the_environment_of_the_run_command(libraries, monkeypatch):
    libraries("libcuda.so.1", *NAMES)
    monkeypatch.setattr(gpus, "PYGPU_PROBE", """
import ctypes, json
ctypes.CDLL("libcuda.so")
print(json.dumps({"version": "0.7.6", "cuda": 1, "opencl": 0}))
""")  # fmt: skip
    assert CHECKS["GPUs"].run().found == "pygpu 0.7.6: 1 CUDA, 0 OpenCL devices"
    assert "synkhronos" not in os.environ["LD_LIBRARY_PATH"]


ABOUT = {
    "Synkhronos": "1.0", "Python": "3.11.2", "NumPy": "1.23.5", TITLE: "1.0.5", "mpi4py": "4.1.2",
    "OpenMPI": "4.1.4", "package": "/here/synkhronos/__init__.py", "digest": "ab12",
}  # fmt: skip


def test_without_mpirun_several_machines_are_not_possible_which_is_no_problem(monkeypatch):
    about = {"mpi4py": "4.1.2", "library": "Open MPI v4.1.4", "path": "/nowhere/lib/libmpi.so.40"}
    monkeypatch.setattr(doctor_mpi.launcher, "find_mpi4py", lambda: about)
    monkeypatch.setenv("PATH", "/nowhere")
    result = doctor_mpi.MPI.run()
    assert result.state == OK and "found none in PATH or beside it" in result.found
    (of_hosts,) = doctor_mpi.check_hosts("a,b")
    assert of_hosts.state == PROBLEM and "openmpi-bin" in of_hosts.remedy


@pytest.mark.parametrize(
    ("change", "state", "remedy"),
    [
        ({}, OK, ""),
        ({"NumPy": "1.24.0"}, PROBLEM, "install there what a has: NumPy 1.23.5"),
        ({"mpi4py": "ModuleNotFoundError: No module named 'mpi4py'"}, PROBLEM, "install mpi4py there"),
        ({"OpenMPI": "5.0.3"}, PROBLEM, "install there what a has: OpenMPI 4.1.4"),
        ({"digest": "cd34"}, PROBLEM, "a has other source files, /here/synkhronos/__init__.py; copy"),
        ({"package": "/there/synkhronos/__init__.py"}, OK, ""),
    ],
)
def test_a_machine_must_have_what_the_first_one_has(change, state, remedy):
    about = {**ABOUT, **change}
    result = Check("b", lambda: doctor_mpi.judge_host(about, "a", ABOUT), is_required=True).run()
    assert result.state == state and remedy in result.remedy and bool(result.remedy) == bool(remedy)


@pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="the test needs mpirun and mpi4py",
)
def test_this_machine_is_asked_by_mpirun():
    assert doctor_mpi.MPI.run().state == OK
    (result,) = doctor_mpi.check_hosts("localhost")
    assert (result.name, result.state) == ("localhost", OK), result


WHY_NOT = why_no_mpi() or why_no_namespaces()
DOCTOR = "import sys, synkhronos.__main__ as main; main.CHECKS = (); sys.exit(main.doctor(sys.argv[1]))"


def ask_doctor(machines, hosts):
    """Run ``doctor --hosts`` on the first machine, without its other checks.

    Return the exit code, and the state and the text of each result by its name.
    """
    agent = f"{sys.executable} -SE {KEEPER} {machines.folder}"
    environment = {
        **os.environ, "PYTHONPATH": PYTHONPATH,
        "OMPI_MCA_plm_rsh_agent": agent, "OMPI_MCA_btl_tcp_if_include": "link0",
        "OMPI_MCA_oob_tcp_if_include": "link0", "OMPI_MCA_btl": "tcp,self",
    }  # fmt: skip
    command = [sys.executable, "-c", DOCTOR, ",".join(hosts)]
    done = Job(machines, command, environment, str(machines.folder)).wait(100)
    parts = re.split(r"^(ok|warning|problem) +(round trip|\S+) ", done.output, flags=re.MULTILINE)[1:]
    results = {name: (state, text) for state, name, text in zip(parts[::3], parts[1::3], parts[2::3])}
    return done.returncode, results, done.output


@pytest.mark.slow
@pytest.mark.skipif(bool(WHY_NOT), reason=f"no machines made of namespaces: {WHY_NOT}")
def test_hosts_are_compared_and_the_way_to_them_is_measured(tmp_path):
    with Machines(3) as machines:
        first, second, third = machines.hosts
        code, results, output = ask_doctor(machines, machines.hosts[:2])
        assert [results[one][0] for one in (first, second, "round trip")] == [OK] * 3, output
        assert code == 0 and len(results) == 3, output
        [time] = re.findall(rf"from {first}, median of 201: {second} (\d+) µs", output)
        assert 0 < int(time) < 1e6

        changed = tmp_path / "_html.py"
        changed.write_text((ROOT / "synkhronos" / "_html.py").read_text() + "# changed\n")
        machines.kill(2)
        with machines.mounted(1, ROOT / "synkhronos" / "_html.py", "--bind", changed):
            code, results, output = ask_doctor(machines, machines.hosts)
        states = {first: OK, second: PROBLEM, third: PROBLEM, "round trip": OK}
        assert code == 1 and {name: state for name, (state, _) in results.items()} == states, output
        assert f"{first} has other source files" in results[second][1], output
        assert "cannot be asked: " in results[third][1] and f"ssh {third} " in results[third][1]
        assert third not in results["round trip"][1]
