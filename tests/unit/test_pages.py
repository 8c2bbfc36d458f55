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
