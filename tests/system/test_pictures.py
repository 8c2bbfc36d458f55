"""Tests that the pictures of the documentation show what the library and the benchmarks give now."""

import re

import pytest
from processes import ROOT

PICTURES = ROOT / "docs" / "pictures"


def version_in(picture):
    """Return which matplotlib has drawn a picture."""
    return re.search(r"<dc:title>(Matplotlib v[^,]+),", picture.read_text()).group(1)


@pytest.fixture(scope="module")
def drawn(demo_programs, tmp_path_factory):
    """The folder of newly drawn pictures."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("pictures")
    demo_programs.run_script(PICTURES / "draw.py", folder, cwd=folder)
    return folder


def test_the_stored_pictures_are_those_that_are_drawn(drawn):
    names = sorted(path.name for path in drawn.glob("*.svg"))
    assert names and names == sorted(path.name for path in PICTURES.glob("*.svg"))
    for name in names:
        if version_in(drawn / name) != version_in(PICTURES / name):
            pytest.skip("another version of matplotlib draws other bytes")
        assert lines_of(drawn / name) == lines_of(PICTURES / name), f"{name}: run docs/pictures/draw.py"


def lines_of(picture):
    """Return the text of a picture, without identifiers, which depend on how NumPy prints numbers."""
    return re.sub("#?p[0-9a-f]{10}", "", picture.read_text()).splitlines()
