"""Tests that the page about troubleshooting has the messages of the library, and only these."""

import ast
import builtins
import re
import runpy
from types import SimpleNamespace

import pytest
from processes import ROOT

from synkhronos._errors import SynkhronosWarning, WorkerError, warn
from synkhronos.arithmetic.partition import select
from synkhronos.host import entries
from synkhronos.host.messages import MESSAGES

PAGE = (ROOT / "docs" / "troubleshooting.rst").read_text()
GAP = "..."  # on the page and below, what varies in a message

#: A message that the page explains although it is not the library's
OF_NUMPY = "module 'numpy.distutils.__config__' has no attribute 'blas_opt_info'"

#: What the page says once for all arguments: "name: expected ..., got ..."
OF_ARGUMENTS = "expected"

#: Files whose errors do not reach a script: they are part of another message, or the doctor reports them
NOT_SEEN = {"__init__.py", "naive.py", "scan_perform_ext.py", "archive.py", "doctor/check.py"}

#: Messages that do not reach a script
INTERNAL = (
    "array ... is ... ...",
    "rank ... of ...",
    "a variable occurs twice",
    "a variable is called",
    "arrays of ... ranks",
    "extra ... is ...",
    "its path contains one of the characters",
    "others may write in",
    "belongs to another user",
    "left a collective: another rank failed",
)


def text_of(node):
    """Return the string that an expression is, with gaps; None if it is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(one.value if isinstance(one, ast.Constant) else GAP for one in node.values)
    if isinstance(node, ast.BinOp):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is None or right is None else left + right
    return None


def sources():
    paths = sorted((ROOT / "synkhronos").rglob("*.py"))
    for path in paths:
        if path.name != "messages.py":  # it repeats the page
            yield path, list(ast.walk(ast.parse(path.read_text())))


def raised():
    """Return the messages of errors, warnings and logged warnings, with the files that have them."""
    found = []
    for path, nodes in sources():
        for node in nodes:
            if not isinstance(node, ast.Call) or any(map(path.match, NOT_SEEN)):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name.endswith("Error") or name in ("error", "warn", "warning"):
                texts = filter(None, map(text_of, node.args))
                found += [(path, text) for text in texts if " " in text]
    return found


def pattern(message):
    parts = [re.escape(part.strip()) for part in message.split(GAP) if part.strip()]
    return re.compile(".*".join(parts), re.DOTALL)


def terms():
    """Return the messages that the page explains: literals in a line with an indented one below it."""
    lines = PAGE.splitlines()
    explained = [
        line for line, below in zip(lines, lines[1:]) if line[:2] == "``" and below[:4] == " " * 4
    ]
    return [term for line in explained for term in re.findall("``(.+?)``", line)]


def test_every_message_is_explained():
    literals = re.findall("``([^`]+ [^`]+)``", PAGE)
    known = [pattern(one) for one in (*literals, *INTERNAL, OF_ARGUMENTS)]
    messages = raised()
    assert len(messages) > 200
    missing = [
        f"{path.name}: {text}" for path, text in messages if not any(one.search(text) for one in known)
    ]
    assert not missing, "docs/troubleshooting.rst should say the cause and the remedy of these messages"


def test_messages_on_the_page_are_in_the_library():
    texts = [text for _, nodes in sources() for text in map(text_of, nodes) if text]
    explained = terms()
    assert len(explained) > 150
    gone = [one for one in explained if not any(pattern(one).search(text) for text in texts)]
    assert gone == [OF_NUMPY]


# The entry that a message names


def test_the_package_has_the_messages_of_the_page():
    found = runpy.run_path(str(ROOT / "docs" / "entries.py"))
    written = (ROOT / "synkhronos" / "host" / "messages.py").read_text()
    assert written == found["module"](found["entries"](PAGE)), "run docs/entries.py"
    assert len(set(terms()) & set(re.findall("^[a-z0-9-]+ (.+)$", MESSAGES, re.MULTILINE))) > 200


@pytest.mark.parametrize(
    "message, entry",
    [
        ("a worker died: rank 1 was killed by SIGKILL", "a-worker-died"),
        ("f: no value for x", "no-value-for"),
        (
            "x: expected float32, got int8, which cannot be cast safely",
            "expected-got-which-cannot-be-cast",
        ),
        (str(WorkerError(1, "ValueError", "x", "a worker died: y")), "rank-raised"),
        ("another message", None),
    ],
)
def test_the_entry_of_a_message_is_that_of_the_page(message, entry):
    assert entries.entry_of(message) == entry


def raised_by(call, *args):
    with pytest.raises(Exception) as found:
        call(*args)
    return found.type, found.value, found.tb


def test_an_error_that_ends_the_script_names_its_entry(capsys):
    seen = []
    hook = entries.show_references(lambda *error: seen.append(error))
    ours = raised_by(select, [7], 3)
    hook(*ours)
    assert seen == [ours]
    line = "See troubleshooting.html#row-is-out-of-range-for in the documentation\n"
    assert capsys.readouterr().err == line


def test_errors_of_others_and_errors_without_an_entry_are_left_as_they_are(capsys):
    def fail():
        raise ValueError("a worker died: no")

    hook = entries.show_references(lambda *error: None)
    hook(*raised_by(fail))
    hook(*raised_by(select, "ab", 3))
    assert not capsys.readouterr().err


def test_a_cell_of_a_notebook_names_the_entry(capsys, monkeypatch):
    registered = {}
    shell = SimpleNamespace(events=SimpleNamespace(register=registered.__setitem__))
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    entries.show_references_in_cells()
    registered["post_run_cell"](SimpleNamespace(error_in_exec=None))
    registered["post_run_cell"](SimpleNamespace(error_in_exec=raised_by(select, [7], 3)[1]))
    assert capsys.readouterr().err.count("#row-is-out-of-range-for") == 1


def test_a_warning_names_its_entry():
    with pytest.warns(SynkhronosWarning) as caught:
        warn("f uses w, whose replicas differ between the ranks")
    assert str(caught[0].message).splitlines()[1:] == [
        "See troubleshooting.html#uses-whose-replicas-differ-between-the in the documentation"
    ]
