"""Tests of the code paths for CUDA and NCCL, through pygpu and libgpuarray, on emulated GPUs.

`emulator.cpp` is as strict as possible, but it does not replace tests with CUDA itself.
"""

import os
import re

import pytest
from namespaces import Machines, why_no_mpi
from processes import FOLDER, MODULES, Programs

from synkhronos.host import nvidia

from .emulator import fixture_emulator  # noqa: F401
from .graphs import CHECKS
from .test_cuda import ASK_FOR_NCCL, PROGRAMS
from .test_gpu_communicators import NAMES

COMMAND_LINE = FOLDER / "programs" / "command_line.py"
GRAPH_CHECKS = [one.__name__ for one in CHECKS]
pygpu = pytest.importorskip("pygpu")
without_nvidia = pytest.mark.skipif(
    bool(nvidia.find()),
    reason="NVIDIA's libraries are here, and the test is about their absence",
)
REFUSAL = "collectives use shared memory, not NCCL: rank 0: ncclCommInitRank: invalid usage"


def flags(emulator):
    """Return Theano's flags for emulated GPUs, with a cache of kernels that no real device uses."""
    own = f"dnn.enabled=False,gpuarray.cache_path={emulator.kernels}"
    return {"THEANO_FLAGS": ",".join(filter(None, [os.environ.get("THEANO_FLAGS"), own]))}


@pytest.fixture(scope="module")
def emulated_programs(emulator):
    """`Programs` whose processes find the emulator as NVIDIA's libraries."""
    made = Programs([*MODULES, "pygpu"], {**flags(emulator), **emulator.environment()})
    yield made
    made.close()


@pytest.fixture
def run(emulated_programs, run_python, emulator, tmp_path):
    """Function that runs a program on emulated GPUs.

    If other libraries are to be found, Python is started for it, as it reads the path at its start.
    """

    def run_it(program, *arguments, gpus=2, **environment):
        program, fresh = PROGRAMS / program, "LD_LIBRARY_PATH" in environment
        environment = {**emulator.environment(gpus), **environment}
        if fresh:
            environment.update(flags(emulator))
            return run_python(program, *arguments, timeout=300, environment=environment)
        return emulated_programs.run_script(
            program, *arguments, timeout=300, cwd=tmp_path, environment=environment
        )

    return run_it


@pytest.fixture
def calls(tmp_path):
    """Function that returns the NCCL calls that rank 0 has made, each with its number of items."""
    path = tmp_path / "calls"

    def read():
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        return [(name, int(items)) for rank, name, items, _ in lines if rank == "0"]

    read.path = str(path)
    return read


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_communicator_conforms_over_pygpus_collectives(run, ranks):
    devices = [f"cuda{number}" for number in range(ranks)]
    done = run("run_module.py", "conform", "nccl", *devices, gpus=ranks)
    passed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("passed")]
    assert passed == [*NAMES, "check_unequal_dtypes"], done.stdout + done.stderr


def test_gpus_are_counted_and_joined_by_nccl_by_default(run):
    done = run("count_gpus.py", gpus=3)
    assert done.stdout.split() == ["NcclCommunicator", "cuda0"]
    assert "shared memory, not NCCL" not in done.stderr


def test_collectives_and_outputs_go_through_nccl(run, calls):
    done = run(ASK_FOR_NCCL, "cuda0", "cuda1", EMULATED_CALLS=calls.path)
    assert done.stdout.split() == ["NCCL"]
    # The first is from a call (a second call, with fewer rows than ranks, does not use NCCL), the
    # others from a reduction with ``nccl=True`` and a weighted all-reduce.
    assert calls() == [("reduce", 2), ("reduce", 6), ("all_reduce", 6)]


def test_many_variables_are_one_call_and_unequal_shapes_are_found_before_it(run, calls):
    run("many_variables.py", EMULATED_CALLS=calls.path)


def test_collectives_in_graphs_and_their_gradients_are_right_over_nccl(run, calls):
    done = run("run_module.py", "graphs", "cuda0", "cuda1", EMULATED_CALLS=calls.path)
    expected = [f"passed {one} on {n}" for n in (2, 1) for one in GRAPH_CHECKS]
    assert done.stdout.splitlines() == expected, done.stdout + done.stderr
    # Unequal numbers of rows are broadcast one after another.
    names = "all_reduce", "all_gather", "broadcast"
    expected = {*((name, 5000) for name in names), ("broadcast", 15000), ("broadcast", 10000)}
    made = {*calls()}
    assert expected <= made and min(items for _, items in made) == 5000, made


def test_nccl_is_used_as_always_by_formats_and_overlap_on_one_machine(run, calls):
    done = run("steps_in_formats.py", "cuda0", "cuda1", EMULATED_CALLS=calls.path)
    assert done.stdout.splitlines()[-1] == "compared on one machine"


@pytest.mark.parametrize("version", [22809, 23000])
def test_ranks_share_a_gpu_with_nccl_where_that_is_asked_for(run, version):
    asked = {"SYNKHRONOS_NCCL_SHARED_GPU": "1", "EMULATED_NCCL": str(version)}
    assert run(ASK_FOR_NCCL, "cuda0", "cuda0", **asked).stdout.split() == ["NCCL"]
    named = {"NCCL_HOSTID": "a-host", **asked}  # set by the user, or inherited from a rank
    assert run(ASK_FOR_NCCL, "cuda0", "cuda0", **named).stdout.split() == ["NCCL"]
    done = run(ASK_FOR_NCCL, "cuda0", "cuda0", EMULATED_NCCL=str(version))
    assert done.stdout.split() == ["no", "NCCL"]
    assert len(re.findall("SYNKHRONOS_NCCL_SHARED_GPU=1", done.stderr)) == 1


def test_ranks_that_nccl_does_not_join_go_over_the_cpu_and_one_line_says_why(run):
    done = run(ASK_FOR_NCCL, "cuda", "cuda0")  # two names for the same GPU
    assert done.stdout.split() == ["no", "NCCL"]
    assert [line for line in done.stderr.splitlines() if "not NCCL" in line] == [REFUSAL]


@without_nvidia
def test_a_machine_without_nccl_goes_over_the_cpu_and_one_line_says_why(run, emulator, tmp_path):
    folder = emulator.put(tmp_path / "no-nccl", "libcuda.so", "libnvrtc.so", "libcublas.so")
    done = run(ASK_FOR_NCCL, "cuda0", "cuda1", LD_LIBRARY_PATH=str(folder))
    assert done.stdout.split() == ["no", "NCCL"]
    notes = [line for line in done.stderr.splitlines() if "not NCCL" in line]
    assert len(notes) == 1 and "libnccl.so" in notes[0], done.stderr


def test_equal_kernels_and_threads_leave_the_context_current(run):
    """Check the workaround for libgpuarray's wrong call count after it finds a kernel in its cache."""
    done = run("kernels_and_threads.py")
    assert "emulated CUDA" not in done.stderr


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather"])
def test_a_rank_without_memory_left_does_not_make_others_wait_in_nccl(run, collective):
    done = run("full_device.py", collective, EMULATED_MEGABYTES="64")
    assert "different calls" not in done.stderr


def test_memory_of_devices_does_not_grow_with_calls(run):
    done = run("memory_of_devices.py")
    assert done.stdout == ""


@without_nvidia
def test_a_script_with_bare_names_missing_runs_by_the_command_and_the_doctor_says_so(
    run, emulator, tmp_path
):
    names = (
        "libcuda.so.1", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libcublas.so.13",
        "libcublasLt.so.13", "libnccl.so.2",
    )  # fmt: skip
    folder = emulator.put(tmp_path / "versions", *names)
    variables = {"LD_LIBRARY_PATH": str(folder), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run(COMMAND_LINE, "run", ASK_FOR_NCCL, "cuda0", "cuda1", **variables)
    assert done.stdout.split() == ["NCCL"], done.stderr
    done = run(COMMAND_LINE, "doctor", **variables)
    assert "start scripts with: python -m synkhronos run SCRIPT" in done.stdout
    assert re.search("GPUs .*: 2 CUDA", done.stdout), done.stdout
    assert re.search("NCCL .*2.28.9", done.stdout), done.stdout


def test_a_cudnn_that_theano_does_not_know_is_left_alone(run):
    done = run("unknown_cudnn.py")
    assert done.stdout.startswith("False") and "cuDNN 9" in done.stdout, done.stdout


@pytest.mark.skipif(bool(why_no_mpi()), reason=why_no_mpi())
@pytest.mark.parametrize(
    "program, last",
    [(ASK_FOR_NCCL, "NCCL"), (PROGRAMS / "steps_in_formats.py", "compared on machines")],
    ids=["collectives and outputs", "steps"],
)
def test_the_clique_of_nccl_spans_machines_but_formats_do_not_use_it(
    emulator, calls, tmp_path, program, last
):
    environment = {**emulator.environment(2), **flags(emulator), "EMULATED_CALLS": calls.path}
    with Machines(2, apart=False) as machines:  # the emulated NCCL joins processes of one host
        done = machines.run(program, "cuda0", "cuda1", cwd=tmp_path, environment=environment)
    assert done.check().output.splitlines()[-1] == last and calls(), done.output
    assert "Traceback" not in done.output


@pytest.mark.skipif(bool(why_no_mpi()), reason=why_no_mpi())
@pytest.mark.slow
def test_nccl_inside_machines_and_messages_between_them_are_a_communicator(emulator, calls, tmp_path):
    environment = {**emulator.environment(2), **flags(emulator), "EMULATED_CALLS": calls.path}
    devices = ["cuda0", "cuda1"] * 2
    with Machines(2, apart=False) as machines:
        program = PROGRAMS / "nccl_inside_machines.py"
        done = machines.run(program, *devices, cwd=tmp_path, environment=environment)
    assert done.check().output.splitlines()[-1] == "reduced on two levels", done.output
    assert "Traceback" not in done.output
