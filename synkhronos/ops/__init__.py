"""Collectives in graphs: operations in which all ranks meet while they compute a function.

They are operations with gradients, defined in ``collectives``. In a function built with
``synkhronos.function`` the ranks combine their values at each operation. Without other ranks an
operation returns its input: with one process, in ``as_theano()``, and in every plain function of the
compiler, even while there are other processes. So the same graph, run on all rows in one process,
computes the same result as all ranks together.

All ranks run the collectives of a function in one order, which is fixed when the function is compiled.
A collective inside ``scan`` or ``OpFromGraph``, or in one branch of ``ifelse`` only, is refused when the
function is built, since ranks could reach it a different number of times.

A rank that has no rows in a call, or fewer slices than others with ``num_slices``, computes on a row of
another rank or slice to take part. Its results are ignored, and it makes only updates that do not depend
on its own rows.

`in_buckets` does not wait: it lets a gradient be reduced while the function computes the rest of it.

The functions are imported when they are first used.
"""

import typing as _typing

__all__ = ["all_gather", "all_reduce", "broadcast", "in_buckets"]

if _typing.TYPE_CHECKING:
    from synkhronos.ops.collectives import all_gather as all_gather
    from synkhronos.ops.collectives import all_reduce as all_reduce
    from synkhronos.ops.collectives import broadcast as broadcast
    from synkhronos.ops.collectives import in_buckets as in_buckets
else:

    def __getattr__(name: str) -> _typing.Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from synkhronos.ops import collectives

        return getattr(collectives, name)


def __dir__() -> _typing.List[str]:
    return list(__all__)
