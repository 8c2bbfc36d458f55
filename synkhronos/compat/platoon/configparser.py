"""Hosts and devices of experiments, from the environment and from Platoon's configuration files.

The environment has priority: ``PLATOON_HOSTS`` and ``PLATOON_DEVICES``, each with commas in between.
Then come the files in ``PLATOONRC``, the last one first, then ``./.platoonrc`` and ``~/.platoonrc``. In
a file the section ``[platoon]`` has ``hosts``, and ``[devices]`` has the devices of each host.
"""

from __future__ import annotations

import configparser
import os
import re

#: Environment variables: devices of this machine, hosts, and files
DEVICES, HOSTS, FILES = "PLATOON_DEVICES", "PLATOON_HOSTS", "PLATOONRC"
_FILE = ".platoonrc"


def fetch_hosts() -> list[str]:
    """Return the hosts of experiments.

    Raises
    ------
    KeyError
        If nothing names any.
    ValueError
        If a file is not a configuration file.
    """
    return _fetch(HOSTS, "platoon", "hosts")


def fetch_devices_for_host(host: str) -> list[str]:
    """Return Theano's devices that workers use on a host; ``PLATOON_DEVICES`` is for any host.

    Raises
    ------
    KeyError
        If nothing names any.
    ValueError
        If a file is not a configuration file.
    """
    return _fetch(DEVICES, "devices", host)


def _fetch(variable: str, section: str, option: str) -> list[str]:
    found = _words(os.environ.get(variable, "")) or _words(_read().get(section, option, fallback=""))
    if not found:
        raise KeyError(option)
    return found


def _words(text: str) -> list[str]:
    return re.findall(r"[^\s,]+", text)


def _read() -> configparser.ConfigParser:
    """Return the contents of all files; those that are read later have priority."""
    parser = configparser.ConfigParser(interpolation=None)
    files = [os.path.join("~", _FILE), _FILE, *os.environ.get(FILES, "").split(os.pathsep)]
    try:
        parser.read([os.path.expanduser(file) for file in files if file], encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ValueError(f"Platoon's configuration file cannot be read: {error}") from None
    return parser
