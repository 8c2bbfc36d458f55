"""Trees, along which a message reaches many ranks or machines in few steps.

The places of a tree are numbered level by level, from the root, which is 0. Each place has as many
places below it as the radix says, as long as there are any: with a radix of 2, 0 has 1 and 2, and 1
has 3 and 4. A place sends to those below it, one after the other, so with a radix of k it takes about
``k * depth(size, k)`` steps until the last one has the message, instead of ``size - 1``.
"""

from __future__ import annotations


def children(place: int, size: int, radix: int) -> range:
    """Return the places directly below a place of a tree with `size` places."""
    first = radix * place + 1
    return range(min(first, size), min(first + radix, size))


def parent(place: int, radix: int) -> int:
    """Return the place directly above a place other than the root."""
    return (place - 1) // radix


def depth(size: int, radix: int) -> int:
    """Return the number of levels below the root of a tree with `size` places."""
    levels, last = 0, size - 1
    while last > 0:
        last = parent(last, radix)
        levels += 1
    return levels
