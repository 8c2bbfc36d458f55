"""The code that Python runs before the script in ``python -m synkhronos run``.

The folder is put in ``PYTHONPATH`` for its ``sitecustomize``, and is not imported as a package.
"""
