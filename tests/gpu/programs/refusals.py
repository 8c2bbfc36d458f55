"""What programs on devices share: a look at what is there after an error."""

import psutil

import synkhronos as synk


def children():
    return psutil.Process().children(recursive=True)


def refused(call, kind):
    """Return the message of the error of a call that leaves neither a world nor a process."""
    try:
        call()
    except kind as error:
        assert not children(), children()
        assert not synk.world.world.world_exists()
        return str(error)
    raise AssertionError("no error")
