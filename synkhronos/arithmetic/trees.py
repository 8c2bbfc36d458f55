"""A tree of numbered members, along which a message spreads from member 0 and answers are gathered.

It is a k-nomial tree: in the number system with the base `radix`, the parent of a member has its number
with the last digit that is not 0 replaced by 0. So the members of a subtree have consecutive numbers.
"""

from __future__ import annotations

# Member 0 sends `radix` - 1 messages for each level, one after the other, while others that have the
# message pass it on. By the measured times of a message and of its way, 2 and 3 take
# equally long, within a tenth, for up to 1024 machines, and larger numbers take longer. With 2, member 0
# handles the fewest messages, and each member and its parent are a power of two apart, as are leaders
# that send to each other in a meeting. So they are connected already.
RADIX = 2


def parent(member: int, radix: int = RADIX) -> int:
    """Return the parent of a member other than 0."""
    return member - member % (radix * _span(member, radix))


def subtree(member: int, size: int, radix: int = RADIX) -> range:
    """Return a member of `size` and all below it."""
    end = size if member == 0 else min(size, member + _span(member, radix))
    return range(member, end)


def children(member: int, size: int, radix: int = RADIX) -> list[int]:
    """Return the children of a member of `size`: those first that have most below them."""
    found, span, below = [], 1, subtree(member, size, radix)
    while span < len(below):
        found += [index for index in range(member + span, member + radix * span, span) if index in below]
        span *= radix
    return sorted(found, key=lambda one: -len(subtree(one, size, radix)))


def _span(member: int, radix: int) -> int:
    """Return the value of the last digit that is not 0."""
    span = 1
    while member % (radix * span) == 0:
        span *= radix
    return span
