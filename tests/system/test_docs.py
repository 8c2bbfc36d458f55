"""Tests that the examples in the documentation run and print the output shown below them."""

import importlib.util
import re
import shlex

import pytest
from compilers import NAME
from processes import ROOT

DOCS = ROOT / "docs"
MARK = "-- end of block {} --"


def code_blocks(text):
    """Return a list of ``(code, output, line)``. The output is empty if the page does not show it.

    The code of a diff is what it leads to: the added lines and those that stay.
    """
    found = re.finditer(
        r"^\.\. code-block:: (python|diff|text)\n\n((?:    .*\n|\n)+)", text, re.MULTILINE
    )
    blocks = []
    for match in found:
        body = re.sub("^    ", "", match.group(2), flags=re.MULTILINE)
        if match.group(1) == "diff":
            body = "".join(f"{line[1:]}\n" for line in body.splitlines() if line[:1] != "-")
        body = body.strip() + "\n"
        if match.group(1) != "text":
            blocks.append((body, "", text[: match.start()].count("\n") + 1))
        else:
            code, _, line = blocks.pop()
            blocks.append((code, body, line))
    return blocks


def commands(text):
    """Return a list of ``(arguments of python, output)`` from the page's blocks of commands."""
    found = []
    for block in re.findall(r"^\.\. code-block:: console\n\n((?:    .*\n|\n)+)", text, re.MULTILINE):
        for command in re.split(r"^    \$ python ", block, flags=re.MULTILINE)[1:]:
            line, _, output = command.partition("\n")
            output = re.sub("^    ", "", output, flags=re.MULTILINE).strip()
            found.append((shlex.split(line), output + "\n"))
    return found


PAGES = sorted(
    str(page.relative_to(DOCS))
    for page in DOCS.rglob("*.rst")
    if "_build" not in page.parts and code_blocks(page.read_text())
)


@pytest.mark.parametrize("page", PAGES)
def test_examples_print_what_is_shown(programs, tmp_path, page):
    if page == "keras.rst" and importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed: python -m synkhronos install keras")
    if page == "pytensor.rst" and NAME != "pytensor":
        pytest.skip("its examples run with PyTensor, in tests/system/test_pytensor.py")
    if page == "pymc.rst" and (NAME != "pytensor" or importlib.util.find_spec("pymc") is None):
        pytest.skip("its examples run with PyMC, in tests/system/test_pymc.py")
    blocks = code_blocks((DOCS / page).read_text())
    script = tmp_path / "script.py"
    script.write_text(
        "".join(
            f"{code}\nprint({MARK.format(number)!r})\n" for number, (code, _, _) in enumerate(blocks)
        )
    )
    home = {"KERAS_HOME": str(tmp_path)}  # where Keras writes a file
    left = programs.run_script(script, timeout=600, cwd=tmp_path, environment=home).stdout
    for number, (_, expected, line) in enumerate(blocks):
        printed, left = left.split(MARK.format(number) + "\n", 1)
        assert printed == expected, f"{page}, line {line}"


def test_the_commands_of_the_tutorial_print_what_is_shown(programs, tmp_path):
    listed = commands((DOCS / "tutorial.rst").read_text())
    scripts = sorted((DOCS / "tutorial").glob("*.py"))
    assert len(scripts) == 7
    used = set()
    for arguments, expected in listed:
        if arguments[:3] == ["-m", "synkhronos", "run"]:  # the processes have what it sets
            del arguments[:3]
        script = DOCS / "tutorial" / arguments.pop(0)
        done = programs.run_script(script, *arguments, cwd=tmp_path)
        printed, shown = (
            re.sub(r"[0-9.]+ s$", "_ s", text, flags=re.M) for text in (done.stdout, expected)
        )
        assert printed == shown, script.name
        used.add(script)
    assert sorted(used) == scripts
