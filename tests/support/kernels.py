"""Modes with and without the library's operations on the CPU, for tests that compare them."""

import pytest
from theano.compile.mode import Mode, get_mode

from synkhronos.engines.theano.kernels import registration


@pytest.fixture(autouse=True)
def kernels_are_used():
    """Use the operations in the tests of a module that imports this."""
    registration.use(True)


def fast(linker="cvm"):
    """Return the usual mode."""
    return Mode(linker, get_mode("FAST_RUN").provided_optimizer)


def plain(linker="cvm"):
    """Return the usual mode with Theano's operations only."""
    return fast(linker).excluding(registration.TAG)
