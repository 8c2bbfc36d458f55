"""A check of the doctor, its result, and the subprocess in which a check runs code."""

import json
import os
import subprocess
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple

from synkhronos.host import environment

OK, WARNING, PROBLEM = "ok", "warning", "problem"
TIME_LIMIT = 120  # seconds; the first compilation takes long on a slow file system

#: The result, in one or more lines, and the remedy; that is empty if nothing could be better.
Finding = Tuple[str, str]


class Fault(Exception):
    """The checked part does not work.

    Parameters
    ----------
    found : str
        The result of the check.
    remedy : str, optional
        How to fix it; by default the `remedy` of the check.
    """

    def __init__(self, found: str, remedy: Optional[str] = None) -> None:
        super().__init__(found)
        self.found, self.remedy = found, remedy


class ProbeError(Fault):
    """A probe's subprocess failed. The message is the last line of its output."""


class Result(NamedTuple):
    """The result of a check, in one or more lines, with a remedy if it is not `OK`."""

    name: str
    state: str
    found: str
    remedy: str = ""

    def line(self) -> str:
        """Return the result in the form that the doctor prints."""
        text = f"{self.state:<8} {self.name:<14} {self.found}"
        text = f"{text}\n-> {self.remedy}" if self.remedy else text
        return text.replace("\n", f"\n{'':<24}")


class Check(NamedTuple):
    """A check of the doctor.

    Attributes
    ----------
    name : str
        The name of the checked part.
    examine : callable
        ``examine()`` returns a `Finding`, or raises a `Fault`, or ``ImportError`` if it needs a package.
    is_required : bool
        Whether nothing works without it. Then a fault is a problem, else a warning.
    remedy : str
        How to fix a fault that does not say it.
    """

    name: str
    examine: Callable[[], Finding]
    is_required: bool
    remedy: str = ""

    def run(self) -> Result:
        """Carry out the check."""
        try:
            found, remedy = self.examine()
        except Fault as fault:
            remedy = self.remedy if fault.remedy is None else fault.remedy
            return Result(self.name, PROBLEM if self.is_required else WARNING, fault.found, remedy)
        except ImportError as error:
            found, remedy = f"unknown without {error.name}", f"python -m pip install {error.name}"
        return Result(self.name, WARNING if remedy else OK, found, remedy)


def probe(code: str, **environ: str) -> Dict[str, Any]:
    """Run `code` in a fresh interpreter and return the JSON in its last line of output."""
    return ask(environment.fresh_python(code), TIME_LIMIT, _last_line, env={**os.environ, **environ})


def ask(
    command: Sequence[str], seconds: float, complaint_of: Callable[[str], str], **options: Any
) -> Dict[str, Any]:
    """Run a command, and return the JSON in its last line of output.

    Parameters
    ----------
    command : sequence of str
        The program and its arguments.
    seconds : float
        How long it may take.
    complaint_of : callable
        Returns the part of the error output to report if the command fails.
    **options
        For `subprocess.run`.

    Raises
    ------
    ProbeError
        If it fails, takes too long, or prints nothing.
    """
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=seconds, **options)
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {seconds} s") from None
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines:
        raise ProbeError(complaint_of(process.stderr) or f"exit status {process.returncode}")
    found: Dict[str, Any] = json.loads(lines[-1])
    return found


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
