"""Conformance checks that every implementation of an interface must pass.

``communicators``, ``wires``, ``stores``, ``named_memory``, ``transports``, ``links`` and ``engines``
each have a list ``CHECKS``. All but the last two run programs on ranks, which ``ranks`` starts;
``machines`` has those of several machines, and ``children`` those that die. ``wire_specification``
computes in one place what ``wires`` compares with.
"""
