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


def call(expression, fail):
    """Return the code that evaluates an expression, which is false after it has set a Python error."""
    return f"""
    {{
        bool done = false;
        try {{
            done = {expression};
        }} catch (const std::bad_alloc &) {{
            PyErr_NoMemory();
        }}
        if (!done) {fail}
    }}
    """


@functools.lru_cache(maxsize=None)
def version(*names):
    """Return a tuple that changes with the text, for ``c_code_cache_version``."""
    return (zlib.crc32(read(*names).encode()),)
