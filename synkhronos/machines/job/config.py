"""The options and the config file of ``launch``, checked before anything starts."""

import re
import shlex
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional

from synkhronos.host import job

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class JobError(Exception):
    """A job that cannot be started. The message is one sentence for the user."""


class Job(NamedTuple):
    """The machines of a job, and the settings of each.

    Attributes
    ----------
    hosts : list of str
        The first one runs the script. Empty for this machine, or for the machines that a batch system
        has allocated.
    machines : int
        The number of machines.
    environment : dict
        Environment variables for all machines.
    by_host : dict
        More environment variables of each host. Empty if there is none.
    mpi : list of str
        More options for mpirun.
    """

    hosts: List[str]
    machines: int
    environment: Dict[str, str]
    by_host: Dict[str, Dict[str, str]]
    mpi: List[str]


def make_job(
    machines: Optional[int],
    ranks: Optional[int],
    hosts: Optional[str],
    hostfile: Optional[str],
    config: Optional[str],
    mpi: Optional[str],
) -> Job:
    """Return the job for the options of ``launch``, which have priority over its config file.

    Raises
    ------
    JobError
        If the options cannot be followed.
    """
    given = {} if config is None else read_config(config)
    named = given.get("hosts", [])
    if hosts is not None:
        named = _hosts("--hosts", hosts.split(","))
    elif hostfile is not None:
        named = read_hostfile(hostfile)
    if machines is not None:
        named = _first(named, _at_least_1("-n", machines))
    if ranks is not None:
        given["ranks"] = _at_least_1("--ranks", ranks)
    if mpi is not None:
        given["mpi"] = _options("--mpi", mpi)
    known = named if "hosts" not in given or not config else [*named, *given["hosts"]]
    by_host = _variables_by_host(config, given, named, known)
    environment = dict(given.get("environment", {}))
    if isinstance(given.get("ranks"), int):
        environment[job.RANKS] = str(given["ranks"])
    return Job(named, machines or len(named) or 1, environment, by_host, given.get("mpi", []))


def _first(hosts: List[str], machines: int) -> List[str]:
    if hosts and machines > len(hosts):
        raise JobError(f"-n: expected at most {len(hosts)}, the number of hosts, got {machines}")
    return hosts[:machines]


def _variables_by_host(
    config: Optional[str], given: Mapping[str, Any], hosts: List[str], known: List[str]
) -> Dict[str, Dict[str, str]]:
    """Return the variables that differ from host to host, from the tables by host in the config file."""
    ranks, devices = given.get("ranks", {}), given.get("devices", {})
    for key, table in (("ranks", ranks), ("devices", devices)):
        unknown = [] if isinstance(table, int) else [host for host in table if host not in known]
        if unknown:
            raise JobError(f"{config}: {key}: {unknown[0]} is none of the hosts: {', '.join(known)}")
    missing = [host for host in hosts if devices and host not in devices]
    if missing:
        raise JobError(f"{config}: devices: expected a list for each host, got none for {missing[0]}")
    found: Dict[str, Dict[str, str]] = {}
    for host in hosts:
        count = ranks if isinstance(ranks, int) else ranks.get(host)
        names = devices.get(host)
        if names and count not in (None, len(names)):
            raise JobError(f"{host} has {len(names)} devices, {', '.join(names)}, for {count} ranks")
        if names:
            found.setdefault(host, {})[job.DEVICES] = ",".join(names)
        elif count and not isinstance(ranks, int):
            found.setdefault(host, {})[job.RANKS] = str(count)
    return found


# Files


def read_hostfile(path: str) -> List[str]:
    """Return the hosts in a file: the first word of each line, up to ``#``."""
    lines = [line.partition("#")[0].split() for line in _text(path).splitlines()]
    return _hosts(path, [line[0] for line in lines if line])


def read_config(path: str) -> Dict[str, Any]:
    """Return the contents of a config file, with `CHECKS` applied to them."""
    text = _text(path)
    toml = _toml_reader(path)
    try:
        given = toml.loads(text)
    except ValueError as error:
        raise JobError(f"{path} is not a TOML file: {error}") from None
    unknown = [key for key in given if key not in CHECKS]
    if unknown:
        raise JobError(f"{path}: expected the keys {', '.join(sorted(CHECKS))}, got {unknown[0]}")
    return {key: CHECKS[key](f"{path}: {key}", value) for key, value in given.items()}


def _toml_reader(path: str) -> Any:
    try:
        import tomllib  # novm
    except ImportError:  # before Python 3.11
        try:
            import tomli as tomllib
        except ImportError:
            raise JobError(
                f"{path} cannot be read, as Python before 3.11 needs tomli: python -m pip install tomli"
            ) from None
    return tomllib


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise JobError(f"{path} cannot be read: it is not text in UTF-8") from None


# Values. Each check gets a label for its message, and returns the value.


def _hosts(label: str, value: Any) -> List[str]:
    if not isinstance(value, list) or not value:
        raise JobError(f"{label}: expected a list of names of machines, got {value!r}")
    for number, host in enumerate(value):
        if not isinstance(host, str) or not _HOST.fullmatch(host):
            raise JobError(f"{label}: expected the name or the address of a machine, got {host!r}")
        if host in value[:number]:
            raise JobError(f"{label}: {host} is named twice; one process per machine starts its ranks")
    return value


def _at_least_1(label: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise JobError(f"{label}: expected a number from 1 on, got {value!r}")
    return value


def _ranks(label: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return _at_least_1(label, value)
    return {host: _at_least_1(f"{label}: {host}", count) for host, count in value.items()}


def _options(label: str, value: Any) -> List[str]:
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            raise JobError(f"{label}: {error}, in {value!r}") from None
    return _strings(label, value)


def _strings(label: str, value: Any) -> List[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise JobError(f"{label}: expected a list of strings, got {value!r}")
    return value


def _environment(label: str, value: Any) -> Dict[str, str]:
    table = _table(label, value)
    for name, item in table.items():
        if not _VARIABLE.fullmatch(name):
            raise JobError(f"{label}: expected the name of an environment variable, got {name!r}")
        if not isinstance(item, (str, int)) or isinstance(item, bool) or "\0" in str(item):
            raise JobError(f"{label}: {name}: expected a string or a number, got {item!r}")
    return {name: str(item) for name, item in table.items()}


def _devices(label: str, value: Any) -> Dict[str, List[str]]:
    return {host: _some(f"{label}: {host}", names) for host, names in _table(label, value).items()}


def _some(label: str, value: Any) -> List[str]:
    if not _strings(label, value):
        raise JobError(f"{label}: expected the name of at least one device, got an empty list")
    return value


def _table(label: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise JobError(f"{label}: expected a table, got {value!r}")
    return value


#: The keys of a config file, and their checks
CHECKS: Dict[str, Callable[[str, Any], Any]] = {
    "hosts": _hosts,
    "ranks": _ranks,
    "environment": _environment,
    "mpi": _options,
    "devices": _devices,
}
