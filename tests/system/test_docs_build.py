"""Tests that the documentation builds without warnings or a network, and that its pages are complete."""

import json
import re
import runpy
import socket
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import numpy as np
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
    """What a page loads, which pages it links to, and which anchors it has."""

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
    """The folder of the built pages."""
    folder = tmp_path_factory.mktemp("docs")
    home = {"KERAS_HOME": str(folder / "keras")}  # where Keras writes a file
    pages = folder / "pages"
    programs.run(
        build_without_network, ROOT / "docs", pages, timeout=300, cwd=folder, environment=home
    ).check()
    return pages


@pytest.fixture(scope="module")
def pages(built):
    """`Page` by path."""
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


def test_no_two_pages_have_one_title(built):
    """The results of a search are told apart by their titles."""
    titles = [re.search("<title>(.*?)</title>", path.read_text())[1] for path in built.rglob("*.html")]
    assert len(titles) > 20
    assert len(set(titles)) == len(titles)


def found_by_search(built, words):
    """Return the pages that the search of the pages finds for words, and those with all in one title."""
    from sphinx.search.en import SearchEnglish

    language = SearchEnglish({})
    stems = [language.stem(one.lower()) for one in words.split() if language.word_filter(one.lower())]
    text = (built / "searchindex.js").read_text()
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    found = []
    for kinds in (("terms", "titleterms"), ("titleterms",)):
        pages = [
            {page for kind in kinds for page in np.atleast_1d(index[kind].get(stem, []))}
            for stem in stems
        ]
        found.append({index["docnames"][page] for page in set.intersection(*pages)})
    return found


@pytest.mark.parametrize(
    "words, page",
    [("speedup", "faq"), ("NaN", "faq"), ("slow", "faq"), ("slower", "troubleshooting")]
    + [("loss is nan", "troubleshooting"), ("Windows", "faq"), ("macOS", "faq"), ("distribute", "faq")],
)
def test_search_finds_what_newcomers_look_for(built, words, page):
    pages, by_title = found_by_search(built, words)
    assert page in by_title and by_title <= pages


def test_pages_state_the_version_and_what_it_has_changed(built):
    version = runpy.run_path(str(ROOT / "synkhronos" / "_version.py"))["__version__"]
    assert f"Synkhronos {version}" in (built / "index.html").read_text()
    assert f"<h2>{version}" in (built / "changes.html").read_text()


def test_whole_scripts_are_highlighted(built):
    tutorial = (built / "tutorial.html").read_text()
    scripts = re.findall(r'class="literal-block-wrapper.*?class="highlight-(\w+)', tutorial, re.DOTALL)
    assert scripts == ["python", "python"]


def test_pages_load_nothing_from_elsewhere(pages):
    for path, page in pages.items():
        assert page.loaded, path
        for address in page.loaded:
            assert not urlsplit(address).scheme and not address.startswith("//"), (path.name, address)
            assert (path.parent / unquote(urlsplit(address).path)).exists(), (path.name, address)


def test_styles_load_nothing_from_elsewhere(built):
    styles = {path: path.read_text() for path in built.rglob("*.css")}
    assert styles
    for path in built.rglob("*.html"):
        styles[path] = "".join(re.findall("<style.*?</style>", path.read_text(), re.DOTALL))
    for style, text in styles.items():
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
        wanted = re.findall(r"url\(\s*['\"]?([^'\")]+)", text) + re.findall(
            r"@import\s+['\"]([^'\"]+)", text
        )
        for address in wanted:
            assert address.startswith("data:") or not re.match(r"(\w+:)?//", address), style.name


def test_formulas_are_escaped_once(built):
    """Two backslashes before a name are a new line: an escape in a docstring that is raw already."""
    formulas = [
        (path.name, formula)
        for path in built.rglob("*.html")
        for formula in re.findall(r'class="math[^"]*">(.*?)</(?:span|div)>', path.read_text(), re.DOTALL)
    ]
    assert len(formulas) > 50
    assert not [one for one in formulas if re.search(r"\\\\[a-zA-Z]|\\text\{[^}]*\\_", one[1])]


def test_formulas_are_drawn_by_a_script_and_fonts_of_the_pages(built, pages):
    scripts = pages[(built / "scaling.html").resolve()].loaded
    mathjax = [one for one in scripts if "mathjax" in one.lower()]
    assert len(mathjax) == 1
    assert list((built / "_static" / "mathjax").rglob("*.woff"))


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


def test_the_reader_of_pages_finds_what_it_looks_for():
    page = Page(
        '<link rel="stylesheet" href="//a/b.css"><link rel="next" href="c"><script src="d.js">'
        '</script><a href="e#f" id="g"></a><img src="h">'
    )
    assert page.loaded == ["//a/b.css", "d.js", "h"]
    assert (page.links, page.anchors) == (["e#f"], {"g"})
