"""Tests of the set-up: the version, the shell scripts, and the requirements."""

import ast
import re
import sys

import pytest
from processes import ROOT


PACKAGES = {"PIL": "pillow", "lasagne": "Lasagne", "sklearn": "scikit-learn"}  # by import name
FOLDERS = ["synkhronos", "demos", "tests", "benchmarks"]
OUR_OWN = {"synkhronos", "setup", *(path.stem for one in FOLDERS for path in (ROOT / one).rglob("*"))}
BY_DEBIAN = {"pygpu"}
OF_CLUSTERS = {"ray"}  # a script that starts a job on a cluster runs where the cluster is installed


def imported_in(folder):
    """Return the top-level names that the code in a folder imports."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found.update(one.name.partition(".")[0] for one in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def declared():
    """Return the requirements, and those of each extra, as ``pyproject.toml`` names their files."""
    toml = pytest.importorskip("tomllib" if sys.version_info >= (3, 11) else "tomli")
    dynamic = toml.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["dynamic"]

    def read(listed):
        lines = "".join((ROOT / file).read_text() for file in listed["file"]).splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    extras = {name: read(files) for name, files in dynamic["optional-dependencies"].items()}
    return read(dynamic["dependencies"]), extras


@pytest.mark.skipif(sys.version_info < (3, 10), reason="the names of Python's own modules are needed")
@pytest.mark.parametrize("folder", ["synkhronos", "demos", "tests"])
def test_what_is_imported_can_be_installed(folder):
    required, extras = declared()
    used = extras.keys() - {"bench", "loading"}  # these are not needed to use or to test the library
    wanted = [*required, *(one for name in used for one in extras[name])]
    names = {re.match(r"[\w-]+", one).group().lower() for one in wanted} | BY_DEBIAN | OF_CLUSTERS
    imported = imported_in(folder) - sys.stdlib_module_names - OUR_OWN
    assert imported and {PACKAGES.get(one, one).lower() for one in imported} <= names
