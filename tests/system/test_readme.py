"""Tests that the README's examples run and print the output shown, and that its pictures are current."""

import pytest
from processes import ROOT
from test_docs import code_blocks

README = (ROOT / "README.rst").read_text()
EXAMPLES = code_blocks(README)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_prints_what_is_shown(programs, tmp_path, number):
    code, output, _ = EXAMPLES[number]
    assert output
    script = tmp_path / "script.py"
    script.write_text(code)
    done = programs.run_script(script, cwd=tmp_path)
    assert done.stdout == output
    assert not done.stderr
