"""The version, for ``setup.py``, the documentation and the package alike."""

__version__ = "1.0.0.dev0"
