"""Helpers for programs on devices that check what is left after an error."""

import psutil

import synkhronos as synk


def children():
    return psutil.Process().children(recursive=True)


def refused(call, kind):
    """Return the message of the error that a call raises.

    Fail if the call raises no error of this kind, or leaves a world or a child process behind.
    """
    try:
        call()
    except kind as error:
        assert not children(), children()
        assert not synk.world.world.world_exists()
        return str(error)
    raise AssertionError("no error")
