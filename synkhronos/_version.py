"""The version, used by ``setup.py``, the documentation and the package."""

__version__ = "1.0.0rc1"
