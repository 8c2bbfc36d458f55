"""The examples in the documentation run and print what is shown below them."""

import re

import pytest
from conftest import ROOT

DOCS = ROOT / "docs"
MARK = "-- end of block {} --"


def code_blocks(text):
    """Return a list of ``(code, output, line)``; the output is empty if none is shown."""
    found = re.finditer(
        r"^\.\. code-block:: (python|text)\n\n((?:    .*\n|\n)+)", text, re.MULTILINE
    )
    blocks = []
    for match in found:
        body = re.sub("^    ", "", match.group(2), flags=re.MULTILINE).strip() + "\n"
        if match.group(1) == "python":
            blocks.append((body, "", text[: match.start()].count("\n") + 1))
        else:
            code, _, line = blocks.pop()
            blocks.append((code, body, line))
    return blocks


PAGES = sorted(page.name for page in DOCS.glob("*.rst") if code_blocks(page.read_text()))


def test_the_tutorial_has_examples():
    assert "usage.rst" in PAGES
    assert len(code_blocks((DOCS / "usage.rst").read_text())) > 10


@pytest.mark.parametrize("page", PAGES)
def test_examples_print_what_is_shown(run_python, tmp_path, page):
    blocks = code_blocks((DOCS / page).read_text())
    script = tmp_path / "script.py"
    script.write_text(
        "".join(
            f"{code}\nprint({MARK.format(number)!r})\n" for number, (code, _, _) in enumerate(blocks)
        )
    )
    left = run_python(script).stdout
    for number, (_, expected, line) in enumerate(blocks):
        printed, left = left.split(MARK.format(number) + "\n", 1)
        assert printed == expected, f"{page}, line {line}"
