"""The introduction in ``demos``: its cells run, twice, and have the outputs that they give."""

import os

import notebooks
import pytest
from processes import ROOT, own_process

PATH = ROOT / "demos" / "introduction.ipynb"


@own_process(timeout=120)
def test_its_outputs_are_those_of_its_cells(tmp_path):
    pytest.importorskip("IPython")
    os.environ["IPYTHONDIR"] = str(tmp_path)
    notebook = notebooks.read(PATH)
    cells, stored = notebooks.code_cells(notebook), notebooks.stored(notebook)
    for _ in range(2):  # the cell that forks can be run again, before the last one has closed
        for cell, expected, got in zip(cells, stored, notebooks.run(notebook)):
            assert notebooks.without_times(cell, got) == notebooks.without_times(cell, expected)
        notebook["cells"] = notebook["cells"][:-1]


@pytest.mark.parametrize("path", sorted((ROOT / "demos").glob("*.ipynb")), ids=lambda path: path.stem)
def test_it_has_the_form_of_a_notebook(path):
    notebook = notebooks.read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    cells = notebooks.code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any("times" in cell["metadata"].get("tags", ()) for cell in cells)
    if path == PATH:
        assert sum("text/html" in str(cell["outputs"]) for cell in cells) >= 4
