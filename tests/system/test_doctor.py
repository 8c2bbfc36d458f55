"""Tests of the doctor's checks, each with and without a problem."""

import functools
import sys

import pytest

from synkhronos.host.doctor import blas_kernels, checks, gpus
from synkhronos.host.doctor.check import OK, PROBLEM, WARNING, Check, Fault, Result

CHECKS = {one.name: one for one in (*checks.OF_PYTENSOR, *checks.OF_THEANO, *checks.CHECKS)}


def result_of(examine, *arguments):
    """Return the result of a check that is required."""
    return Check("this", lambda: examine(*arguments), is_required=True).run()


FOUND = {
    "version": "1.0.5",
    "compiler": "/usr/bin/g++",
    "ldflags": "-lopenblas",
    "theano": 0.010,
    "numpy": 0.010,
    "libraries": [
        {
            "user_api": "blas",
            "internal_api": "openblas",
            "filepath": "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblasp-r0.3.29.so",
            "version": "0.3.29",
            "threading_layer": "pthreads",
            "architecture": "Haswell",
        }
    ],
}


@pytest.mark.parametrize(
    "change, state",
    [
        ({}, OK),
        ({"pytensor": 0.030}, WARNING),
        ({"ldflags": ""}, WARNING),
        ({"compiler": ""}, WARNING),
    ],
)
def test_pytensors_product_is_judged(change, state):
    found = {**FOUND, "version": "3.0.7", "pytensor": 0.010}
    assert result_of(checks.judge_pytensor, {**found, **change}).state == state


JUDGES = {
    "Theano": (checks.judge_theano, FOUND),
    "PyTensor": (checks.judge_pytensor, {**FOUND, "version": "3.0.7", "pytensor": 0.010}),
}
each_compiler = pytest.mark.parametrize(("judge", "found"), JUDGES.values(), ids=JUDGES)


@each_compiler
def test_the_linked_openblas_and_its_kernels_are_named(judge, found):
    result = result_of(judge, found, None, "AVX2")
    assert result.state == OK
    assert ", -lopenblas (OpenBLAS 0.3.29 with Haswell kernels); float32 product" in result.found


@each_compiler
@pytest.mark.parametrize(
    ("coretype", "remedy"),
    [("Haswell", "unset OPENBLAS_CORETYPE"), (None, "install a newer version of OpenBLAS")],
)
def test_kernels_that_are_older_than_the_processor_are_a_warning(judge, found, coretype, remedy):
    result = result_of(judge, found, coretype, "AVX-512")
    assert result.state == WARNING
    assert f"AVX-512, which the processor has: {remedy}" in result.remedy


@each_compiler
def test_openblas_that_is_linked_already_is_not_recommended(judge, found):
    slow = {**found, "theano": 0.030, "pytensor": 0.030}
    for instructions in ("AVX2", "AVX-512", None):
        result = result_of(judge, slow, None, instructions)
        assert result.state == WARNING and "libopenblas-dev" not in result.remedy


@pytest.mark.slow
@pytest.mark.skipif(
    blas_kernels.instructions_of_processor() in (None, "SSE"), reason="has no newer instructions"
)
def test_old_kernels_that_the_environment_names_are_found_and_their_cause(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Nehalem")
    result = CHECKS["Theano"].run()
    if "OpenBLAS" not in result.found:
        pytest.skip("Theano is linked with another BLAS")
    assert result.state == WARNING and "with Nehalem kernels" in result.found
    assert "unset OPENBLAS_CORETYPE, which is 'Nehalem'" in result.remedy


def test_pytensor_without_numpy_2_is_a_problem(monkeypatch):
    monkeypatch.setattr("numpy.__version__", "1.23.5")
    for check in checks.OF_PYTENSOR[1], checks.OF_PYTENSOR[-1]:
        assert check.run().state == PROBLEM and "NumPy 2" in check.run().remedy


def test_this_python_is_well():
    assert CHECKS["Python"].run().state == OK


def test_another_python_is_a_problem(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 15, 0, "final", 0))
    assert CHECKS["Python"].run().state == PROBLEM


def test_missing_modules_are_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    result = CHECKS["packages"].run()
    assert result.state == PROBLEM
    assert result.remedy == "python -m pip install psutil"


def test_without_the_right_python_no_package_is_recommended(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 15, 0, "final", 0))
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert CHECKS["packages"].run().remedy == "use another version of Python first, as described above"
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert CHECKS["NumPy"].run().remedy.startswith("use another version of Python first")


def test_no_compiler_is_a_problem(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "g++" in CHECKS["compiler"].run().remedy


def test_the_compiler_is_the_one_that_theano_would_use(monkeypatch):
    monkeypatch.setenv("THEANO_FLAGS", "cxx=/nowhere/clang++")
    assert CHECKS["compiler"].run().found == "no /nowhere/clang++ in PATH"


def test_this_compiler_finds_the_headers():
    assert CHECKS["compiler"].run().state == OK


def test_missing_headers_are_a_problem(monkeypatch, tmp_path):
    folders = dict.fromkeys(["include", "platinclude"], str(tmp_path))
    monkeypatch.setattr(checks.sysconfig, "get_paths", lambda: folders)
    result = CHECKS["compiler"].run()
    assert result.state == PROBLEM and "python3-dev" in result.remedy
    assert result.found == f"no Python headers in {tmp_path}"


def test_a_compiler_that_fails_is_a_problem_with_its_own_message(monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'In file x:' >&2; echo 'error: no cc1plus' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    result = CHECKS["compiler"].run()
    assert result.state == PROBLEM
    assert result.found == f"{compiler} does not compile: error: no cc1plus"


def test_theano_is_not_tried_before_the_rest_works(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "psutil", None)
    result = CHECKS["Theano"].run()
    assert result.remedy == "fix the problems above first: packages, compiler"


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, OK),
        ({"theano": 0.019}, OK),
        ({"theano": 0.030}, WARNING),
        ({"ldflags": ""}, WARNING),
        ({"compiler": ""}, PROBLEM),
        ({"version": "0.9.0"}, PROBLEM),
    ],
)
def test_theano_is_judged_by_its_product_and_its_settings(change, state):
    result = result_of(checks.judge_theano, {**FOUND, **change})
    assert result.state == state
    assert bool(result.remedy) == (state != OK)


@pytest.mark.parametrize(
    ("ldflags", "name"),
    [
        ("-lopenblas", "-lopenblas"),
        ("-Wl,--no-as-needed,/a/libopenblasp-r0.3.18.so,-rpath,/a", "libopenblasp-r0.3.18.so"),
        ("", "no BLAS (blas.ldflags is empty)"),
    ],
)
def test_the_blas_is_named_shortly(ldflags, name):
    assert checks.blas_name(ldflags) == name


def test_theano_that_fails_is_a_problem(monkeypatch):
    monkeypatch.setattr(checks, "PRODUCT_PROBE", "raise OSError('disk full')")
    result = CHECKS["Theano"].run()
    assert (result.state, result.found) == (PROBLEM, "OSError: disk full")


def test_theano_is_probed_on_the_cpu_whatever_the_flags_say(monkeypatch):
    monkeypatch.setenv("THEANO_FLAGS", "device=cuda")
    monkeypatch.setattr(
        checks, "probe", lambda code, **variables: {**FOUND, "version": variables["THEANO_FLAGS"]}
    )
    assert "device=cuda,device=cpu" in CHECKS["Theano"].run().found


def test_one_core_is_a_warning(monkeypatch):
    monkeypatch.setattr(checks, "cores", lambda: 1)
    assert CHECKS["cores"].run().state == WARNING


def test_room_in_memory_is_the_limit_less_what_is_used(tmp_path):
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert checks.memory_room([tmp_path]) == 2000


def test_no_limit_on_memory_is_told_from_a_limit(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert checks.memory_room([tmp_path]) is None


def test_little_memory_is_a_warning(monkeypatch):
    monkeypatch.setattr(checks, "memory_room", lambda: 2**20)
    assert CHECKS["memory"].run().state == WARNING


BY_MADVISE = {"enabled": "always [madvise] never", "shmem_enabled": "always within_size [advise] never"}
NEVER = {"enabled": "always madvise [never]", "shmem_enabled": "always within_size advise [never]"}


@pytest.mark.parametrize(
    ("switch", "has_glibc", "settings", "text"),
    [
        ("1", True, BY_MADVISE, "keeps freed memory; huge pages: heap madvise, shared memory advise"),
        ("1", True, NEVER, "keeps freed memory; huge pages: heap never, shared memory never"),
        ("1", True, {}, "keeps freed memory; huge pages: heap never, shared memory never"),
        ("0", True, BY_MADVISE, "returns freed memory, as SYNKHRONOS_KEEP_MEMORY=0 is set; huge pages: "
         "heap madvise, shared memory advise"),
        ("1", False, NEVER, "returns freed memory, as the C library is not glibc; huge pages: heap "
         "never, shared memory never"),
    ],
    ids=["madvise", "never", "a-kernel-without", "switched-off", "no-glibc"],
)  # fmt: skip
def test_what_malloc_does_is_reported(monkeypatch, tmp_path, switch, has_glibc, settings, text):
    for name, setting in settings.items():
        (tmp_path / name).write_text(f"{setting}\n")
    of_folder = functools.partial(checks.heap.huge_pages, folder=tmp_path)
    monkeypatch.setattr(checks.heap, "huge_pages", of_folder)
    monkeypatch.setattr(checks.heap, "_glibc", lambda: object() if has_glibc else None)
    monkeypatch.setenv("SYNKHRONOS_KEEP_MEMORY", switch)
    assert CHECKS["malloc"].run() == Result("malloc", OK, text)


def test_every_check_is_carried_out():
    examined = {one.examine for one in (*checks.OF_PYTENSOR, *checks.OF_THEANO, *checks.CHECKS)}
    functions = {**vars(checks), **vars(gpus)}
    assert examined == {one for name, one in functions.items() if name.startswith("examine_")}


def test_only_what_is_required_is_a_problem():
    def fail():
        raise Fault("lost")

    assert Check("this", fail, is_required=True, remedy="repair it").run() == (
        "this", PROBLEM, "lost", "repair it"
    )  # fmt: skip
    assert Check("this", fail, is_required=False, remedy="repair it").run().state == WARNING
    required = [one.name for one in checks.OF_THEANO if one.is_required]
    assert required == [one.name for one in checks.OF_THEANO]
