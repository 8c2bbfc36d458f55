"""The modules of the demos, for tests of them and with them."""

import importlib
import importlib.util
import sys
from types import SimpleNamespace

import pytest
from processes import ROOT


def need(*packages):
    """Skip the tests of a module unless these packages are installed."""
    for needed in packages:
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"the demos need {needed}", allow_module_level=True)


def modules_of(folder, *names):
    """Return a fixture: a namespace of modules in a folder of ``demos``.

    They set ``floatX``, which is restored afterwards.
    """

    @pytest.fixture(scope="module")
    def demo():
        theano = pytest.importorskip("theano")
        float_x = theano.config.floatX
        sys.path.insert(0, str(ROOT / "demos" / folder))
        try:
            yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        finally:
            sys.path.remove(str(ROOT / "demos" / folder))
            theano.config.floatX = float_x
            for name in names:
                sys.modules.pop(name, None)

    return demo
