"""Whether Theano uses the operations of this folder in the functions that it compiles."""

from theano.compile import optdb

from synkhronos.engines.kernels import batch_normalization, fusion, inplace, moments

_OPTIMIZATIONS = [
    *batch_normalization.OPTIMIZATIONS,
    *moments.OPTIMIZATIONS,
    *fusion.OPTIMIZATIONS,
    *inplace.OPTIMIZATIONS,
]

#: The tag of all optimizations, with which the flag ``optimizer_excluding`` excludes them together.
TAG = "synkhronos"

_used = {}  # the name of each registered optimization, and whether it is used


def use(wanted):
    """Let functions that are compiled from now on have these operations, or only Theano's own.

    Parameters
    ----------
    wanted : bool
    """
    if wanted and not _used:
        for name, position, optimizer in _OPTIMIZATIONS:
            optdb.register(name, optimizer, position, TAG)
            _used[name] = False
    for name, used in _used.items():
        if used != wanted:
            (optdb.add_tags if wanted else optdb.remove_tags)(name, "fast_run")
            _used[name] = wanted
