"""The scripts that everybody starts with: the environment is made once, and found the next time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_version_is_read_from_one_place():
    from synkhronos._version import __version__

    answer = subprocess.run(
        [sys.executable, "setup.py", "--version"],
        cwd=str(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=60,
        check=True,
    )
    assert answer.stdout.split()[-1] == __version__


@pytest.mark.parametrize("name", ["tools/environment.sh", "demos/run", "tests/run", ".ci/run"])
def test_scripts_are_executable_and_are_shell(name):
    assert os.access(str(ROOT / name), os.X_OK)
    subprocess.run(["sh", "-n", str(ROOT / name)], check=True, timeout=60)


def test_the_environment_takes_no_other_option():
    answer = subprocess.run(
        ["sh", str(ROOT / "tools" / "environment.sh"), "--with-everything"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr == "usage: environment.sh [--with-opencl]\n"
