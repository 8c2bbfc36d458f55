"""Installing Theano, Lasagne and Keras with pip, for ``python -m synkhronos install``.

pip alone cannot build Theano 1.0.5 on Python 3.12 and newer: its ``setup.py`` uses two names that the
module ``configparser`` no longer has. Here they are supplied while Theano is built, from a temporary
folder, which also has a setuptools that can build Theano and Lasagne.

Nothing here imports anything but Python's own modules, as nothing else may be installed yet.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence

from synkhronos.host import environment

NAMES = ("theano", "lasagne", "keras")
#: The packages that are installed from wheels
WHEELS: Dict[str, Sequence[str]] = {
    "theano": ("numpy>=1.23,<3", "scipy>=1.9", "six", "cloudpickle", "psutil", "threadpoolctl"),
    "lasagne": (),
    "keras": ("Keras==2.3.1", "h5py", "pyyaml"),
}
#: The packages that are built from source archives: the name and the version
SOURCES = {"theano": ("Theano", "1.0.5"), "lasagne": ("Lasagne", "0.1")}
BUILD_TOOLS = ("setuptools>=66.1,<82", "wheel")
SITECUSTOMIZE = """# Python runs this when it starts. Theano's setup.py needs these names.
import configparser

if not hasattr(configparser, "SafeConfigParser"):
    configparser.SafeConfigParser = configparser.ConfigParser
if not hasattr(configparser.RawConfigParser, "readfp"):
    configparser.RawConfigParser.readfp = configparser.RawConfigParser.read_file
"""


class Command(NamedTuple):
    """A command, and its environment variables in addition to those of this process."""

    arguments: List[str]
    variables: Dict[str, str]

    def line(self) -> str:
        """Return the command in the form in which a shell takes it."""
        settings = [f"{name}={value}" for name, value in self.variables.items()]
        return shlex.join([*settings, *self.arguments])

    def run(self) -> int:
        """Run the command, and return its exit status as a shell does."""
        status = subprocess.call(self.arguments, env={**os.environ, **self.variables})
        return 128 - status if status < 0 else status


def complaint() -> Optional[str]:
    """Return an error message if nothing can be installed into this Python, else None."""
    of_python = environment.python_complaint(sys.version_info[:3], "theano")
    if of_python:
        return of_python
    if is_externally_managed():
        return (
            f"Packages of this Python, {sys.executable}, are managed by the system, so pip does not "
            f"install into it: make a virtual environment first: python3 -m venv env && . "
            f"env/bin/activate"
        )
    if installed_version("pip") is None:
        return (
            f"There is no pip for this Python, {sys.executable}: install it with: python -m ensurepip; "
            f"or make a virtual environment that has it: python3 -m venv env && . env/bin/activate"
        )
    if installed_version("Theano-PyMC"):
        return (
            "Theano-PyMC is installed, which has the same name as Theano when it is imported: remove "
            "it first: python -m pip uninstall Theano-PyMC Theano"
        )
    return None


def is_externally_managed() -> bool:
    """Whether pip refuses to install into this Python, as PEP 668 asks of it."""
    is_virtual = sys.prefix != sys.base_prefix
    is_allowed = bool(os.environ.get("PIP_BREAK_SYSTEM_PACKAGES"))
    marker = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
    return not is_virtual and not is_allowed and marker.exists()


def installed_version(name: str) -> Optional[str]:
    """Return the installed version of a package, by its name for pip; None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def commands(names: Iterable[str], constraints: Sequence[str], folder: str) -> List[Command]:
    """Return the commands that install these packages, and Theano, which the others need.

    Parameters
    ----------
    names : iterable of str
        Of `NAMES`.
    constraints : sequence of str
        Files with the versions that pip is to take.
    folder : str
        An empty folder, which must exist until the commands have run.

    Returns
    -------
    list of Command
        If Theano and Lasagne are installed already, there is no command that builds them.
    """
    wanted = [name for name in NAMES if name in {"theano", *names}]
    limits = [option for file in constraints for option in ("--constraint", file)]
    wheels = [requirement for name in wanted for requirement in WHEELS[name]]
    found = [_pip("install", *limits, *wheels)]
    sources = [
        f"{package}=={version}"
        for package, version in (SOURCES[name] for name in wanted if name in SOURCES)
        if installed_version(package) != version
    ]
    if sources:
        Path(folder, "sitecustomize.py").write_text(SITECUSTOMIZE)
        found.append(_pip("install", "--target", folder, *limits, *BUILD_TOOLS))
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        build = _pip("install", "--no-build-isolation", "--no-deps", *limits, *sources)
        found.append(build._replace(variables={"PYTHONPATH": path}))
    return found


def trial() -> Command:
    """Return the command that imports Theano in a fresh process, as a script would."""
    arguments = [sys.executable, "-m", "synkhronos", "run", "-c", "import theano"]
    return Command(arguments, {"SYNKHRONOS_COMPILER": "theano"})


def _pip(*arguments: str) -> Command:
    return Command([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], {})
