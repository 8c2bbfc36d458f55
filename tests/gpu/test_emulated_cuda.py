"""The ways for CUDA and NCCL, through pygpu and libgpuarray, on GPUs that are made of the CPU.

`emulator.cpp` is as strict as it can be, but it is not CUDA.
"""

import os
import re

import pytest


from .emulator import fixture_emulator  # noqa: F401
from .test_cuda import ASK_FOR_NCCL, PATH
from .test_gpu_communicators import NAMES

pygpu = pytest.importorskip("pygpu")
REFUSAL = "collectives use shared memory, not NCCL: rank 0: ncclCommInitRank: invalid usage"


@pytest.fixture
def run(run_python, emulator):
    """A function that runs code on emulated GPUs."""

    def run_it(code, *arguments, gpus=2, **environment):
        own = f"dnn.enabled=False,gpuarray.cache_path={emulator.kernels}"  # no real device's kernels
        flags = ",".join(filter(None, [os.environ.get("THEANO_FLAGS"), own]))
        environment = {
            "PYTHONPATH": PATH, "THEANO_FLAGS": flags, **emulator.environment(gpus), **environment}
        return run_python(code, *arguments, timeout=300, environment=environment)

    return run_it


@pytest.fixture
def calls(tmp_path):
    """A function that reads which NCCL calls rank 0 made, each with its number of items."""
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
    done = run(f"from gpu.conform import conform\nconform('nccl', {devices!r})", gpus=ranks)
    passed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("passed")]
    assert passed == [*NAMES, "check_unequal_dtypes"], done.stdout + done.stderr


def test_gpus_are_counted_and_joined_by_nccl_by_themselves(run):
    done = run("""
    import synkhronos as synk
    assert synk.get_n_gpu() == 3
    assert synk.fork() == 3
    import theano.gpuarray
    print(type(synk.world.world.current_world().here.comm).__name__, *theano.gpuarray.init_dev.devmap)
    """, gpus=3)
    assert done.stdout.split() == ["NcclCommunicator", "cuda0"]
    assert "shared memory, not NCCL" not in done.stderr


def test_collectives_and_outputs_go_through_nccl(run, calls):
    done = run(ASK_FOR_NCCL, "cuda0", "cuda1", EMULATED_CALLS=calls.path)
    assert done.stdout.split() == ["NCCL"]
    # Two calls, of which one has fewer rows than ranks; a reduction with NCCL; a weighted one.
    assert calls() == [("reduce", 2), ("reduce", 6), ("all_reduce", 6)]


def test_many_variables_are_one_call_and_unequal_shapes_are_found_before_it(run, calls):
    run("""
    import numpy as np, os
    import synkhronos as synk
    n = synk.fork()
    import theano
    many = [theano.shared(np.full(size, size, "float32")) for size in range(1, 40)]
    half = theano.shared(np.full((2, 2), 2, "float16"))
    f = synk.function([], updates=[(one, one + 1) for one in [*many, half]])
    synk.distribute()
    def calls():
        path = os.environ["EMULATED_CALLS"]
        lines = open(path).read().split("\\n") if os.path.exists(path) else []
        return [line.split()[1:3] for line in lines if line.startswith("0 ")]
    synk.all_reduce([*many, half], "sum")
    assert calls() == [["all_reduce", str(sum(range(1, 40)))], ["all_reduce", "4"]], calls()
    assert all((one.get_value() == n * one.get_value().size).all() for one in many)
    synk.broadcast(many)
    synk.all_gather(many[0])
    before = calls()
    assert [name for name, _ in before[2:]] == ["broadcast", "all_gather"], before
    synk.set_value(1, many[1], np.ones(7, "float32"))
    for collective in (synk.all_reduce, synk.reduce):
        try:
            collective([many[2], many[1]], "sum")
        except ValueError as error:
            assert "(7,)" in str(error)
        else:
            raise AssertionError("no error")
    assert calls() == before
    synk.all_gather(many[1])  # ragged: a broadcast a rank
    assert [name for name, _ in calls()[4:]] == ["broadcast"] * n
    """, EMULATED_CALLS=calls.path)


@pytest.mark.parametrize("version", [22809, 23000])
def test_ranks_share_a_gpu_with_nccl_where_that_is_asked_for(run, version):
    asked = {"SYNKHRONOS_NCCL_SHARED_GPU": "1", "EMULATED_NCCL": str(version)}
    assert run(ASK_FOR_NCCL, "cuda0", "cuda0", **asked).stdout.split() == ["NCCL"]
    named = {"NCCL_HOSTID": "a-host", **asked}  # by the user, or as the rank that starts this process
    assert run(ASK_FOR_NCCL, "cuda0", "cuda0", **named).stdout.split() == ["NCCL"]
    done = run(ASK_FOR_NCCL, "cuda0", "cuda0", EMULATED_NCCL=str(version))
    assert done.stdout.split() == ["no", "NCCL"]
    assert len(re.findall("SYNKHRONOS_NCCL_SHARED_GPU=1", done.stderr)) == 1


def test_ranks_that_nccl_does_not_join_go_over_the_cpu_and_one_line_says_why(run):
    done = run(ASK_FOR_NCCL, "cuda", "cuda0")  # one GPU by two names
    assert done.stdout.split() == ["no", "NCCL"]
    assert [line for line in done.stderr.splitlines() if "not NCCL" in line] == [REFUSAL]


def test_a_machine_without_nccl_goes_over_the_cpu_and_one_line_says_why(run, emulator, tmp_path):
    folder = emulator.put(tmp_path / "no-nccl", "libcuda.so", "libnvrtc.so", "libcublas.so")
    done = run(ASK_FOR_NCCL, "cuda0", "cuda1", LD_LIBRARY_PATH=str(folder))
    assert done.stdout.split() == ["no", "NCCL"]
    notes = [line for line in done.stderr.splitlines() if "not NCCL" in line]
    assert len(notes) == 1 and "libnccl.so" in notes[0], done.stderr


def test_equal_kernels_and_threads_leave_the_context_current(run):
    """A kernel that libgpuarray has in its cache leaves its count of entries wrong."""
    done = run("""
    import threading
    import numpy as np
    import synkhronos as synk
    n = synk.fork()
    import theano, theano.tensor as tt
    x, y = tt.fmatrix("x"), tt.fmatrix("y")
    w = theano.shared(np.ones((2, 2), "float32"))
    def make(x):
        outputs = [(x * w.sum() + 1, "gather"), (x.sum(axis=0), "sum")]
        return synk.function([x], outputs, updates=[(w, w + 1)])
    def call(f):
        results.append(f(np.ones((3, 2), "float32"))[0][0, 0])
    results = []
    f, g = make(x), make(y)
    synk.distribute()
    call(f), call(g)
    late = make(x)  # unpickled in a thread of its own, when its kernels are in the cache
    call(late), call(f)
    in_thread = threading.Thread(target=lambda: (call(g), call(make(y))))
    in_thread.start()
    in_thread.join()
    assert results == [5, 9, 13, 17, 21, 25], results
    assert (synk.gather(w) == 7).all()
    """)
    assert "emulated CUDA" not in done.stderr


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather"])
def test_a_rank_without_memory_left_keeps_no_other_in_nccl(run, collective):
    done = run("""
    import sys, time
    import numpy as np
    import synkhronos as synk
    n = synk.fork()
    import theano
    full = theano.shared(np.zeros(1, "float32"))
    many = [theano.shared(np.ones(1 << 17, "float32")) for _ in range(16)]
    f = synk.function([], updates=[(one, one + 1) for one in [full, *many]])
    synk.distribute()
    synk.set_value(1, full, np.ones(12 << 20, "float32"))  # 48 MB of the 64 that there are
    call = {
        "all_reduce": lambda: synk.all_reduce(many, "sum"),
        "broadcast": lambda: synk.broadcast(many),
        "all_gather": lambda: synk.all_gather(many),
    }[sys.argv[1]]
    begin = time.monotonic()
    try:
        call()
    except synk.WorkerError as error:
        assert error.rank == 1 and "cuMemAlloc" in str(error), error
    else:
        raise AssertionError("no error")
    assert time.monotonic() - begin < 20
    synk.set_value(1, full, np.zeros(1, "float32"))
    synk.all_reduce(many, "sum")
    assert (many[0].get_value() == n).all()
    """, collective, EMULATED_MEGABYTES="64")
    assert "different calls" not in done.stderr


def test_memory_of_devices_does_not_grow_with_calls(run):
    done = run("""
    import numpy as np
    import synkhronos as synk
    from synkhronos.world.here import Command

    class Free(Command):
        def run(self, here):
            return here.engine.context.free_gmem

    n = synk.fork()
    import theano, theano.tensor as tt
    x = tt.fmatrix("x")
    w = theano.shared(np.ones((200, 300), "float32"))
    v = [theano.shared(np.ones((200, 300), "float32")) for _ in range(5)]
    outputs = [(x.dot(w), "gather"), (x.dot(w).sum(axis=0), "avg"), (w * 2, "max")]
    f = synk.function([x], outputs, updates=[(one, one + 1, "avg") for one in [w, *v]])
    synk.distribute()
    free = []
    for turn in range(30):
        rows = 10 + turn % 7
        f(np.ones((rows, 200), "float32"), num_slices=2)
        synk.all_reduce([w, *v], "avg", weights=[1, turn])
        synk.broadcast([w, *v])
        synk.scatter(v[0], np.ones((rows, 300), "float32"))
        synk.all_gather(v[0])
        free.append(synk.world.world.current_world().run(Free()))
    assert free[14] == free[-1], free
    """)
    assert done.stdout == ""


def test_a_script_with_bare_names_missing_runs_by_the_command_and_the_doctor_says_so(
    run, emulator, tmp_path
):
    names = ("libcuda.so.1", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0", "libcublas.so.13",
             "libcublasLt.so.13", "libnccl.so.2")
    folder = emulator.put(tmp_path / "versions", *names)
    script = tmp_path / "ask.py"
    script.write_text(ASK_FOR_NCCL)
    variables = {"LD_LIBRARY_PATH": str(folder), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = """
    import os, sys
    os.execv(sys.executable, [sys.executable, "-m", "synkhronos", *sys.argv[1:]])
    """
    done = run(command, "run", script, "cuda0", "cuda1", **variables)
    assert done.stdout.split() == ["NCCL"], done.stderr
    done = run(command, "doctor", **variables)
    assert "start scripts by: python -m synkhronos run SCRIPT" in done.stdout
    assert re.search("GPUs .*: 2 CUDA", done.stdout), done.stdout
    assert re.search("NCCL .*2.28.9", done.stdout), done.stdout


def test_pygpu_takes_the_dtypes_that_the_communicator_takes(run):
    done = run("""
    import numpy as np, pygpu
    from pygpu.collectives import GpuComm, GpuCommCliqueId
    from synkhronos.comms import nccl
    context = pygpu.init("cuda0")
    name = bytes(GpuCommCliqueId(context).comm_id)
    names = [name, bytes(GpuCommCliqueId(context).comm_id)]
    assert len(set(names)) == 2 and {len(one) for one in names} == {128}
    comm = GpuComm(GpuCommCliqueId(context, bytearray(name)), 1, 0)
    assert (comm.rank, comm.count) == (0, 1)
    taken = []
    ints = "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
    for dtype in ["bool", *ints.split(), "float16", "float32", "float64"]:
        array = pygpu.array(np.ones(3, dtype), context=context)
        try:
            comm.all_reduce(array, "sum", array)
        except pygpu.gpuarray.GpuArrayException as error:
            assert b"data type" in error.args[0], error
        else:
            taken.append(np.dtype(dtype))
            assert (np.asarray(array) == 1).all()
    assert set(taken) == set(nccl._DTYPES)
    """, gpus=1)
    assert done.stdout == ""


def test_a_cudnn_that_theano_does_not_know_is_left_alone(run):
    done = run("""
    import synkhronos as synk
    import theano
    from theano.gpuarray import dnn
    theano.config.dnn.enabled = "auto"
    dnn.dnn_present.avail, dnn.version.v = True, 90100  # as where cuDNN 9 can be compiled with
    synk.fork(devices=["cuda0"])
    print(dnn.dnn_available(None), dnn.dnn_available.msg)
    """)
    assert done.stdout.startswith("False") and "cuDNN 9" in done.stdout, done.stdout
