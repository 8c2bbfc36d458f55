"""Programs that every rank runs by itself: what they share and how they reach each other.

``center`` is one copy of parameters that belongs to no rank. ``stripes`` is its memory, which changes
piece by piece, and ``layout`` says what is in each piece. ``messages`` sends arrays from one rank to
another, by way of its ``mailbox``.

May import: ``engines``, ``stores``, ``transports``.
"""
