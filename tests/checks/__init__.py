"""Conformance checks that every implementation of an interface must pass.

``communicators``, ``stores``, ``transports`` and ``engines`` each have a list ``CHECKS``. The first
three run programs on ranks, which ``ranks`` starts.
"""
