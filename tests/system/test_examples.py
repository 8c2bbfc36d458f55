"""Tests that the examples in the docstrings of public names print the output shown."""

import doctest
import inspect

import pytest
from processes import own_process

import synkhronos as synk

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
