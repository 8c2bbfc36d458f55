"""Run Theano's own tests, from its installed package, and tabulate how they end in several environments.

::

    python tools/theano_tests.py run [--plain] [--kernels] RESULTS.json [FILE ...]
    python tools/theano_tests.py table REFERENCE.json RESULTS.json [...]

``run`` runs the test files, by default those in `FILES`, in two processes, without optimization by the
C++ compiler, and writes how each test ended. Nothing of Theano is changed but what the table of repairs
of Synkhronos changes; with ``--plain`` not even that, which is for versions of Python and NumPy for
which Theano was made. With ``--kernels``, functions have the library's operations for the CPU. The
environment needs pytest before 8.4, which still accepts the tests that yield
others, pytest-xdist, pytest-timeout and parameterized.

``table`` counts the tests that passed with the reference and in each other environment, by folder, and
lists those that passed with the reference only, with their reasons in `REASONS`.

The test files themselves use names that are gone, and nose, which does not work with Python 3.10 and
newer. `REPAIRS` has these; they do not concern users of Theano.
"""

import argparse
import collections
import functools
import json
import os
import platform
import runpy
import subprocess
import sys
import types
import unittest
from fnmatch import fnmatch
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path

HOST = Path(__file__).resolve().parent.parent / "synkhronos" / "host"
PLAIN = "THEANO_TESTS_PLAIN"
KERNELS = "THEANO_TESTS_KERNELS"
FLAGS = "device=cpu,gcc.cxxflags=-O0"
TIME_LIMIT = 600  # seconds for one test

#: Test files and folders, relative to Theano's folder. Those of GPUs are left out, and a few that take
#: more than ten minutes.
FILES = (
    "compile/tests",
    "gof/tests",
    "misc/tests",
    "sandbox/tests/test_rng_mrg.py",
    "scalar/tests",
    "scan_module/tests",
    "sparse/tests",
    "tensor/nnet/tests/test_bn.py",
    "tensor/nnet/tests/test_neighbours.py",
    "tensor/nnet/tests/test_nnet.py",
    "tensor/nnet/tests/test_sigm.py",
    "tensor/signal/tests",
    "tensor/tests/test_basic.py",
    "tensor/tests/test_casting.py",
    "tensor/tests/test_complex.py",
    "tensor/tests/test_elemwise.py",
    "tensor/tests/test_extra_ops.py",
    "tensor/tests/test_inc_subtensor.py",
    "tensor/tests/test_keepdims.py",
    "tensor/tests/test_nlinalg.py",
    "tensor/tests/test_raw_random.py",
    "tensor/tests/test_shared_randomstreams.py",
    "tensor/tests/test_slinalg.py",
    "tensor/tests/test_sort.py",
    "tensor/tests/test_subtensor.py",
    "tensor/tests/test_var.py",
    "tests",
    "typed_list/tests",
)

Repair = collections.namedtuple("Repair", "old new")

#: What is replaced in the test files
REPAIRS = (
    Repair("np.cast[", "__import__('theano_tests').CAST["),
    Repair("np.complex(", "(0j).__class__("),
    Repair("np.complex)", "(0j).__class__)"),
    Repair("from numpy.testing import dec\n", "from theano_tests import dec\n"),
    Repair(
        "from numpy.testing import dec, ", "from theano_tests import dec; from numpy.testing import "
    ),
    Repair("np.array((-1,), dtype=dtype)[0]", "np.array((-1,)).astype(dtype)[0]"),
    Repair("np.MAXDIMS", "64"),
    Repair(
        "            x[idx] += a\n", "            x[tuple(idx) if type(idx) is list else idx] += a\n"
    ),
    Repair("x[[slice(1, -1)] * x.ndim])", "x[tuple([slice(1, -1)] * x.ndim)])"),
    Repair("patch = padded_input[l][region]", "patch = padded_input[l][tuple(region)]"),
    Repair("patch = input[l][region]", "patch = input[l][tuple(region)]"),
    Repair('print("sum %f" % _sum)', 'print("sum %f" % _sum[0])'),
    Repair("np.product(", "np.prod("),
    Repair("np.float(", "float("),
    Repair("np.float)", "float)"),
    Repair("np.in1d(", "np.isin("),
    Repair("np.linalg.linalg.", "np.linalg."),
    Repair("numpy.linalg.linalg", "numpy.linalg"),
    Repair("np.find_common_type(", "__import__('theano_tests').find_common_type("),
)

#: Why tests do not pass, by pattern
REASONS = {
    "tensor/tests/test_sort.py::Test_TopK::test_grad_*": "the largest numbers come in no particular "
    "order, and NumPy's partition gives them another one after the small changes of this test",
    "tensor/tests/test_extra_ops.py::test_Unique::test_basic_matrix": "it compares with "
    "`numpy.unique`, whose inverse has another shape; Theano's is as before",
}


class _Cast:
    """What ``numpy.cast`` was."""

    def __getitem__(self, dtype):
        import numpy

        return lambda value: numpy.asarray(value).astype(dtype)


CAST = _Cast()


def find_common_type(array_types, scalar_types):
    """Return what ``numpy.find_common_type`` returned: scalars count if they are of a higher kind."""
    import numpy

    array, scalar = numpy.result_type(*array_types), numpy.result_type(*scalar_types)
    kinds = "buifc"
    is_higher = kinds.index(scalar.kind) > kinds.index(array.kind)
    return numpy.result_type(array, scalar) if is_higher else array


class dec:  # noqa: N801  # the name that it had in numpy.testing
    """What of ``numpy.testing.dec`` the tests use."""

    @staticmethod
    def skipif(condition, reason):
        """Return a decorator of a test that is skipped if the condition holds."""
        return unittest.skipIf(condition, reason)

    @staticmethod
    def knownfailureif(condition, reason):
        """Return a decorator of a test that is expected to fail if the condition holds."""
        return unittest.skipIf(condition, reason)


class TestFinder:
    """Loads Theano's test files with `REPAIRS`."""

    def __init__(self, imports):
        self._imports = imports

    def find_spec(self, name, path=None, target=None):
        """Return where to load a test file from; None for all other modules."""
        if not name.startswith("theano.") or ".test" not in name:
            return None
        spec = self._imports["Finder"].find_spec(name, path, target) or PathFinder.find_spec(name, path)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = self._imports["RepairingLoader"](name, spec.loader.path, list(REPAIRS))
        return spec


def _raises(*errors):
    """Return a decorator of a test that must raise one of the errors."""

    def decorated(test):
        @functools.wraps(test)
        def run_test(*args, **kwargs):
            with unittest.TestCase().assertRaises(errors):
                test(*args, **kwargs)

        return run_test

    return decorated


def provide_nose():
    """Provide the names of nose that the tests import, by those of unittest."""
    case = unittest.TestCase()
    tools = types.ModuleType("nose.tools")
    tools.assert_raises, tools.assert_true = case.assertRaises, case.assertTrue
    tools.assert_equal = tools.assert_equals = case.assertEqual
    tools.raises = _raises
    skip = types.ModuleType("nose.plugins.skip")
    skip.SkipTest = unittest.SkipTest
    attrib = types.ModuleType("nose.plugins.attrib")
    attrib.attr = lambda *args, **kwargs: lambda function: function
    for name, module in {
        "nose": types.ModuleType("nose"),
        "nose.tools": tools,
        "nose.plugins": types.ModuleType("nose.plugins"),
        "nose.plugins.skip": skip,
        "nose.plugins.attrib": attrib,
    }.items():
        sys.modules[name] = module


def set_up():
    """Prepare this process. It is a process of pytest, which loads this file as a plugin."""
    if "theano" in sys.modules:
        return
    if not os.environ.get(PLAIN):
        imports = runpy.run_path(str(HOST / "imports.py"))
        imports["provide"]()
        sys.meta_path.insert(0, TestFinder(imports))
        provide_nose()


def run(results, plain, kernels, files):
    """Run test files with pytest, and write the outcome of each test to a JSON file."""
    environ = dict(os.environ)
    environ.update(PYTHONPATH=str(Path(__file__).resolve().parent), RESULTS=str(Path(results).resolve()))
    environ["THEANO_FLAGS"] = ",".join(filter(None, [environ.get("THEANO_FLAGS"), FLAGS]))
    if plain:
        environ[PLAIN] = "1"
    if kernels:
        environ[KERNELS] = "1"
    from importlib.util import find_spec

    root = Path(find_spec("theano").submodule_search_locations[0])
    options = [
        "-p",
        "theano_tests",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "-n2",
        "--dist=loadfile",
    ]
    options += ["--assert=plain", "--tb=no", "-v", "-W", "ignore", f"--timeout={TIME_LIMIT}"]
    options += [f"--rootdir={root.parent}", *(str(root / file) for file in files or FILES)]
    # The working directory comes first in the path, and may have a folder of the name of a module.
    return subprocess.call([sys.executable, "-m", "pytest", *options], env=environ, cwd=root.parent)


class _Outcomes:
    """Records how tests end, in the process that pytest-xdist reports to."""

    def __init__(self):
        self._outcomes = {}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            reason = "" if report.passed else str(report.longrepr).strip().splitlines()[-1][-200:]
            self._outcomes[report.nodeid] = [report.outcome, reason]

    def pytest_sessionfinish(self):
        import numpy
        import scipy

        versions = {
            "Python": platform.python_version(),
            "NumPy": numpy.__version__,
            "SciPy": scipy.__version__,
        }
        Path(os.environ["RESULTS"]).write_text(
            json.dumps({"versions": versions, "outcomes": self._outcomes}, indent=0, sort_keys=True)
        )


def pytest_configure(config):
    """Record outcomes, where there is no process that this one reports to."""
    if os.environ.get(KERNELS):
        sys.path.append(str(HOST.parent.parent))
        from synkhronos.engines.theano.kernels import registration

        registration.use(True)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcomes())


def table(reference, others):
    """Print how many of the tests that passed with the reference pass elsewhere, by folder."""
    reference, *others = [json.loads(Path(file).read_text()) for file in (reference, *others)]
    expected = [name for name, (outcome, _) in reference["outcomes"].items() if outcome == "passed"]
    counts = collections.Counter(map(_folder, expected))
    found = [
        collections.Counter(_folder(name) for name in expected if _passed(one, name)) for one in others
    ]
    titles = [
        ", ".join(f"{what} {version}" for what, version in one["versions"].items())
        for one in (reference, *others)
    ]
    print(".. list-table::\n   :header-rows: 1\n")
    for row in [
        ["Folder", *titles],
        *([folder, counts[folder], *(one[folder] for one in found)] for folder in sorted(counts)),
        ["all", len(expected), *(sum(one.values()) for one in found)],
    ]:
        for place, cell in enumerate(row):
            print(f"   {'-' if place else '* -'} {cell}".replace("   - ", "     - "))
    print()
    for title, one in zip(titles[1:], others):
        reasons = collections.defaultdict(list)
        for name in expected:
            if not _passed(one, name):
                short = name.partition("theano/")[2]
                reasons[_reason(short, one["outcomes"].get(name, ["", "it did not run"])[1])].append(
                    short
                )
        for reason, names in reasons.items():
            print(f"- {title}: {', '.join(f'``{name}``' for name in names)}: {reason}.")


def _reason(test, error):
    """Return why a test does not pass, or its error."""
    return next((why for pattern, why in REASONS.items() if fnmatch(test, pattern)), f"**{error}**")


def _folder(name):
    return "/".join(name.partition("theano/")[2].partition("/test_")[0].split("/")[:-1]) or "tests"


def _passed(results, name):
    return results["outcomes"].get(name, [None])[0] == "passed"


def main():
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run_parser = commands.add_parser("run")
    run_parser.add_argument("results")
    run_parser.add_argument("--plain", action="store_true")
    run_parser.add_argument("--kernels", action="store_true")
    run_parser.add_argument("files", nargs="*")
    table_parser = commands.add_parser("table")
    table_parser.add_argument("reference")
    table_parser.add_argument("others", nargs="+")
    options = parser.parse_args()
    if options.command == "run":
        return run(options.results, options.plain, options.kernels, options.files)
    return table(options.reference, options.others)


if __name__ == "__main__":
    sys.exit(main())
elif "pytest" in sys.modules:
    set_up()
