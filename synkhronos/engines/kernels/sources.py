"""The C++ code of the operations, from the files ``*.h`` of this folder."""

import functools
import zlib
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent

#: Without traps for invalid operations, which nothing here enables, the compiler can vectorize
#: comparisons. No result changes.
COMPILE_ARGS = ["-fno-trapping-math", "-fno-math-errno"]


@functools.lru_cache(maxsize=None)
def read(*names):
    """Return the text of files, one after another."""
    return "\n".join((_FOLDER / f"{name}.h").read_text(encoding="utf-8") for name in names)


@functools.lru_cache(maxsize=None)
def version(*names):
    """Return a tuple that changes with the text, for ``c_code_cache_version``."""
    return (zlib.crc32(read(*names).encode()),)
