"""The result of a check of the doctor, and the subprocess in which a check runs code."""

import json
import os
import subprocess
from typing import Any, Dict, NamedTuple

from synkhronos.host import environment

OK, WARNING, PROBLEM = "ok", "warning", "problem"
TIME_LIMIT = 120  # seconds; the first compilation takes long on a slow file system


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


class ProbeError(Exception):
    """A probe's subprocess failed. The message is the last line of its output."""


def probe(code: str, **environ: str) -> Dict[str, Any]:
    """Run `code` in a fresh interpreter and return the JSON in its last line of output."""
    try:
        process = subprocess.run(
            environment.fresh_python(code),
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            env={**os.environ, **environ},
        )
    except subprocess.TimeoutExpired:
        raise ProbeError(f"no answer within {TIME_LIMIT} s") from None
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines:
        complaint = process.stderr.strip().splitlines() or [f"exit status {process.returncode}"]
        raise ProbeError(complaint[-1])
    return json.loads(lines[-1])
