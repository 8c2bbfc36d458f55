"""The version, used by ``pyproject.toml``, the documentation and the package."""

__version__ = "1.0.0rc1"
