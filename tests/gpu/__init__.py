"""Tests on devices. They are a package because they have a ``conftest`` module of their own."""
