"""The command ``tmlauncher``: starts a session by its options, or by a config file.

The session is run by ``python -m synkhronos run``, or, if its devices are on other hosts, by ``launch``,
in place of this process. So the exit status is that of the session.
"""

import json
import os
import sys
from typing import List, Optional, Sequence

from synkhronos.compat.theanompi.configuration import (
    USAGE,
    Configuration,
    ConfigurationError,
    read_arguments,
)

_PROGRAM = "synkhronos.compat.theanompi"


def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Start a session in place of this process.

    The exit status is 0 when the model is trained, 1 if an option is wrong or the training fails, and 3
    after Ctrl-C.

    Parameters
    ----------
    arguments : sequence of str, optional
        The arguments after the program's name; by default the arguments of this process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(f"usage: {USAGE}\n")
        return
    try:
        line = command(read_arguments(arguments))
    except ConfigurationError as error:
        sys.exit(f"tmlauncher: {error}")
    sys.stdout.flush()
    os.execv(line[0], line)


def command(session: Configuration) -> List[str]:
    """Return the command that runs a session; for other hosts it reads a file that this process opens.

    Parameters
    ----------
    session : Configuration
        The session.
    """
    line = [sys.executable, "-u", "-m", "synkhronos"]
    start = ["launch", "--config", _job(session)] if session.devices[0][0] else ["run"]
    return [*line, *start, "-m", _PROGRAM, *session.options()]


def _job(session: Configuration) -> str:
    """Return the path of a config file for ``launch``, in memory, which the next program inherits."""
    hosts = [host for host, _ in session.devices]
    lines = [f"hosts = {json.dumps(hosts)}", "[devices]"]
    lines += [f"{json.dumps(host)} = {json.dumps(devices)}" for host, devices in session.devices]
    file = os.memfd_create("tmlauncher", 0)
    os.write(file, "\n".join([*lines, ""]).encode())
    return f"/dev/fd/{file}"
