"""Tests that the page about troubleshooting has the messages of the library, and only these."""

import ast
import re

from processes import ROOT

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
    for path in sorted((ROOT / "synkhronos").rglob("*.py")):
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
