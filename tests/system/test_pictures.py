"""Tests that the pictures of the documentation show what the library and the benchmarks give now."""

import re
import runpy
from types import SimpleNamespace

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


def test_pictures_are_described(drawn):
    for picture in drawn.glob("*.svg"):
        text = re.search("<dc:description>(.*?)</dc:description>", picture.read_text(), re.DOTALL)
        assert len(text.group(1)) > 100, picture.name


def test_all_text_is_inside_its_picture():
    matplotlib = pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    draw = SimpleNamespace(**runpy.run_path(str(PICTURES / "draw.py")))
    with matplotlib.rc_context(draw.SETTINGS):
        for picture in draw.PICTURES:
            figure, _ = picture("light")
            renderer = FigureCanvasAgg(figure).get_renderer()
            for text in figure.axes[0].texts:
                (left, top), (right, bottom) = text.get_window_extent(renderer).get_points()
                is_inside = 0 <= min(left, top) and right <= figure.bbox.x1 and bottom <= figure.bbox.y1
                assert is_inside, (picture.__name__, text.get_text())


def test_every_picture_is_used():
    used = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.rst"))
    for picture in PICTURES.glob("*.svg"):
        assert f".. picture:: {picture.name.split('.')[0]}\n" in used
