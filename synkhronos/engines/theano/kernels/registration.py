"""Registers the operations of this folder with Theano, or takes them back."""

from __future__ import annotations

from theano.compile import optdb

from synkhronos.engines.theano.kernels import images, loops, normalization

_OPTIMIZATIONS = [
    *images.OPTIMIZATIONS,
    *normalization.OPTIMIZATIONS,
    *loops.OPTIMIZATIONS,
]

#: The tag of all optimizations, with which the flag ``optimizer_excluding`` excludes them together.
TAG = "synkhronos"

_MODE = "fast_run"


def use(wanted: bool) -> None:
    """Compile functions with these operations from now on, or with Theano's own only.

    Parameters
    ----------
    wanted : bool
        Whether functions have the operations of this folder.
    """
    for name, position, optimizer in _OPTIMIZATIONS:
        if TAG not in optdb.__db__ or optimizer not in optdb.__db__[TAG]:
            optdb.register(name, optimizer, position, TAG)
        if wanted != (optimizer in optdb.__db__[_MODE]):
            (optdb.add_tags if wanted else optdb.remove_tags)(name, _MODE)
