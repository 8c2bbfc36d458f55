"""Tests on devices: a package, as its ``conftest`` is not the one of the folder above."""
