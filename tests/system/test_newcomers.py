"""Tests that the paths of newcomers in tests/newcomers lead to their end, without the installation."""

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
