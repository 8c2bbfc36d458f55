"""Tests of which kernels of OpenBLAS are older than the processor, and of the remedies."""

import pytest

from synkhronos.host.doctor import blas_kernels

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
