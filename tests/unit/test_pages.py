"""Tests of what the pages state: measured times, versions, links from the landing page, and terms."""

import json
import re
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
INDEX = (DOCS / "index.rst").read_text()


def median(results, beginning):
    """Return the median of the line of stored results that begins so."""
    lines = json.loads((ROOT / "benchmarks" / "results" / f"{results}.json").read_text())["lines"]
    return float(np.median(next(one["samples"] for one in lines if one["what"].startswith(beginning))))


def test_the_times_on_the_landing_page_are_measured():
    told = " ".join(INDEX.split())
    synk, alone, untouched = (
        median("step_small", one)
        for one in ("synkhronos, 2 ranks", "Theano, 1 thread, memory kept", "Theano untouched")
    )
    by_ranks = alone / median("step_small", "Theano's operations, synk")
    assert f"takes {synk:.0f} ms, where untouched Theano takes {untouched:.0f} ms" in told
    assert f"and {alone:.0f} ms at its best on one core" in told
    assert f"two ranks alone give {by_ranks:.1f} times" in told


def test_every_page_is_in_a_group_and_in_the_list_of_pages():
    pages = {page.stem for page in DOCS.glob("*.rst")} - {"index"}
    trees = re.findall(r"^\.\. toctree::\n((?:   .*\n|\n)+)", INDEX, re.MULTILINE)
    grouped = re.findall(r"^   (\w+)$", "".join(trees), re.MULTILINE)
    assert sorted(grouped) == sorted(pages)
    listed = INDEX.partition("**All pages**")[2]
    assert not [page for page in pages if not re.search(rf":doc:`[^`]*\b{page}>?`", listed)]
    assert INDEX.count(":caption: Guides: ") == 4


def test_the_versions_of_pytensor_are_those_that_are_installed():
    page = (DOCS / "pytensor.rst").read_text()
    for name in ("pytensor", "pymc"):
        pinned = (ROOT / "requirements" / f"{name}.txt").read_text()
        for version in re.findall(r"^pytensor==([\d.]+)", pinned, re.MULTILINE):
            assert f"\n{version} " in page, version
        for version in re.findall(r"^pymc==(\d+\.\d+)", pinned, re.MULTILINE):
            assert f"PyMC {version} " in page, version


def test_the_bound_in_the_picture_of_speed_is_not_below_the_bar():
    for shade in ("light", "dark"):
        text = (DOCS / "pictures" / f"speed.{shade}.svg").read_text()
        found = re.findall(
            r"(?:2 processes|waiting³): ([\d.]+) times", text.partition("description>")[2]
        )
        for _, ours, apart in zip(found[::3], found[1::3], found[2::3]):
            assert float(ours) <= float(apart)
        assert len(found) == 6


#: What has rows, replicas and values is a rank; what the operating system runs is a process.
OF_A_PROCESS = re.compile(
    r"(rows|replicas?|values?|share|streams?) (of|on|for) (a|each|every|all|the other) process\b"
    r"|(each|every|a) process(es)?('s own| computes| updates| averages| draws) "
    r"|fewer rows than processes|(rows are split|averaged) (over|among) the processes",
    re.IGNORECASE,
)


def test_what_has_rows_and_replicas_is_called_a_rank():
    files = [page for page in DOCS.rglob("*.rst") if "_build" not in page.parts]
    files += (ROOT / "synkhronos").rglob("*.py")
    found = [
        f"{path.name}: {one[0]}"
        for path in files
        for one in OF_A_PROCESS.finditer(" ".join(path.read_text().split()))
    ]
    assert len(files) > 100 and not found
