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
        same = (drawn / name).read_text() == (PICTURES / name).read_text()
        assert same, f"{name}: run docs/pictures/draw.py"


def test_pictures_are_described(drawn):
    for picture in drawn.glob("*.svg"):
        text = re.search("<dc:description>(.*?)</dc:description>", picture.read_text(), re.DOTALL)
        assert len(text.group(1)) > 100, picture.name


def test_every_picture_is_used():
    used = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.rst"))
    for picture in PICTURES.glob("*.svg"):
        assert f".. picture:: {picture.name.split('.')[0]}\n" in used
