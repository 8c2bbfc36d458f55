"""Whether machines have the same code: a digest of the source files of this package."""

import hashlib
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2]


def digest_of(package: Path = PACKAGE) -> str:
    """Return a digest of the names and the contents of the source files in a folder.

    It takes some hundredths of a second for this package.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(package.rglob("*.py")):
        for part in (str(path.relative_to(package)).encode(), path.read_bytes()):
            digest.update(b"%d " % len(part))
            digest.update(part)
    return digest.hexdigest()
