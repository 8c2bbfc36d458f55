"""Tests that the code needs no newer Python than the oldest one that is supported.

The linter finds annotations that only a newer Python can evaluate.
"""

import importlib.util
import subprocess
import sys

import pytest
from processes import ROOT

OLDEST = "3.8"
CODE = ["setup.py", "synkhronos", "demos", "tests"]
NOT_ON_OLDEST = [
    "sys.stdlib_module_names",  # the test that needs it is skipped there
    "tempfile.TemporaryDirectory(ignore_cleanup_errors)",  # mutation testing is not among the tests
    "tomllib",  # tomli is used there
    "file",  # vermin takes a package's file attribute for a type of Python 2
]


def newer_than_oldest(paths):
    """Return what vermin, which knows when each name was added to Python, finds; empty if nothing."""
    if importlib.util.find_spec("vermin") is None:
        pytest.skip("the test needs vermin")
    excluded = [option for name in NOT_ON_OLDEST for option in ("--exclude", name)]
    done = subprocess.run(
        [sys.executable, "-c", "import vermin; vermin.main()", f"--target={OLDEST}-", "--violations",
         "--no-tips", "--backport", "typing_extensions", *excluded, *map(str, paths)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert not done.stderr and "File with incompatible versions" not in done.stdout
    return done.stdout if done.returncode else ""


@pytest.mark.slow
def test_the_code_uses_nothing_newer_than_the_oldest_python():
    found = newer_than_oldest(CODE)
    assert not found, found
