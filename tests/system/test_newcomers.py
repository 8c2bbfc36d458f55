"""Tests that the paths of newcomers in tests/newcomers lead to their end, without the installation."""

import runpy
import subprocess
import sys

import pytest
from processes import ROOT

PATHS = ROOT / "tests" / "newcomers"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["readme", "own_script"])
def test_a_path_is_followed_to_its_end(tmp_path, name):
    words = [sys.executable, PATHS / f"{name}.py", tmp_path, "--python", sys.executable]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pages_have_the_commands_that_a_newcomer_needs():
    steps = runpy.run_path(str(PATHS / "steps.py"))
    assert steps["block"]("README.rst", "python3 -m venv env")[-1] == "python -m synkhronos doctor"
    assert any("[pymc]" in line for line in steps["block"]("docs/pymc.rst", "python3 -m venv env"))
    assert steps["examples"]("README.rst")[0][1] == "5.5 [30. 36.]"


def test_a_path_that_fails_says_where(tmp_path):
    words = [sys.executable, PATHS / "own_script.py", tmp_path, "--python", "false"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("the path ends here")
