"""The setup of the machine and of the process. Nothing here knows about ranks.

``environment`` makes Theano importable, ``imports`` provides modules that Theano lacks, ``heap`` makes
malloc keep memory, ``signals`` defers Ctrl-C. The folder ``startup`` does the same for ``python -m
synkhronos run``.
``machine`` counts the cores and bytes that this process may use. ``compile_cache`` checks whether Theano
has room to compile, and ``ownership`` who else can change its code. ``libraries`` finds NVIDIA's
libraries, and ``library_links`` creates links with the names that libgpuarray expects. ``doctor`` and
``doctor_gpus`` report what is missing, using the subprocesses of ``probe``.
``progress`` shows what takes long, ``theano_progress`` that a script's own ``theano.function`` compiles,
and ``log`` writes the log.

May import: nothing.
"""
