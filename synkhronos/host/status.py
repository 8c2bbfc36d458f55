"""The status of the ranks on this machine, in memory that other processes of the user can read.

The ranks keep there what they need themselves: how far each has come, and the command. For readers alone
they write how many rows they have computed on, and the names of functions when these are new.

The memory is a file without a name, which only the ranks can write to. A reader finds it among the open
files of the ranks, in ``/proc``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import pickletools
import stat
import struct
from typing import Iterator, NamedTuple, Sequence

from synkhronos.host.descriptors import FULL, open_unnamed
from synkhronos.host.handler_errors import reraise_if_handlers, suppress

LABEL = "synkhronos-status"
#: Words of the line of a rank
PASSED, FINISHED, REACHED, REACHED_IN, ROWS, PROCESS, NUMBER, BEGUN = range(8)
LINE = 8  # words of 8 bytes, in a cache line
NONE = -1  # no command

_MAGIC, _VERSION = 0x5359_4E4B_5354_4154, 1
_HEADER = struct.Struct("<4q")  # magic number, version, number of ranks, place of the master
_COMMAND, _ABORTED, _FIRST = LINE, 2 * LINE, 3 * LINE  # in words: the last is the first rank's line
_NAMES, _NAME_BYTES = 256, 128
_NAME = struct.Struct("<2q")  # the number of a function or schedule, and the bytes of its name
_PAGE = mmap.PAGESIZE
_PAYLOAD = struct.Struct("<2q")  # where the command is: at the offset 0, or elsewhere; and its bytes
_READ = 1024  # bytes of a command that are read
_SEAL_FUTURE_WRITE = 0x10  # of Linux 5.1; Python has no name for it


class StatusPage:
    """The status of the ranks of a machine, as these have it.

    Parameters
    ----------
    size : int
        The number of ranks.
    master : int
        The place of the master among them.
    labels : sequence of int, optional
        The number of each rank; by default its place.
    room : int
        The bytes of the largest command that has its place here.

    Attributes
    ----------
    mapping : mmap.mmap
        The memory.
    lines : memoryview
        The lines of the ranks, as 64-bit integers.
    command, aborted : memoryview
        The number of the last command, and the first barrier at which it is aborted.
    box : int
        Where in the memory the command is.
    """

    def __init__(
        self, size: int, master: int = 0, labels: Sequence[int] | None = None, room: int = 0
    ) -> None:
        self._names = _names_of(size)
        self.box = self._names + _NAMES * _NAME_BYTES
        self.mapping = _map(self.box + _PAYLOAD.size + room)
        words = memoryview(self.mapping)[: self._names].cast("q")
        self.lines = words[_FIRST : _FIRST + size * LINE]
        self.command, self.aborted = words[_COMMAND : _COMMAND + 1], words[_ABORTED : _ABORTED + 1]
        for place in range(size):
            self.line(place)[NUMBER] = place if labels is None else labels[place]
        _HEADER.pack_into(self.mapping, 0, _MAGIC, _VERSION, size, master)

    def line(self, place: int) -> memoryview:
        """Return the line of a rank."""
        return self.lines[place * LINE : (place + 1) * LINE]

    def name(self, number: int, name: str) -> None:
        """Give a function or a schedule a name. Names that were given long ago are lost."""
        encoded = name.encode()[: _NAME_BYTES - _NAME.size]
        start = self._names + number % _NAMES * _NAME_BYTES
        _NAME.pack_into(self.mapping, start, number, len(encoded))
        self.mapping[start + _NAME.size : start + _NAME.size + len(encoded)] = encoded


def _names_of(size: int) -> int:
    """Return where the names begin."""
    return -(-8 * (_FIRST + size * LINE) // _PAGE) * _PAGE


def _map(nbytes: int) -> mmap.mmap:
    """Return new memory: of a file that others can only read, or of none where that is not possible."""
    try:
        with open_unnamed(LABEL, can_be_sealed=True) as file:  # the mapping has a descriptor of its own
            file.truncate(nbytes)
            mapping = mmap.mmap(file.fileno(), nbytes)
            # The memory that is mapped already stays writable.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK)
        return mapping
    except (AttributeError, OSError) as error:
        reraise_if_handlers(error)
        if isinstance(error, OSError) and error.errno in FULL:
            raise
        return mmap.mmap(-1, nbytes)  # an old kernel, or a sandbox


class Line(NamedTuple):
    """What a rank has written; the fields are in the order of the words."""

    passed: int
    finished: int
    reached: int
    reached_in: int
    rows: int
    process: int
    number: int
    begun: int

    def barriers(self, command: int) -> int:
        """Return how many barriers it has reached in a command."""
        return self.reached if self.reached_in == command else 0


class Snapshot(NamedTuple):
    """The status of all ranks at a time.

    Attributes
    ----------
    command : int
        The number of the last command.
    lines : list of Line
        One for each rank.
    """

    command: int
    lines: list[Line]

    def waiting(self) -> list[bool] | None:
        """Return for each rank whether it waits for others; None between two commands."""
        unfinished = [line for line in self.lines if line.finished != self.command]
        if not self.command or not unfinished:
            return None
        first = min(item.barriers(self.command) for item in unfinished)
        return [
            line.finished == self.command or line.barriers(self.command) > first for line in self.lines
        ]


class StatusReader:
    """Reads the status of ranks from another process.

    Parameters
    ----------
    path : str
        The file, below ``/proc``.

    Raises
    ------
    OSError
        If it cannot be opened.
    ValueError
        If it is no status, or that of another version.
    """

    def __init__(self, path: str) -> None:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            length = os.fstat(number).st_size
            self._mapping = mmap.mmap(number, length, prot=mmap.PROT_READ)
        finally:
            os.close(number)
        magic, version, self.size, self.master = _HEADER.unpack_from(self._mapping)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(f"{path}: expected a status of version {_VERSION}, got {version}")
        self._lines = struct.Struct(f"<{self.size * LINE}q")
        self._names = _names_of(self.size)
        self._box = self._names + _NAMES * _NAME_BYTES

    def read(self) -> Snapshot:
        """Return what the ranks have written."""
        (command,) = struct.unpack_from("<q", self._mapping, 8 * _COMMAND)
        words = self._lines.unpack_from(self._mapping, 8 * _FIRST)
        lines = [Line(*words[start : start + LINE]) for start in range(0, len(words), LINE)]
        return Snapshot(command, lines)

    def last_command(self) -> str:
        """Return a few words about the last command; "" if there was none, or it is not known."""
        offset, nbytes = _PAYLOAD.unpack_from(self._mapping, self._box)
        if offset or not nbytes:  # it is very long, and elsewhere
            return ""
        start = self._box + _PAYLOAD.size
        return self._described(self._mapping[start : start + min(nbytes, _READ)], nbytes)

    def _described(self, payload: bytes, nbytes: int) -> str:
        if nbytes == 8:
            return self._name_of(struct.unpack("<q", payload)[0])
        number, kind = _summary(payload)
        name = "" if number is None else self._name_of(number)
        return name if name or not kind else kind

    def _name_of(self, number: int) -> str:
        start = self._names + number % _NAMES * _NAME_BYTES
        found, length = _NAME.unpack_from(self._mapping, start)
        if found != number or not 0 <= length <= _NAME_BYTES:
            return ""
        start += _NAME.size
        return self._mapping[start : start + length].decode(errors="replace")


def _summary(payload: bytes) -> tuple[int | None, str]:
    """Return the first number in a pickled command, and the name of its class.

    Nothing is loaded: only the opcodes are read. A schedule is a number. A call of a function has the
    class first, and then the number of the function. The name of other commands says what they do, and
    that of the function of an `Ask`.
    """
    names: list[str] = []
    with suppress(Exception):  # it is cut, or is being replaced
        for opcode, argument, _ in pickletools.genops(payload):
            if opcode.name.startswith("BININT"):
                is_call = not names or "CallFunction" in names
                return (argument if is_call else None), names[-1] if names else ""
            if "UNICODE" in opcode.name:
                names.append(str(argument))
            if opcode.name == "STACK_GLOBAL" and names[-1] not in ("CallFunction", "Ask"):
                break
    return None, names[-1].strip("_").replace("_", " ") if names else ""


def find(process: int | None = None) -> dict[tuple[int, int], str]:
    """Return the files with the status of ranks that this user may read, by device and number.

    Parameters
    ----------
    process : int, optional
        The process of a rank; by default all processes.

    Raises
    ------
    OSError
        If there is no such process, or its files cannot be read.
    """
    if process is not None:
        return dict(_files_of(process))
    found: dict[tuple[int, int], str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal():
            with suppress(OSError):  # it has ended, or belongs to another user
                found.update(_files_of(int(entry)))
    return found


def _files_of(process: int) -> Iterator[tuple[tuple[int, int], str]]:
    folder = f"/proc/{process}/fd"
    for number in os.listdir(folder):
        path = f"{folder}/{number}"
        with suppress(OSError):
            # Other readers have it open, too, but not for writing.
            if LABEL in os.readlink(path) and os.lstat(path).st_mode & stat.S_IWUSR:
                facts = os.stat(path)
                yield (facts.st_dev, facts.st_ino), path
