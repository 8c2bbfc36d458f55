"""Tests of the doctor's checks, each with and without a problem."""

import functools
import sys

import pytest

from synkhronos.host import blas_kernels, doctor, doctor_pytensor

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
        ({}, doctor.OK),
        ({"pytensor": 0.030}, doctor.WARNING),
        ({"ldflags": ""}, doctor.WARNING),
        ({"compiler": ""}, doctor.WARNING),
    ],
)
def test_pytensors_product_is_judged(change, state):
    found = {**FOUND, "version": "3.0.7", "pytensor": 0.010}
    assert doctor_pytensor.judge_pytensor({**found, **change}).state == state


JUDGES = {
    "Theano": (doctor.judge_theano, FOUND),
    "PyTensor": (doctor_pytensor.judge_pytensor, {**FOUND, "version": "3.0.7", "pytensor": 0.010}),
}
each_compiler = pytest.mark.parametrize(("judge", "found"), JUDGES.values(), ids=JUDGES)


@each_compiler
def test_the_linked_openblas_and_its_kernels_are_named(judge, found):
    result = judge(found, None, "AVX2")
    assert result.state == doctor.OK
    assert ", -lopenblas (OpenBLAS 0.3.29 with Haswell kernels); float32 product" in result.found


@each_compiler
@pytest.mark.parametrize(
    ("coretype", "remedy"),
    [("Haswell", "unset OPENBLAS_CORETYPE"), (None, "install a newer version of OpenBLAS")],
)
def test_kernels_that_are_older_than_the_processor_are_a_warning(judge, found, coretype, remedy):
    result = judge(found, coretype, "AVX-512")
    assert result.state == doctor.WARNING
    assert f"AVX-512, which the processor has: {remedy}" in result.remedy


@each_compiler
def test_openblas_that_is_linked_already_is_not_recommended(judge, found):
    slow = {**found, "theano": 0.030, "pytensor": 0.030}
    for instructions in ("AVX2", "AVX-512", None):
        result = judge(slow, None, instructions)
        assert result.state == doctor.WARNING and "libopenblas-dev" not in result.remedy


@pytest.mark.skipif(
    blas_kernels.instructions_of_processor() in (None, "SSE"), reason="has no newer instructions"
)
def test_old_kernels_that_the_environment_names_are_found_and_their_cause(monkeypatch):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Nehalem")
    result = doctor.check_theano()
    if "OpenBLAS" not in result.found:
        pytest.skip("Theano is linked with another BLAS")
    assert result.state == doctor.WARNING and "with Nehalem kernels" in result.found
    assert "unset OPENBLAS_CORETYPE, which is 'Nehalem'" in result.remedy


def test_pytensor_without_numpy_2_is_a_problem(monkeypatch):
    monkeypatch.setattr("numpy.__version__", "1.23.5")
    for check in (doctor_pytensor.check_numpy, doctor_pytensor.check_pytensor):
        assert check().state == doctor.PROBLEM and "NumPy 2" in check().remedy


def test_this_python_is_well():
    assert doctor.check_python().state == doctor.OK


def test_another_python_is_a_problem(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 15, 0, "final", 0))
    assert doctor.check_python().state == doctor.PROBLEM


def test_missing_modules_are_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    result = doctor.check_modules()
    assert result.state == doctor.PROBLEM
    assert result.remedy == "python -m pip install psutil"


def test_without_the_right_python_no_package_is_recommended(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 15, 0, "final", 0))
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert doctor.check_modules().remedy == "use another version of Python first, as described above"
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert doctor.check_numpy().remedy.startswith("use another version of Python first")


def test_no_compiler_is_a_problem(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert "g++" in doctor.check_compiler().remedy


def test_the_compiler_is_the_one_that_theano_would_use(monkeypatch):
    monkeypatch.setenv("THEANO_FLAGS", "cxx=/nowhere/clang++")
    assert doctor.check_compiler().found == "no /nowhere/clang++ in PATH"


def test_this_compiler_finds_the_headers():
    assert doctor.check_compiler().state == doctor.OK


def test_missing_headers_are_a_problem(monkeypatch, tmp_path):
    folders = dict.fromkeys(["include", "platinclude"], str(tmp_path))
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: folders)
    result = doctor.check_compiler()
    assert result.state == doctor.PROBLEM and "python3-dev" in result.remedy
    assert result.found == f"no Python headers in {tmp_path}"


def test_a_compiler_that_fails_is_a_problem_with_its_own_message(monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'In file x:' >&2; echo 'error: no cc1plus' >&2; exit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    result = doctor.check_compiler()
    assert result.state == doctor.PROBLEM
    assert result.found == f"{compiler} does not compile: error: no cc1plus"


def test_theano_is_not_tried_before_the_rest_works(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "psutil", None)
    result = doctor.check_theano()
    assert result.remedy == "fix the problems above first: packages, compiler"


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, doctor.OK),
        ({"theano": 0.019}, doctor.OK),
        ({"theano": 0.030}, doctor.WARNING),
        ({"ldflags": ""}, doctor.WARNING),
        ({"compiler": ""}, doctor.PROBLEM),
        ({"version": "0.9.0"}, doctor.PROBLEM),
    ],
)
def test_theano_is_judged_by_its_product_and_its_settings(change, state):
    result = doctor.judge_theano({**FOUND, **change})
    assert result.state == state
    assert bool(result.remedy) == (state != doctor.OK)


@pytest.mark.parametrize(
    ("ldflags", "name"),
    [
        ("-lopenblas", "-lopenblas"),
        ("-Wl,--no-as-needed,/a/libopenblasp-r0.3.18.so,-rpath,/a", "libopenblasp-r0.3.18.so"),
        ("", "no BLAS (blas.ldflags is empty)"),
    ],
)
def test_the_blas_is_named_shortly(ldflags, name):
    assert doctor.blas_name(ldflags) == name


def test_theano_that_fails_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "THEANO_PROBE", "raise OSError('disk full')")
    result = doctor.check_theano()
    assert (result.state, result.found) == (doctor.PROBLEM, "OSError: disk full")


def test_theano_is_probed_on_the_cpu_whatever_the_flags_say(monkeypatch):
    monkeypatch.setenv("THEANO_FLAGS", "device=cuda")
    monkeypatch.setattr(
        doctor, "probe", lambda code, **variables: {**FOUND, "version": variables["THEANO_FLAGS"]}
    )
    assert "device=cuda,device=cpu" in doctor.check_theano().found


def test_one_core_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "cores", lambda: 1)
    assert doctor.check_cores().state == doctor.WARNING


def test_room_in_memory_is_the_limit_less_what_is_used(tmp_path):
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert doctor.memory_room([tmp_path]) == 2000


def test_no_limit_on_memory_is_told_from_a_limit(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert doctor.memory_room([tmp_path]) is None


def test_little_memory_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "memory_room", lambda: 2**20)
    assert doctor.check_memory().state == doctor.WARNING


BY_MADVISE = {"enabled": "always [madvise] never", "shmem_enabled": "always within_size [advise] never"}
NEVER = {"enabled": "always madvise [never]", "shmem_enabled": "always within_size advise [never]"}


@pytest.mark.parametrize(
    ("switch", "has_glibc", "settings", "text"),
    [
        ("1", True, BY_MADVISE, "keeps freed memory; huge pages by the kernel's settings: heap madvise, "
         "shared memory advise; scripts started by python -m synkhronos run use them"),
        ("1", True, NEVER, "keeps freed memory; huge pages by the kernel's settings: heap never, shared "
         "memory never"),
        ("1", True, {}, "keeps freed memory; huge pages by the kernel's settings: heap never, shared "
         "memory never"),
        ("0", True, BY_MADVISE, "returns freed memory, as SYNKHRONOS_KEEP_MEMORY=0 is set; huge pages "
         "by the kernel's settings: heap madvise, shared memory advise"),
        ("1", False, NEVER, "returns freed memory, as the C library is not glibc; huge pages by the "
         "kernel's settings: heap never, shared memory never"),
    ],
    ids=["madvise", "never", "a-kernel-without", "switched-off", "no-glibc"],
)  # fmt: skip
def test_what_malloc_does_is_reported(monkeypatch, tmp_path, switch, has_glibc, settings, text):
    for name, setting in settings.items():
        (tmp_path / name).write_text(f"{setting}\n")
    of_folder = functools.partial(doctor.heap.huge_pages, folder=tmp_path)
    monkeypatch.setattr(doctor.heap, "huge_pages", of_folder)
    monkeypatch.setattr(doctor.heap, "_glibc", lambda: object() if has_glibc else None)
    monkeypatch.setenv("SYNKHRONOS_KEEP_MEMORY", switch)
    assert doctor.check_malloc() == doctor.Result("malloc", doctor.OK, text)


def test_every_check_is_carried_out():
    checks = {value for name, value in vars(doctor).items() if name.startswith("check_")}
    assert checks == set(doctor.CHECKS)
