"""What Python runs at the start of a script that ``python -m synkhronos run`` starts.

The folder is put in ``PYTHONPATH`` for its ``sitecustomize``, and is not imported as a package.

May import: ``world``.
"""
