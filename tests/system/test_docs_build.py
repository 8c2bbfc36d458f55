"""Tests that the documentation builds without warnings or a network, and that its pages are complete."""

import runpy
import socket
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from processes import ROOT

pytest.importorskip("sphinx")

#: Attributes with which a page has the browser load something, by element.
LOADED = {
    "script": "src", "link": "href", "img": "src", "source": "src", "iframe": "src", "object": "data",
    "video": "src", "audio": "src", "embed": "src",
}  # fmt: skip
#: Links of these kinds tell about other pages, and load nothing.
NOT_LOADED = {"index", "search", "next", "prev", "author", "copyright", "canonical"}


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.loaded, self.links, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors.update(found[name] for name in ("id", "name") if found.get(name))
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if found.get(LOADED.get(tag)) and found.get("rel") not in NOT_LOADED:
            self.loaded.append(found[LOADED[tag]])


def build_without_network(source, target):
    """Build the pages as ``make docs`` does, in a process that can open no connection."""

    def refuse(*arguments, **keywords):
        raise AssertionError(f"the build asks for {arguments}")

    socket.socket.connect = socket.getaddrinfo = refuse
    sys.argv = ["sphinx", "-W", "--keep-going", "-q", str(source), str(target)]
    runpy.run_module("sphinx", run_name="__main__")  # exits with the status


@pytest.fixture(scope="module")
def built(programs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    home = {"KERAS_HOME": str(folder / "keras")}  # where Keras writes a file
    pages = folder / "pages"
    programs.run(
        build_without_network, ROOT / "docs", pages, timeout=300, cwd=folder, environment=home
    ).check()
    return pages


@pytest.fixture(scope="module")
def pages(built):
    found = {path.resolve(): Page(path.read_text()) for path in built.rglob("*.html")}
    assert len(found) > 20
    return found


def test_every_source_is_a_page(built):
    sources = [
        path.relative_to(ROOT / "docs").with_suffix("")
        for path in (ROOT / "docs").rglob("*.rst")
        if "_build" not in path.parts
    ]
    missing = [str(one) for one in sources if not (built / f"{one}.html").exists()]
    assert sources and not missing


def test_pages_load_nothing_from_elsewhere(pages):
    for path, page in pages.items():
        assert page.loaded, path
        for address in page.loaded:
            assert not urlsplit(address).scheme and not address.startswith("//"), (path.name, address)
            assert (path.parent / unquote(urlsplit(address).path)).exists(), (path.name, address)


def test_links_between_pages_lead_somewhere(pages):
    followed = 0
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), (path.name, link)
            anchor = unquote(parts.fragment)
            if anchor and target in pages:
                assert anchor in pages[target].anchors, (path.name, link)
            followed += 1
    assert followed > 500
