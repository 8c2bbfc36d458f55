"""Tests that the README's example runs and prints the output shown."""

import re

from conftest import ROOT

README = (ROOT / "README.rst").read_text()


def block(language):
    """Return the README's first code block in a language."""
    found = re.search(rf"^\.\. code-block:: {language}\n\n((?:    .*\n|\n)+)", README, re.MULTILINE)
    return re.sub("^    ", "", found.group(1), flags=re.MULTILINE).strip() + "\n"


def test_example_prints_what_is_shown(run_python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(block("python"))
    done = run_python(script)
    assert done.stdout == block("text")
    assert not done.stderr


def test_paths_that_are_named_exist():
    paths = re.findall(r"<([^>:\s]+)>`_", README)
    paths += re.findall(r"^ +sh (\S+)$", README, re.MULTILINE)
    assert len(paths) >= 6
    for path in paths:
        assert (ROOT / path).exists(), path
