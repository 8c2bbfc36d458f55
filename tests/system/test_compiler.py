"""Tests of which graph compiler is chosen, and of what PyTensor needs."""

import numpy as np
import pytest

import synkhronos as synk
from processes import ROOT, run_interpreter
from synkhronos.engines import names
from synkhronos.extensions import updates
from synkhronos.extensions.train import parallel_function
from synkhronos.host import compiler, environment, preparation
from synkhronos.host.compiler import VARIABLE, choose


def installed(*names):
    return names.__contains__


@pytest.mark.parametrize(
    "environ, imported, there, wanted",
    [
        ({}, [], ["theano", "pytensor"], "theano"),
        ({}, [], ["pytensor"], "pytensor"),
        ({}, ["pytensor"], ["theano", "pytensor"], "pytensor"),
        ({}, ["theano", "pytensor"], ["theano", "pytensor"], "theano"),
        ({}, [], [], "theano"),
        ({VARIABLE: "pytensor"}, ["theano"], ["theano"], "pytensor"),
        ({VARIABLE: "theano"}, ["pytensor"], ["theano", "pytensor"], "theano"),
        ({VARIABLE: ""}, [], ["pytensor"], "pytensor"),
    ],
)
def test_the_variable_comes_before_what_is_imported_and_that_before_what_is_installed(
    environ, imported, there, wanted
):
    assert choose(environ, imported, installed(*there)) == wanted


def other_compiler():
    return compiler.NAMES[1 - compiler.NAMES.index(compiler.NAME)]


def of_the_other_compiler():
    """Return an object of a class of the compiler that this process does not use."""
    module = f"{other_compiler()}.tensor.variable"
    members = {"__module__": module, "__repr__": lambda self: "x", "owner": None, "type": None}
    return type("TensorVariable", (), members)()


@pytest.mark.parametrize(
    "use",
    [
        lambda x, own: synk.function([x], []), lambda x, own: synk.function([], (x, "sum")),
        lambda x, own: synk.function([], updates=[(x, 0)]),
        lambda x, own: synk.function([], updates=[(own, x)]),
        lambda x, own: synk.function([], [], givens=[(own, x)]), lambda x, own: synk.broadcast(x),
        lambda x, own: synk.reseed(x, 1), lambda x, own: parallel_function([x], []),
        lambda x, own: updates.sgd(own, [x], 0.1),
    ],
)  # fmt: skip
def test_a_variable_of_the_other_compiler_is_refused_by_its_name(world_of, use):
    world_of(1)
    other, own = other_compiler(), names.shared(np.ones(3), "own", (False,))
    words = f"got .*x of {compiler.TITLES[other]}. Both compilers are installed.* set {VARIABLE}={other}"
    with pytest.raises(TypeError, match=words):
        use(of_the_other_compiler(), own)


def test_an_unknown_compiler_is_refused_with_the_names_that_there_are():
    with pytest.raises(ImportError, match="SYNKHRONOS_COMPILER: .*theano, pytensor, got 'aesara'"):
        choose({VARIABLE: "aesara"}, [], installed("theano"))


def test_the_choice_is_made_from_this_process(run_python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import synkhronos")
    done = run_python(script, environment={VARIABLE: "jax"}, check=False)
    assert done.stderr.splitlines()[-1].startswith("ImportError: SYNKHRONOS_COMPILER: expected one of")
    done = run_python(script, environment={VARIABLE: other_compiler()}, check=False)
    message = done.stderr[done.stderr.rindex("ImportError: ") :]
    assert "install" in message


def test_the_import_gives_no_warning():
    done = run_interpreter("-W", "error", "-c", "import synkhronos", cwd=ROOT)
    assert done.stderr == ""


@pytest.mark.parametrize("version", ["1.23.5", "1.26.4"])
def test_pytensor_needs_numpy_2(version):
    complaint = environment.numpy_complaint(version, "pytensor")
    assert f"needs NumPy 2, and got NumPy {version}" in complaint and "pip install" in complaint
    assert environment.numpy_complaint("2.0.0rc1", "pytensor") is None


@pytest.mark.parametrize("version", ["2.18.6", "2.37.0", "2.38", "2.38.2", "4.0.0"])
def test_other_versions_of_pytensor_are_named_with_the_remedy(version):
    complaint = environment.pytensor_complaint(version)
    assert f"needs PyTensor 2.38.3 or newer, before 4, and got PyTensor {version}" in complaint
    assert "pip install" in complaint


@pytest.mark.parametrize("version", ["2.38.3", "2.38.3rc1", "2.39", "3.0.7", "3.3.7.post1"])
def test_these_versions_of_pytensor_are_accepted(version):
    assert environment.pytensor_complaint(version) is None


def test_a_blas_is_found_for_pytensor_unless_the_user_names_one(tmp_path, monkeypatch):
    settings = tmp_path / "rc"
    nothing = {"PYTENSORRC": str(settings)}
    monkeypatch.setattr(environment, "find_ldflags", lambda: "-Wl,/a,-rpath,/b")
    for flags in ("", "floatX=float32"):
        environ = {**nothing, "PYTENSOR_FLAGS": flags}
        preparation.set_flags(environ, "pytensor")
        found = environment.flags_of(environ["PYTENSOR_FLAGS"])
        assert found["blas__ldflags"] == "-Wl,/a,-rpath,/b" and environ["PYTENSOR_FLAGS"].endswith(flags)
    for environ in ({**nothing, "PYTENSOR_FLAGS": "blas__ldflags="}, {"PYTENSORRC": str(settings)}):
        if "PYTENSOR_FLAGS" not in environ:
            settings.write_text("[blas]\nldflags = -lmine\n")
        before = dict(environ)
        preparation.set_flags(environ, "pytensor")
        assert environ == before
    monkeypatch.setattr(environment, "find_ldflags", lambda: "")
    environ = {"PYTENSORRC": "none"}
    preparation.set_flags(environ, "pytensor")
    assert "PYTENSOR_FLAGS" not in environ  # PyTensor searches itself
