"""Tests of the public names: what the reference documents, with its parameters and types."""

import inspect
import re
import sys
import typing

import pytest
from processes import ROOT, own_process

import synkhronos as synk

DOCS = ROOT / "docs"


def documented_in(page):
    return re.findall(r"^\.\. auto(?:function|class|exception):: (\w+)", page.read_text(), re.MULTILINE)


def test_all_is_what_the_reference_documents():
    pages = sorted((DOCS / "reference").glob("*.rst"))
    of_rules = DOCS / "reference" / "rules.rst"
    of_sessions = DOCS / "reference" / "sessions.rst"
    of_ops = DOCS / "reference" / "ops.rst"
    assert sorted(documented_in(of_rules)) == sorted(synk.extensions.rules.__all__)
    assert sorted(documented_in(of_sessions)) == sorted(synk.extensions.session.__all__)
    assert sorted(documented_in(of_ops)) == sorted(synk.ops.__all__)
    others = [page for page in pages if page not in (of_rules, of_sessions, of_ops)]
    documented = [name for page in others for name in documented_in(page)]
    assert sorted(documented) == sorted(synk.__all__)


def test_all_is_sorted_and_complete():
    assert synk.__all__ == sorted(synk.__all__)
    public = {
        name
        for name, value in vars(synk).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(synk.__all__)


def sections(docstring):
    """Return a dictionary of the numpydoc sections, each a list of lines."""
    found, current = {}, None
    lines = inspect.cleandoc(docstring).splitlines()
    for line, following in zip(lines, [*lines[1:], ""]):
        if set(following) == {"-"} and len(following) == len(line):
            current = found.setdefault(line, [])
        elif current is not None and set(line) != {"-"}:
            current.append(line)
    return found


def documented_parameters(docstring):
    names = []
    for line in sections(docstring).get("Parameters", []):
        if line and not line.startswith(" "):
            names += [name.strip().lstrip("*") for name in line.partition(" : ")[0].split(",")]
    return names


def public_callables():
    for name in synk.__all__:
        value = getattr(synk, name)
        if inspect.isclass(value):
            for member, function in vars(value).items():
                if inspect.isfunction(function) and not member.startswith("_"):
                    yield f"{name}.{member}", function
        else:
            yield name, value


PUBLIC = dict(public_callables())


def test_what_is_public_has_a_docstring():
    docstrings = {name: inspect.getdoc(getattr(synk, name)) or "" for name in synk.__all__}
    lines = {name: text.partition("\n")[0] for name, text in docstrings.items()}
    assert not [name for name, line in lines.items() if not line.endswith((".", ":"))]


def test_every_parameter_is_documented():
    wrong = {}
    for name, function in {**PUBLIC, "Function.__call__": synk.Function.__call__}.items():
        function = inspect.unwrap(function)
        expected = set(inspect.signature(function).parameters) - {"self"}
        documented = set(documented_parameters(function.__doc__ or ""))
        if documented != expected:
            wrong[name] = documented ^ expected
    assert not wrong


@pytest.mark.skipif(sys.version_info < (3, 10), reason="int | None cannot be evaluated before")
def test_annotations_name_what_there_is():
    hints = {name: typing.get_type_hints(inspect.unwrap(one)) for name, one in PUBLIC.items()}
    assert not [name for name, one in hints.items() if "return" not in one]


@own_process
def test_extensions_are_imported_when_they_are_used():
    assert "synkhronos.extensions.updates" not in sys.modules
    assert dir(synk.extensions) == [
        "batch_norm", "loading", "rules", "session", "train", "updates", "zoo",
    ]  # fmt: skip
    with pytest.raises(ImportError, match="builds graphs of PyTensor, and Theano is used"):
        synk.extensions.pymc  # noqa: B018
    assert callable(synk.extensions.updates.sgd)
    assert "synkhronos.extensions.train" not in sys.modules
    assert callable(synk.extensions.train.make_train_function)
    assert not {"keras", "lasagne"} & {*sys.modules}
    with pytest.raises(AttributeError, match="no attribute 'rule'"):
        synk.extensions.__getattr__("rule")
    sys.modules["keras"] = None  # as if it were not installed
    with pytest.raises(ImportError, match="synkhronos install keras"):
        synk.extensions.__getattr__("keras")
