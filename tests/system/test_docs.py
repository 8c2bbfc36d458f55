"""Tests of the documentation: its examples, pictures, paths and links, and that it builds."""

import doctest
import importlib.util
import inspect
import re
import runpy
import shlex
import socket
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from compilers import NAME
from processes import own_process, ROOT, run_interpreter
import synkhronos as synk

DOCS = ROOT / "docs"
MARK = "-- end of block {} --"


def code_blocks(text):
    """Return a list of ``(code, output, line)``. The output is empty if the page does not show it.

    The code of a diff is what it leads to: the added lines and those that stay.
    """
    found = re.finditer(
        r"^\.\. code-block:: (python|diff|text)\n\n((?:    .*\n|\n)+)", text, re.MULTILINE
    )
    blocks = []
    for match in found:
        body = re.sub("^    ", "", match.group(2), flags=re.MULTILINE)
        if match.group(1) == "diff":
            body = "".join(f"{line[1:]}\n" for line in body.splitlines() if line[:1] != "-")
        body = body.strip() + "\n"
        if match.group(1) != "text":
            blocks.append((body, "", text[: match.start()].count("\n") + 1))
        else:
            code, _, line = blocks.pop()
            blocks.append((code, body, line))
    return blocks


def commands(text):
    """Return a list of ``(arguments of python, output)`` from the page's blocks of commands."""
    found = []
    for block in re.findall(r"^\.\. code-block:: console\n\n((?:    .*\n|\n)+)", text, re.MULTILINE):
        for command in re.split(r"^    \$ python ", block, flags=re.MULTILINE)[1:]:
            line, _, output = command.partition("\n")
            output = re.sub("^    ", "", output, flags=re.MULTILINE).strip()
            found.append((shlex.split(line), output + "\n"))
    return found


PAGES = sorted(
    str(page.relative_to(DOCS))
    for page in DOCS.rglob("*.rst")
    if "_build" not in page.parts and code_blocks(page.read_text())
)


@pytest.mark.parametrize("page", PAGES)
def test_examples_print_what_is_shown(programs, tmp_path, page):
    if page == "keras.rst" and importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed: python -m synkhronos install keras")
    if page == "pytensor.rst" and NAME != "pytensor":
        pytest.skip("its examples run with PyTensor, in tests/system/test_pytensor.py")
    if page == "pymc.rst" and (NAME != "pytensor" or importlib.util.find_spec("pymc") is None):
        pytest.skip("its examples run with PyMC, in tests/system/test_pymc.py")
    blocks = code_blocks((DOCS / page).read_text())
    script = tmp_path / "script.py"
    script.write_text(
        "".join(
            f"{code}\nprint({MARK.format(number)!r})\n" for number, (code, _, _) in enumerate(blocks)
        )
    )
    home = {"KERAS_HOME": str(tmp_path)}  # where Keras writes a file
    left = programs.run_script(script, timeout=600, cwd=tmp_path, environment=home).stdout
    for number, (_, expected, line) in enumerate(blocks):
        printed, left = left.split(MARK.format(number) + "\n", 1)
        assert printed == expected, f"{page}, line {line}"


def test_the_commands_of_the_tutorial_print_what_is_shown(programs, tmp_path):
    listed = commands((DOCS / "tutorial.rst").read_text())
    scripts = sorted((DOCS / "tutorial").glob("*.py"))
    assert len(scripts) == 7
    used = set()
    for arguments, expected in listed:
        if arguments[:3] == ["-m", "synkhronos", "run"]:  # the processes have what it sets
            del arguments[:3]
        script = DOCS / "tutorial" / arguments.pop(0)
        done = programs.run_script(script, *arguments, cwd=tmp_path)
        printed, shown = (
            re.sub(r"[0-9.]+ s$", "_ s", text, flags=re.M) for text in (done.stdout, expected)
        )
        assert printed == shown, script.name
        used.add(script)
    assert sorted(used) == scripts


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


WITH_EXAMPLES = [
    "Function.__call__", "Function.check", "Function.copy", "In", "Listener", "PowerSGD",
    "ProgramLock", "Rank.compiling", "Rank.save", "Rank.split", "TopK", "all_gather", "all_reduce",
    "broadcast", "data", "distribute", "fork", "function", "fuse", "gather", "get_lengths",
    "get_shapes", "get_value", "in_sync", "make_slices", "on_step", "profile", "reduce", "reseed",
    "restart", "save", "scatter", "set_shmems", "set_value", "spmd", "synkhronos",
]  # fmt: skip


def documented():
    found = {"synkhronos": synk.__doc__}
    for name in synk.__all__:
        one = getattr(synk, name)
        found[name] = inspect.getdoc(one)
        if inspect.isclass(one):
            for member, method in vars(one).items():
                if inspect.isfunction(method):
                    found[f"{name}.{member}"] = inspect.getdoc(method)
    return {name: text for name, text in found.items() if text and ">>>" in text}


def test_what_is_used_first_has_examples():
    assert sorted(documented()) == WITH_EXAMPLES


@own_process
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_the_example_prints_what_it_shows(name):
    names = {"make_slices": synk.make_slices} if name == "make_slices" else {}
    test = doctest.DocTestParser().get_doctest(documented()[name], names, name, None, 0)
    assert not any(doctest.SKIP in example.options for example in test.examples)
    failed, tried = doctest.DocTestRunner().run(test)
    assert tried and not failed


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


PATHS = ROOT / "tests" / "newcomers"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["readme", "own_script"])
def test_a_path_is_followed_to_its_end(tmp_path, name):
    run_interpreter(PATHS / f"{name}.py", tmp_path, "--python", sys.executable, timeout=600)


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
    pytest.importorskip("sphinx")
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
