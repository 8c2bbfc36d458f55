"""What every implementation of an interface must do, as functions that run on any of them.

``communicators``, ``stores``, ``transports`` and ``engines`` each have a list ``CHECKS``. The first
three run programs on ranks, which ``ranks`` starts.
"""
