"""The setup of the machine and of the process. Nothing here knows about ranks.

``compiler`` chooses the graph compiler, and ``preparation`` prepares the process for it: ``environment``
knows the versions that it needs, and finds a BLAS; ``imports`` loads Theano, Lasagne and Keras with the
repairs that this version of Python and NumPy needs, and finds modules of older libraries by their names.
``compile_cache`` checks whether Theano has room to compile, and who else can change its code.
``installation`` installs Theano, Lasagne and Keras with pip. ``nvidia`` finds NVIDIA's libraries, and
creates links with the names that libgpuarray expects.

``signals`` defers Ctrl-C and other signals, and ``handler_errors`` recognizes what signal handlers
raise. ``descriptors`` says which files a worker does not inherit, and makes files without a name.
``heap`` makes malloc keep memory.
``machine`` counts the cores and bytes that this process may use, and the cores that other programs use;
``job`` tells whether it is a task of an MPI job. ``progress`` shows the progress of long steps, such as
compiling; ``log`` writes the log, and gives the records of children to the script's handlers. ``status``
is the memory in which ranks show what they do, and ``top`` reads it from another process, and prints it.

The folder ``doctor`` has the checks of the command of this name.
"""
