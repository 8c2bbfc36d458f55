"""The command ``tmlauncher``: starts a session by its options, or by a config file.

The session is run by ``python -m synkhronos run``, or, if its devices are on other hosts, by ``launch``,
in place of this process. So the exit status is that of the session.

The options and the config file are checked before anything starts. The file is written like the
assignments of a shell, but no shell runs it: it may have comments, and lines such as ``KEY=VALUE``,
``KEY="VALUE"`` and ``KEY=("VALUE" "VALUE")``. Everything else is an error.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from typing import NamedTuple, Sequence

#: The options, as Theano-MPI spells them, with the key of each in a config file.
OPTIONS = {
    "-cfg": "CONFIG", "--config": "CONFIG",
    "-r": "RULE", "--rule": "RULE",
    "-file": "MODELFILE", "--modelfile": "MODELFILE",
    "-class": "MODELCLASS", "--modelclass": "MODELCLASS",
    "-d": "DEVICES", "--devices": "DEVICES",
    "-s": "SIZE", "--size": "SIZE",
    "-bsp_sync_type": "BSP_SYNC_TYPE",
    "-bsp_exch_strategy": "BSP_EXCH_STRATEGY",
}  # fmt: skip
#: They bind processes to cores, which the threads of Synkhronos do not need.
FLAGS = ("-b", "-bind")
RULES = ("BSP", "EASGD", "GOSGD")
KEYS = {*OPTIONS.values(), "BIND"} - {"CONFIG"}
USAGE = (
    "tmlauncher -cfg=FILE, or tmlauncher -r=RULE -file=MODULE -class=CLASS -d=DEVICES [-s=SIZE] "
    "[-bsp_sync_type=avg|cdd] [-bsp_exch_strategy=NAME]"
)
#: An assignment of a list, with its parentheses and the rest of its line, or of a value; or any line
_STATEMENT = re.compile(
    r"""[^\S\n]*([A-Za-z_]\w*)=(?:\(((?:"[^"]*"|'[^']*'|\#.*\n|[^()"'#])*)\)[^\S\n]*(?:\#.*)?$|(.*))|.*""",
    re.MULTILINE,
)
_DEVICE = re.compile(r"cpu|cuda\d*|opencl\d+:\d+")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_PROGRAM = "synkhronos.compat.theanompi"


class ConfigurationError(Exception):
    """A session that cannot be started. The message is one sentence for the user."""


class Configuration(NamedTuple):
    """A session.

    Attributes
    ----------
    rule, modelfile, modelclass : str
        The rule, the module and the class of the model.
    devices : list of (str, list of str)
        The devices of each host; one pair with the host ``""`` for this machine.
    sync_type, exch_strategy : str or None
        Options of BSP.
    """

    rule: str
    modelfile: str
    modelclass: str
    devices: list[tuple[str, list[str]]]
    sync_type: str | None
    exch_strategy: str | None

    def options(self) -> list[str]:
        """Return the options from which `read_arguments` makes this session."""
        devices = [":".join(filter(None, (host, ",".join(names)))) for host, names in self.devices]
        values = (self.rule, self.modelfile, self.modelclass, " ".join(devices), *self[4:])
        names = ("-r", "-file", "-class", "-d", "-bsp_sync_type", "-bsp_exch_strategy")
        return [f"{name}={value}" for name, value in zip(names, values) if value is not None]


def read_arguments(arguments: Sequence[str]) -> Configuration:
    """Return the session that the arguments of ``tmlauncher`` describe.

    As with Theano-MPI, the values in the config file have priority over options.

    Raises
    ------
    ConfigurationError
        If an option, the file, or a value is wrong.
    """
    given: dict[str, list[str]] = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument in FLAGS:
            continue
        if name not in OPTIONS or not equals:
            raise ConfigurationError(f"expected {USAGE}; got {argument!r}")
        given[OPTIONS[name]] = [value]
    if not given:
        raise ConfigurationError(f"expected {USAGE}; got nothing")
    for path in given.pop("CONFIG", []):
        given.update(read_file(path))
    return _checked(given)


def read_file(path: str) -> dict[str, list[str]]:
    """Return the words of each key in a config file. Keys that ``tmlauncher`` does not use are left out.

    Raises
    ------
    ConfigurationError
        If the file cannot be read, or has anything else than comments and assignments.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the file {path} cannot be read: {error}") from None
    found: dict[str, list[str]] = {}
    for statement in _STATEMENT.finditer(text):
        try:
            found.update(_assignment(statement))
        except ValueError as error:
            line = text.count("\n", 0, statement.start()) + 1
            raise ConfigurationError(
                f"{path}, line {line}: {error}; the file is parsed, not run by a shell"
            ) from None
    return {key: words for key, words in found.items() if key in KEYS}


def _assignment(statement: re.Match[str]) -> dict[str, list[str]]:
    """Return the key and the words of an assignment; nothing for a line without any."""
    key, items, value = statement.groups()
    text = next(given for given in (items, value, statement[0]) if given is not None)
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        raise ValueError(f"expected a closing quotation mark in {text.strip()!r}") from None
    if key is None:
        if words:
            raise ValueError(f"expected KEY=VALUE, got {text.strip()!r}")
        return {}
    if items is None and text.startswith("("):
        raise ValueError(f"expected a list such as ('a' 'b'), got {text.strip()!r}")
    wrong = [word for word in words if re.search(r"[$`;&|<>]", word)]
    if re.search(r"[()]", re.sub(r"\"[^\"]*\"|'[^']*'|#.*", "", text)):
        wrong.insert(0, text.strip())
    if wrong:
        raise ValueError(f"expected a plain value, got {wrong[0]!r}")
    if items is None and (len(words) > 1 or (words and text[0].isspace())):
        raise ValueError(f"expected one value, in quotes if it has spaces, got {text.strip()!r}")
    return {key: words if items is not None else words or [""]}


def _checked(given: dict[str, list[str]]) -> Configuration:
    keys = ("RULE", "MODELFILE", "MODELCLASS", "SIZE", "BSP_SYNC_TYPE", "BSP_EXCH_STRATEGY")
    values = [given.get(key, [""]) for key in keys]
    for key, words in zip(keys, values):
        if len(words) != 1:
            raise ConfigurationError(f"{key}: expected one value, got {' '.join(words)!r}")
        if key in keys[:3] and not words[0]:
            raise ConfigurationError(f"expected a value for {key}, got none; {USAGE}")
    rule, modelfile, modelclass, size, sync_type, strategy = (word for (word,) in values)
    if rule not in RULES:
        raise ConfigurationError(f"RULE: expected {', '.join(RULES)}, got {rule!r}")
    if not _MODULE.fullmatch(modelfile):
        raise ConfigurationError(
            f"MODELFILE: expected a module as in an import, such as models.modelfile, got {modelfile!r}"
        )
    if sync_type not in ("", "avg", "cdd"):
        raise ConfigurationError(f"BSP_SYNC_TYPE: expected avg or cdd, got {sync_type!r}")
    devices = _devices(given.get("DEVICES", []), size)
    return Configuration(rule, modelfile, modelclass, devices, sync_type or None, strategy or None)


def _devices(words: Sequence[str], size: str) -> list[tuple[str, list[str]]]:
    """Return the devices of each host. Without names, as many GPUs of this machine as `size` says."""
    count = None
    if size:
        if not size.isdecimal() or int(size) < 1:
            raise ConfigurationError(f"SIZE: expected a number from 1 on, got {size!r}")
        count = int(size)
    parts = [part for word in words for part in word.split()]
    if not parts:
        if count is None:
            raise ConfigurationError("expected DEVICES or SIZE, got neither")
        return [("", [f"cuda{number}" for number in range(count)])]
    found = [_of_host(part) for part in parts]
    hosts = [host for host, _ in found]
    if len(set(hosts)) < len(hosts) or ("" in hosts and len(hosts) > 1):
        raise ConfigurationError(
            f"DEVICES: expected a list such as cuda0,cuda1, or one for each host, such as "
            f"('node0:cuda0' 'node1:cuda0,cuda1'), got {' '.join(parts)!r}"
        )
    named = sum(len(devices) for _, devices in found)
    if count not in (None, named):
        raise ConfigurationError(f"expected as many DEVICES as SIZE, {count}, got {named}")
    return found


def _of_host(part: str) -> tuple[str, list[str]]:
    """Return the host and the devices of ``cuda0,cuda1`` or ``host:cuda0,cuda1``."""
    host, colon, names = part.partition(":")
    if not colon or host.startswith("opencl"):
        host, names = "", part
    devices = names.split(",")
    for device in devices:
        if not _DEVICE.fullmatch(device):
            raise ConfigurationError(f"DEVICES: expected names such as cuda0 or cpu, got {device!r}")
    return host, devices


def main(arguments: Sequence[str] | None = None) -> None:
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


def command(session: Configuration) -> list[str]:
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
