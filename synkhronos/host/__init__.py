"""The machine and the process as they are set up. Nothing here knows of ranks.

``environment`` makes Theano importable; ``heap`` has malloc keep memory; ``signals`` defers Ctrl-C;
``machine`` counts the cores and bytes that this process may use. ``compile_cache`` looks whether Theano
has room to compile, and ``ownership`` who else can change its code. ``libraries`` finds NVIDIA's
libraries, and ``library_links`` makes the names by which libgpuarray looks for them. ``doctor`` and
``doctor_gpus`` say what is missing, by subprocesses of ``probe``.

May import: nothing.
"""
