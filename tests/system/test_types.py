"""Tests of what a type checker tells a user: nothing about a right script, and its mistakes."""

import importlib.util
import re
import sys

import pytest
from processes import FOLDER, ROOT, run_interpreter


SCRIPTS = FOLDER / "programs" / "types"
MARK = re.compile(r"  # ([a-z-]+)$")


@pytest.fixture(scope="module")
def errors(pytestconfig):
    """The errors that mypy finds in the scripts, by file name: pairs of line number and code."""
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("the test needs mypy")
    options = ["--config-file=", "--strict", "--ignore-missing-imports", "--follow-imports=silent"]
    words = ["-m", "mypy", "--cache-dir", pytestconfig.cache.mkdir("mypy"), *options]
    done = run_interpreter(
        *words, "script.py", "mistakes.py",
        code=1, cwd=SCRIPTS, environment={"MYPYPATH": str(ROOT)}, timeout=200,
    )  # fmt: skip
    found = {"script.py": [], "mistakes.py": []}
    for file, line, code in re.findall(r"^([^:]+):(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.M):
        found[file].append((int(line), code))
    assert sum(map(len, found.values())) == done.stdout.count(": error: ")
    return found


def test_mypy_accepts_a_script(errors):
    assert errors["script.py"] == []


def test_mypy_finds_each_mistake_and_no_other(errors):
    lines = enumerate((SCRIPTS / "mistakes.py").read_text().splitlines(), 1)
    marked = [(number, MARK.search(line)[1]) for number, line in lines if MARK.search(line)]
    assert len(marked) > 30
    assert errors["mistakes.py"] == marked


@pytest.mark.skipif(sys.version_info < (3, 9), reason="ndarray has no type arguments before")
def test_what_the_script_declares_is_so(programs):
    programs.run_script("types/script.py")
